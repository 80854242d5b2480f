"""Grants at the source: gathered into staging, written, and answered whatever became of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest
import xxhash
from structlog.testing import capture_logs

from kvferry.daemon.metrics import Counters
from kvferry.daemon.rooms.peer_forms import piece_of
from kvferry.daemon.rooms.sides import Piece, State
from kvferry.daemon.transports.landing_sender import LandingSender
from kvferry.daemon.transports.mooncake_writes import OnWriteDone, OnWriteLate, WriteFailedError
from kvferry.protocol.errors import GeometryMismatchError, InvalidFieldError, TransferFailedError, UnknownRoomError
from kvferry.protocol.peer_messages import Grant, Landed
from kvferry.protocol.peer_messages import Piece as PieceMessage
from tests.daemon.transports.landing_world import (
    BYTES,
    PAGES,
    SEGMENTS,
    LandingWorld,
    ManualExecutor,
    Said,
    bytes_at,
    content_at_source,
    region,
)
from tests.rooms.room_world import PAGE_BYTES

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]
HALF = SEGMENTS // 2
SLOT = 1 << 20
"""Where the slots of the home are, as far as it says."""


class Begun(NamedTuple):
    """A write that was begun."""

    session_name: str
    content: bytes
    remote_address: int
    on_done: OnWriteDone
    on_late: OnWriteLate | None


class ScriptedWriter:
    """Writes nothing; the test ends each write."""

    def __init__(self) -> None:
        self.begun: list[Begun] = []
        self.refuse_after: int | None = None

    def write(
        self,
        session_name: str,
        local_address: int,
        remote_address: int,
        size_bytes: int,
        on_done: OnWriteDone,
        *,
        timeout_s: float,
        on_late: OnWriteLate | None = None,
    ) -> int:
        """See ``MooncakeEngine.write``."""
        assert timeout_s == 7.0
        if len(self.begun) == self.refuse_after:
            raise TransferFailedError("the engine is closed")
        self.begun.append(Begun(session_name, bytes_at(local_address, size_bytes), remote_address, on_done, on_late))
        return len(self.begun)


class Source:
    """A sender, and what is around it."""

    def __init__(self, *, buffers: int = 2, staging_bytes: int = BYTES) -> None:
        self.world = LandingWorld()
        self.said, self.executor, self.writer, self.counters = Said(), ManualExecutor(), ScriptedWriter(), Counters()
        self.settled = 0
        self.staging = region(buffers * staging_bytes)
        self.sender = LandingSender(
            self.said,
            self.writer,
            self.staging,
            staging_bytes,
            self.executor,
            self.world.source.book.peers,
            self._settled,
            self.counters,
            7.0,
        )

    def _settled(self) -> None:
        self.settled += 1

    def asked(self) -> tuple[Piece, PieceMessage]:
        """Let a home ask for a piece."""
        piece = self.world.piece()
        message = piece_of(piece)
        self.sender.piece(self.world.to_home, message)
        return piece, message

    def grant(self, message: PieceMessage, number: int = 1, **fields: Any) -> Grant:  # noqa: ANN401
        """Let the home grant all of a piece, or what ``fields`` say."""
        grant = Grant(
            piece=message.piece,
            grant=number,
            part=0,
            first=0,
            stop=SEGMENTS,
            session="home:1",
            address=SLOT,
            size_bytes=BYTES,
        )
        grant = msgspec.structs.replace(grant, **fields)
        self.sender.grant(self.world.to_home, grant)
        return grant

    def halves(self, message: PieceMessage) -> None:
        """Let the home grant a piece in two halves."""
        self.grant(message, 1, stop=HALF, size_bytes=HALF * PAGE_BYTES)
        self.grant(message, 2, first=HALF, size_bytes=HALF * PAGE_BYTES, address=SLOT + BYTES)

    @property
    def landed(self) -> list[tuple[int, str]]:
        """Return the answers to grants, in short."""
        return [(one.grant, one.error.code if one.error else "OK") for one in self.said.of(Landed)]

    @property
    def target_states(self) -> list[State]:
        """Return how far the targets are that have not settled."""
        return [one.state for one in self.world.source.book.sides.targets.values()]

    def sending(self) -> set[int]:
        """Return the pieces that the book thinks are being sent."""
        return {number for one in self.world.source.book.sides.targets.values() for number in one.sending}


@pytest.fixture
async def source(anyio_backend: object) -> Source:  # noqa: ARG001  this fixture runs on the test's loop
    """Return a source with two staging buffers."""
    return Source()


async def test_what_is_granted_is_gathered_written_and_answered(source: Source) -> None:
    piece, message = source.asked()
    assert source.sending() == {piece.piece_id}
    source.grant(message)
    assert source.writer.begun == [], "not gathered yet"
    await source.executor.run()
    (begun,) = source.writer.begun
    assert (begun.session_name, begun.remote_address) == ("home:1", SLOT)
    assert sorted(begun.content) == sorted(content_at_source(source.world.source_pool, piece))
    assert source.landed == []
    begun.on_done(None)
    assert source.landed == [(1, "OK")]
    assert source.said.of(Landed)[0].checksum == xxhash.xxh3_64_intdigest(begun.content)
    assert source.counters.snapshot()["landing.sent_bytes"] == BYTES
    source.sender.piece_over(source.world.to_home, piece.piece_id)
    assert (source.sending(), source.settled) == (set(), 1)


async def test_grants_wait_for_staging_in_their_order() -> None:
    source = Source(buffers=1)
    _, message = source.asked()
    source.halves(message)
    await source.executor.run()
    (first,) = source.writer.begun
    assert first.remote_address == SLOT
    first.on_done(None)
    await source.executor.run()
    assert [one.remote_address for one in source.writer.begun] == [SLOT, SLOT + BYTES]
    assert source.landed == [(1, "OK")]


async def test_a_piece_is_sent_until_its_last_write_has_ended(source: Source) -> None:
    piece, message = source.asked()
    source.halves(message)
    await source.executor.run()
    source.sender.piece_over(source.world.to_home, piece.piece_id)
    source.writer.begun[0].on_done(None)
    assert (source.sending(), source.settled) == ({piece.piece_id}, 0), "its pages are being read"
    source.writer.begun[1].on_done(None)
    assert (source.sending(), source.settled) == (set(), 1)
    source.sender.piece_over(source.world.to_home, piece.piece_id)
    assert source.settled == 1, "once"


@pytest.mark.parametrize("may_still_land", [False, True])
async def test_a_write_that_fails_is_answered(source: Source, *, may_still_land: bool) -> None:
    _, message = source.asked()
    source.grant(message)
    await source.executor.run()
    with capture_logs():
        source.writer.begun[0].on_done(WriteFailedError("cut off", may_still_land=may_still_land))
    (landed,) = source.said.of(Landed)
    assert landed.error is not None
    assert (landed.error.code, landed.may_still_land) == ("TRANSFER_FAILED", may_still_land)
    source.grant(message, 2)
    await source.executor.run()
    assert len(source.writer.begun) == 2, "its buffer is free again"


async def test_a_writer_that_refuses_is_answered(source: Source) -> None:
    _, message = source.asked()
    source.writer.refuse_after = 0
    source.grant(message)
    with capture_logs():
        await source.executor.run()
    assert source.landed == [(1, "TRANSFER_FAILED")]
    assert not source.said.of(Landed)[0].may_still_land


async def test_late_writes_are_counted(source: Source) -> None:
    _, message = source.asked()
    source.grant(message)
    await source.executor.run()
    on_late = source.writer.begun[0].on_late
    assert on_late is not None
    on_late(1)
    assert source.counters.snapshot()["landing.late_writes"] == 1
    assert source.landed == []


# -- several writes for one grant: pages that are written directly

RUNS = ((SLOT, 4 * PAGE_BYTES), (SLOT + (1 << 12), 8 * PAGE_BYTES))


async def test_runs_are_written_one_by_one_and_answered_together(source: Source) -> None:
    _, message = source.asked()
    source.grant(message, runs=RUNS)
    await source.executor.run()
    assert [(one.remote_address, len(one.content)) for one in source.writer.begun] == list(RUNS)
    source.writer.begun[1].on_done(None)
    assert source.landed == []
    source.writer.begun[0].on_done(None)
    assert source.landed == [(1, "OK")]


async def test_that_something_may_still_land_outweighs_other_errors(source: Source) -> None:
    _, message = source.asked()
    source.grant(message, runs=RUNS)
    await source.executor.run()
    with capture_logs():
        source.writer.begun[0].on_done(WriteFailedError("unclear", may_still_land=True))
        source.writer.begun[1].on_done(WriteFailedError("refused", may_still_land=False))
    (landed,) = source.said.of(Landed)
    assert landed.may_still_land


async def test_a_run_that_cannot_begin_fails_the_grant_when_the_others_have_ended(source: Source) -> None:
    _, message = source.asked()
    source.writer.refuse_after = 1
    source.grant(message, runs=RUNS)
    await source.executor.run()
    assert source.landed == []
    with capture_logs():
        source.writer.begun[0].on_done(None)
    assert source.landed == [(1, "TRANSFER_FAILED")]


# -- ends


async def test_a_target_that_ends_drops_what_waits_and_ends_what_is_written() -> None:
    source = Source(buffers=1)
    piece, message = source.asked()
    source.halves(message)
    await source.executor.run()
    (target,) = source.world.source.book.sides.targets.values()
    source.sender.stop(target)
    assert source.landed == [(2, "CANCELLED")]
    assert source.sending() == {piece.piece_id}
    source.grant(message, 3)
    assert source.landed[1:] == [(3, "UNKNOWN_ROOM")]
    source.writer.begun[0].on_done(None)
    assert source.landed[2:] == [(1, "OK")]
    assert (source.sending(), source.settled) == (set(), 1)


async def test_pages_stay_held_until_the_last_write_to_a_home_that_is_gone(source: Source) -> None:
    _, message = source.asked()
    source.grant(message)
    await source.executor.run()
    book, home = source.world.source.book, source.world.to_home
    source.said.gone.add(home)
    source.sender.peer_lost(home)
    book.peers.peer_lost(home, "gone", source.world.source.now)
    assert source.target_states == [State.FINISHED]
    assert source.world.source_pool.allocator.busy_count == PAGES
    source.writer.begun[0].on_done(None)
    assert source.target_states == []
    assert source.world.source_pool.allocator.busy_count == 0


async def test_another_homes_pieces_go_on(source: Source) -> None:
    _, message = source.asked()
    source.sender.peer_lost(source.world.to_home._replace(boot_id="f" * 32))
    source.grant(message)
    await source.executor.run()
    source.writer.begun[0].on_done(None)
    assert source.landed == [(1, "OK")]


# -- what homes may not ask for


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("part", {"part": 1}),
        ("stop", {"first": SEGMENTS, "stop": SEGMENTS}),
        ("stop", {"first": 3, "stop": 2}),
        ("stop", {"stop": SEGMENTS + 1}),
        ("stop", {"stop": (1 << 63) - 1}),
        ("size_bytes", {"size_bytes": BYTES - 1}),
        ("size_bytes", {"size_bytes": 1 << 40}),
        ("size_bytes", {"stop": 1}),
        ("runs", {"runs": ((SLOT, BYTES), (SLOT, 1))}),
        ("runs", {"runs": ((SLOT, BYTES - 1),)}),
        ("piece", {"piece": 99}),
    ],
)
async def test_a_grant_that_is_wrong_is_answered_and_nothing_is_read(
    source: Source, field: str, fields: dict[str, Any]
) -> None:
    _, message = source.asked()
    source.grant(message, **fields)
    (landed,) = source.said.of(Landed)
    assert landed.error is not None
    assert landed.error.field == field
    assert not landed.may_still_land
    await source.executor.run()
    assert source.writer.begun == []


async def test_a_grant_larger_than_staging_names_the_remedy() -> None:
    source = Source(staging_bytes=BYTES - PAGE_BYTES)
    _, message = source.asked()
    source.grant(message)
    (landed,) = source.said.of(Landed)
    assert landed.error is not None
    assert "landing.slot_bytes" in landed.error.detail


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("chunk", {"chunk": 1}),
        ("parts", {"component": "draft"}),
        ("parts", {"heads": ()}),
        ("parts", {"entries": (0, 99), "heads": ((0, 0), (0, 0))}),
        ("parts", {"pages": PAGES + 1}),
        ("parts", {"start": 1}),
        ("parts", {"start": 1 << 62}),
        ("parts", {"pages": 0}),
    ],
)
async def test_a_piece_that_the_offer_does_not_have_is_refused(
    source: Source, field: str, change: dict[str, Any]
) -> None:
    message = piece_of(source.world.piece())
    (part,) = message.parts
    if "chunk" in change:
        wrong = msgspec.structs.replace(message, **change)
    else:
        wrong = msgspec.structs.replace(message, parts=(msgspec.structs.replace(part, **change),))
    with pytest.raises(InvalidFieldError) as refused:
        source.sender.piece(source.world.to_home, wrong)
    assert refused.value.field == field
    assert source.sending() == set()


async def test_grants_for_a_piece_that_was_refused_are_told_why(source: Source) -> None:
    message = piece_of(source.world.piece())
    with pytest.raises(InvalidFieldError):
        source.sender.piece(source.world.to_home, msgspec.structs.replace(message, chunk=1))
    source.grant(message)
    assert source.landed == [(1, "INVALID_FIELD")]
    source.sender.piece_over(source.world.to_home, message.piece)
    source.grant(message, 2)
    assert source.landed[1:] == [(2, "UNKNOWN_ROOM")]


async def test_heads_that_an_entry_does_not_have_are_refused(source: Source) -> None:
    message = piece_of(source.world.piece())
    (part,) = message.parts
    wrong = msgspec.structs.replace(part, heads=((1, 1),) * len(part.entries))
    with pytest.raises(GeometryMismatchError):
        source.sender.piece(source.world.to_home, msgspec.structs.replace(message, parts=(wrong,)))


async def test_only_the_home_of_the_offer_may_ask_and_once(source: Source) -> None:
    message = piece_of(source.world.piece())
    stranger = source.world.to_home._replace(boot_id="f" * 32)
    with pytest.raises(UnknownRoomError):
        source.sender.piece(stranger, message)
    with pytest.raises(UnknownRoomError):
        source.sender.piece(source.world.to_home, msgspec.structs.replace(message, offer=99, piece=77))
    source.sender.piece(source.world.to_home, message)
    source.sender.grant(stranger, source.grant(message))
    assert source.landed == [(1, "UNKNOWN_ROOM")]
    with pytest.raises(InvalidFieldError, match="known already"):
        source.sender.piece(source.world.to_home, message)
