"""Pipeline stages of a model: their layers, and that together they compute what the whole model does, to the bit."""

from __future__ import annotations

import copy
import importlib.util

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers, of the demo extra", allow_module_level=True)

from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from examples.demo.stages import compute, cut_stage, split_layers

LAYERS = 5
CHUNKS = (7, 1, 12)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    """Return a Llama of five layers whose every layer matters: large random weights, in fp32."""
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    torch.manual_seed(2)
    made: torch.nn.Module = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    return made


@given(st.integers(1, 100), st.integers(1, 100))
def test_stages_have_all_layers_once_and_about_as_many_each(layers: int, stages: int) -> None:
    if stages > layers:
        with pytest.raises(ValueError, match="cannot be split"):
            split_layers(layers, stages)
        return
    split = split_layers(layers, stages)
    assert len(split) == stages
    assert [layer for one in split for layer in one] == list(range(layers))
    assert {len(one) for one in split} <= {layers // stages, -(-layers // stages)}


def test_thirty_layers_are_fifteen_and_fifteen() -> None:
    assert split_layers(30, 2) == [range(15), range(15, 30)]


def logits_of(models: list[torch.nn.Module], *, without: int | None = None) -> torch.Tensor:
    """Return the logits of each chunk's last token; ``without`` names a stage whose output is zeroed."""
    torch.manual_seed(3)
    caches = [DynamicCache() for _ in models]
    position, found = 0, []
    for length in CHUNKS:
        states = torch.randint(0, 97, (length,))
        for number, (model, cache) in enumerate(zip(models, caches, strict=True)):
            states = compute(model, states, cache, position, only_last=number == len(models) - 1)
            if number == without:
                states = torch.zeros_like(states)
        position += length
        found.append(states)
    return torch.cat(found)


def stages_of(model: torch.nn.Module, split: list[range]) -> list[torch.nn.Module]:
    stages = [copy.deepcopy(model) for _ in split]
    for stage, layers in zip(stages, split, strict=True):
        cut_stage(stage, layers)
    return stages


@pytest.mark.parametrize(
    "split",
    [
        [range(5)],
        [range(3), range(3, 5)],
        [range(1), range(1, 5)],
        [range(4), range(4, 5)],
        [range(2), range(2, 3), range(3, 5)],
    ],
    ids=str,
)
def test_stages_give_the_logits_of_the_whole_model(model: torch.nn.Module, split: list[range]) -> None:
    whole = logits_of([model])
    assert whole.shape == (len(CHUNKS), 97)
    assert torch.equal(logits_of(stages_of(model, split)), whole)


def test_a_stage_whose_states_are_lost_is_noticed(model: torch.nn.Module) -> None:
    stages = stages_of(model, [range(3), range(3, 5)])
    assert not torch.allclose(logits_of(stages, without=0), logits_of([model]))


def test_a_whole_model_computes_as_it_does_by_itself(model: torch.nn.Module) -> None:
    torch.manual_seed(3)
    cache, found = DynamicCache(), []
    for length in CHUNKS:
        tokens = torch.randint(0, 97, (1, length))
        with torch.inference_mode():
            found.append(model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[0])
    assert torch.equal(logits_of([model]), torch.cat(found))


@pytest.mark.parametrize("layers", [range(3, 6), range(-1, 2), range(2, 2)], ids=str)
def test_layers_that_a_model_does_not_have(model: torch.nn.Module, layers: range) -> None:
    with pytest.raises(ValueError, match="of a model that has 5"):
        cut_stage(model, layers)
