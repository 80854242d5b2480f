"""The Mooncake engine: what the wrapper does by itself, on a scripted engine, and with real ones over loopback."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
import torch

from kvferry.clients import MhaSpec, new_request_id, pages
from kvferry.daemon.transports import mooncake_native
from kvferry.daemon.transports.mooncake import MooncakeEngine, WriteFailedError
from kvferry.daemon.transports.mooncake_completions import CompletionPoller
from kvferry.daemon.transports.mooncake_native import MooncakeSettings, check_delivery
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import ConfigError, InvalidFieldError, KvferryError, TransferFailedError
from tests import kit
from tests.kit.mooncake import (
    PROGRESS_TIMEOUT_S,
    WAIT_S,
    Ends,
    Factory,
    Peer,
    ScriptedEngine,
    mooncake_works,
    running_peer,
)
from tests.kit.servers import free_ports

MIB = 1 << 20
KIB = 1 << 10
SETTINGS = MooncakeSettings(address="127.0.0.1", progress_timeout_s=PROGRESS_TIMEOUT_S)
pytestmark = pytest.mark.anyio
needs_mooncake = pytest.mark.usefixtures("real")


@pytest.fixture
def real(require: Callable[[object, str], None]) -> None:
    require(mooncake_works(), "mooncake-transfer-engine-non-cuda and libibverbs1")


@pytest.fixture
async def listener() -> AsyncIterator[str]:
    """Take connections, as a peer does at first contact; yield the session name."""
    server = await asyncio.start_server(lambda _reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


class Scripted:
    """A wrapper, the scripted engine that it has first, and a peer that takes connections."""

    def __init__(self, engine: MooncakeEngine, factory: Factory, peer: str) -> None:
        self.engine, self.factory, self.peer = engine, factory, peer
        self.native = factory.engines[0]

    def write(self, *addresses: int, size_bytes: int = 10, timeout_s: float = WAIT_S, **more: Any) -> Ends:  # noqa: ANN401
        """Write to these addresses of the peer; return their ends."""
        ends = Ends()
        for address in addresses:
            self.engine.write(self.peer, 1, address, size_bytes, ends, timeout_s=timeout_s, **more)
        return ends

    async def submitted(self, *addresses: int) -> None:
        """Wait until these writes, and no others, have begun."""
        await eventually(lambda: self.native.submitted == [*addresses])


@contextlib.asynccontextmanager
async def scripted(peer: str = "", **settings: Any) -> AsyncIterator[Scripted]:  # noqa: ANN401  any setting
    factory = Factory()
    engine = MooncakeEngine(
        MooncakeSettings(address="127.0.0.1", **settings),
        create=factory.create,
        destroy=factory.destroy,
        worker=factory.worker,
    )
    mishaps: list[dict[str, Any]] = []  # an exception in a callback fails nothing by itself
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: mishaps.append(context))
    async with engine:
        yield Scripted(engine, factory, peer)
    assert mishaps == []
    assert [native.aborted for native in factory.engines] == [[] for _ in factory.engines]


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110  another process's memory has no event; this is no pause, but a turn
            await asyncio.sleep(0)


def failure(error: KvferryError | None) -> WriteFailedError:
    assert isinstance(error, WriteFailedError)
    return error


# --- on a scripted engine ---


async def test_bytes_in_flight_are_bounded_and_the_rest_waits_in_order(listener: str) -> None:
    async with scripted(listener, max_bytes_in_flight_per_peer=100) as one:
        ends = one.write(*range(5), size_bytes=50)
        await one.submitted(0, 1)
        assert one.engine.bytes_in_flight == {listener: 100}
        one.native.end(1, 1)
        await one.submitted(0, 1, 2)
        one.native.end(0, 1)
        one.native.end(2, 1)
        await one.submitted(0, 1, 2, 3, 4)
        one.native.end(3, 1)
        one.native.end(4, 1)
        assert await ends.wait(5) == [None] * 5
        assert one.engine.bytes_in_flight == {}


async def test_the_ends_of_writes_are_asked_for_until_all_are_known(listener: str) -> None:
    async with scripted(listener) as one:
        ends, native = one.write(0, 1, 2), one.native
        await one.submitted(0, 1, 2)
        native.fails[native.ids[1]] = MemoryError()  # nothing is lost by it, not even the one before
        native.end(0, 1)
        assert await ends.wait(1) == [None]
        await eventually(lambda: not native.fails)
        native.end(1, 1)
        native.end(2, -1)
        assert sorted(map(bool, await ends.wait(3))) == [False, False, True]
        asked, ends = native.polls, one.write(3)
        await eventually(lambda: native.polls > asked)
        native.end(3, 1)
        await ends.wait(1)


@pytest.mark.parametrize("refused", [False, True])
async def test_a_failed_write_may_still_land_and_a_refused_one_not(listener: str, *, refused: bool) -> None:
    async with scripted(listener) as one:
        one.native.refuse = refused
        ends = one.write(7)
        if not refused:
            await one.submitted(7)
            one.native.end(7, -1)
        assert failure((await ends.wait(1))[0]).may_still_land == (not refused)


async def test_a_late_write_stays_under_way_until_it_ends(listener: str) -> None:
    async with scripted(listener) as one:
        late: list[int] = []
        ends = one.write(7, on_late=late.append)
        await one.submitted(7)
        one.engine.expire(1)
        assert late == [1]
        await asyncio.sleep(0)
        assert ends.errors == []
        assert one.engine.bytes_in_flight == {listener: 10}
        one.native.end(7, 1)
        assert await ends.wait(1) == [None]


async def test_a_waiting_write_ends_at_its_deadline_and_is_never_submitted(listener: str) -> None:
    async with scripted(listener, max_bytes_in_flight_per_peer=10) as one:
        first, second, third = one.write(1), one.write(2, timeout_s=0.01), one.write(3)
        assert not failure((await second.wait(1))[0]).may_still_land
        await one.submitted(1)
        one.native.end(1, 1)
        await first.wait(1)
        await one.submitted(1, 3)
        one.native.end(3, 1)
        assert await third.wait(1) == [None]


async def test_rebuilding_fails_what_is_under_way_and_keeps_what_waits(listener: str) -> None:
    async with scripted(listener, max_bytes_in_flight_per_peer=10) as one:
        await one.engine.register(4096, 100)
        begun, waiting = one.write(1), one.write(2)
        await eventually(lambda: one.native.polls)
        before = one.engine.session_name
        assert await one.engine.rebuild() == one.engine.session_name != before
        assert failure((await begun.wait(1))[0]).may_still_land
        old, new = one.factory.engines
        assert one.factory.destroyed == [old]
        assert new.regions == {4096: 100}
        await eventually(lambda: new.submitted == [2])
        new.end(2, 1)
        assert await waiting.wait(1) == [None]


async def test_an_end_that_is_found_just_before_the_engine_is_replaced_is_reported(listener: str) -> None:
    async with scripted(listener) as one:
        ends = one.write(1)
        await eventually(lambda: one.native.polls)
        rebuilding = asyncio.create_task(one.engine.rebuild())
        one.native.end(1, 1)
        assert one.native.ended.wait(WAIT_S)  # without a turn of the loop, whose next one is the rebuild's
        await rebuilding
        assert await ends.wait(1) == [None]


async def test_an_id_that_is_given_again_before_its_end_is_reported_is_another_write(
    listener: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = CompletionPoller[Any].watch

    def watch_at_last(poller: CompletionPoller[Any], native: list[Any], batch_id: int, write: object) -> None:
        if native[0].returns is not None:
            native[0].returns.set()
        watch(poller, native, batch_id, write)

    monkeypatch.setattr(CompletionPoller, "watch", watch_at_last)
    async with scripted(listener) as one:
        first, native = one.write(1), one.native
        await eventually(lambda: native.polls)
        native.returns = threading.Event()
        native.end(1, 1)
        assert native.ended.wait(WAIT_S)
        second = one.write(2)
        assert await first.wait(1) == [None]
        assert native.ids[1] == native.ids[2]
        assert second.errors == []
        native.end(2, -1)
        assert failure((await second.wait(1))[0]).may_still_land


async def keep_the_worker_busy(one: Scripted, gate: threading.Event) -> None:
    """Meet the peer with a write to address 1, then let the worker wait at the gate."""
    ends = one.write(1)
    await one.submitted(1)
    one.native.end(1, 1)
    await ends.wait(1)
    one.factory.worker.submit(gate.wait, WAIT_S)


async def test_a_write_at_the_worker_whose_deadline_passes_does_not_begin(listener: str) -> None:
    async with scripted(listener) as one:
        await keep_the_worker_busy(one, gate := threading.Event())
        ends = one.write(2)
        one.engine.expire(2)
        assert not failure((await ends.wait(1))[0]).may_still_land
        assert one.engine.bytes_in_flight == {}
        gate.set()
        ends = one.write(3)
        await one.submitted(1, 3)
        one.native.end(3, 1)
        assert await ends.wait(1) == [None]


async def test_a_write_at_the_worker_that_has_not_begun_goes_to_the_new_engine(listener: str) -> None:
    async with scripted(listener) as one:
        await keep_the_worker_busy(one, gate := threading.Event())
        ends = one.write(2, 3)
        assert one.engine.bytes_in_flight == {listener: 10}
        rebuilding = asyncio.create_task(one.engine.rebuild())
        await asyncio.sleep(0)
        gate.set()
        await rebuilding
        old, new = one.factory.engines
        await eventually(lambda: len(new.submitted) == 2)
        assert (old.submitted, new.submitted) == ([1], [2, 3])
        new.end(2, 1)
        new.end(3, 1)
        assert await ends.wait(2) == [None] * 2
        assert one.engine.bytes_in_flight == {}


async def test_a_rebuild_that_fails_closes_the_engine(listener: str) -> None:
    async with scripted(listener) as one:
        ends = one.write(1)
        await one.submitted(1)
        one.factory.fail = TransferFailedError("no port is free")
        with pytest.raises(TransferFailedError, match="no port is free"):
            await one.engine.rebuild()
        assert one.factory.destroyed == one.factory.engines
        assert failure((await ends.wait(1))[0]).may_still_land
        with pytest.raises(TransferFailedError, match="closed"):
            one.write(2)


async def test_closing_fails_all_writes_and_says_which_may_land(listener: str) -> None:
    async with scripted(listener, max_bytes_in_flight_per_peer=10) as one:
        ends = [one.write(0), one.write(1)]
        await one.submitted(0)
    assert [failure((await end.wait(1))[0]).may_still_land for end in ends] == [True, False]
    assert one.factory.destroyed == one.factory.engines
    await one.engine.close()
    for step in (one.engine.register(1, 1), one.engine.unregister(1), one.engine.rebuild()):
        with pytest.raises(TransferFailedError, match="closed"):
            await step


async def test_a_submission_that_hangs_blocks_neither_the_loop_nor_deadlines(listener: str) -> None:
    async with scripted(listener) as one:
        hangs = one.native.hangs = threading.Event()
        late: list[int] = []
        first, second = one.write(1, on_late=late.append), one.write(2, timeout_s=0.05)
        await eventually(lambda: one.native.hanging)
        assert not failure((await second.wait(1))[0]).may_still_land
        one.engine.expire(1)
        assert (first.errors, late) == ([], [1])
        hangs.set()
        await one.submitted(1)
        one.native.end(1, 1)
        assert await first.wait(1) == [None]


async def test_a_peer_that_takes_no_connections_is_not_submitted_to() -> None:
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    name = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
    async with scripted(name) as one:
        error = failure((await one.write(1).wait(1))[0])
        assert not error.may_still_land
        assert "accepts no connections" in error.detail
        assert one.native.submitted == []


@pytest.mark.parametrize(
    "session_name", ["", "host", "host:", ":1", "host:x", "host:65536", "host:" + "9" * 5000, "127.0.0.1:1"]
)
async def test_names_that_are_none_and_empty_writes_are_refused(session_name: str) -> None:
    is_name = session_name == "127.0.0.1:1"
    async with scripted(session_name) as one:
        with pytest.raises(InvalidFieldError, match="size_bytes" if is_name else "session_name"):
            one.write(1, size_bytes=0 if is_name else 1)


@pytest.mark.parametrize(
    ("settings", "said", "field"),
    [
        ({"address": "198.51.100.1"}, r"198\.51\.100\.1.*not an address of this host", "network.address"),
        ({"address": "127.0.0.1:7801"}, "not an address of this host", "network.address"),
        ({"address": "0"}, "all addresses of this host", "network.address"),  # what 0.0.0.0 may be called, too
        ({"address": "::", "section": "tiers.remote"}, "all addresses of this host", "tiers.remote.address"),
        ({"address": "127.0.0.1", "protocol": "ascend"}, "mooncake-transfer-engine-npu", "network.protocol"),
    ],
)
async def test_settings_that_cannot_be_are_refused(settings: dict[str, Any], said: str, field: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        await asyncio.to_thread(mooncake_native.create, MooncakeSettings(**settings))
    assert refused.value.field == field


async def test_another_process_does_not_inherit_what_this_one_has_set_for_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MC_TCP_LANES_PER_PEER", "1")
    monkeypatch.delenv("MC_TCP_PROGRESS_TIMEOUT_SEC", raising=False)
    monkeypatch.setenv("MC_USE_IPV6", "0")  # any value turns it on
    async with MooncakeEngine(SETTINGS):
        other = MooncakeSettings(address="127.0.0.1", progress_timeout_s=77)
        environment = other.environment(socket.AF_INET)
        assert environment["MC_TCP_PROGRESS_TIMEOUT_SEC"] == "77"
        assert environment["MC_TCP_LANES_PER_PEER"] == "1"
        assert "MC_USE_IPV6" not in environment
        assert other.environment(socket.AF_INET6)["MC_USE_IPV6"] == "1"


# --- whether bytes get through, on a scripted engine and by real ones ---


class Moves(ScriptedEngine):
    """An engine whose writes end as a test says, after they have moved ``moved`` of their bytes."""

    def __init__(self, port: int, status: int, moved: float) -> None:
        super().__init__(port)
        self._status, self._moved = status, moved

    def batch_transfer_async_write(
        self, target: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        assert target.startswith("127.0.0.1:")
        ctypes.memmove(peer_buffer_addresses[0], buffers[0], int(lengths[0] * self._moved))
        self.under_way[1] = self._status
        return 0 if self.refuse else 1


@pytest.mark.parametrize(
    ("status", "moved", "refuse", "why"),
    [
        (1, 1.0, False, None),
        (1, 0.5, False, "other bytes arrived than were sent"),
        (-1, 0.0, False, "the write failed"),
        (0, 0.0, False, "nothing moved for 0 s"),
        (0, 0.0, True, "the engine there did not answer"),
    ],
)
async def test_bytes_that_do_not_arrive_at_the_own_address_are_an_error(
    monkeypatch: pytest.MonkeyPatch, listener: str, status: int, moved: float, *, refuse: bool, why: str | None
) -> None:
    engine = Moves(int(listener.rpartition(":")[2]), status, moved)
    engine.refuse = refuse
    monkeypatch.setattr(mooncake_native, "create", lambda _settings: engine)
    monkeypatch.setattr(mooncake_native, "destroy", list.clear)
    settings = MooncakeSettings(address="127.0.0.1", progress_timeout_s=0)
    if why is None:
        await asyncio.to_thread(check_delivery, settings)
        return
    with pytest.raises(ConfigError, match=why) as refused:
        await asyncio.to_thread(check_delivery, settings)
    assert (refused.value.field, refused.value.retryable) == ("network.address", True)


WRONG_FAMILY = """
from kvferry.daemon.transports.mooncake_native import MooncakeSettings, check_delivery
check_delivery(MooncakeSettings(address="127.0.0.1"))
check_delivery(MooncakeSettings(address="::1"))
"""


@needs_mooncake
async def test_an_engine_that_starts_with_the_wrong_family_is_found_out() -> None:
    done = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", WRONG_FAMILY], stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"do not arrive" in done.stderr
    assert b"CONFIG [network.address]" in done.stderr


@needs_mooncake
async def test_a_peer_of_the_other_family_is_told_apart() -> None:
    async with MooncakeEngine(SETTINGS) as engine:
        ends = Ends()
        engine.write("[::1]:1", 1, 1, 1, ends, timeout_s=WAIT_S)
        assert "family" in str((await ends.wait(1))[0])


# --- with real engines ---


def noise(size_bytes: int) -> HostRegion:
    region = HostRegion.create("noise", size_bytes)
    region.view()[:] = np.random.default_rng(size_bytes).integers(1, 256, size_bytes, np.uint8)
    return region


@needs_mooncake
async def test_many_concurrent_writes_land_where_they_should_and_none_lands_outside() -> None:
    count, size_bytes = 48, 512 * KIB
    with running_peer(count * size_bytes) as peer, noise(count * size_bytes) as source:
        async with MooncakeEngine(SETTINGS) as engine:
            ends = Ends()

            def write(start: int, offset: int, size_bytes: int) -> None:
                local_address, remote_address = source.address + start, peer.address + offset
                engine.write(peer.session_name, local_address, remote_address, size_bytes, ends, timeout_s=WAIT_S)

            outside = ((count * size_bytes - 100, 4 * KIB), (count * size_bytes, 1), (-1, 2))
            for number, (offset, too_many) in enumerate(outside, 1):
                write(0, offset, too_many)
                assert isinstance((await ends.wait(number))[-1], WriteFailedError)
            assert not peer.region.view().any()
            order = np.random.default_rng(3).permutation(count)
            for number, place in enumerate(order.tolist()):
                write(number * size_bytes, place * size_bytes, size_bytes)
            most = 0
            while len(ends.errors) < len(outside) + count:
                most = max(most, sum(engine.bytes_in_flight.values()))
                await ends.wait(len(ends.errors) + 1)
            assert ends.errors[len(outside) :] == [None] * count
            assert 0 < most <= SETTINGS.max_bytes_in_flight_per_peer
            written = peer.region.view().reshape(count, size_bytes)
            assert np.array_equal(written[order], source.view().reshape(count, size_bytes))


@pytest.mark.full
@needs_mooncake
async def test_a_peer_that_hangs_fails_a_window_of_writes_within_the_progress_timeout() -> None:
    with running_peer(16 * MIB) as peer, noise(16 * MIB) as source:
        async with MooncakeEngine(SETTINGS) as engine:
            ends = Ends()
            late: list[int] = []
            engine.write(peer.session_name, source.address, peer.address, KIB, ends, timeout_s=WAIT_S)
            await ends.wait(1)
            peer.signal(signal.SIGSTOP)
            started_s = asyncio.get_running_loop().time()
            for number in range(4):
                at = peer.address + number * 4 * MIB
                engine.write(peer.session_name, source.address, at, 4 * MIB, ends, timeout_s=1.0, on_late=late.append)
            await ends.wait(5)
            assert all(failure(error).may_still_land for error in ends.errors[1:])
            assert late == [2, 3, 4, 5]
            assert asyncio.get_running_loop().time() - started_s < 2 * PROGRESS_TIMEOUT_S


async def stop_within_a_write(writer: Peer, session_name: str, network: HostRegion) -> None:
    for _ in range(20):
        network.view()[:] = 0
        writer.notify(write=[session_name, network.address, network.size_bytes])
        await eventually(lambda: network.view()[MIB])
        writer.signal(signal.SIGSTOP)
        if not network.view()[-1]:
            return
        writer.signal(signal.SIGCONT)
        await asyncio.to_thread(writer.hear)
    pytest.fail("each write was over before it could be stopped")


@pytest.mark.full
@needs_mooncake
async def test_after_a_rebuild_nothing_of_a_peers_write_lands() -> None:
    size_bytes = 256 * MIB
    with HostRegion.create("network", size_bytes) as network, running_peer(size_bytes) as writer:
        writer.region.view()[:] = 7
        async with MooncakeEngine(SETTINGS) as engine:
            await engine.register(network.address, size_bytes)
            await stop_within_a_write(writer, engine.session_name, network)
            writer.signal(signal.SIGCONT)
            assert await asyncio.to_thread(writer.hear) == {"done": None, "may_still_land": None}
            assert (network.view() == 7).all()
            await stop_within_a_write(writer, engine.session_name, network)
            before = engine.session_name
            assert await engine.rebuild() != before
            network.view()[:] = 0
            writer.signal(signal.SIGCONT)
            assert (await asyncio.to_thread(writer.hear))["may_still_land"]
            assert not network.view().any()
            writer.notify(write=[engine.session_name, network.address, MIB])
            assert await asyncio.to_thread(writer.hear) == {"done": None, "may_still_land": None}
            assert (network.view()[:MIB] == 7).all()


# --- between real daemons, over each address family ---

CONFIG = """
[peers]
listen = "tcp://{address}:{port}"
[network]
transport = "mooncake"
bounce_buffers = 4
bounce_buffer_bytes = 65536
address = "{address}"
"""


@pytest.mark.full
@needs_mooncake
@pytest.mark.parametrize(
    ("address", "environment"),
    [
        ("[::1]", {}),
        ("127.0.0.1", {"MC_USE_IPV6": "1"}),  # the configuration decides, not what a container has set
    ],
)
def test_a_transfer_between_two_daemons(address: str, environment: dict[str, str]) -> None:
    spec = MhaSpec(layers=4, tokens=1024, page_size=16, kv_heads=4, head_dim=64, dtype="float32")
    with contextlib.ExitStack() as stack:
        configs = [CONFIG.format(address=address, port=port) for port in free_ports(2)]
        daemons = [stack.enter_context(kit.daemon(config, environment=environment)) for config in configs]
        source, destination = (stack.enter_context(kit.engine(one)) for one in daemons)
        ours, theirs = source.create_pool("kv", spec), destination.create_pool("kv", spec)
        sent, received = source.allocate("kv", 40), destination.allocate("kv", 40)[::-1].copy()
        for role in ("k", "v"):
            tensor = ours.tensor("main", role)
            noise = np.random.default_rng(7).standard_normal(tensor[:, sent].shape, np.float32)
            tensor[:, sent] = torch.from_numpy(noise)
        request, (listening,) = new_request_id(), [one for one in source.status().addresses if one.startswith("tcp:")]
        transfer = destination.receive("kv", request, [pages(received)], source_daemons=[listening])
        source.send("kv", request, [pages(sent)])
        destination.wait_finished(transfer, timeout_s=WAIT_S)
        for role in ("k", "v"):
            assert torch.equal(theirs.tensor("main", role)[:, received], ours.tensor("main", role)[:, sent])
