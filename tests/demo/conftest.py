"""What the demo's tests share: a tiny model with random weights, whose attention matters."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from examples.demo.__main__ import check_possible
from examples.demo.messages import DemoError


@pytest.fixture(scope="session")
def _installed(require: Callable[[object, str], None]) -> None:
    try:
        check_possible()
    except DemoError as error:
        require(None, str(error))


@pytest.fixture(scope="session")
def tiny_model(_installed: None) -> torch.nn.Module:
    """Return a Llama of two layers with large random weights, in fp32."""
    return llama(layers=2, vocabulary=97)


def llama(layers: int, vocabulary: int) -> torch.nn.Module:
    """Return a Llama with large random weights, in fp32."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  may be missing

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(1)
    model: torch.nn.Module = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    return model
