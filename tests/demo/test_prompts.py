"""The demo's prompts: enough of them, and of the lengths that transfers go wrong at."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

from examples.demo.prompts import AT_LEAST, PAGE_SIZE, make_prompts


class Words:
    """A tokenizer: a word is a token."""

    def apply_chat_template(self, chat: list[dict[str, str]], **_options: bool) -> str:
        return " ".join(f"START {turn['content']} END" for turn in chat)

    def __call__(self, text: str, **_options: bool) -> dict[str, list[int]]:
        return {"input_ids": [zlib.crc32(word.encode()) for word in text.split()]}


@pytest.mark.parametrize("count", [AT_LEAST, 9, 30])
def test_as_many_as_wanted_of_every_kind_and_no_two_alike(count: int) -> None:
    tokenizer: Any = Words()
    prompts = make_prompts(tokenizer, count)
    assert len({tuple(one.tokens) for one in prompts}) == len(prompts) == count
    start, end = (zlib.crc32(one) for one in (b"START", b"END"))
    assert all((one.tokens[0], one.tokens[-1]) == (start, end) for one in prompts), "no turn is cut off"
    lengths = [len(one.tokens) for one in prompts]
    assert min(lengths) < PAGE_SIZE in lengths
    assert any(length > PAGE_SIZE and length % PAGE_SIZE == 0 for length in lengths)
    assert any(length > PAGE_SIZE and length % PAGE_SIZE == 1 for length in lengths)
    assert 6 * PAGE_SIZE < max(lengths) <= 1000
