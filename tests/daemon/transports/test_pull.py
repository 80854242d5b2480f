"""Transfer ops read from another daemon's memory: mapped once, copied, confirmed; mapped while anything is read."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import tempfile
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Final, cast

import pytest

from kvferry.daemon.transfer.endpoints import RemotePool, TransferOp
from kvferry.daemon.transports import pull
from kvferry.daemon.transports.network_receiver import NetworkReceiver
from kvferry.daemon.transports.pull import FETCH_TIMEOUT_S, PullTransport, fetch_region
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol import errors
from kvferry.protocol.peer_messages import Confirm, Confirmed
from kvferry.protocol.session_stream import RegionFollows, RegionRequest, SessionRefused, pack
from tests.kit.network import ManualExecutor, NetworkHarness, Said, turns
from tests.kit.peers import Way
from tests.kit.scripted_transport import ScriptedTransport

pytestmark = pytest.mark.anyio
SOMEBODY = 65534


class Home:
    """A pulling transport, a copier that does what the test says, and memory to map."""

    def __init__(self) -> None:
        self.harness = NetworkHarness("ipc")
        self.said, self.executor = Said(), ManualExecutor()
        self.copier = ScriptedTransport()
        self.fetched: list[tuple[str, RegionRequest, int]] = []
        self.refusal: Exception | None = None
        self.mapped: list[HostRegion] = []
        self.pull = PullTransport(self.said, self.copier, self.executor, self._fetch)

    def start(self) -> TransferOp:
        op = self.harness.op()
        self.pull.start(op, self.harness.report)
        return op

    async def copying(self) -> TransferOp:
        op = self.start()
        await self.executor.run()
        return op

    async def outcomes(self) -> list[tuple[int, str]]:
        await turns()
        return self.harness.outcomes

    def pool(self, op: TransferOp) -> RemotePool:
        assert isinstance(op.send_request.pool, RemotePool)
        return op.send_request.pool

    def confirm(self, op: TransferOp, error: errors.KvferryError | None = None) -> None:
        answer = Confirmed(op=op.op_id, error=error.info() if error else None)
        self.pull.confirmed(self.harness.to_source, answer)

    def _fetch(self, address: str, asked: RegionRequest, size_bytes: int) -> HostRegion:
        self.fetched.append((address, asked, size_bytes))
        if self.refusal is not None:
            raise self.refusal
        held = self.harness.source_pool.region
        assert isinstance(held, HostRegion)
        fd = os.dup(held.fd)
        self.mapped.append(HostRegion(fd, size_bytes, writable=False))
        return self.mapped[-1]


@pytest.fixture
async def home(anyio_backend: object) -> Home:  # noqa: ARG001  this fixture runs on the test's loop
    return Home()


async def test_an_op_is_mapped_copied_and_confirmed(home: Home) -> None:
    op = home.start()
    assert list(home.copier.under_way) == [], "not mapped yet"
    await home.executor.run()
    pool, origin, region = home.pool(op), op.send_request.origin, home.harness.source_pool.region
    assert origin is not None
    assert op.send_request.region_key
    asked = RegionRequest(
        tenant=pool.tenant,
        pool="prefill",
        region=region.identity,
        send_request=origin.send_request,
        key=op.send_request.region_key,
    )
    assert home.fetched == [(home.harness.source.ipc, asked, pool.manifest.region_bytes)]
    home.copier.finish(op.op_id)
    await turns()
    (confirm,) = home.said.of(Confirm)
    assert confirm.op == op.op_id
    assert home.harness.reports == [], "the pages may have been used anew"
    home.confirm(op)
    assert await home.outcomes() == [(op.op_id, "OK")]
    assert home.harness.arrived(op)


async def test_only_the_source_may_confirm_and_only_what_was_copied(home: Home) -> None:
    op = home.start()
    home.confirm(op)
    assert await home.outcomes() == [], "not a byte has been read"
    await home.executor.run()
    home.confirm(op)  # nobody has asked
    home.copier.finish(op.op_id)
    home.pull.confirmed(home.harness.to_source._replace(boot_id="f" * 32), Confirmed(op=op.op_id))
    home.pull.confirmed(home.harness.to_source, Confirmed(op=99))
    assert await home.outcomes() == []
    home.confirm(op)
    home.confirm(op)
    assert await home.outcomes() == [(op.op_id, "OK")]


@pytest.mark.parametrize("code", ["UNKNOWN_TRANSFER", "ACCESS_DENIED", "PEER_LOST"])
async def test_what_is_not_copied_and_confirmed_has_failed(home: Home, code: str) -> None:
    op = await home.copying()
    if code == "ACCESS_DENIED":
        home.copier.end(op.op_id, errors.AccessDeniedError("scripted"))
    elif code == "PEER_LOST":  # who cannot be asked to confirm
        home.said.gone.add(home.harness.to_source)
        home.copier.finish(op.op_id)
    else:
        home.copier.finish(op.op_id)
        home.confirm(op, errors.UnknownTransferError("the send request is over", field="send_request"))
    assert await home.outcomes() == [(op.op_id, code)]
    assert len(home.said.of(Confirm)) == (code == "UNKNOWN_TRANSFER")


@pytest.mark.parametrize(
    ("refusal", "code"),
    [(errors.UnknownPoolError("made anew", field="region"), "UNKNOWN_POOL"), (ValueError("a bug"), "TRANSFER_FAILED")],
)
async def test_a_pool_that_cannot_be_mapped_fails_all_that_wait(home: Home, refusal: Exception, code: str) -> None:
    home.refusal = refusal
    ops = [home.start(), home.start()]
    await home.executor.run()
    assert home.harness.outcomes == [(one.op_id, code) for one in ops]
    home.refusal = None
    again = home.start()
    await home.executor.run()
    assert list(home.copier.under_way) == [again.op_id], "the next one asks again"


async def test_the_key_of_a_transfer_that_has_ended_fails_no_other(home: Home) -> None:
    home.refusal = errors.AccessDeniedError("no open send request has this key", field="key")
    ended, other = home.start(), home.start()
    await home.executor.run_one()
    home.refusal = None
    await home.executor.run()
    assert await home.outcomes() == [(ended.op_id, "PEER_LOST")], "and its own daemon says why"
    assert list(home.copier.under_way) == [other.op_id]
    assert [one.key for _, one, _ in home.fetched] == [ended.send_request.region_key, other.send_request.region_key]


# -- stopped, and lost


@pytest.mark.parametrize("fault", ["CANCELLED", "PEER_LOST"])
@pytest.mark.parametrize("when", ["mapping", "copying", "confirming"])
async def test_an_op_that_fails_is_over_when_nothing_is_copied(home: Home, fault: str, when: str) -> None:
    op = home.start()
    if when != "mapping":
        await home.executor.run()
    if when == "confirming":
        home.copier.finish(op.op_id)
    if fault == "CANCELLED":
        home.pull.stop(op.op_id)
    else:
        home.pull.peer_lost(home.harness.to_source, "its connection closed")
    assert await home.outcomes() == ([] if when == "copying" else [(op.op_id, fault)])
    if when == "mapping":
        await home.executor.run()
        assert home.pool(op).mapping is None
        assert home.mapped[0].fd == -1, "nobody wants it"
    elif when == "copying":
        assert home.copier.stopped == {op.op_id}
        home.copier.finish(op.op_id)
    home.confirm(op)
    assert await home.outcomes() == [(op.op_id, fault)]
    assert len(home.said.of(Confirm)) == (when == "confirming")


async def test_memory_of_a_lost_peer_stays_mapped_until_the_copy_has_ended(home: Home) -> None:
    op = await home.copying()
    mapping = weakref.ref(home.mapped[0].buffer)
    home.pull.peer_lost(home.harness.to_source, "its connection closed")
    home.mapped.pop().close()  # as the receive requests do, which do not know of copies
    home.pool(op).mapping = None
    await turns()
    assert home.harness.reports == []
    assert mapping() is not None, "it is being read"
    home.copier.end(op.op_id)
    assert await home.outcomes() == [(op.op_id, "PEER_LOST")]
    assert mapping() is None


@pytest.mark.parametrize("mapped", [True, False])
async def test_nothing_is_reported_after_the_end(home: Home, *, mapped: bool) -> None:
    op = await home.copying() if mapped else home.start()
    home.pull.close()
    await home.executor.run()
    if mapped:
        home.copier.end(op.op_id)
    assert await home.outcomes() == []
    assert not home.said.of(Confirm)


# -- asking for memory: blocks, on real sockets

ASKED = RegionRequest(tenant=7, pool="prefill", region=5)


def fetch(path: Path) -> HostRegion:
    return fetch_region(f"ipc://{path}/peer.sock", ASKED, 4096)


async def fetched(path: Path, answer: Callable[[socket.socket], None]) -> HostRegion:
    """Fetch from a daemon that answers one request for memory."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening, ThreadPoolExecutor(1) as daemon:
        listening.bind(os.fspath(path / "session.sock"))
        listening.listen()

        def serve() -> None:
            with listening.accept()[0] as channel:
                assert channel.recv(4096) == pack(ASKED)
                answer(channel)

        served = daemon.submit(serve)
        try:
            return await asyncio.to_thread(fetch, path)
        finally:
            await asyncio.wrap_future(served)


async def test_memory_is_mapped_for_reading_only(tmp_path: Path) -> None:
    region = HostRegion.create("prefill", 4096)
    region.view()[:] = 7

    def answer(channel: socket.socket) -> None:
        frame = pack(RegionFollows(message_id=0, pool="prefill"))
        socket.send_fds(channel, [frame[:3]], [region.fd])
        channel.sendall(frame[3:])

    mapped = await fetched(tmp_path, answer)
    assert mapped.view().tolist() == [7] * 4096
    assert not mapped.view().flags.writeable


async def test_a_daemon_that_refuses_hangs_up_or_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(errors.PeerLostError, match="no daemon answers"):
        await asyncio.to_thread(fetch, tmp_path)
    info = errors.UnknownPoolError("made anew", field="region").info()
    with pytest.raises(errors.UnknownPoolError, match="made anew"):
        await fetched(tmp_path, lambda channel: channel.sendall(pack(SessionRefused(error=info))))
    (tmp_path / "session.sock").unlink()
    with pytest.raises(errors.PeerLostError, match="closed its socket"):
        await fetched(tmp_path, lambda _channel: None)


@pytest.mark.parametrize("memory", ["unsealed", "larger", "file"])
async def test_memory_that_could_shrink_is_not_mapped(tmp_path: Path, memory: str) -> None:
    if memory == "file":
        fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    else:
        fd = os.memfd_create("memory", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8192 if memory == "larger" else 4096)

    def answer(channel: socket.socket) -> None:
        socket.send_fds(channel, [pack(RegionFollows(message_id=0, pool="prefill"))], [fd])

    try:
        with pytest.raises(errors.InvalidFieldError) as refused:
            await fetched(tmp_path, answer)
        assert refused.value.field == "region"
    finally:
        os.close(fd)


async def test_only_root_and_the_same_user_are_believed(require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be somebody else")
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(f"{folder}/session.sock")
        os.seteuid(SOMEBODY)
        try:
            listening.listen()
        finally:
            os.seteuid(0)
        with pytest.raises(errors.AccessDeniedError, match=str(SOMEBODY)):
            await asyncio.to_thread(fetch, Path(folder))


async def test_who_answers_drop_by_drop_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = itertools.count(0.0, FETCH_TIMEOUT_S * 0.6)
    monkeypatch.setattr(pull, "time", SimpleNamespace(monotonic=lambda: next(times)))

    def answer(channel: socket.socket) -> None:
        channel.sendall(pack(RegionFollows(message_id=0, pool="prefill"))[:1])
        channel.recv(1)  # until the other side has had enough

    with pytest.raises(errors.PeerLostError, match="within"):
        await fetched(tmp_path, answer)


async def test_more_descriptors_than_one_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frame = pack(RegionFollows(message_id=0, pool="prefill"))
    receive, kept = socket.recv_fds, list[int]()

    def counted(
        channel: socket.socket, size: int, most: int, flags: int = 0
    ) -> tuple[bytes, list[int], int, tuple[str, int]]:
        kept.append(descriptors("memfd:kvferry:surplus"))
        return receive(channel, size, most, flags)

    def answer(channel: socket.socket) -> None:
        for place in range(len(frame)):
            socket.send_fds(channel, [frame[place : place + 1]], [region.fd])

    monkeypatch.setattr(socket, "recv_fds", counted)
    with HostRegion.create("surplus", 4096) as region:
        before = descriptors("memfd:kvferry:surplus")
        (await fetched(tmp_path, answer)).close()
        assert len(kept) == len(frame)
        assert set(kept[1:]) == {before + 1}
        assert descriptors("memfd:kvferry:surplus") == before


def descriptors(name: str) -> int:
    found = 0
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # another thread has just closed it
            found += name in str(one.readlink())
    return found


# -- the two ways between daemons: what went by one is stopped there, also where there is the other


WAYS: Final[tuple[Way, ...]] = ("ipc", "tcp")


class Ways:
    """Both ways, and a harness on this host and one on another."""

    def __init__(self) -> None:
        self.by = {way: ScriptedTransport() for way in WAYS}
        self.harnesses = {way: NetworkHarness(way) for way in WAYS}
        self.harnesses["tcp"].op()  # so that their numbers differ
        pull, receiver = cast("PullTransport", self.by["ipc"]), cast("NetworkReceiver", self.by["tcp"])
        self.transports = RemoteTransports(pull, receiver)


@pytest.mark.parametrize("way", WAYS)
def test_an_op_is_stopped_on_the_way_that_it_took(way: Way) -> None:
    ways = Ways()
    for one in WAYS:
        ways.transports.start(ways.harnesses[one].op(), ways.harnesses["ipc"].report)
    [op_id] = ways.by[way].under_way
    ways.transports.stop(op_id)
    assert {one: transport.stopped for one, transport in ways.by.items() if transport.stopped} == {way: {op_id}}


def test_where_there_is_no_transport_between_hosts_ops_of_this_host_are_stopped_all_the_same() -> None:
    ways = Ways()
    ways.transports.receiver = None
    op = ways.harnesses["ipc"].op()
    ways.transports.start(op, ways.harnesses["ipc"].report)
    ways.transports.stop(op.op_id)
    assert ways.by["ipc"].stopped == {op.op_id}
    assert not ways.transports.can_reach(ways.harnesses["tcp"].source.tcp)
