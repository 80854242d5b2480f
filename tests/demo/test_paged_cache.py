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


def test_decode_from_copied_pages_gives_the_same_logits_and_from_wrong_ones_others(tiny_model: torch.nn.Module) -> None:
    source, source_ids, ids = Memory(), [9, 2, 7, 4, 1], [3, 11, 5, 8, 2]
    chunks = [(0, 32), (32, 64), (64, len(PROMPT))]
    prompts = [last_logits(tiny_model, PROMPT[start:end], source.cache(source_ids, start)) for start, end in chunks]
    whole, known = Memory(), expected(tiny_model)
    assert torch.equal(last_logits(tiny_model, PROMPT, whole.cache(source_ids, 0)), known[0])
    torch.testing.assert_close(prompts[-1], known[0], rtol=1e-3, atol=1e-4)

    copied = Memory()
    copied.k[:, ids], copied.v[:, ids] = whole.k[:, source_ids], whole.v[:, source_ids]
    cache = copied.cache([*ids, 10], len(PROMPT))
    first = int(known[0].argmax())
    assert all(map(torch.equal, decode(tiny_model, first, cache), known[1:]))
    assert cache.get_seq_length() == len(PROMPT) + NEW_TOKENS

    wrong = [copied.cache([3, 11, 5, 2, 8], len(PROMPT))]
    copied.v[1, ids[2]] = 0
    wrong.append(copied.cache(ids, len(PROMPT)))
    for one in wrong:
        assert not torch.allclose(last_logits(tiny_model, [first], one), known[1], atol=1e-2)
