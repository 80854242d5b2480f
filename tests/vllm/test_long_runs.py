"""A thousand requests through few blocks: from the first to the last the tokens of vLLM without a connector.

Decode preempts, clients go away at either side, and the daemon is killed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import pytest

from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.folders import TINY_GEMMA, TINY_MHA
from tests.vllm.in_process import (
    HOST_TIER,
    NEVER,
    Asked,
    Pair,
    Plain,
    Served,
    aborted,
    both_given,
    by_hand,
    metrics,
    prompt,
    received,
    running_pair,
    wait_until_back,
    zeroed,
)

pytestmark = pytest.mark.long

A_ROUND: Final = 40
"""Requests that are asked at once."""
LENGTHS: Final = range(5, 160)
"""Tokens of their prompts."""
NEW: Final = 12
ANSWERED: Final = 10
"""Of a round in which something happens, before that."""
BLOCKS: Final = {TINY_MHA: 20, TINY_GEMMA: 60}
"""Of decode: for about five of these requests. Prefill has twice as many."""

Event: TypeAlias = Literal["nothing", "clients go away", "the daemon is killed"]
Tokens: TypeAlias = tuple[int, ...]


def rounds(requests: int) -> Iterator[tuple[Event, list[Tokens]]]:
    """Yield what happens in each round, and its prompts, no two of which are equal."""
    chance = random.Random(requests)  # noqa: S311  a test's
    count = requests // A_ROUND
    for number in range(count):
        event: Event = "clients go away" if number % 3 == 1 else "nothing"
        prompts = [prompt(chance.choice(LENGTHS), seed=number * A_ROUND + one) for one in range(A_ROUND)]
        yield "the daemon is killed" if number == 2 * count // 3 else event, prompts


def added(served: Served, *asked: Asked) -> list[str]:
    return [served.add(one) for one in asked]


def stepped_until_answered(served: Served, names: Sequence[str], count: int) -> list[str]:
    """Step until so many of these requests have ended; return the others."""

    def others() -> list[str]:
        return [one for one in names if one not in served.answers or not served.answers[one].ended]

    served.step_until(lambda: len(names) - len(others()) >= count)
    return others()


class Round(NamedTuple):
    """What decode has answered, and of how many prompts prefill's clients went away."""

    tokens: dict[Tokens, list[int]]
    unsent: int


def ask_a_round(pair: Pair, daemon: Daemon, event: Event, prompts: list[Tokens]) -> Round:
    """Ask both sides for a round's prompts, and have the event happen among them."""
    given = [both_given() for _ in prompts]
    asked = [Asked(one, NEW, to_decode) for one, (_, to_decode) in zip(prompts, given, strict=True)]
    names = pair.decode.call(added, *asked)
    told = [Asked(one, 1, to_prefill) for one, (to_prefill, _) in zip(prompts, given, strict=True)]
    there = pair.prefill.call(added, *told)
    gone: list[str] = []
    unsent: list[str] = []
    if event != "nothing":
        left = pair.decode.call(stepped_until_answered, names, ANSWERED)
        if event == "clients go away":
            gone, unsent = left[::4], left[1::4]
            pair.decode.call(aborted, *gone)
            pair.prefill.call(aborted, *(there[names.index(one)] for one in unsent))
        else:
            daemon.restart()
    stays = [one for one in names if one not in gone]
    answers = pair.decode.wait(*stays)
    found = {prompts[names.index(one)]: answer.tokens for one, answer in zip(stays, answers, strict=True)}
    return Round(found, len(unsent))


@pytest.mark.parametrize(("model", "requests"), [(TINY_MHA, 1000), (TINY_GEMMA, 200)])
def test_tokens_stay_those_of_a_plain_engine(model: str, requests: int, plain: Plain, tmp_path: Path) -> None:
    sides: dict[str, Any] = {
        "prefill_options": {"num_gpu_blocks_override": 2 * BLOCKS[model]},
        "decode_options": {"num_gpu_blocks_override": BLOCKS[model], "disable_log_stats": False},
        "prefill": {"cache": True, **NEVER},
        "decode": {"cache": True, **NEVER},
    }
    with (
        kit.daemon(HOST_TIER, keep=True) as daemon,
        running_pair(tmp_path, daemon.runtime_dir, model=model, max_model_len=256, **sides) as pair,
    ):
        loads = gone = 0
        for event, prompts in rounds(requests):
            expected = plain.tokens(*prompts, tokens=NEW, model=model)
            before = pair.other.status().counters
            found, unsent = ask_a_round(pair, daemon, event, prompts)
            assert found == {one: tokens for one, tokens in zip(prompts, expected, strict=True) if one in found}, event
            if event == "the daemon is killed":
                assert len(found) == A_ROUND
                for one in (pair.prefill, pair.decode):
                    wait_until_back(one)
                continue  # the next one counts anew
            pair.assert_nothing_left()
            since = Counter(pair.other.status().counters)
            since.subtract(before)
            assert len(found) - unsent <= since["transfers.receive.ok"] <= A_ROUND, "what arrived is not computed again"
            loads += since["operations.load.ok"]
            gone += A_ROUND - len(found)
        assert loads > 0, "of what decode had to give up"
        assert gone > 0
        assert pair.decode.call(metrics)["vllm:num_preemptions"] > 0
        assert pair.client.verify().findings == ()
        assert [one.busy for one in pair.client.status().pools] == [0, 0]
        assert_blocks_count(pair, plain, model)


def assert_blocks_count(pair: Pair, plain: Plain, model: str) -> None:
    """Check that tokens are others where what has come is wiped: the control."""
    one = prompt(LENGTHS[-1], seed=-1)
    (params,) = pair.prefilled(one)
    with by_hand(pair.decode), pair.counts("transfers.receive.ok", 1):
        name = pair.decode.add(Asked(one, params=params))
        pair.decode.call(received, name)
        pair.decode.call(zeroed, name)
        (answer,) = pair.decode.wait(name)
    assert [answer.tokens] != plain.tokens(one, model=model)
