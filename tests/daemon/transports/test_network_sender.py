"""Write credits at the source: gathered into staging, written, and answered whatever became of them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import pytest
import xxhash
from structlog.testing import capture_logs

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transfer.endpoints import Incarnation, TransferOp
from kvferry.daemon.transfer.peer_transfers import op_of
from kvferry.daemon.transfer.transitions import State
from kvferry.daemon.transports.mooncake import WriteFailedError
from kvferry.daemon.transports.network_copier import NetworkCopier
from kvferry.daemon.transports.network_sender import NetworkSender
from kvferry.protocol.errors import ErrorInfo, GeometryMismatchError, InvalidFieldError, UnknownTransferError
from kvferry.protocol.peer_messages import OpRequest, WriteCredit, Written
from tests.kit.network import (
    BYTES,
    SEGMENTS,
    ManualExecutor,
    NetworkHarness,
    Said,
    content_at_source,
    network_memory,
)
from tests.kit.peers import PAGES
from tests.kit.transfers import PAGE_BYTES

pytestmark = pytest.mark.anyio
HALF = SEGMENTS // 2
BOUNCE_BUFFER = 1 << 20
"""Where the bounce buffers of the home are, as far as it says."""


class Source:
    """A sender, and what is around it."""

    def __init__(self, *, buffers: int = 2, staging_bytes: int = BYTES) -> None:
        self.harness = NetworkHarness()
        self.said, self.executor, self.counters = Said(), ManualExecutor(), Counters()
        self.settled = 0
        self.copier = NetworkCopier(self.executor)
        self.writer, self.memory = network_memory(buffer_bytes=staging_bytes, staging=buffers)
        peers = self.harness.source.state_machine.peers
        self.sender = NetworkSender(self.said, self.memory, self.copier, peers, self.counters)

    def ask(self, message: OpRequest, home: Incarnation | None = None) -> None:
        self.sender.op(home or self.harness.to_home, message, self._settled)

    def _settled(self) -> None:
        self.settled += 1

    def asked(self) -> tuple[TransferOp, OpRequest]:
        op = self.harness.op()
        message = op_of(op)
        self.ask(message)
        return op, message

    def credit(self, message: OpRequest, number: int = 1, **fields: Any) -> WriteCredit:  # noqa: ANN401
        whole = {"segment": 0, "first": 0, "stop": SEGMENTS, "address": BOUNCE_BUFFER, "size_bytes": BYTES}
        credit = WriteCredit(**{"op": message.op, "credit": number, "session": "home:1", **whole, **fields})
        self.sender.credit(self.harness.to_home, credit)
        return credit

    async def credited(self, number: int = 1, **fields: Any) -> tuple[TransferOp, OpRequest]:  # noqa: ANN401
        op, message = self.asked()
        self.credit(message, number, **fields)
        await self.executor.run()
        return op, message

    def refusal(self) -> ErrorInfo:
        (written,) = self.said.of(Written)
        assert written.error is not None
        assert not written.may_still_land
        return written.error

    def halves(self, message: OpRequest) -> None:
        self.credit(message, 1, stop=HALF, size_bytes=HALF * PAGE_BYTES)
        self.credit(message, 2, first=HALF, size_bytes=HALF * PAGE_BYTES, address=BOUNCE_BUFFER + BYTES)

    @property
    def written(self) -> list[tuple[int, str]]:
        return [(one.credit, one.error.code if one.error else "OK") for one in self.said.of(Written)]

    @property
    def remote_states(self) -> list[State]:
        return [one.state for one in self.harness.source.state_machine.endpoints.remote_endpoints.values()]

    def sending(self) -> set[int]:
        endpoints = self.harness.source.state_machine.endpoints.remote_endpoints
        return {number for one in endpoints.values() for number in one.sending}


@pytest.fixture
async def source(anyio_backend: object) -> Source:  # noqa: ARG001  this fixture runs on the test's loop
    return Source()


@pytest.mark.any_device
async def test_what_is_credited_is_gathered_written_and_answered(source: Source) -> None:
    op, message = source.asked()
    source.sender.peer_lost(source.harness.to_home._replace(boot_id="f" * 32))  # another home's
    assert source.sending() == {op.op_id}
    source.credit(message)
    assert source.writer.begun == [], "not gathered yet"
    await source.executor.run()
    (begun,) = source.writer.begun
    assert (begun.session_name, begun.remote_address) == ("home:1", BOUNCE_BUFFER)
    assert sorted(begun.content) == sorted(content_at_source(source.harness.source_pool, op))
    assert source.written == []
    begun.on_done(None)
    assert source.written == [(1, "OK")]
    assert source.said.of(Written)[0].checksum == xxhash.xxh3_64_intdigest(begun.content)
    assert source.counters.snapshot()["network.sent_bytes"] == BYTES
    source.sender.op_over(source.harness.to_home, op.op_id)
    assert (source.sending(), source.settled) == (set(), 1)


async def test_credits_wait_for_staging_in_their_order() -> None:
    source = Source(buffers=1)
    _, message = source.asked()
    source.halves(message)
    await source.executor.run()
    (first,) = source.writer.begun
    assert first.remote_address == BOUNCE_BUFFER
    first.on_done(None)
    await source.executor.run()
    assert [one.remote_address for one in source.writer.begun] == [BOUNCE_BUFFER, BOUNCE_BUFFER + BYTES]
    assert source.written == [(1, "OK")]


async def test_an_op_is_sent_until_its_last_page_is_gathered(source: Source) -> None:
    op, message = source.asked()
    source.halves(message)
    source.sender.op_over(source.harness.to_home, op.op_id)
    assert (source.sending(), source.settled) == ({op.op_id}, 0), "its pages are being read"
    await source.executor.run()
    assert (source.sending(), source.settled) == (set(), 1), "a write that hangs reads staging, not pages"
    for begun in source.writer.begun:
        begun.on_done(None)
    assert source.written == [(1, "OK"), (2, "OK")]
    source.sender.op_over(source.harness.to_home, op.op_id)
    assert source.settled == 1, "once"


@pytest.mark.any_device
async def test_bytes_that_cannot_be_gathered_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(buffers=1)
    _, message = source.asked()
    source.credit(message)
    with capture_logs(), monkeypatch.context() as patched:
        patched.delattr("kvferry.daemon.transports.network_sender.FlatCopies")  # of the host's memory
        patched.delattr(type(source.harness.source_pool.region), "gather")  # of a device's
        await source.executor.run()
    assert source.written == [(1, "INTERNAL")]
    source.credit(message, 2)
    await source.executor.run()
    assert len(source.writer.begun) == 1, "its staging buffer is free again"


async def test_a_late_write_is_answered_once_and_keeps_its_staging_buffer_until_it_ends() -> None:
    source = Source(buffers=1)
    _, message = source.asked()
    source.credit(message)
    source.credit(message, 2)
    await source.executor.run()
    late = source.writer.begun[0]
    assert late.on_late is not None
    with capture_logs():
        late.on_late(1)
    assert source.written == [(1, "TRANSFER_FAILED")]
    assert source.said.of(Written)[-1].may_still_land
    assert source.counters.snapshot()["network.late_writes"] == 1
    await source.executor.run()
    assert len(source.writer.begun) == 1, "it may still be read"
    late.on_done(None)
    await source.executor.run()
    assert [code for _, code in source.written] == ["TRANSFER_FAILED"], "once"
    assert len(source.writer.begun) == 2


# -- several writes for one write credit: pages that are written directly

RUNS = ((BOUNCE_BUFFER, 4 * PAGE_BYTES), (BOUNCE_BUFFER + (1 << 12), 8 * PAGE_BYTES))


@pytest.mark.parametrize(
    ("runs", "ends", "refuse_after"),
    [
        pytest.param((), (), 0, id="refused"),
        pytest.param((), (False,), None, id="failed"),
        pytest.param((), (True,), None, id="may still land"),
        pytest.param(RUNS, (True, False), None, id="may still land, and failed"),
        pytest.param(RUNS, (False, True), None, id="failed, and may still land"),
        pytest.param(RUNS, (None,), 1, id="the second is refused"),
        pytest.param(RUNS, (None, None), None, id="landed"),
    ],
)
async def test_a_credit_is_answered_when_all_its_writes_have_ended(
    runs: tuple[tuple[int, int], ...], ends: tuple[bool | None, ...], refuse_after: int | None
) -> None:
    source, whole = Source(buffers=1), runs or ((BOUNCE_BUFFER, BYTES),)
    op, message = source.asked()
    source.writer.refuse_after = refuse_after
    source.credit(message, runs=runs)
    with capture_logs():
        await source.executor.run()
        assert [(one.remote_address, len(one.content)) for one in source.writer.begun] == [*whole][: len(ends)]
        for begun, end in zip(source.writer.begun, ends, strict=True):
            assert source.written == []
            begun.on_done(None if end is None else WriteFailedError("cut off", may_still_land=end))
    if ends == (None, None):
        content = b"".join(one.content for one in source.writer.begun)
        assert sorted(content) == sorted(content_at_source(source.harness.source_pool, op))
    (written,) = source.said.of(Written)
    code = "OK" if ends == (None, None) else "TRANSFER_FAILED"
    assert (source.written, bool(written.may_still_land)) == ([(1, code)], True in ends)
    source.writer.refuse_after = None
    source.credit(message, 2)
    await source.executor.run()
    assert len(source.writer.begun) == len(ends) + 1, "its staging buffer is free again"


# -- ends


async def test_a_remote_that_ends_drops_what_waits_and_ends_what_is_written() -> None:
    source = Source(buffers=1)
    op, message = source.asked()
    source.halves(message)
    await source.executor.run()
    (remote_endpoint,) = source.harness.source.state_machine.endpoints.remote_endpoints.values()
    assert source.sending() == {op.op_id}
    source.sender.stop(remote_endpoint)
    assert source.written == [(2, "CANCELLED")]
    assert (source.sending(), source.settled) == (set(), 1)
    source.credit(message, 3)
    assert source.written[1:] == [(3, "UNKNOWN_TRANSFER")]
    source.writer.begun[0].on_done(None)
    assert source.written[2:] == [(1, "OK")]
    assert source.settled == 1


@pytest.mark.any_device
async def test_pages_stay_held_until_they_are_gathered_for_a_home_that_is_gone(source: Source) -> None:
    source.credit(source.asked()[1])
    state_machine, home = source.harness.source.state_machine, source.harness.to_home
    source.said.gone.add(home)
    source.sender.peer_lost(home)
    state_machine.peers.peer_lost(home, "gone", source.harness.source.now)
    assert source.remote_states == [State.FINISHED]
    assert source.harness.source_pool.allocator.busy_count == PAGES
    await source.executor.run()
    assert source.remote_states == []
    assert source.harness.source_pool.allocator.busy_count == 0


# -- what homes may not ask for


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("segment", {"segment": 1}),
        ("stop", {"first": SEGMENTS, "stop": SEGMENTS}),
        ("stop", {"first": 3, "stop": 2}),
        ("stop", {"stop": SEGMENTS + 1}),
        ("stop", {"stop": (1 << 63) - 1}),
        ("size_bytes", {"size_bytes": BYTES - 1}),
        ("size_bytes", {"size_bytes": 1 << 40}),
        ("size_bytes", {"stop": 1}),
        ("runs", {"runs": ((BOUNCE_BUFFER, BYTES), (BOUNCE_BUFFER, 1))}),
        ("runs", {"runs": ((BOUNCE_BUFFER, BYTES - 1),)}),
        ("op", {"op": 99}),
    ],
)
async def test_a_credit_that_is_wrong_is_answered_and_nothing_is_read(
    source: Source, field: str, fields: dict[str, Any]
) -> None:
    _, message = source.asked()
    source.credit(message, **fields)
    assert source.refusal().field == field
    await source.executor.run()
    assert source.writer.begun == []


async def test_a_credit_larger_than_staging_is_refused() -> None:
    source = Source(staging_bytes=BYTES - PAGE_BYTES)
    _, message = source.asked()
    source.credit(message)
    assert "staging has" in source.refusal().detail


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("chunk", {"chunk": 1}),
        ("segments", {"component": "draft"}),
        ("segments", {"heads": ()}),
        ("segments", {"entries": (0, 99), "heads": ((0, 0), (0, 0))}),
        ("segments", {"pages": PAGES + 1}),
        ("segments", {"start": 1}),
        ("segments", {"start": 1 << 62}),
        ("segments", {"pages": 0}),
        ("heads", {"heads": ((1, 1),) * 4}),
    ],
)
async def test_an_op_that_the_send_does_not_have_is_refused(source: Source, field: str, change: dict[str, Any]) -> None:
    message = op_of(source.harness.op())
    (segment,) = message.segments
    if "chunk" not in change:
        change = {"segments": (msgspec.structs.replace(segment, **change),)}
    with pytest.raises(InvalidFieldError if field != "heads" else GeometryMismatchError) as refused:
        source.ask(msgspec.structs.replace(message, **change))
    assert field in {"heads", refused.value.field}
    assert source.sending() == set()


async def test_credits_for_an_op_that_was_refused_are_told_why(source: Source) -> None:
    message = op_of(source.harness.op())
    with pytest.raises(InvalidFieldError):
        source.ask(msgspec.structs.replace(message, chunk=1))
    source.credit(message)
    assert source.written == [(1, "INVALID_FIELD")]
    source.sender.op_over(source.harness.to_home, message.op)
    source.credit(message, 2)
    assert source.written[1:] == [(2, "UNKNOWN_TRANSFER")]
    with pytest.raises(InvalidFieldError):
        source.ask(msgspec.structs.replace(message, chunk=1))
    source.ask(message)
    source.credit(message, 3)
    assert source.written[2:] == [], "asked for as it should be, it is sent"


async def test_only_the_home_of_the_send_may_ask_and_once(source: Source) -> None:
    message = op_of(source.harness.op())
    stranger = source.harness.to_home._replace(boot_id="f" * 32)
    later = msgspec.structs.replace(message.receive_request, epoch=2)
    for peer, wrong in ((stranger, {}), (None, {"send_request": 99}), (None, {"receive_request": later})):
        with pytest.raises(UnknownTransferError):
            source.ask(msgspec.structs.replace(message, **wrong), peer)
    source.ask(message)
    source.sender.credit(stranger, source.credit(message))
    assert source.written == [(1, "UNKNOWN_TRANSFER")]
    with pytest.raises(InvalidFieldError, match="known already"):
        source.ask(message)


async def test_what_is_credited_when_the_daemon_ends_is_refused() -> None:
    source = Source()
    with ThreadPoolExecutor(1) as waiter:
        await source.copier.close(waiter)
    await source.credited()
    assert source.refusal().code == "CANCELLED"
    assert source.writer.begun == []
