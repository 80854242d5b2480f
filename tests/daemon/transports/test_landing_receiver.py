"""Landing slots at the home: granted, checked, scattered; nothing that comes late or wrong touches a page."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator
from typing import Literal

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.landing import FenceBounds, LandingSlots
from kvferry.daemon.metrics import Counters
from kvferry.daemon.rooms.sides import Piece
from kvferry.daemon.transports import fence_watch, landing_receiver
from kvferry.daemon.transports.direct_pages import DirectPages
from kvferry.daemon.transports.landing_receiver import LandingReceiver
from kvferry.pools.copies import copy_one_by_one
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import DeadlineError, TransferFailedError
from kvferry.protocol.ids import BootId
from kvferry.protocol.peer_messages import Grant, Landed, PieceOver
from kvferry.protocol.peer_messages import Piece as PieceMessage
from tests.daemon.transports.landing_world import (
    BYTES,
    PAGES,
    SEGMENTS,
    LandingWorld,
    ManualExecutor,
    Said,
    bytes_at,
    checksum_at,
    content_at_home,
    region,
    turns,
    write,
)
from tests.rooms.room_world import PAGE_BYTES

pytestmark = [pytest.mark.anyio, pytest.mark.any_device]
GRANTS = 4
"""How many a piece may have at a time in these tests."""

NEVER = FenceBounds(quarantined_bytes=1 << 30, quarantined_s=1e9, drain_timeout_s=1e9)
AT_ONCE = FenceBounds(quarantined_bytes=0, quarantined_s=1e9, drain_timeout_s=1e9)
IMPATIENT = FenceBounds(quarantined_bytes=0, quarantined_s=1e9, drain_timeout_s=0.0)
FAILED = DeadlineError("the write failed").info()


class ScriptedFence:
    """Rebuilds when the test says so."""

    def __init__(self) -> None:
        self.session_name = "session 1"
        self.writing = False
        self.held = False
        self.may_go_on = asyncio.Event()
        self.error: TransferFailedError | None = None
        self.begun = 0

    def hold(self, *, held: bool) -> None:
        """See ``Fence.hold``."""
        self.held = held

    async def rebuild(self) -> str:
        """See ``Fence.rebuild``."""
        self.begun += 1
        await self.may_go_on.wait()
        if self.error is not None:
            raise self.error
        self.session_name = f"session {self.begun + 1}"
        return self.session_name


class AllDirect(DirectPages):
    """Pools that are all registered."""

    def __init__(self) -> None:  # nothing of the real one is needed
        self.on_change = lambda: None

    def state(self, pool: Pool) -> Literal["pending", "ready", "refused"]:
        """See ``DirectPages.state``."""
        del pool
        return "ready"


class Home:
    """A receiver, and what is around it."""

    def __init__(
        self, *, slot_bytes: int = 2 * PAGE_BYTES, slots: int = 8, bounds: FenceBounds = NEVER, direct: bool = False
    ) -> None:
        self.world = LandingWorld()
        self.said, self.executor, self.fence, self.counters = Said(), ManualExecutor(), ScriptedFence(), Counters()
        self.region = region(slots * slot_bytes)
        self.slots = LandingSlots(self.region.address, slot_bytes, slots, bounds)
        self.receiver = LandingReceiver(
            self.said,
            self.fence,
            self.slots,
            self.executor,
            self.world.report,
            self.counters,
            AllDirect() if direct else None,
        )

    def start(self) -> Piece:
        """Start a piece."""
        piece = self.world.piece()
        self.receiver.start(piece)
        return piece

    def grants(self, piece: Piece) -> list[Grant]:
        """Return all grants of a piece so far."""
        return [one for one in self.said.of(Grant) if one.piece == piece.piece_id]

    def land(self, piece: Piece, grant: Grant) -> None:
        """Let a grant be written, and the source say so."""
        self.tell(Landed(grant=grant.grant, checksum=write(self.world, piece, grant)))

    def tell(self, landed: Landed) -> None:
        """Let the source say something."""
        self.receiver.landed(self.world.to_source, landed)

    async def land_all(self, *pieces: Piece) -> None:
        """Let everything land that is granted, also meanwhile."""
        done: set[int] = set()
        while new := [(p, g) for p in pieces for g in self.grants(p) if g.grant not in done]:
            for piece, grant in new:
                done.add(grant.grant)
                self.land(piece, grant)
            await self.executor.run()

    def counted(self, name: str) -> int:
        """Return a counter."""
        return self.counters.snapshot().get(name, 0)


@pytest.fixture(autouse=True)
def _grants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landing_receiver, "GRANTS_PER_PIECE", GRANTS)


@pytest.fixture
async def homes(anyio_backend: object) -> AsyncIterator[list[Home]]:  # noqa: ARG001  this fixture runs on the test's loop
    """Return a list for the homes that a test makes; they are closed after it."""
    made: list[Home] = []
    yield made
    for home in made:
        home.receiver.close()
    await turns()


def home_of(
    homes: list[Home],
    *,
    slot_bytes: int = 2 * PAGE_BYTES,
    slots: int = 8,
    bounds: FenceBounds = NEVER,
    direct: bool = False,
) -> Home:
    """Return a home that will be closed."""
    homes.append(Home(slot_bytes=slot_bytes, slots=slots, bounds=bounds, direct=direct))
    return homes[-1]


async def test_a_piece_lands_fragment_by_fragment_in_any_order(homes: list[Home]) -> None:
    home = home_of(homes)
    piece = home.start()
    (asked,) = home.said.of(PieceMessage)
    assert (asked.piece, [part.pages for part in asked.parts]) == (piece.piece_id, [PAGES])
    assert len(home.grants(piece)) == GRANTS
    for grant in reversed(home.grants(piece)):
        home.land(piece, grant)
    await home.executor.run()
    assert home.world.reports == [], "two of six parcels have not landed"
    for grant in home.grants(piece)[GRANTS:]:
        home.land(piece, grant)
    await home.executor.run()
    assert home.world.outcomes == [(piece.piece_id, "OK")]
    assert home.world.arrived(piece)
    assert home.said.all[-1] == (home.world.to_source, PieceOver(piece=piece.piece_id))
    assert home.slots.free == home.slots.count


async def test_grants_tile_the_piece_and_do_not_share_slots(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=5 * PAGE_BYTES)
    piece = home.start()
    grants = home.grants(piece)
    assert [(one.first, one.stop) for one in grants] == [(0, 5), (5, 10), (10, SEGMENTS)]
    assert [one.size_bytes for one in grants] == [5 * PAGE_BYTES, 5 * PAGE_BYTES, 2 * PAGE_BYTES]
    assert len({one.address for one in grants}) == len(grants)
    assert {one.session for one in grants} == {"session 1"}


async def test_a_wrong_checksum_fails_the_piece_and_touches_no_page(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=BYTES)
    piece = home.start()
    before = content_at_home(piece)
    (grant,) = home.grants(piece)
    checksum = write(home.world, piece, grant)
    ctypes.memset(grant.address + 3, 0x55, 1)
    home.tell(Landed(grant=grant.grant, checksum=checksum))
    await home.executor.run()
    assert home.world.outcomes == [(piece.piece_id, "TRANSFER_FAILED")]
    assert "checksum" in str(home.world.reports[0][1])
    assert content_at_home(piece) == before
    assert home.counted("landing.refused") == 1
    assert home.slots.free == home.slots.count, "nothing more can land there"


async def test_pieces_wait_for_slots_and_take_turns(homes: list[Home]) -> None:
    home = home_of(homes, slots=2)
    one, other = home.start(), home.start()
    assert (len(home.grants(one)), len(home.grants(other))) == (2, 0)
    home.land(one, home.grants(one)[0])
    assert len(home.said.of(Grant)) == 2, "the slot is being read"
    await home.executor.run()
    assert len(home.said.of(Grant)) == 3
    await home.land_all(one, other)
    assert sorted(home.world.outcomes) == [(one.piece_id, "OK"), (other.piece_id, "OK")]
    assert home.world.arrived(one)
    assert home.world.arrived(other)
    assert home.slots.free == 2


async def test_a_page_that_no_slot_can_hold_is_refused(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=PAGE_BYTES - 1)
    piece = home.start()
    await turns()
    assert home.world.outcomes == [(piece.piece_id, "SLOT_TOO_SMALL")]
    assert not home.said.of(Grant)


async def test_a_piece_that_is_stopped_is_over_at_once_but_its_slots_are_not(homes: list[Home]) -> None:
    home = home_of(homes)
    piece = home.start()
    before = content_at_home(piece)
    home.receiver.stop(piece.piece_id)
    await turns()
    assert home.world.outcomes == [(piece.piece_id, "CANCELLED")]
    assert home.said.of(PieceOver) == [PieceOver(piece=piece.piece_id)]
    assert home.slots.granted == GRANTS
    for grant in home.grants(piece):  # they were under way
        home.land(piece, grant)
    await home.executor.run()
    assert content_at_home(piece) == before, "what comes late touches no page"
    assert home.slots.free == home.slots.count
    assert len(home.world.reports) == 1


async def test_a_piece_that_is_stopped_while_it_is_scattered_is_over_afterwards(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=BYTES)
    piece = home.start()
    home.land(piece, home.grants(piece)[0])
    home.receiver.stop(piece.piece_id)
    await turns()
    assert home.world.reports == [], "its pages are being written"
    await home.executor.run()
    assert home.world.outcomes == [(piece.piece_id, "CANCELLED")]
    assert home.slots.free == home.slots.count


async def test_stopping_what_is_over_does_nothing(homes: list[Home]) -> None:
    home = home_of(homes)
    piece = home.start()
    await home.land_all(piece)
    home.receiver.stop(piece.piece_id)
    home.receiver.stop(99)
    await turns()
    assert home.world.outcomes == [(piece.piece_id, "OK")]


async def test_a_source_that_fails_a_grant_fails_the_piece(homes: list[Home]) -> None:
    home = home_of(homes)
    piece = home.start()
    first, *others = home.grants(piece)
    home.tell(Landed(grant=first.grant, error=FAILED))
    await turns()
    assert home.world.outcomes == [(piece.piece_id, "DEADLINE")]
    assert home.slots.granted == len(others)
    for grant in others:
        home.tell(Landed(grant=grant.grant, error=FAILED))
    assert home.slots.free == home.slots.count
    assert len(home.grants(piece)) == GRANTS, "no more is granted"


async def test_what_has_landed_is_taken_once(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=6 * PAGE_BYTES)
    piece = home.start()
    first, second = home.grants(piece)
    home.land(piece, first)
    home.land(piece, first)  # while it is being scattered
    await home.executor.run()
    assert home.world.reports == [], "the other half has not landed"
    assert home.counted("landing.unknown_grants") == 1
    home.land(piece, second)
    await home.executor.run()
    assert home.world.arrived(piece)


async def test_only_the_source_of_a_grant_may_end_it_and_once(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=BYTES)
    piece = home.start()
    (grant,) = home.grants(piece)
    landed = Landed(grant=grant.grant, checksum=write(home.world, piece, grant))
    home.receiver.landed(home.world.to_source._replace(boot_id="f" * 32), landed)
    home.tell(Landed(grant=grant.grant + 1))
    await home.executor.run()
    assert home.world.reports == []
    assert home.counted("landing.unknown_grants") == 2
    home.tell(landed)
    await home.executor.run()
    home.tell(landed)
    await home.executor.run()
    assert home.world.outcomes == [(piece.piece_id, "OK")]
    assert home.counted("landing.unknown_grants") == 3
    home.slots.check()


# -- peers that are gone


async def test_a_lost_peer_fails_its_pieces_and_its_slots_rest(homes: list[Home]) -> None:
    home = home_of(homes)
    piece = home.start()
    before, (grant, *_) = content_at_home(piece), home.grants(piece)
    home.receiver.peer_lost(home.world.to_source, "its connection closed")
    await turns()
    assert home.world.outcomes == [(piece.piece_id, "PEER_LOST")]
    assert home.slots.quarantined == GRANTS
    write(home.world, piece, grant)  # lands late
    home.tell(Landed(grant=grant.grant, checksum=checksum_at(grant.address, grant.size_bytes)))
    await home.executor.run()
    assert content_at_home(piece) == before
    assert home.slots.quarantined == GRANTS
    other = home.start()
    taken = {one.address for one in home.grants(other)}
    assert not taken & {one.address for one in home.grants(piece)}, "a slot in which something may land"


async def test_a_peer_that_is_lost_while_its_bytes_are_scattered(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=BYTES)
    piece = home.start()
    home.land(piece, home.grants(piece)[0])
    home.receiver.peer_lost(home.world.to_source, "its connection closed")
    await turns()
    assert home.world.reports == []
    await home.executor.run()
    assert home.world.outcomes == [(piece.piece_id, "PEER_LOST")]
    assert home.slots.free == home.slots.count, "its one write had ended"


async def test_another_peers_pieces_go_on(homes: list[Home]) -> None:
    home = home_of(homes)
    piece = home.start()
    home.receiver.peer_lost(home.world.to_source._replace(boot_id="f" * 32), "another one")
    await home.land_all(piece)
    assert home.world.outcomes == [(piece.piece_id, "OK")]


async def test_a_peer_that_cannot_be_told_of_a_piece_is_lost(homes: list[Home]) -> None:
    home = home_of(homes)
    home.said.gone.add(home.world.to_source)
    piece = home.start()
    await turns()
    assert home.world.outcomes == [(piece.piece_id, "PEER_LOST")]
    assert home.slots.free == home.slots.count


async def test_a_peer_that_cannot_be_told_of_a_grant_gives_the_slot_back(homes: list[Home]) -> None:
    home = home_of(homes, slots=1)
    piece = home.start()
    (grant,) = home.grants(piece)
    home.land(piece, grant)
    home.said.gone.add(home.world.to_source)
    await home.executor.run()
    assert home.world.outcomes == [(piece.piece_id, "PEER_LOST")]
    assert home.slots.free == 1


# -- fences


async def test_a_write_that_may_still_land_lets_its_slot_rest_until_a_fence(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=BYTES, slots=1, bounds=AT_ONCE)
    piece, (grant,) = (found := home.start()), home.grants(found)
    before = content_at_home(piece)
    home.tell(Landed(grant=grant.grant, error=FAILED, may_still_land=True))
    await turns()
    assert home.world.outcomes == [(piece.piece_id, "DEADLINE")]
    assert home.fence.begun == 1
    other = home.start()
    assert not home.grants(other), "it may still be written"
    write(home.world, piece, grant)
    assert content_at_home(piece) == before
    home.fence.may_go_on.set()
    with capture_logs():
        await turns()
    assert (home.slots.free + home.slots.granted, home.counted("landing.fences")) == (1, 1)
    assert [one.session for one in home.grants(other)] == ["session 2"]
    await home.land_all(other)
    assert home.world.arrived(other)


async def test_a_fence_waits_for_live_grants(homes: list[Home], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence_watch, "LOOK_S", 0.0)
    home = home_of(homes, slot_bytes=6 * PAGE_BYTES, slots=3, bounds=AT_ONCE)
    bad = home.start()
    doomed, alive = home.grants(bad)
    home.tell(Landed(grant=doomed.grant, error=FAILED, may_still_land=True))
    await turns()
    assert (home.fence.begun, home.fence.held) == (0, True)
    home.fence.writing = True
    home.tell(Landed(grant=alive.grant))
    await turns()
    assert home.fence.begun == 0, "this daemon's own writes would end"
    home.fence.writing = False
    await turns()
    assert home.fence.begun == 1


async def test_a_peer_that_lives_and_says_nothing_does_not_hold_slots_for_ever(
    homes: list[Home], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fence_watch, "LOOK_S", 0.0)
    home = home_of(homes, slots=GRANTS, bounds=FenceBounds(0, 0.0, 0.0))
    piece = home.start()
    assert home.slots.free == 0
    home.receiver.stop(piece.piece_id)
    home.fence.may_go_on.set()
    async with asyncio.timeout(10):
        while home.slots.free < GRANTS:
            await turns()
    assert home.world.outcomes == [(piece.piece_id, "CANCELLED")]
    assert home.fence.begun >= 1


async def test_a_fence_that_waits_no_longer_fails_what_is_under_way(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=BYTES, slots=3, bounds=IMPATIENT)
    bad, good = home.start(), home.start()
    home.tell(Landed(grant=home.grants(bad)[0].grant, error=FAILED, may_still_land=True))
    await turns()
    assert home.fence.begun == 1
    assert home.world.outcomes == [(bad.piece_id, "DEADLINE"), (good.piece_id, "TRANSFER_FAILED")]
    home.land(good, home.grants(good)[0])
    assert home.counted("landing.unknown_grants") == 1
    home.fence.may_go_on.set()
    await turns()
    assert home.slots.free == home.slots.count


async def test_a_fence_that_fails_frees_nothing(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=BYTES, slots=2, bounds=AT_ONCE)
    piece = home.start()
    home.fence.error = TransferFailedError("no engine")
    home.fence.may_go_on.set()
    with capture_logs() as logs:
        home.tell(Landed(grant=home.grants(piece)[0].grant, error=FAILED, may_still_land=True))
        await turns()
    (complaint,) = [one["event"] for one in logs if one["log_level"] == "error"]
    assert complaint.startswith("the fence failed: no slot is freed")
    assert (home.slots.quarantined, home.slots.take(BootId("f" * 32), 9)) == (1, None)
    other = home.start()
    await turns()
    assert home.world.outcomes[1:] == [(other.piece_id, "TRANSFER_FAILED")], "it must not wait for ever"


async def test_nothing_is_reported_after_the_end(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=BYTES)
    piece = home.start()
    home.land(piece, home.grants(piece)[0])
    home.receiver.close()
    await home.executor.run()
    assert home.world.reports == []


# -- pages that are written directly


def write_pages(home: Home, piece: Piece, grant: Grant) -> int:
    """Write to pages what was granted; return the checksum."""
    staging = region(grant.size_bytes)
    side = piece.promises[grant.part].plan.source
    home.world.source_pool.region.gather(side, grant.first, grant.stop, staging.address, copy_one_by_one)
    at = staging.address
    for address, size_bytes in grant.runs:
        ctypes.memmove(address, at, size_bytes)
        at += size_bytes
    return checksum_at(staging.address, grant.size_bytes)


@pytest.mark.host_only
async def test_pages_written_directly_are_checked_in_place(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=BYTES, direct=True)
    piece = home.start()
    (grant,) = home.grants(piece)
    assert sum(size for _, size in grant.runs) == grant.size_bytes == BYTES
    home.tell(Landed(grant=grant.grant, checksum=write_pages(home, piece, grant)))
    await home.executor.run()
    assert home.world.outcomes == [(piece.piece_id, "OK")]
    assert home.world.arrived(piece)
    assert bytes_at(home.region.address, home.region.size_bytes) == b"\xee" * home.region.size_bytes
    assert home.counted("landing.direct_bytes") == BYTES


@pytest.mark.host_only
async def test_what_lands_in_the_host_tier_goes_by_slots_all_the_same(homes: list[Home]) -> None:
    home = home_of(homes, slot_bytes=BYTES, direct=True)
    home.world.home_pool.lands_as = "0" * 32
    piece = home.start()
    assert [grant.runs for grant in home.grants(piece)] == [()]


@pytest.mark.host_only
async def test_a_stopped_piece_whose_pages_are_written_is_over_when_they_are(homes: list[Home]) -> None:
    home = home_of(homes, direct=True)
    piece = home.start()
    *grants, last = home.grants(piece)
    home.receiver.stop(piece.piece_id)
    assert home.said.of(PieceOver) == [PieceOver(piece=piece.piece_id)]
    for grant in grants:
        home.tell(Landed(grant=grant.grant, checksum=0))
    await home.executor.run()
    assert home.world.reports == [], "one may still land"
    home.tell(Landed(grant=last.grant, checksum=0))
    await home.executor.run()
    assert home.world.outcomes == [(piece.piece_id, "CANCELLED")]


@pytest.mark.host_only
@pytest.mark.parametrize("how", ["may still land", "lost"])
async def test_pages_in_which_something_may_land_are_held_until_a_fence(homes: list[Home], how: str) -> None:
    home = home_of(homes, slot_bytes=BYTES, bounds=AT_ONCE, direct=True)
    piece, (grant,) = (found := home.start()), home.grants(found)
    if how == "lost":
        home.receiver.peer_lost(home.world.to_source, "its connection closed")
    else:
        home.tell(Landed(grant=grant.grant, error=FAILED, may_still_land=True))
    await turns()
    assert (home.world.reports, home.fence.begun) == ([], 1)
    home.fence.may_go_on.set()
    await turns()
    assert home.world.outcomes == [(piece.piece_id, "PEER_LOST" if how == "lost" else "DEADLINE")]
