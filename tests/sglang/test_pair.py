"""One prefill and one decode server by one daemon, SGLang's router in front: the same tokens as a plain server's.

All tests share the servers, whatever was aborted or killed before.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from kvferry.clients import Client
from tests.kit.daemons import Daemon
from tests.kit.servers import Reply, at_once, prompt
from tests.sglang.expected import AT_ONCE, LENGTHS, Expected
from tests.sglang.servers import SIDES, Pair, Side, new_room, running_pair
from tests.sglang.watch import RoomWatch

CHUNK = 256
LONG = 2000
"""Tokens of a prompt that is under way for many chunks."""

SOON_S = 120.0
"""Within which a request has ended that cannot go on: after the daemon's grace of ten seconds, and prefill's chunk."""


@pytest.fixture(scope="module")
def pair(
    expected: Expected,  # noqa: ARG001  before, so that three servers never run at once
    kept_daemon: Daemon,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Pair]:
    """Return the pair of all tests here."""
    folder: Path = tmp_path_factory.mktemp("pair")
    with running_pair(folder, kept_daemon.runtime_dir, chunk=CHUNK, options=["--page-size", "16"]) as one:
        yield one


@pytest.fixture
def watch(kept_daemon: Daemon) -> Iterator[RoomWatch]:
    """Return what looks at the daemon."""
    with RoomWatch(kept_daemon.runtime_dir) as one:
        yield one


@pytest.fixture
def well(pair: Pair, expected: Expected) -> Iterator[Pair]:
    """Return the pair, which must be healthy after the test, too, and serve as if nothing had been."""
    yield pair
    pair.assert_healthy()
    assert pair.generate(prompt(129)).tokens == expected.tokens(129)


@pytest.mark.parametrize("length", LENGTHS)
def test_tokens_are_those_of_a_plain_server(pair: Pair, expected: Expected, length: int) -> None:
    assert pair.generate(prompt(length)).tokens == expected.tokens(length)


def test_tokens_of_requests_at_once(pair: Pair, expected: Expected) -> None:
    replies = at_once(lambda one: pair.generate(prompt(*one)), AT_ONCE)
    assert [reply.tokens for reply in replies] == [expected.tokens(*one) for one in AT_ONCE]


@pytest.mark.parametrize("first", SIDES)
def test_either_side_may_come_first(pair: Pair, expected: Expected, watch: RoomWatch, first: Side) -> None:
    room = new_room()
    other: Side = "decode" if first == "prefill" else "prefill"
    halves = {first: pair.half(first, prompt(333), room)}
    watch.wait_until_opened(room, first)
    halves[other] = pair.half(other, prompt(333), room)
    assert halves["decode"].result().tokens == expected.tokens(333)
    assert halves["prefill"].result().tokens == expected.tokens(333)[:1]


def test_decode_computes_with_the_pages_that_prefill_has_in_the_daemon(
    pair: Pair, expected: Expected, kept_daemon: Daemon
) -> None:
    """The control of all the others: zeros in their place change the tokens."""
    ids = prompt(600, seed=99)
    as_it_is = pair.generate(ids).tokens
    assert pair.generate(ids).tokens == as_it_is, "prefill's prefix cache alone changes nothing"
    with Client.connect(kept_daemon.runtime_dir) as other:
        pool = other.attach_pool("prefill")
        for role in ("k", "v"):
            pool.tensor("main", role)[:, 1:] = 0
    assert pair.generate(ids).tokens != as_it_is
    pair.prefill.flush()
    assert pair.generate(ids).tokens == as_it_is
    assert pair.generate(prompt(64)).tokens == expected.tokens(64)


@pytest.mark.parametrize("side", SIDES)
def test_an_abort_of_a_half_that_waits_for_the_other(well: Pair, watch: RoomWatch, side: Side) -> None:
    room = new_room()
    alone = well.half(side, prompt(129, seed=1), room, rid=f"alone-{side}")
    watch.wait_until_opened(room, side)
    well.abort(side, f"alone-{side}")
    assert "abort" in alone.result(SOON_S).reason.lower()
    watch.wait_until_idle()


@pytest.mark.parametrize("side", SIDES)
def test_an_abort_amid_the_chunks_ends_both_halves(well: Pair, watch: RoomWatch, side: Side) -> None:
    halves = both_amid_chunks(well, watch, seed=SIDES.index(side))
    well.abort(side, f"{side}-{SIDES.index(side)}")
    for half in halves.values():
        assert half.result(SOON_S).reason
    watch.wait_until_idle()


def test_prefill_killed_amid_the_chunks_comes_back(well: Pair, watch: RoomWatch) -> None:
    halves = both_amid_chunks(well, watch, seed=2)
    well.prefill.kill()
    assert halves["decode"].result(SOON_S).reason
    assert well.decode.get("/health").status == 200
    watch.wait_until_idle()
    well.restart("prefill")


def test_a_daemon_killed_amid_the_chunks_comes_back(
    well: Pair, expected: Expected, kept_daemon: Daemon, watch: RoomWatch
) -> None:
    """The servers stay: the daemon after it adopts their pools."""
    halves = both_amid_chunks(well, watch, seed=3)
    kept_daemon.end()
    for side in SIDES:
        assert "DAEMON_LOST" in halves[side].result(SOON_S).reason
    well.assert_healthy()
    assert "DAEMON_LOST" in well.generate(prompt(64)).reason
    kept_daemon.start()
    well.wait_until_served(prompt(64), expected.tokens(64))


@pytest.mark.long
def test_decode_killed_amid_the_chunks_comes_back(well: Pair, watch: RoomWatch) -> None:
    halves = both_amid_chunks(well, watch, seed=4)
    well.decode.kill()
    assert halves["prefill"].result(SOON_S).reason
    assert well.prefill.get("/health").status == 200
    watch.wait_until_idle()
    well.restart("decode")


@pytest.mark.long
def test_prefill_killed_while_decode_waits_for_it(well: Pair, watch: RoomWatch) -> None:
    room = new_room()
    alone = well.half("decode", prompt(129, seed=5), room)
    watch.wait_until_opened(room, "decode")
    well.prefill.kill()
    assert alone.result(SOON_S).reason
    watch.wait_until_idle()
    well.restart("prefill")


@pytest.mark.long
def test_decode_killed_while_it_generates(well: Pair, watch: RoomWatch) -> None:
    halves = both_with_decode_generating(well, seed=6)
    well.decode.kill()
    assert halves["decode"].result(SOON_S).status == 0
    watch.wait_until_idle()
    well.restart("decode")


@pytest.mark.long
def test_an_abort_while_decode_generates(well: Pair, watch: RoomWatch) -> None:
    halves = both_with_decode_generating(well, seed=7)
    well.abort("decode", "decode-7")
    assert "abort" in halves["decode"].result(SOON_S).reason.lower()
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
def test_a_daemon_killed_while_decode_generates_is_not_noticed(
    well: Pair, expected: Expected, kept_daemon: Daemon
) -> None:
    room = new_room()
    halves = {side: well.half(side, prompt(333), room) for side in SIDES}
    assert halves["prefill"].result().tokens
    kept_daemon.restart()
    assert halves["decode"].result().tokens == expected.tokens(333)
    well.wait_until_served(prompt(64), expected.tokens(64))


@pytest.mark.long
@pytest.mark.parametrize("side", SIDES)
def test_a_daemon_killed_while_a_half_waits_for_the_other(
    well: Pair, expected: Expected, kept_daemon: Daemon, watch: RoomWatch, side: Side
) -> None:
    room = new_room()
    alone = well.half(side, prompt(129, seed=9), room)
    watch.wait_until_opened(room, side)
    kept_daemon.restart()
    assert alone.result(SOON_S).reason
    well.wait_until_served(prompt(64), expected.tokens(64))


@pytest.mark.long
def test_a_daemon_killed_and_soon_back_amid_the_chunks(
    well: Pair, expected: Expected, kept_daemon: Daemon, watch: RoomWatch
) -> None:
    halves = both_amid_chunks(well, watch, seed=10)
    kept_daemon.restart()
    for half in halves.values():
        assert half.result(SOON_S).reason
    well.wait_until_served(prompt(64), expected.tokens(64))


def both_amid_chunks(pair: Pair, watch: RoomWatch, seed: int) -> dict[Side, Future[Reply]]:
    """Send both halves of a long request, and return once some of its chunks are at decode."""
    room = new_room()
    ids = prompt(LONG, seed)
    halves = {side: pair.half(side, ids, room, rid=f"{side}-{seed}") for side in SIDES}
    watch.wait_until_room_arrives(room)
    return halves


def both_with_decode_generating(pair: Pair, seed: int) -> dict[Side, Future[Reply]]:
    """Send both halves of a request of many new tokens, and return once prefill's has ended."""
    room = new_room()
    halves = {side: pair.half(side, prompt(129, seed), room, new=600, rid=f"{side}-{seed}") for side in SIDES}
    assert halves["prefill"].result().tokens
    return halves
