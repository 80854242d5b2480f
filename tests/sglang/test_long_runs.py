"""Hundreds of requests through few pages and slots: from the first to the last the tokens of a plain server.

Decode retracts, clients go away, decode and the daemon are killed.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import as_completed
from pathlib import Path
from typing import Final, Literal, TypeAlias

import pytest

from kvferry.clients import Client
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.folders import TINY_DELTA, TINY_MHA, TINY_WINDOWS
from tests.kit.servers import REPLY_S, Prompt, Reply, at_once, prompt, running
from tests.sglang.servers import (
    Expected,
    Pair,
    RoomWatch,
    assert_decodes_memory_counts,
    assert_pages_count,
    request,
    running_pair,
    server,
)

pytestmark = pytest.mark.long

A_ROUND: Final = 40
"""Requests that are sent at once."""
LENGTHS: Final = range(5, 160)
"""Tokens of their prompts."""
NEW: Final = 20
TOKENS: Final = 640
"""In either's pool: for about seven of these requests."""
OPTIONS: Final = ("--page-size", "16", "--num-reserved-decode-tokens", "4", "--max-running-requests", "8")
TIER: Final = "[tiers]\nhost_bytes = 268435456\n"

Event: TypeAlias = Literal["nothing", "clients go away", "decode is killed", "the daemon is killed"]

ANSWERED: Final = 10
"""Of a round in which something is killed, before that."""


def rounds(requests: int) -> Iterator[tuple[Event, list[Prompt]]]:
    """Yield what happens in each round, and its prompts, no two of which are equal."""
    chance = random.Random(requests)  # noqa: S311  a test's
    count = requests // A_ROUND
    killed: dict[int, Event] = {count // 3: "decode is killed", 2 * count // 3: "the daemon is killed"}
    for number in range(count):
        event: Event = "clients go away" if number % 3 == 1 else "nothing"
        prompts = [Prompt(chance.choice(LENGTHS), number * A_ROUND + one) for one in range(A_ROUND)]
        yield killed.get(number, event), prompts


def answers_of_a_plain_server(folder: Path, model: str, requests: int) -> Expected:
    plain = server(folder, "plain", model=model)
    control = Prompt(64)
    answers: dict[Prompt, tuple[list[int], list[float]]] = {}
    with running(plain):
        answers[control] = plain.post("/generate", request(prompt(*control))).tokens, []
        for _, prompts in rounds(requests):
            replies = at_once(lambda one: plain.post("/generate", request(prompt(*one), NEW)), prompts)
            answers |= {one: (reply.tokens, []) for one, reply in zip(prompts, replies, strict=True)}
    return Expected(answers, [])


def patience_s(event: Event, number: int) -> float:
    """Return how long a round's client waits: every fourth of those that go away a second, in which few are answered.

    Prefill waits for a decode that was killed, for as long as its client does.
    """
    if event == "clients go away" and number % 4 == 0:
        return 1.0
    return 40.0 if event == "decode is killed" else REPLY_S


def ask_a_round(pair: Pair, daemon: Daemon, event: Event, prompts: list[Prompt]) -> list[Reply]:
    """Send a round's requests, have the event happen among them, and return the replies."""
    replies = [
        pair.front.posted("/generate", request(prompt(*one), NEW), patience_s(event, number))
        for number, one in enumerate(prompts)
    ]
    if event.endswith("killed"):
        for _ in itertools.islice(as_completed(replies), ANSWERED):
            pass
        if event == "decode is killed":
            pair.decode.kill()
        else:
            daemon.restart()
    return [one.result() for one in replies]


def assert_memory_counts(pair: Pair, daemon: Daemon, expected: Expected, components: Sequence[str]) -> None:
    """Check that zeros in each of the components change the tokens: where prefill has a prefix cache, in its pool."""
    if "mamba" in components:
        assert_decodes_memory_counts(pair, daemon.runtime_dir, *components)
        return
    for component in components:
        assert_pages_count(pair, daemon.runtime_dir, expected, component=component)


@pytest.mark.parametrize(
    ("model", "requests", "components"),
    [
        (TINY_MHA, 1000, ("main",)),
        (TINY_WINDOWS, 240, ("main", "swa")),
        (TINY_DELTA, 240, ("main", "mamba")),
    ],
    ids=["mha", "windows", "states"],
)
def test_tokens_stay_those_of_a_plain_server(
    model: str, requests: int, components: Sequence[str], tmp_path: Path
) -> None:
    expected = answers_of_a_plain_server(tmp_path, model, requests)
    gone = retractions = 0
    with (
        kit.daemon(TIER, keep=True) as daemon,
        RoomWatch(daemon.runtime_dir) as watch,
        running_pair(tmp_path, daemon.runtime_dir, model=model, tokens=TOKENS, chunk=64, options=OPTIONS) as pair,
    ):
        for event, prompts in rounds(requests):
            before = watch.status().counters
            replies = ask_a_round(pair, daemon, event, prompts)
            answered = {one: reply for one, reply in zip(prompts, replies, strict=True) if reply.status == 200}
            for one, reply in answered.items():
                assert reply.tokens == expected.tokens(*one), (event, one)
            watch.wait_until_idle()
            if event.endswith("killed"):
                assert ANSWERED <= len(answered) < A_ROUND
            else:
                stays = {one for number, one in enumerate(prompts) if patience_s(event, number) == REPLY_S}
                assert stays <= answered.keys(), [reply for reply in replies if reply.status != 200]
                gone += A_ROUND - len(answered)
            if event == "the daemon is killed":
                continue  # the next one counts anew
            since = Counter(watch.status().counters)
            since.subtract(before)
            retractions += since["operations.restore.ok"]
            assert len(answered) <= since["transfers.receive.ok"] <= A_ROUND, "what arrived is not computed again"
            if event == "decode is killed":
                pair.restart("decode")
        assert gone > 0
        assert retractions > 0
        watch.assert_all_is_free(pair)
        with Client.connect(daemon.runtime_dir) as client:
            assert client.verify().findings == ()
            status = client.status()
        assert [one.busy for one in status.pools] == [0, 0]
        assert [one.used_bytes for one in status.tiers] == [0]
        assert_memory_counts(pair, daemon, expected, components)
