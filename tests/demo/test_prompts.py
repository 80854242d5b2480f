"""The demo's prompts: enough of them, and of the lengths that they are there for."""

from __future__ import annotations

import zlib
from typing import Any, Final

import pytest

from examples.demo.prompts import AT_LEAST, PAGE_SIZE, make_prompts

START: Final = 1
END: Final = 2


class Words:
    """A tokenizer: a word is a token, and so are a turn's start and its end."""

    def apply_chat_template(self, chat: list[dict[str, str]], **_options: bool) -> str:
        turns = " ".join(f"<start> {turn['role']} {turn['content']} <end>" for turn in chat)
        return f"{turns} <start> assistant"

    def __call__(self, text: str, **_options: bool) -> dict[str, list[int]]:
        special = {"<start>": START, "<end>": END}
        return {"input_ids": [special.get(word) or 3 + zlib.crc32(word.encode()) for word in text.split()]}


def lengths(count: int) -> list[int]:
    return [len(one.tokens) for one in made(count)]


def made(count: int) -> list[Any]:
    tokenizer: Any = Words()
    return make_prompts(tokenizer, count)


def test_the_kinds_that_transfers_go_wrong_at() -> None:
    found = lengths(AT_LEAST)
    assert len(found) == AT_LEAST == 8
    assert any(length < PAGE_SIZE for length in found)
    assert any(length == PAGE_SIZE for length in found)
    assert any(length > PAGE_SIZE and length % PAGE_SIZE == 0 for length in found)
    assert any(length > PAGE_SIZE and length % PAGE_SIZE == 1 for length in found)
    assert 6 * PAGE_SIZE < max(found) <= 1000


@pytest.mark.parametrize("count", [AT_LEAST, 9, 30])
def test_as_many_as_wanted_and_no_two_alike(count: int) -> None:
    prompts = made(count)
    assert len(prompts) == count
    assert len({tuple(one.tokens) for one in prompts}) == count
    assert all(one.tokens[0] == START and one.tokens.count(END) == 1 for one in prompts)
