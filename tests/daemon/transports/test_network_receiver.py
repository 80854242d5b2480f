"""Bounce buffers at the home: credited, checked, scattered; nothing that comes late or wrong touches a page."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from structlog.testing import capture_logs

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transfer.endpoints import Incarnation, TransferOp
from kvferry.daemon.transports import network_receiver
from kvferry.daemon.transports.network_copier import NetworkCopier
from kvferry.daemon.transports.network_memory import FenceBounds
from kvferry.daemon.transports.network_receiver import NetworkReceiver
from kvferry.pools import copy_kernel
from kvferry.pools.copy_kernel import Copies
from kvferry.pools.planning.copies import CopyBlocks, copy_one_by_one
from kvferry.pools.planning.sides import PlanSide
from kvferry.protocol.errors import DeadlineError, TransferFailedError
from kvferry.protocol.peer_messages import OpEnded, OpRequest, WriteCredit, Written
from tests.kit.network import (
    BYTES,
    SEGMENTS,
    ManualExecutor,
    NetworkHarness,
    Said,
    bytes_at,
    checksum_at,
    content_at_home,
    network_memory,
    region,
    turns,
    write,
)
from tests.kit.peers import PAGES
from tests.kit.transfers import PAGE_BYTES

pytestmark = pytest.mark.anyio
ANOTHER = Incarnation("tcp://192.0.2.9:7801", "f" * 32)
CREDITS = 4
"""How many a transfer op may have at a time in these tests."""

AT_ONCE = FenceBounds(quarantined_bytes=0, quarantined_s=1e9, drain_timeout_s=1e9, pages_s=1e9)
IMPATIENT = FenceBounds(quarantined_bytes=0, quarantined_s=1e9, drain_timeout_s=0.0, pages_s=1e9)
FAILED = DeadlineError("the write failed").info()


class Home:
    """A receiver, and what is around it."""

    def __init__(self, buffer_bytes: int, **network: Any) -> None:  # noqa: ANN401  see ``network_memory``
        self.harness = NetworkHarness()
        self.said, self.executor, self.counters = Said(), ManualExecutor(), Counters()
        self.copier = NetworkCopier(self.executor)
        self.engine, memory = network_memory(buffer_bytes=buffer_bytes, **network)
        self.engine.may_register.set()
        self.memory, self.bounce_buffers = memory, memory.bounce_buffers
        self.write_bytes = buffer_bytes
        self.receiver = NetworkReceiver(self.said, lambda _peer: self.write_bytes, memory, self.copier, self.counters)

    def start(self) -> TransferOp:
        op = self.harness.op()
        self.receiver.start(op, self.harness.report)
        return op

    async def start_direct(self) -> TransferOp:
        op = self.start()
        await turns()
        return op

    def credits(self, op: TransferOp) -> list[WriteCredit]:
        return [one for one in self.said.of(WriteCredit) if one.op == op.op_id]

    def into(self, op: TransferOp, credit: WriteCredit) -> None:
        self.notify(Written(credit=credit.credit, checksum=write(self.harness, op, credit)))

    def notify(self, written: Written) -> None:
        self.receiver.written(self.harness.to_source, written)

    async def land_all(self, *ops: TransferOp) -> None:
        done: set[int] = set()
        while new := [(p, g) for p in ops for g in self.credits(p) if g.credit not in done]:
            for op, credit in new:
                done.add(credit.credit)
                self.into(op, credit)
            await self.executor.run()

    def fails(self, credit: WriteCredit, *, may_still_land: bool = True) -> None:
        self.notify(Written(credit=credit.credit, error=FAILED, may_still_land=may_still_land))

    def ends(self, op: TransferOp, credit: WriteCredit, how: str) -> None:
        """End a transfer op one of whose writes may still land."""
        if how == "lost":
            self.receiver.peer_lost(self.harness.to_source, "its connection closed")
        elif how == "stopped":
            self.receiver.stop(op.op_id)
        else:
            self.fails(credit)

    def all_free(self) -> bool:
        return self.bounce_buffers.free == self.bounce_buffers.count

    def fence(self) -> tuple[int, bool, str]:
        return self.engine.rebuilds, self.engine.held, self.receiver.status().state

    def counted(self, name: str) -> int:
        return self.counters.snapshot().get(name, 0)


MakeHome = Callable[..., Home]


@pytest.fixture(autouse=True)
def _credits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_receiver, "CREDITS_PER_OP", CREDITS)


@pytest.fixture
async def home_of(anyio_backend: object) -> AsyncIterator[MakeHome]:  # noqa: ARG001  this fixture runs on the test's loop
    made: list[Home] = []

    def make(buffer_bytes: int = 2 * PAGE_BYTES, **network: Any) -> Home:  # noqa: ANN401  see ``network_memory``
        made.append(Home(buffer_bytes, **network))
        return made[-1]

    yield make
    for home in made:
        home.receiver.close()
    await turns()


@pytest.mark.parametrize(
    ("buffer_pages", "least_pages", "chunk_pages"), [(12, 0, 3), (12, 4, 4), (12, 5, 5), (12, 12, 12), (2, 0, 2)]
)
async def test_a_transfer_is_cut_so_that_its_copies_overlap(
    home_of: MakeHome, monkeypatch: pytest.MonkeyPatch, buffer_pages: int, least_pages: int, chunk_pages: int
) -> None:
    monkeypatch.setattr(network_receiver, "LEAST_CHUNK_BYTES", least_pages * PAGE_BYTES)
    home = home_of(buffer_pages * PAGE_BYTES)
    op = home.start()
    assert home.credits(op)[0].size_bytes == chunk_pages * PAGE_BYTES
    await home.land_all(op)
    assert len(home.credits(op)) == -(-SEGMENTS // chunk_pages)
    assert home.harness.arrived(op)


@pytest.mark.any_device
async def test_an_op_lands_fragment_by_fragment_in_any_order(home_of: MakeHome) -> None:
    home = home_of()
    op = home.start()
    home.receiver.peer_lost(home.harness.to_source._replace(boot_id="f" * 32), "another one")
    home.receiver.peer_lost(home.harness.to_source._replace(address=ANOTHER.address), "another one with its boot id")
    (asked,) = home.said.of(OpRequest)
    assert (asked.op, [segment.pages for segment in asked.segments]) == (op.op_id, [PAGES])
    assert len(home.credits(op)) == CREDITS
    for credit in reversed(home.credits(op)):
        home.into(op, credit)
    await home.executor.run()
    assert home.harness.reports == [], "two of six copy chunks have not landed"
    for credit in home.credits(op)[CREDITS:]:
        home.into(op, credit)
    await home.executor.run()
    assert home.harness.outcomes == [(op.op_id, "OK")]
    assert home.harness.arrived(op)
    assert home.said.all[-1] == (home.harness.to_source, OpEnded(op=op.op_id))
    assert home.all_free()
    for over_or_unknown in (op.op_id, 99):
        home.receiver.stop(over_or_unknown)
    await turns()
    assert home.harness.outcomes == [(op.op_id, "OK")]


@pytest.mark.any_device
@pytest.mark.parametrize("way", ["in one pass", "as a device's are"])
async def test_a_wrong_checksum_fails_the_op(home_of: MakeHome, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    if way == "as a device's are":
        monkeypatch.setattr(network_receiver, "HostRegion", Home)  # which no region is
    home = home_of(BYTES)
    op = home.start()
    before = content_at_home(op)
    (credit,) = home.credits(op)
    checksum = write(home.harness, op, credit)
    ctypes.memset(credit.address + 3, 0x55, 1)
    home.notify(Written(credit=credit.credit, checksum=checksum))
    await home.executor.run()
    assert home.harness.outcomes == [(op.op_id, "TRANSFER_FAILED")]
    assert "checksum" in str(home.harness.reports[0][1])
    if way != "in one pass":
        assert content_at_home(op) == before, "slices, and what devices have, are verified first"
    assert home.counted("network.refused") == 1
    assert home.all_free(), "nothing more can land there"


async def test_a_peer_that_does_not_answer_leaves_others_some_bounce_buffers(home_of: MakeHome) -> None:
    home = home_of(PAGE_BYTES, bounce_buffers=8)
    silent = [home.start() for _ in range(3)]
    assert sum(len(home.credits(op)) for op in silent) == 7
    other = home.harness.op()
    assert other.send_request.origin is not None
    other.send_request.origin = other.send_request.origin._replace(peer=ANOTHER)
    home.receiver.start(other, home.harness.report)
    assert (len(home.credits(other)), home.bounce_buffers.free) == (1, 0)
    (credit,) = home.credits(other)
    home.receiver.written(ANOTHER, Written(credit=credit.credit, error=FAILED))
    assert home.bounce_buffers.free == 1, "nor does the silent peer get it"
    await home.land_all(*silent)  # once it answers all goes on
    assert all(home.harness.arrived(op) for op in silent)
    assert home.all_free()


async def test_ops_wait_for_bounce_buffers_and_take_turns(home_of: MakeHome) -> None:
    home = home_of(bounce_buffers=2)
    one, other = home.start(), home.start()
    assert (len(home.credits(one)), len(home.credits(other))) == (2, 0)
    home.into(one, home.credits(one)[0])
    assert len(home.said.of(WriteCredit)) == 2, "the bounce buffer is being read"
    await home.executor.run()
    assert len(home.said.of(WriteCredit)) == 3
    await home.land_all(one, other)
    assert sorted(home.harness.outcomes) == [(one.op_id, "OK"), (other.op_id, "OK")]
    assert home.harness.arrived(one)
    assert home.harness.arrived(other)
    assert home.bounce_buffers.free == 2


async def test_a_page_that_no_bounce_buffer_can_hold_is_refused(home_of: MakeHome) -> None:
    home = home_of(PAGE_BYTES - 1)
    op = home.start()
    await turns()
    assert home.harness.outcomes == [(op.op_id, "BOUNCE_BUFFER_TOO_SMALL")]
    assert not home.said.of(WriteCredit)


@pytest.mark.any_device
@pytest.mark.parametrize("fault", ["CANCELLED", "PEER_LOST"])
@pytest.mark.parametrize("when", ["credited", "being scattered"])
async def test_an_op_that_fails_is_over_when_no_page_changes_any_more(home_of: MakeHome, fault: str, when: str) -> None:
    home = home_of(2 * PAGE_BYTES if when == "credited" else BYTES)
    op = home.start()
    before, write_credits = content_at_home(op), home.credits(op)
    if when == "being scattered":
        home.into(op, write_credits[0])
    home.ends(op, write_credits[0], "stopped" if fault == "CANCELLED" else "lost")
    await turns()
    assert home.said.of(OpEnded) == [OpEnded(op=op.op_id)]
    assert home.harness.outcomes == ([(op.op_id, fault)] if when == "credited" else []), "its pages are being written"
    if when == "credited":  # bounce buffers outlive the op; what comes late touches no page
        assert home.bounce_buffers.quarantined == (CREDITS if fault == "PEER_LOST" else 0)
        for credit in write_credits:
            home.into(op, credit)
    await home.executor.run()
    assert (content_at_home(op) == before) == (when == "credited")
    assert home.harness.outcomes == [(op.op_id, fault)]
    may_still_land = fault == "PEER_LOST" and when == "credited"
    assert home.bounce_buffers.free == home.bounce_buffers.count - (CREDITS if may_still_land else 0)
    taken = {one.address for one in home.credits(home.start())}
    assert not (may_still_land and taken & {one.address for one in write_credits}), "something may still land there"


async def test_a_source_that_fails_a_credit_fails_the_op(home_of: MakeHome) -> None:
    home = home_of()
    op = home.start()
    first, *others = home.credits(op)
    home.fails(first, may_still_land=False)
    await turns()
    assert home.harness.outcomes == [(op.op_id, "DEADLINE")]
    assert home.bounce_buffers.credits == len(others)
    for credit in others:
        home.fails(credit, may_still_land=False)
    assert home.all_free()
    assert len(home.credits(op)) == CREDITS, "no more is credited"


async def test_only_the_source_of_a_credit_may_end_it_and_once(home_of: MakeHome) -> None:
    home = home_of(BYTES)
    op = home.start()
    (credit,) = home.credits(op)
    written = Written(credit=credit.credit, checksum=write(home.harness, op, credit))
    home.receiver.written(home.harness.to_source._replace(boot_id="f" * 32), written)
    home.notify(Written(credit=credit.credit + 1))
    await home.executor.run()
    assert home.harness.reports == []
    assert home.counted("network.unknown_credits") == 2
    home.notify(written)
    await home.executor.run()
    home.notify(written)
    await home.executor.run()
    assert home.harness.outcomes == [(op.op_id, "OK")]
    assert home.counted("network.unknown_credits") == 3
    assert home.all_free()


# -- peers that are gone


@pytest.mark.parametrize("credited", [False, True], ids=["an op", "a write credit"])
async def test_a_peer_that_cannot_be_told_is_lost(home_of: MakeHome, *, credited: bool) -> None:
    home = home_of(bounce_buffers=1)
    if not credited:
        home.said.gone.add(home.harness.to_source)
    op = home.start()
    if credited:
        (credit,) = home.credits(op)
        home.into(op, credit)
        home.said.gone.add(home.harness.to_source)
    await home.executor.run()
    assert home.harness.outcomes == [(op.op_id, "PEER_LOST")]
    assert home.all_free()


# -- fences


@pytest.fixture
def _checks_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_receiver, "CHECK_INTERVAL_S", 0.0)


async def test_a_write_that_may_still_land_lets_its_bounce_buffer_rest_until_a_fence(home_of: MakeHome) -> None:
    home = home_of(BYTES, bounce_buffers=1, bounds=AT_ONCE)
    assert home.fence() == (0, False, "ready")
    op, (credit,) = (found := home.start()), home.credits(found)
    before = content_at_home(op)
    home.fails(credit)
    await turns()
    assert home.harness.outcomes == [(op.op_id, "DEADLINE")]
    assert home.fence() == (1, True, "fencing")
    other = home.start()
    assert not home.credits(other), "it may still be written"
    write(home.harness, op, credit)
    assert content_at_home(op) == before
    home.engine.may_rebuild.set()
    with capture_logs() as logs:
        await turns()
    assert [(one["event"], one["freed"]) for one in logs] == [("bounce buffers fenced", 1)]
    assert (home.bounce_buffers.free + home.bounce_buffers.credits, home.counted("network.fences")) == (1, 1)
    assert home.fence() == (1, False, "ready")
    assert [one.session for one in home.credits(other)] == ["session 2"]
    await home.land_all(other)
    assert home.harness.arrived(other)


@pytest.mark.usefixtures("_checks_all_the_time")
@pytest.mark.parametrize("own", [False, True], ids=["write credits", "own writes"])
async def test_a_fence_waits_for_credits_and_for_own_writes(home_of: MakeHome, *, own: bool) -> None:
    home = home_of(6 * PAGE_BYTES, bounce_buffers=3, bounds=AT_ONCE)
    bad = home.start()
    doomed, alive = home.credits(bad)
    home.fails(doomed)
    home.engine.writing = own
    if own:
        home.notify(Written(credit=alive.credit))
    await turns()
    assert home.fence() == (0, True, "draining")
    if not own:
        home.notify(Written(credit=alive.credit))
    home.engine.writing = False
    home.engine.may_rebuild.set()
    await turns()
    assert home.fence() == (1, False, "ready")
    assert home.bounce_buffers.free == 3


@pytest.mark.usefixtures("_checks_all_the_time")
async def test_a_peer_that_lives_and_says_nothing_does_not_hold_bounce_buffers_for_ever(home_of: MakeHome) -> None:
    home = home_of(bounce_buffers=CREDITS, bounds=FenceBounds(0, 0.0, 0.0, 0.0))
    op = home.start()
    assert home.bounce_buffers.free == 0
    assert list(home.receiver.status().held_by.values()) == [CREDITS]
    home.receiver.stop(op.op_id)
    home.engine.may_rebuild.set()
    async with asyncio.timeout(10):
        while home.bounce_buffers.free < CREDITS:
            await turns()
    assert home.harness.outcomes == [(op.op_id, "CANCELLED")]
    assert home.engine.rebuilds >= 1
    assert (home.counted("network.unanswered_credits"), home.receiver.status().held_by) == (CREDITS, {})


async def test_a_fence_that_waits_no_longer_fails_what_is_under_way(home_of: MakeHome) -> None:
    home = home_of(BYTES, bounce_buffers=3, bounds=IMPATIENT)
    bad, good = home.start(), home.start()
    home.engine.writing = True
    home.fails(home.credits(bad)[0])
    await turns()
    assert home.engine.rebuilds == 1
    assert home.harness.outcomes == [(bad.op_id, "DEADLINE"), (good.op_id, "TRANSFER_FAILED")]
    home.into(good, home.credits(good)[0])
    assert home.counted("network.unknown_credits") == 1
    home.engine.may_rebuild.set()
    await turns()
    assert home.all_free()


@pytest.mark.usefixtures("_checks_all_the_time")
async def test_a_fence_that_fails_frees_nothing_and_is_not_tried_again(home_of: MakeHome) -> None:
    home = home_of(BYTES, bounce_buffers=2, bounds=AT_ONCE)
    op = home.start()
    home.engine.error = TransferFailedError("no engine")
    home.engine.may_rebuild.set()
    with capture_logs() as logs:
        home.fails(home.credits(op)[0])
        await turns()
    (complaint,) = [one["event"] for one in logs if one["log_level"] == "error"]
    assert complaint.startswith("the fence failed: bounce buffers stay quarantined")
    assert (home.bounce_buffers.quarantined, home.bounce_buffers.take(ANOTHER, 9)) == (1, None)
    other = home.start()
    await turns()
    assert home.harness.outcomes[1:] == [(other.op_id, "TRANSFER_FAILED")], "it must not wait for ever"
    assert (home.engine.rebuilds, home.receiver.status().state) == (1, "broken")


async def test_nothing_is_reported_after_the_end(home_of: MakeHome) -> None:
    home = home_of(BYTES)
    op = home.start()
    home.into(op, home.credits(op)[0])
    home.receiver.close()
    await home.executor.run()
    assert home.harness.reports == []


# -- pages that are written directly


def write_pages(home: Home, op: TransferOp, credit: WriteCredit) -> int:
    """Write to pages what was credited; return the checksum."""
    staging = region(credit.size_bytes)
    side = op.planned_copies[credit.segment].plan.source
    home.harness.source_pool.region.gather(side, credit.first, credit.stop, staging.address, copy_one_by_one)
    at = staging.address
    for address, size_bytes in credit.runs:
        ctypes.memmove(address, at, size_bytes)
        at += size_bytes
    return checksum_at(staging.address, credit.size_bytes)


async def test_pages_written_directly_are_checked_in_place(home_of: MakeHome) -> None:
    home = home_of(BYTES, direct=True)
    op = await home.start_direct()
    (credit,) = home.credits(op)
    assert sum(size for _, size in credit.runs) == credit.size_bytes == BYTES
    home.notify(Written(credit=credit.credit, checksum=write_pages(home, op, credit)))
    await home.executor.run()
    assert home.harness.outcomes == [(op.op_id, "OK")]
    assert home.harness.arrived(op)
    buffer = home.bounce_buffers.take(ANOTHER, 99)
    assert buffer is not None
    assert bytes_at(buffer.address, BYTES) == b"\xee" * BYTES
    assert home.counted("network.direct_bytes") == BYTES


async def test_what_lands_in_the_host_tier_goes_by_bounce_buffers_all_the_same(home_of: MakeHome) -> None:
    home = home_of(BYTES, direct=True)
    home.harness.home_pool.becomes_snapshot = "0" * 32
    assert [credit.runs for credit in home.credits(await home.start_direct())] == [()]


async def test_a_stopped_op_whose_pages_are_written_is_over_when_they_are(home_of: MakeHome) -> None:
    home = home_of(direct=True)
    op = await home.start_direct()
    *write_credits, last = home.credits(op)
    home.receiver.stop(op.op_id)
    assert home.said.of(OpEnded) == [OpEnded(op=op.op_id)]
    for credit in write_credits:
        home.notify(Written(credit=credit.credit, checksum=0))
    await home.executor.run()
    assert home.harness.reports == [], "one may still land"
    home.notify(Written(credit=last.credit, checksum=0))
    await home.executor.run()
    assert home.harness.outcomes == [(op.op_id, "CANCELLED")]


@pytest.mark.usefixtures("_checks_all_the_time")
@pytest.mark.parametrize("how", ["may still land", "lost", "stopped"])
async def test_a_transfer_waits_for_a_fence_of_pages_no_longer_than_it_must(home_of: MakeHome, how: str) -> None:
    bounds = FenceBounds(quarantined_bytes=1 << 30, quarantined_s=1e9, drain_timeout_s=1e9, pages_s=0.0)
    home = home_of(BYTES, bounds=bounds, direct=True)
    op = await home.start_direct()
    (credit,) = home.credits(op)
    home.ends(op, credit, how)
    home.engine.may_rebuild.set()
    async with asyncio.timeout(10):
        while not home.harness.outcomes:
            await turns()
    assert home.engine.rebuilds == 1


@pytest.mark.parametrize("how", ["may still land", "lost"])
async def test_pages_in_which_something_may_land_are_held_until_a_fence(home_of: MakeHome, how: str) -> None:
    home = home_of(BYTES, bounds=AT_ONCE, direct=True)
    op = await home.start_direct()
    (credit,) = home.credits(op)
    home.ends(op, credit, how)
    await turns()
    assert (home.harness.reports, home.engine.rebuilds) == ([], 1)
    home.engine.may_rebuild.set()
    await turns()
    assert home.harness.outcomes == [(op.op_id, "PEER_LOST" if how == "lost" else "DEADLINE")]


@pytest.mark.any_device
@pytest.mark.parametrize("asked", ["by the sender", "by the receiver", "by nobody"])
async def test_what_was_scattered_wrongly_is_found_where_checksums_are_asked_for(
    home_of: MakeHome, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    home = home_of(BYTES)
    op = home.start()
    op.send_request.checksums = asked == "by the sender"
    op.receive_request.checksums = asked == "by the receiver"
    region, rightly = type(home.harness.home_pool.region), copy_kernel.copy_with_digest
    scatter = region.scatter

    def wrong(copies: Copies) -> int:
        digest = rightly(copies)
        source, destination = copies[0, :2].tolist()
        ctypes.memmove(destination, source + BYTES // 2, 8)
        return digest

    def wrong_on_device(self: Any, side: PlanSide, first: int, stop: int, at: int, copy: CopyBlocks) -> None:  # noqa: ANN401
        scatter(self, side, first, stop, at, copy)
        scatter(self, side, first, first + 1, at + BYTES // 2, copy)

    monkeypatch.setattr(copy_kernel, "copy_with_digest", wrong)
    monkeypatch.setattr(region, "scatter", wrong_on_device)
    await home.land_all(op)
    outcome = "OK" if asked == "by nobody" else "TRANSFER_FAILED"
    assert home.harness.outcomes == [(op.op_id, outcome)]
    assert not home.harness.arrived(op)
