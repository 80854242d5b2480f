"""A prefill and a decode server on a simulated NPU: SGLang's own code for Ascend, pools in the daemon's memory there.

Decode's graphs are captured and replayed. The tokens are a plain server's on the same device; what has arrived is
counted, because decode may compute again what did not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import pytest

from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon
from tests.kit.folders import TINY_ASCEND
from tests.kit.servers import AT_ONCE, LENGTHS, SIDES, Side, prompt
from tests.sglang.servers import (
    SCHEDULER,
    Expected,
    Pair,
    Pause,
    RoomWatch,
    assert_pages_count,
    assert_tokens,
    running_pair,
)

TOKENS = 2048
LONG = 1500
"""Tokens of a prompt that is under way for several chunks."""
SOON_S = 120.0


@pytest.fixture(scope="module")
def expected(answers: Callable[[str], Expected]) -> Expected:
    """Return what a plain server on the device answers."""
    return answers(TINY_ASCEND)


@pytest.fixture(scope="module")
def npu_daemon() -> Iterator[Daemon]:
    """Return the daemon of the pair, of which a device's memory does not outlive it."""
    with kit.daemon() as daemon:
        yield daemon


@pytest.fixture
def watch(npu_daemon: Daemon) -> Iterator[RoomWatch]:
    with RoomWatch(npu_daemon.runtime_dir) as one:
        yield one


@pytest.fixture(scope="module")
def pair(
    expected: Expected,  # noqa: ARG001  before, so that three servers never run at once
    npu_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Return the pair of all tests here."""
    folder = tmp_path_factory.mktemp("pair")
    with running_pair(folder, npu_daemon.runtime_dir, model=TINY_ASCEND, tokens=TOKENS, chunk=256) as one:
        yield one


def test_tokens_are_those_of_a_plain_server_and_all_have_arrived(
    pair: Pair, expected: Expected, watch: RoomWatch
) -> None:
    assert [(one.device, one.registered_by) for one in watch.status().pools] == [("npu:0", None)] * 2
    before = watch.arrived()
    assert_tokens(pair, expected)
    assert watch.arrived() - before == len(LENGTHS) + len(AT_ONCE)
    assert "npu graph: True" in pair.decode.logged()
    [tables] = watch.status().tables
    assert tables.updates > len(LENGTHS), "decode's graphs read the daemon's tables"  # those at once may share one
    assert "SGLang writes the graph tables" not in pair.decode.logged()


def test_decode_computes_with_the_pages_that_prefill_has_in_the_daemon(
    pair: Pair, expected: Expected, npu_daemon: Daemon
) -> None:
    assert_pages_count(pair, npu_daemon.runtime_dir, expected)


@pytest.fixture
def held(pair: Pair, simulator: Simulator) -> Pause:
    """Return what holds prefill's NPU: a stopped process would hold up what a device does by itself."""
    [scheduler] = pair.prefill.processes(SCHEDULER)
    return partial(simulator.held, scheduler)


@pytest.mark.parametrize("side", SIDES)
def test_an_abort_amid_the_chunks_ends_both_halves(
    pair: Pair, expected: Expected, watch: RoomWatch, held: Pause, side: Side
) -> None:
    with pair.amid_the_chunks(watch, LONG, f"{side}-", held) as halves:
        pair.abort(side, f"{side}-{side}")
    for half in halves.values():
        assert half.result(SOON_S).reason
    watch.wait_until_idle()
    assert pair.generate(prompt(129)).tokens == expected.tokens(129)


def test_a_killed_decode_server_comes_back(pair: Pair, expected: Expected, watch: RoomWatch, held: Pause) -> None:
    with pair.amid_the_chunks(watch, LONG, "killed-", held) as halves:
        connected = watch.connected()
        pair.decode.kill()
        watch.wait_until(lambda: watch.connected() < connected, "the daemon knows")
    assert halves["prefill"].result(SOON_S).reason
    watch.wait_until_idle()
    pair.restart("decode")
    pair.wait_until_served(prompt(129), expected.tokens(129))
    watch.assert_all_is_free(pair)
