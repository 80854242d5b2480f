"""The paged cache: what a model computes from pages is what it computes from a cache of its own."""

from __future__ import annotations

import importlib.util
from typing import Final

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers, of the demo extra", allow_module_level=True)

from transformers import Cache, DynamicCache

from examples.demo.paged_cache import PagedCache, PagedSequence

PAGE_SIZE: Final = 16
PAGES: Final = 12
PROMPT: Final = [3 + number * number % 89 for number in range(75)]  # five pages, the last one of 11 tokens
NEW_TOKENS: Final = 12  # crosses into a sixth page


class Memory:
    """The K and V of a pool, filled with what must never be read."""

    def __init__(self) -> None:
        self.k = torch.full((2, PAGES, PAGE_SIZE, 2, 12), float("nan"))
        self.v = torch.full_like(self.k, float("nan"))

    def cache(self, ids: list[int], length: int) -> PagedCache:
        """Return a cache of a request that has these pages, and tokens up to ``length``."""
        return PagedCache(self.k, self.v, PagedSequence(ids, PAGE_SIZE, length))


def last_logits(model: torch.nn.Module, tokens: list[int], cache: Cache) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits
        return logits[0, -1]


def decode(model: torch.nn.Module, first: int, cache: Cache) -> list[torch.Tensor]:
    """Return the logits of greedy steps from ``first`` on."""
    steps = [last_logits(model, [first], cache)]
    for _ in range(NEW_TOKENS - 1):
        steps.append(last_logits(model, [int(steps[-1].argmax())], cache))
    return steps


def expected(model: torch.nn.Module) -> list[torch.Tensor]:
    """Return the logits after the prompt and of the steps from there, with transformers' own cache."""
    cache = DynamicCache()
    prompt = last_logits(model, PROMPT, cache)
    return [prompt, *decode(model, int(prompt.argmax()), cache)]


def handed_over(source: Memory, source_ids: list[int], ids: list[int]) -> Memory:
    """Return other memory, into which a transfer copied the pages."""
    destination = Memory()
    destination.k[:, ids] = source.k[:, source_ids]
    destination.v[:, ids] = source.v[:, source_ids]
    return destination


@pytest.fixture
def prefilled(tiny_model: torch.nn.Module) -> tuple[Memory, list[int], torch.Tensor]:
    """Return memory that holds the prompt, in which pages, and the logits after it."""
    memory, ids = Memory(), [9, 2, 7, 4, 1]
    return memory, ids, last_logits(tiny_model, PROMPT, memory.cache(ids, 0))


def test_decode_from_copied_pages_gives_the_same_logits(
    tiny_model: torch.nn.Module, prefilled: tuple[Memory, list[int], torch.Tensor]
) -> None:
    source, source_ids, prompt = prefilled
    ids = [3, 11, 5, 8, 2]
    cache = handed_over(source, source_ids, ids).cache([*ids, 10], len(PROMPT))
    steps = decode(tiny_model, int(prompt.argmax()), cache)
    assert all(map(torch.equal, [prompt, *steps], expected(tiny_model)))
    assert cache.get_seq_length() == len(PROMPT) + NEW_TOKENS


def test_chunks_give_the_same_tokens(tiny_model: torch.nn.Module) -> None:
    memory = Memory()
    cache = memory.cache([9, 2, 7, 4, 1, 6], 0)
    chunks = [last_logits(tiny_model, PROMPT[start : start + 32], cache) for start in range(0, len(PROMPT), 32)]
    steps = [chunks[-1], *decode(tiny_model, int(chunks[-1].argmax()), cache)]
    for ours, theirs in zip(steps, expected(tiny_model), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        assert ours.argmax() == theirs.argmax()


@pytest.mark.parametrize("what", ["zeroed K", "zeroed V", "one page of one layer zeroed", "last pages swapped"])
def test_wrong_pages_give_other_logits(
    tiny_model: torch.nn.Module, prefilled: tuple[Memory, list[int], torch.Tensor], what: str
) -> None:
    source, source_ids, prompt = prefilled
    ids = [3, 11, 5, 8, 2]
    copied = handed_over(source, source_ids, ids)
    if what == "zeroed K":
        copied.k[:, ids] = 0
    elif what == "zeroed V":
        copied.v[:, ids] = 0
    elif what == "one page of one layer zeroed":
        copied.k[1, ids[2]] = 0
    else:
        ids[3], ids[4] = ids[4], ids[3]
    step = last_logits(tiny_model, [int(prompt.argmax())], copied.cache(ids, len(PROMPT)))
    assert not torch.allclose(step, expected(tiny_model)[1], atol=1e-2)
