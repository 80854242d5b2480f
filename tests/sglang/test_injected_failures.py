"""Failures that SGLang injects: it calls a transfer failed that is not, or computes a prompt again.

After a failure of the first kind it uses the request's pages for others at once, while decode's half or prefill's is
under way: only a half that has ended before leaves the others' tokens right.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.kit.daemons import Daemon
from tests.kit.servers import Prompt, Reply, at_once, prompt
from tests.sglang.expected import AT_ONCE, Expected
from tests.sglang.servers import Pair, running_pair
from tests.sglang.watch import RoomWatch

pytestmark = pytest.mark.long

ROUNDS: Final = 5


def ask(pair: Pair, rounds: int) -> list[tuple[Prompt, Reply]]:
    """Return the replies to the prompts of all rounds, those of one at once."""
    found: list[tuple[Prompt, Reply]] = []
    for _ in range(rounds):
        found += zip(AT_ONCE, at_once(lambda one: pair.generate(prompt(*one)), AT_ONCE), strict=True)
    return found


@pytest.fixture
def watch(kept_daemon: Daemon) -> Iterator[RoomWatch]:
    with RoomWatch(kept_daemon.runtime_dir) as one:
        yield one


def test_injected_failures_harm_only_their_requests(
    expected: Expected, kept_daemon: Daemon, watch: RoomWatch, tmp_path: Path
) -> None:
    environment = {"SGLANG_TEST_DISAGG_FAILURE_PROB": "0.003"}  # of each look: there are hundreds a request
    with running_pair(
        tmp_path, kept_daemon.runtime_dir, options=["--page-size", "16"], chunk=64, environment=environment
    ) as pair:
        replies = ask(pair, ROUNDS)
        failed = [reply for _, reply in replies if reply.status != 200]
        assert 0 < len(failed) < len(replies)
        assert all(reply.reason for reply in failed)
        for one, reply in replies:
            assert reply.status != 200 or reply.tokens == expected.tokens(*one)
        watch.assert_all_is_free(pair)


def test_prompts_that_are_computed_again_answer_the_same(
    expected: Expected, kept_daemon: Daemon, watch: RoomWatch, tmp_path: Path
) -> None:
    environment = {"SGLANG_TEST_FORCE_OPTIMISTIC_PREFILL_RETRY_PROB": "0.5"}
    options = ["--page-size", "16", "--optimistic-prefill-attempts", "3"]
    with running_pair(tmp_path, kept_daemon.runtime_dir, options=options, environment=environment) as pair:
        for one, reply in ask(pair, 2):
            assert reply.tokens == expected.tokens(*one)
        pair.prefill.wait_until_logged("optimistic prefill yielded")
        watch.assert_all_is_free(pair)
