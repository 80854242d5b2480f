"""What a plain server of SGLang says to the prompts of the tests: each model's is run once for all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple

from tests.kit.servers import Prompt, at_once, prompt, running
from tests.sglang.servers import request, server

LENGTHS: Final = (5, 17, 64, 129, 333, 600, 1000)
"""Less than a page, all of a page, pages and a part of one, and chunks."""
AT_ONCE: Final = [Prompt(40 + 37 * seed, seed) for seed in range(1, 7)]
"""The prompts that are sent at once."""
NEW: Final = 16

RETRACTED: Final = [Prompt(30 + 17 * seed, seed) for seed in range(6)]
"""The prompts of requests that decode retracts: 435 tokens."""
RETRACTED_NEW: Final = 80
"""After each of these."""


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

    def __init__(self, answers: dict[Prompt, Answer], retracted: list[list[int]]) -> None:
        self._answers, self._retracted = answers, retracted

    def answer(self, length: int, seed: int = 0) -> Answer:
        """Return the answer to ``prompt(length, seed)``."""
        return self._answers[Prompt(length, seed)]

    def tokens(self, length: int, seed: int = 0) -> list[int]:
        """Return the new tokens after ``prompt(length, seed)``."""
        return self.answer(length, seed).tokens

    @property
    def retracted(self) -> list[list[int]]:
        """Return the new tokens after each of ``RETRACTED``, where the run has long tests."""
        return self._retracted


def ask_plain_server(folder: Path, model: str, *, long: bool) -> Expected:
    """Run a plain server, and return its answers; ``long``: also those that long tests need."""
    wanted = [*(Prompt(length) for length in LENGTHS), *AT_ONCE]
    plain = server(folder, "plain", model=model)
    with running(plain):
        replies = at_once(lambda one: plain.post("/generate", request(prompt(*one), NEW, return_logprob=True)), wanted)
        more = RETRACTED if long else []
        retracted = at_once(lambda one: plain.post("/generate", request(prompt(*one), RETRACTED_NEW)), more)
    answers = {}
    for one, reply in zip(wanted, replies, strict=True):
        logprobs = [row[0] for row in reply.body["meta_info"]["output_token_logprobs"]]
        answers[one] = Answer(reply.tokens, logprobs)
    return Expected(answers, [reply.tokens for reply in retracted])
