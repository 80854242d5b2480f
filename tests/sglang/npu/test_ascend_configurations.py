"""Pairs of servers on a simulated NPU in other configurations: latent attention, memory that servers register."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests import kit
from tests.kit.folders import TINY_ASCEND, TINY_DEEPSEEK
from tests.kit.servers import AT_ONCE, LENGTHS, at_once, prompt
from tests.sglang.servers import RETRACTED, Expected, RoomWatch, assert_tokens, running_pair

LONG = 1500
"""Tokens of a prompt whose whole pages, but for the last one, have more than the 4 MiB that go layer by layer."""
GROWING = 160
"""Tokens of the answers to requests that outgrow decode's pool."""


def test_latent_attention_in_chunks_and_retracted_requests(answers: Callable[[str], Expected], tmp_path: Path) -> None:
    """Eleven pages are too few for the requests of the second part at once: decode retracts some."""
    latent, options = answers(TINY_DEEPSEEK), ("--num-reserved-decode-tokens", "16")
    with (
        kit.daemon("[tiers]\nhost_bytes = 67108864\n") as daemon,
        RoomWatch(daemon.runtime_dir) as watch,
        running_pair(
            tmp_path, daemon.runtime_dir, model=TINY_DEEPSEEK, tokens=11 * 128, chunk=256, options=options
        ) as both,
    ):
        assert_tokens(both, latent)
        assert watch.arrived() == len(LENGTHS) + len(AT_ONCE)
        assert "npu graph: True" in both.decode.logged()
        alone = [both.generate(prompt(*one), GROWING).tokens for one in RETRACTED]
        replies = at_once(lambda one: both.generate(prompt(*one), GROWING), RETRACTED)
        assert [reply.tokens for reply in replies] == alone
        both.decode.wait_until_logged("Retract requests|Testing retraction")
        assert "SGLang copies a retracted request's pages by itself" not in both.decode.logged()
        watch.assert_all_is_free(both)


@pytest.mark.long
@pytest.mark.parametrize("memory", ["engine", "daemon"])
def test_three_hundred_requests_and_a_killed_daemon(
    answers: Callable[[str], Expected], tmp_path: Path, memory: str
) -> None:
    """One more goes layer by layer, and once more as a whole: prefill has computed it."""
    expected, environment = answers(TINY_ASCEND), {"KVFERRY_SGLANG_MEMORY": memory}
    with (
        kit.daemon(keep=memory == "daemon") as daemon,
        running_pair(
            tmp_path, daemon.runtime_dir, model=TINY_ASCEND, tokens=2048, chunk=2048, environment=environment
        ) as both,
    ):
        with RoomWatch(daemon.runtime_dir) as watch:
            assert all((one.registered_by is not None) == (memory == "engine") for one in watch.status().pools)
            for _ in range(300 // len(AT_ONCE)):
                replies = at_once(lambda one: both.generate(prompt(*one)), AT_ONCE)
                assert [reply.tokens for reply in replies] == [expected.tokens(*one) for one in AT_ONCE]
            assert watch.arrived() == 300
            assert "transfers.layered" not in watch.status().counters
            tokens = both.generate(prompt(LONG)).tokens
            assert watch.status().counters["transfers.layered"] == 1
            assert both.generate(prompt(LONG)).tokens == tokens
            assert watch.status().counters["transfers.layered"] == 1
        daemon.restart()
        both.wait_until_served(prompt(333), expected.tokens(333))
        with RoomWatch(daemon.runtime_dir) as watch:
            before = watch.arrived()
            replies = at_once(lambda one: both.generate(prompt(*one)), AT_ONCE)
            assert [reply.tokens for reply in replies] == [expected.tokens(*one) for one in AT_ONCE]
            assert watch.arrived() - before == len(AT_ONCE)
        both.assert_healthy()
