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


@contextlib.asynccontextmanager
async def scripted(**settings: Any) -> AsyncIterator[tuple[MooncakeEngine, Factory]]:  # noqa: ANN401  any setting
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
        yield engine, factory
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
    async with scripted(max_bytes_in_flight_per_peer=100) as (engine, factory):
        ends = Ends()
        for number in range(5):
            engine.write(listener, 1, number, 50, ends, timeout_s=WAIT_S)
        native = factory.engines[0]
        await eventually(lambda: native.submitted == [0, 1])
        assert engine.bytes_in_flight == {listener: 100}
        native.end(1, 1)
        await eventually(lambda: native.submitted == [0, 1, 2])
        native.end(0, 1)
        native.end(2, 1)
        await eventually(lambda: native.submitted == [0, 1, 2, 3, 4])
        native.end(3, 1)
        native.end(4, 1)
        assert await ends.wait(5) == [None] * 5
        assert engine.bytes_in_flight == {}


async def test_the_ends_of_writes_are_asked_for_until_all_are_known(listener: str) -> None:
    async with scripted() as (engine, factory):
        native, ends = factory.engines[0], Ends()
        for number in range(3):
            engine.write(listener, 1, number, 10, ends, timeout_s=WAIT_S)
        await eventually(lambda: len(native.submitted) == 3)
        native.fails[native.ids[1]] = MemoryError()  # nothing is lost by it, not even the one before
        native.end(0, 1)
        assert await ends.wait(1) == [None]
        await eventually(lambda: not native.fails)
        native.end(1, 1)
        native.end(2, -1)
        assert sorted(map(bool, await ends.wait(3))) == [False, False, True]
        asked = native.polls
        engine.write(listener, 1, 3, 10, ends, timeout_s=WAIT_S)
        await eventually(lambda: native.polls > asked)
        native.end(3, 1)
        await ends.wait(4)


@pytest.mark.parametrize("refused", [False, True])
async def test_a_failed_write_may_still_land_and_a_refused_one_not(listener: str, *, refused: bool) -> None:
    async with scripted() as (engine, factory):
        factory.engines[0].refuse = refused
        ends = Ends()
        engine.write(listener, 1, 7, 10, ends, timeout_s=WAIT_S)
        if not refused:
            await eventually(lambda: factory.engines[0].submitted)
            factory.engines[0].end(7, -1)
        assert failure((await ends.wait(1))[0]).may_still_land == (not refused)


async def test_a_late_write_stays_under_way_until_it_ends(listener: str) -> None:
    async with scripted() as (engine, factory):
        ends = Ends()
        late: list[int] = []
        write_id = engine.write(listener, 1, 7, 10, ends, timeout_s=WAIT_S, on_late=late.append)
        await eventually(lambda: factory.engines[0].submitted)
        engine.expire(write_id)
        assert late == [write_id]
        await asyncio.sleep(0)
        assert ends.errors == []
        assert engine.bytes_in_flight == {listener: 10}
        factory.engines[0].end(7, 1)
        assert await ends.wait(1) == [None]


async def test_a_waiting_write_ends_at_its_deadline_and_is_never_submitted(listener: str) -> None:
    async with scripted(max_bytes_in_flight_per_peer=10) as (engine, factory):
        first, second, third = Ends(), Ends(), Ends()
        engine.write(listener, 1, 1, 10, first, timeout_s=WAIT_S)
        engine.write(listener, 1, 2, 10, second, timeout_s=0.01)
        engine.write(listener, 1, 3, 10, third, timeout_s=WAIT_S)
        error = failure((await second.wait(1))[0])
        assert not error.may_still_land
        assert "did not begin within 0.01 s" in error.detail
        await eventually(lambda: factory.engines[0].submitted)
        factory.engines[0].end(1, 1)
        await first.wait(1)
        await eventually(lambda: factory.engines[0].submitted == [1, 3])
        factory.engines[0].end(3, 1)
        assert await third.wait(1) == [None]


async def test_rebuilding_fails_what_is_under_way_and_keeps_what_waits(listener: str) -> None:
    async with scripted(max_bytes_in_flight_per_peer=10) as (engine, factory):
        await engine.register(4096, 100)
        begun, waiting = Ends(), Ends()
        engine.write(listener, 1, 1, 10, begun, timeout_s=WAIT_S)
        engine.write(listener, 1, 2, 10, waiting, timeout_s=WAIT_S)
        await eventually(lambda: factory.engines[0].polls)
        before = engine.session_name
        assert await engine.rebuild() == engine.session_name != before
        assert failure((await begun.wait(1))[0]).may_still_land
        old, new = factory.engines
        assert factory.destroyed == [old]
        assert new.regions == {4096: 100}
        await eventually(lambda: new.submitted == [2])
        new.end(2, 1)
        assert await waiting.wait(1) == [None]


async def test_an_end_that_is_found_just_before_the_engine_is_replaced_is_reported(listener: str) -> None:
    async with scripted() as (engine, factory):
        old, ends = factory.engines[0], Ends()
        engine.write(listener, 1, 1, 10, ends, timeout_s=WAIT_S)
        await eventually(lambda: old.polls)
        rebuilding = asyncio.create_task(engine.rebuild())
        old.end(1, 1)
        assert old.ended.wait(WAIT_S)  # without a turn of the loop, whose next one is the rebuild's
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
    async with scripted() as (engine, factory):
        native, first, second = factory.engines[0], Ends(), Ends()
        engine.write(listener, 1, 1, 10, first, timeout_s=WAIT_S)
        await eventually(lambda: native.polls)
        native.returns = threading.Event()
        native.end(1, 1)
        assert native.ended.wait(WAIT_S)
        engine.write(listener, 1, 2, 10, second, timeout_s=WAIT_S)
        assert await first.wait(1) == [None]
        assert native.ids[1] == native.ids[2]
        assert second.errors == []
        native.end(2, -1)
        assert failure((await second.wait(1))[0]).may_still_land


async def keep_the_worker_busy(engine: MooncakeEngine, factory: Factory, name: str, gate: threading.Event) -> None:
    ends = Ends()
    engine.write(name, 1, 1, 10, ends, timeout_s=WAIT_S)
    await eventually(lambda: factory.engines[0].submitted)
    factory.engines[0].end(1, 1)
    await ends.wait(1)
    factory.worker.submit(gate.wait, WAIT_S)


async def test_a_write_at_the_worker_whose_deadline_passes_does_not_begin(listener: str) -> None:
    async with scripted() as (engine, factory):
        ends, gate = Ends(), threading.Event()
        await keep_the_worker_busy(engine, factory, listener, gate)
        engine.expire(engine.write(listener, 1, 2, 10, ends, timeout_s=WAIT_S))
        assert not failure((await ends.wait(1))[0]).may_still_land
        assert engine.bytes_in_flight == {}
        gate.set()
        engine.write(listener, 1, 3, 10, ends, timeout_s=WAIT_S)
        native = factory.engines[0]
        await eventually(lambda: len(native.submitted) > 1)
        assert native.submitted == [1, 3]
        native.end(3, 1)
        assert (await ends.wait(2))[1] is None


async def test_a_write_at_the_worker_that_has_not_begun_goes_to_the_new_engine(listener: str) -> None:
    async with scripted() as (engine, factory):
        ends, gate = Ends(), threading.Event()
        await keep_the_worker_busy(engine, factory, listener, gate)
        for number in (2, 3):
            engine.write(listener, 1, number, 10, ends, timeout_s=WAIT_S)
        assert engine.bytes_in_flight == {listener: 10}
        rebuilding = asyncio.create_task(engine.rebuild())
        await asyncio.sleep(0)
        gate.set()
        await rebuilding
        old, new = factory.engines
        await eventually(lambda: len(new.submitted) == 2)
        assert (old.submitted, new.submitted) == ([1], [2, 3])
        new.end(2, 1)
        new.end(3, 1)
        assert await ends.wait(2) == [None] * 2
        assert engine.bytes_in_flight == {}


async def test_a_rebuild_that_fails_closes_the_engine(listener: str) -> None:
    async with scripted() as (engine, factory):
        ends = Ends()
        engine.write(listener, 1, 1, 10, ends, timeout_s=WAIT_S)
        await eventually(lambda: factory.engines[0].submitted)
        factory.fail = TransferFailedError("no port is free")
        with pytest.raises(TransferFailedError, match="no port is free"):
            await engine.rebuild()
        assert factory.destroyed == factory.engines
        assert failure((await ends.wait(1))[0]).may_still_land
        with pytest.raises(TransferFailedError, match="closed"):
            engine.write(listener, 1, 2, 10, ends, timeout_s=WAIT_S)


async def test_closing_fails_all_writes_and_says_which_may_land(listener: str) -> None:
    ends = [Ends(), Ends()]
    async with scripted(max_bytes_in_flight_per_peer=10) as (engine, factory):
        for number, end in enumerate(ends):
            engine.write(listener, 1, number, 10, end, timeout_s=WAIT_S)
        await eventually(lambda: factory.engines[0].submitted)
    assert [failure((await end.wait(1))[0]).may_still_land for end in ends] == [True, False]
    assert factory.destroyed == factory.engines
    await engine.close()
    assert "closed" in repr(engine)
    for step in (engine.register(1, 1), engine.unregister(1), engine.rebuild()):
        with pytest.raises(TransferFailedError, match="closed"):
            await step


async def test_a_submission_that_hangs_blocks_neither_the_loop_nor_deadlines(listener: str) -> None:
    async with scripted() as (engine, factory):
        native = factory.engines[0]
        hangs = native.hangs = threading.Event()
        first, second = Ends(), Ends()
        late: list[int] = []
        write_id = engine.write(listener, 1, 1, 10, first, timeout_s=WAIT_S, on_late=late.append)
        engine.write(listener, 1, 2, 10, second, timeout_s=0.05)
        await eventually(lambda: native.hanging)
        assert not failure((await second.wait(1))[0]).may_still_land
        engine.expire(write_id)
        assert (first.errors, late) == ([], [write_id])
        hangs.set()
        await eventually(lambda: native.submitted == [1])
        native.end(1, 1)
        assert await first.wait(1) == [None]


async def test_a_peer_that_takes_no_connections_is_not_submitted_to() -> None:
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    name = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()
    async with scripted() as (engine, factory):
        ends = Ends()
        engine.write(name, 1, 1, 10, ends, timeout_s=WAIT_S)
        error = failure((await ends.wait(1))[0])
        assert not error.may_still_land
        assert "accepts no connections" in error.detail
        assert factory.engines[0].submitted == []


@pytest.mark.parametrize(
    "session_name", ["", "host", "host:", ":1", "host:x", "host:65536", "host:" + "9" * 5000, "127.0.0.1:1"]
)
async def test_names_that_are_none_and_empty_writes_are_refused(session_name: str) -> None:
    is_name = session_name == "127.0.0.1:1"
    async with scripted() as (engine, _):
        with pytest.raises(InvalidFieldError, match="size_bytes" if is_name else "session_name"):
            engine.write(session_name, 1, 1, 0 if is_name else 1, Ends(), timeout_s=1)


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
