"""One prefill and one decode server by one daemon, SGLang's router in front: the same tokens as a plain server's.

All tests share the servers, whatever was aborted or killed before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Literal

import pytest

from tests.kit.daemons import Daemon
from tests.kit.servers import SIDES, Reply, Side, prompt
from tests.sglang.servers import Expected, Pair, RoomWatch, assert_pages_count, assert_tokens, new_room, running_pair

LONG = 2000
"""Tokens of a prompt that is under way for many chunks."""

SOON_S = 120.0
"""Within which a request has ended that cannot go on: after the daemon's grace of ten seconds, and prefill's chunk."""

Moment = Literal["amid the chunks", "waits", "generates"]


@pytest.fixture(scope="module")
def pair(
    expected: Expected,  # noqa: ARG001  before, so that three servers never run at once
    kept_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Return the pair of all tests here."""
    with running_pair(
        tmp_path_factory.mktemp("pair"), kept_daemon.runtime_dir, chunk=256, options=["--page-size", "16"]
    ) as one:
        yield one


@pytest.fixture
def well(pair: Pair, expected: Expected) -> Iterator[Pair]:
    """Return the pair, which must be healthy after the test, too, and serve as if nothing had been."""
    yield pair
    pair.assert_healthy()
    assert pair.generate(prompt(129)).tokens == expected.tokens(129)


@contextlib.contextmanager
def begun(pair: Pair, watch: RoomWatch, moment: Moment, of: Side = "decode") -> Iterator[Mapping[Side, Future[Reply]]]:
    """Begin a request, which is at this moment until the context ends.

    Yields its halves: both, that which waits alone, or decode's. They are named by moment, ``of`` and side.
    """
    rid = f"{moment}-{of}-"
    if moment == "amid the chunks":
        with pair.amid_the_chunks(watch, LONG, rid) as both:
            yield both
        return
    room = new_room()
    if moment == "waits":
        half = pair.half(of, prompt(129, seed=1), room, rid=f"{rid}{of}")
        watch.wait_until_opened(room, of)
        yield {of: half}
        return
    ids = prompt(129, room % 1000)  # which no cache has
    halves = {side: pair.half(side, ids, room, new=600, rid=f"{rid}{side}") for side in SIDES}
    assert halves.pop("prefill").result().tokens
    yield halves


def test_tokens_are_those_of_a_plain_server(pair: Pair, expected: Expected) -> None:
    assert_tokens(pair, expected)


def test_decode_computes_with_the_pages_that_prefill_has_in_the_daemon(
    pair: Pair, expected: Expected, kept_daemon: Daemon
) -> None:
    assert_pages_count(pair, kept_daemon.runtime_dir, expected)


@pytest.mark.parametrize("side", ["prefill", pytest.param("decode", marks=pytest.mark.long)])
def test_an_abort_amid_the_chunks_ends_both_halves(well: Pair, watch: RoomWatch, side: Side) -> None:
    with begun(well, watch, "amid the chunks", side) as halves:
        well.abort(side, f"amid the chunks-{side}-{side}")
    for half in halves.values():
        assert half.result(SOON_S).reason
    watch.wait_until_idle()


def test_a_daemon_killed_amid_the_chunks_comes_back(
    well: Pair, expected: Expected, kept_daemon: Daemon, watch: RoomWatch
) -> None:
    """The servers stay: the daemon after it adopts their pools."""
    with begun(well, watch, "amid the chunks") as halves:
        kept_daemon.kill()
    for side in SIDES:
        assert "DAEMON_LOST" in halves[side].result(SOON_S).reason
    well.assert_healthy()
    assert "DAEMON_LOST" in well.generate(prompt(64)).reason
    kept_daemon.start()
    well.wait_until_served(prompt(64), expected.tokens(64))


@pytest.mark.long
@pytest.mark.parametrize("first", SIDES)
def test_either_side_may_come_first(pair: Pair, expected: Expected, watch: RoomWatch, first: Side) -> None:
    room = new_room()
    other: Side = "decode" if first == "prefill" else "prefill"
    halves = {first: pair.half(first, prompt(333), room)}
    watch.wait_until_opened(room, first)
    halves[other] = pair.half(other, prompt(333), room)
    assert halves["decode"].result().tokens == expected.tokens(333)
    assert halves["prefill"].result().tokens == expected.tokens(333)[:1]


@pytest.mark.long
@pytest.mark.parametrize(("side", "moment"), [("prefill", "waits"), ("decode", "waits"), ("decode", "generates")])
def test_an_abort_of_a_half_alone(well: Pair, watch: RoomWatch, side: Side, moment: Moment) -> None:
    with begun(well, watch, moment, side) as halves:
        well.abort(side, f"{moment}-{side}-{side}")
    assert "abort" in halves[side].result(SOON_S).reason.lower()
    watch.wait_until_idle()


@pytest.mark.long
@pytest.mark.parametrize("side", SIDES)
def test_an_abort_of_a_request_that_waits_behind_another(
    well: Pair, expected: Expected, watch: RoomWatch, side: Side
) -> None:
    well.prefill.flush()
    first, second = new_room(), new_room()
    before = {one: well.half(one, prompt(1000), first) for one in SIDES}
    watch.wait_until_opened(first, "decode")
    behind = {one: well.half(one, prompt(600, seed=8), second, rid=f"behind-{one}-{side}") for one in SIDES}
    for one in SIDES:
        watch.wait_until_opened(second, one)
    well.abort(side, f"behind-{side}-{side}")
    for half in behind.values():
        assert half.result(SOON_S).reason
    assert before["decode"].result().tokens == expected.tokens(1000)
    watch.wait_until_idle()


@pytest.mark.long
@pytest.mark.parametrize(
    ("killed", "moment"),
    [("prefill", "amid the chunks"), ("decode", "amid the chunks"), ("prefill", "waits"), ("decode", "generates")],
)
def test_a_server_that_is_killed_comes_back(well: Pair, watch: RoomWatch, killed: Side, moment: Moment) -> None:
    other: Side = "decode" if killed == "prefill" else "prefill"
    with begun(well, watch, moment) as halves:
        connected = watch.connected()
        well.side(killed).kill()
        watch.wait_until(lambda: watch.connected() < connected, "the daemon knows")
    if moment == "generates":
        assert halves["decode"].result(SOON_S).status == 0
    else:
        assert halves[other].result(SOON_S).reason
    assert well.side(other).get("/health").status == 200
    watch.wait_until_idle()
    well.restart(killed)


@pytest.mark.long
@pytest.mark.parametrize(("moment", "of"), [("amid the chunks", "decode"), ("waits", "prefill"), ("waits", "decode")])
def test_a_daemon_that_is_killed_and_soon_back(
    well: Pair, expected: Expected, kept_daemon: Daemon, watch: RoomWatch, moment: Moment, of: Side
) -> None:
    with begun(well, watch, moment, of) as halves:
        kept_daemon.restart()
    for half in halves.values():
        assert half.result(SOON_S).reason
    well.wait_until_served(prompt(64), expected.tokens(64))


@pytest.mark.long
def test_a_daemon_killed_while_decode_generates_is_not_noticed(
    well: Pair, expected: Expected, kept_daemon: Daemon
) -> None:
    room = new_room()
    halves = {side: well.half(side, prompt(333), room) for side in SIDES}
    assert halves["prefill"].result().tokens
    kept_daemon.restart()
    assert halves["decode"].result().tokens == expected.tokens(333)
    well.wait_until_served(prompt(64), expected.tokens(64))
