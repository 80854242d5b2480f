"""What a plain server of SGLang says to the prompts of the tests: each model's is run once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tests.sglang.servers import in_parallel, prompt, request, running, server

LENGTHS: Final = (5, 17, 64, 129, 333, 600, 1000)
"""Of one token less than a chunk and more than two, and multiples of pages and none."""
SEEDS: Final = range(1, 7)
"""Of the prompts that are sent at once, of 40 + 37 * seed tokens."""
NEW: Final = 16


class Answer(NamedTuple):
    """A plain server's answer.

    Attributes:
        tokens: the new ones.
        logprobs: of each of them.
    """

    tokens: list[int]
    logprobs: list[float]


class Expected:
    """The answers to the prompts of the tests."""

    def __init__(self, answers: dict[tuple[int, int], Answer]) -> None:
        self._answers = answers

    def answer(self, length: int, seed: int = 0) -> Answer:
        """Return the answer to ``prompt(length, seed)``."""
        return self._answers[length, seed]

    def tokens(self, length: int, seed: int = 0) -> list[int]:
        """Return the new tokens after ``prompt(length, seed)``."""
        return self.answer(length, seed).tokens


def at_once() -> list[tuple[int, int]]:
    """Return length and seed of the prompts that are sent at once."""
    return [(40 + 37 * seed, seed) for seed in SEEDS]


def ask_plain_server(folder: Path, model: str, more: Sequence[tuple[int, int]] = ()) -> Expected:
    """Run a plain server, and return its answers."""
    wanted = [*((length, 0) for length in LENGTHS), *at_once(), *more]
    plain = server(folder, "plain", model=model)
    with running(plain):
        replies = in_parallel(
            [lambda one=one: plain.post("/generate", request(prompt(*one), NEW, return_logprob=True)) for one in wanted]
        )
    answers = {}
    for one, reply in zip(wanted, replies, strict=True):
        logprobs = [row[0] for row in reply.body["meta_info"]["output_token_logprobs"]]
        answers[one] = Answer(reply.tokens, logprobs)
    return Expected(answers)
