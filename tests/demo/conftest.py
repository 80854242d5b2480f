"""What the demo's tests share: a tiny model with random weights, and prompts for it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import pytest
import torch


@pytest.fixture(scope="session")
def tiny_model(require: Callable[[object, str], None]) -> torch.nn.Module:
    """Return a Llama of two layers whose attention matters: large random weights, in fp32."""
    require(importlib.util.find_spec("transformers"), "transformers, of the demo extra")
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  may be missing

    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=512,
        initializer_range=0.3,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(1)
    model: torch.nn.Module = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    return model
