"""The demo's prompts: short, long, ending exactly at a page boundary, and sharing a prefix."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAGE_SIZE = 128
AT_LEAST = 8

_STORY = (
    "The harbour master kept a ledger of every crate that crossed the quay. Each morning the ferries came in with the "
    "tide, and each evening they left again, lighter or heavier than before. She wrote down who had sent a crate, "
    "where it was bound, and how many hands it took to lift it. When a crate was late she sent word to both sides. "
)
_QUESTIONS = (
    "How many hands did it take?",
    "Who kept the ledger?",
    "What came in with the tide?",
    "What did she do when a crate was late?",
)


class DemoPrompt(NamedTuple):
    """A prompt, and what it demonstrates."""

    shows: str
    tokens: list[int]


def make_prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[DemoPrompt]:
    """Return ``count`` prompts, at least AT_LEAST; deterministic."""
    prompts = [
        DemoPrompt("shorter than a page", _chat(tokenizer, "What is the capital of France?")),
        DemoPrompt("ends on a page", _chat_of_length(tokenizer, PAGE_SIZE)),
        DemoPrompt("ends on a page, several", _chat_of_length(tokenizer, 3 * PAGE_SIZE)),
        DemoPrompt("several pages", _chat(tokenizer, f"{_STORY * 4}\nSummarise this in one sentence.")),
        DemoPrompt("many pages", _chat_of_length(tokenizer, 7 * PAGE_SIZE + 37)),
        DemoPrompt("one past a page", _chat_of_length(tokenizer, 2 * PAGE_SIZE + 1)),
    ]
    for number, question in zip(itertools.count(), itertools.cycle(_QUESTIONS)):
        if len(prompts) >= max(count, AT_LEAST):
            return prompts
        more = f" Answer number {number + 1}, please." if number >= len(_QUESTIONS) else ""
        prompts.append(DemoPrompt("shared prefix", _chat(tokenizer, f"{_STORY * 3}\n{question}{more}")))
    return prompts


def _chat(tokenizer: PreTrainedTokenizerBase, question: str) -> list[int]:
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def _chat_of_length(tokenizer: PreTrainedTokenizerBase, length: int) -> list[int]:
    """Return a chat of exactly ``length`` tokens: the story is cut inside the user's turn, whose end is kept."""
    endless = _chat(tokenizer, f"Go on with this story. {_STORY * 40}")
    closing = _chat(tokenizer, "x")
    shared = next(n for n in range(1, len(closing)) if closing[-n - 1 :] != endless[-n - 1 :])
    tail = endless[-shared:]
    tokens = endless[: length - shared] + tail
    if len(tokens) != length:
        raise ValueError(f"a chat of {len(tokens)} tokens, not {length}")
    return tokens
