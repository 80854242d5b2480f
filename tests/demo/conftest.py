"""What the demo's tests share: a tiny model with random weights, and prompts for it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable

import pytest
import torch

from examples.demo import model as demo_model
from examples.demo.errors import DemoError


@pytest.fixture(scope="session")
def _installed(require: Callable[[object, str], None]) -> None:
    """Make sure that the demo's packages are there."""
    try:
        demo_model.check_installed()
    except DemoError as error:
        require(None, str(error))


@pytest.fixture(scope="session")
def small_model(_installed: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which the demo finds a small model in the place of its own, with its own tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415  may be missing

    tokenizer = demo_model.load_tokenizer(demo_model.converted_model(lambda _said: None))
    environment = {"XDG_CACHE_HOME": os.fspath(tmp_path_factory.mktemp("cache"))}
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(*next(iter(environment.items())))
        folder = demo_model.cache_folder()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=30,
        num_attention_heads=3,
        num_key_value_heads=3,
        head_dim=8,
        max_position_embeddings=2048,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    tokenizer.save_pretrained(folder)
    LlamaForCausalLM(config).save_pretrained(folder)
    return environment


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
