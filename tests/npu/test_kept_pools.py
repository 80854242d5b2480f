"""Pools of the daemon on a device: with a keeper they outlive it, with owners, bytes, addresses and graphs."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import pytest
import torch

from kvferry.clients import AsyncClient, AttachedPool, Client, MhaSpec, ModelIdentity, new_request_id, pages
from kvferry.clients.connection import Reconnected
from kvferry.clients.engine import Engine
from kvferry.clients.engine_pool import EnginePool
from kvferry.daemon.daemon import EXIT_DEVICE_LOST
from kvferry.daemon.process.device_keeper import DeviceKeeper
from kvferry.protocol.errors import DeadlineError, DeviceUnavailableError, KvferryError, OverloadedError, PoolLostError
from kvferry.protocol.session_stream import VmmShare
from tests import kit
from tests.cann_simulator.simulator import NPU_PYTHON, Simulator
from tests.kit import faults
from tests.kit.blocking import connected
from tests.kit.daemons import Daemon, engine, soon
from tests.kit.devices import DEVICE
from tests.npu.conftest import OPENING_S

CONFIG: Final = "[service]\nresume_grace_s = 60.0\n"
SPEC: Final = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=2, head_dim=8, dtype="float16")
MIB: Final = 1 << 20
POOL_BYTES: Final = 2 * MIB
"""The least that there is; a daemon's canary has as much."""

LATE_MS: Final = 8_000
"""Longer than a daemon takes to open its device, so that it is the fence that is waited for."""


OF_THE_SIMULATOR: Final = "root: the simulator finds a keeper's memory by /proc, where it is closed to others"
T = TypeVar("T")


@pytest.fixture
def life(require: Callable[[object, str], None]) -> Iterator[Daemon]:
    """Return a daemon that outlives its process."""
    require(os.geteuid() == 0, OF_THE_SIMULATOR)
    DEVICE.accelerator  # noqa: B018
    with kit.daemon(CONFIG, keep=True) as one:
        yield one


def made(client: Any, name: str = "kept") -> AttachedPool:  # noqa: ANN401  any client
    pool: AttachedPool = client.create_pool(name, SPEC, device=DEVICE.name, deadline_s=OPENING_S)
    return pool


@contextmanager
def mapped(client: Any, name: str = "kept") -> Iterator[AttachedPool]:  # noqa: ANN401  any client
    """Make a pool that stays mapped in this process meanwhile."""
    pool = made(client, name)
    try:
        yield pool
    finally:
        pool.close()


def again(life: Daemon, client: Any, told: list[Reconnected]) -> Reconnected:  # noqa: ANN401  any client
    """Kill the daemon, start it again, and return what the client says of it."""
    life.restart()
    assert soon(lambda: client.poll(0) is not None and bool(told))
    return told.pop()


@contextmanager
def fence_ahead(life: Daemon) -> Iterator[None]:
    """Let no pool be adopted meanwhile: this process is a dead daemon that the driver has not taken apart."""
    accelerator, dead = DEVICE.accelerator, DeviceKeeper(life.runtime_dir, 300, may_start=False)
    with accelerator.calling():
        canary = accelerator.vendor.allocate(accelerator.index, POOL_BYTES)
        share = accelerator.vendor.share(canary, dead.number(accelerator.index))
    assert isinstance(share, VmmShare)
    dead.watch(accelerator.index, share.handle)
    dead.close()
    try:
        yield
    finally:
        with accelerator.calling():
            accelerator.vendor.unmap(canary)


def keeper_of(client: Client) -> str:
    [device] = client.status().devices
    return device.keeper


def keeper_pid(client: Client) -> int:
    found = re.fullmatch("process ([0-9]+)", keeper_of(client))
    assert found, keeper_of(client)
    return int(found[1])


def asked(life: Daemon, asks: Callable[[Client], T]) -> T:
    """Return what a new engine gets."""
    with engine(life, name="new") as client:
        return asks(client)


class Graph:
    """A captured graph that reads the keys of two pages."""

    def __init__(self, pool: AttachedPool, ids: list[int]) -> None:
        npu = torch.get_device_module("npu")
        keys = pool.tensor("main", "k")[0]
        self._out = torch.zeros(2, *keys.shape[1:], dtype=keys.dtype, device=keys.device)
        self._chosen = torch.tensor(ids, device=keys.device)  # the graph reads it
        torch.accelerator.synchronize()
        self._graph = npu.NPUGraph()
        with npu.graph(self._graph, auto_dispatch_capture=True):
            torch.index_select(keys, 0, self._chosen, out=self._out)

    def replay(self) -> list[float]:
        """Return which values it has found."""
        self._graph.replay()
        torch.accelerator.synchronize()
        return sorted(set(self._out.cpu().flatten().tolist()))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_addresses_bytes_owners_and_graphs_stay_over_kill_after_kill(
    life: Daemon, kind: type[Client | AsyncClient]
) -> None:
    told: list[Reconnected] = []
    with connected(kind, life.runtime_dir, name="engine", on_reconnect=told.append) as client, mapped(client) as pool:
        ids = client.allocate("kept", 2)
        keys = pool.tensor("main", "k")
        keys[:, ids[0]], keys[:, ids[1]] = 1.0, 2.0
        graph, address = Graph(pool, ids.tolist()), keys.data_ptr()
        on_host = client.create_pool("host", SPEC).tensor("main", "k")
        for turn, ended_by in enumerate((signal.SIGTERM, *[signal.SIGKILL] * 3)):
            life.end(ended_by)
            assert graph.replay() == [1.0, 2.0], "while there is no daemon"
            life.start()
            assert soon(lambda: client.poll(0) is not None and bool(told))
            event = told.pop()
            assert (event.pools, event.pages) == ((), {})
            assert keys.data_ptr() == address
            assert graph.replay() == [1.0, 2.0]
            assert client.owned_pages("kept")["main"].tolist() == ids.tolist()
            more = client.allocate("kept", 2)
            assert not set(more) & set(ids), "no page has two owners"
            keys[:, more[0]] = 3.0 + turn
            torch.accelerator.synchronize()
            target = client.allocate("host", 1)
            request_id = new_request_id()
            receiving = client.receive("host", request_id, [pages(target)])
            client.wait_settled(client.send("kept", request_id, [pages(more[:1])]))
            client.wait_settled(receiving)
            assert (on_host[:, target] == 3.0 + turn).all()
            assert client.free("kept", more).freed == 2
            assert client.free("host", target).freed == 1


def test_a_pool_goes_on_with_the_daemon_that_takes_anothers_place(require: Callable[[object, str], None]) -> None:
    """It is not forked: its successor is started by its own command."""
    require(os.geteuid() == 0, OF_THE_SIMULATOR)
    told: list[Reconnected] = []
    with (
        kit.daemon(CONFIG, keep=True, python=NPU_PYTHON) as one,
        engine(one, on_reconnect=told.append) as client,
        mapped(client) as pool,
    ):
        ids, keys = client.allocate("kept", 2), pool.tensor("main", "k")
        keys[:, ids] = 6.0
        torch.accelerator.synchronize()
        one.upgrade()
        assert soon(lambda: client.poll(0) is not None and bool(told))
        assert (told.pop().pools, client.owned_pages("kept")["main"].tolist()) == ((), ids.tolist())
        assert (keys[:, ids] == 6.0).all().cpu()
        assert client.free("kept", ids).freed == 2


def test_a_pool_of_an_engines_adapter_goes_on(life: Daemon) -> None:
    """The reconnected client does, and another one that resumes the session and does not know the pool."""

    def records(pool: EnginePool) -> bool:
        with contextlib.suppress(KvferryError):
            return pool.event() is not None
        return False

    one = Engine("adapter", str(life.runtime_dir))
    try:
        pool = EnginePool(one, "adapters", SPEC, ModelIdentity(name="model"), "daemon", device=DEVICE.name)
        address, every = pool.tensor("k").data_ptr(), pool.tensor("k").shape[1] - 1
        life.restart()
        assert soon(lambda: records(pool))
        with one.client() as client:
            pool.come_back(client, resumed=True)
            assert len(client.owned_pages("adapters")["main"]) == every
            assert records(pool)
            with pytest.raises(PoolLostError, match="not adopted"):
                pool.come_back(client, resumed=False)
        assert pool.tensor("k").data_ptr() == address
    finally:
        one.close()


def test_whoever_comes_while_a_pool_is_adopted_waits(life: Daemon) -> None:
    """A client that has mapped nothing of it, and a new one, wait too; pools on the host are there at once."""
    told: list[Reconnected] = []
    with engine(life, name="scheduler", on_reconnect=told.append) as scheduler, ThreadPoolExecutor() as threads:
        made(scheduler).close()
        scheduler.create_pool("host", SPEC).close()
        scheduled = scheduler.allocate("kept", 1)
        life.kill()
        with fence_ahead(life):
            life.start()
            waiting = [
                threads.submit(asked, life, asks)
                for asks in (
                    lambda one: one.allocate("kept", 1).tolist(),
                    lambda one: made(one).manifest.pages,
                    lambda one: one.attach_pool("kept").manifest.pages,
                )
            ]
            with engine(life, name="other") as other:
                assert other.free("host", other.allocate("host", 1)).freed == 1
                with pytest.raises(OverloadedError, match="is being adopted"):
                    other.wait_finished(other.receive("kept", new_request_id(), [pages([1])]))
                assert {one.pool for one in other.status().pools} == {"host"}
            assert not any(one.done() for one in waiting)
        [more], *others = [one.result() for one in waiting]
        assert (others, more in scheduled) == ([5, 5], False)
        assert scheduler.free("kept", scheduled).freed == 1
        assert [one.pages for one in told] == [{}]


def test_a_daemon_that_is_killed_while_it_adopts_leaves_the_next_one_everything(
    life: Daemon, simulator: Simulator
) -> None:
    told: list[Reconnected] = []
    with engine(life, on_reconnect=told.append) as client, mapped(client) as pool:
        ids = client.allocate("kept", 3)
        pool.tensor("main", "v").fill_(5)
        assert (pool.tensor("main", "v") == 5).all().cpu()
        used = simulator.memory_used(0)
        life.kill()
        with fence_ahead(life):
            for _ in range(2):
                life.start()
                life.kill()
        life.start()
        assert soon(lambda: client.poll(0) is not None and bool(told))
        event = told.pop()
        assert (event.pools, event.pages) == ((), {})
        assert client.owned_pages("kept")["main"].tolist() == ids.tolist()
        assert (pool.tensor("main", "v") == 5).all().cpu()
        assert soon(lambda: simulator.memory_used(0) == used)


def test_one_that_ends_whoever_adopts_it_is_lost_in_the_end_and_free(life: Daemon, simulator: Simulator) -> None:
    """What is not on a device stays."""
    told: list[Reconnected] = []
    before = simulator.memory_used(0)
    with engine(life, on_reconnect=told.append) as client:
        made(client).close()
        client.create_pool("host", SPEC).close()
        ids = client.allocate("host", 1)
        life.kill()
        with fence_ahead(life):
            for _ in range(3):
                life.start()
                life.kill()
            life.start()
            assert soon(lambda: client.poll(0) is not None and bool(told)), "it is not waited for the fence"
        assert told.pop().pools == ("kept",)
        with pytest.raises(PoolLostError):
            client.allocate("kept", 1)
        assert client.owned_pages("host")["main"].tolist() == ids.tolist()
        assert soon(lambda: simulator.memory_used(0) == before), "no device is open any more"


def test_what_was_not_zeroed_when_the_daemon_was_killed_is_nobodys(life: Daemon, simulator: Simulator) -> None:
    with engine(life, reconnect=False) as client:
        made(client).close()
        used = simulator.memory_used(0)
        with simulator.held(life.process.pid):
            with pytest.raises(DeadlineError):
                client.create_pool("dirty", SPEC, device=DEVICE.name, deadline_s=1.0)
            assert simulator.memory_used(0) == used + POOL_BYTES
            life.kill()
    life.start()
    with engine(life) as client:
        assert client.attach_pool("kept").manifest.pages == 5
        assert soon(lambda: simulator.memory_used(0) == used)


def test_a_keeper_that_ends_is_said_and_the_daemon_goes_on_until_its_end(life: Daemon) -> None:
    told: list[Reconnected] = []
    with engine(life, on_reconnect=told.append) as client, mapped(client) as pool:
        faults.kill(keeper_pid(client))
        assert soon(lambda: keeper_of(client) == "lost: the keeper has ended")
        assert client.status().counters["adoption.keeper_lost"] == 1
        assert "pools on devices do not outlive this daemon" in life.log.read_text()
        ids = client.allocate("kept", 2)
        pool.tensor("main", "k")[:, ids] = 7.0
        torch.accelerator.synchronize()
        request_id = new_request_id()
        client.create_pool("host", SPEC).close()
        target = client.allocate("host", 2)
        receiving = client.receive("host", request_id, [pages(target)])
        client.wait_settled(client.send("kept", request_id, [pages(ids)]))
        client.wait_finished(receiving)
        with mapped(client, "later") as own:
            assert not own.tensor("main", "k").any(), "without a keeper it is the daemon's own memory"
        with engine(life, name="other") as other, pytest.raises(DeviceUnavailableError, match="the keeper has ended"):
            other.attach_pool("kept")
        event = again(life, client, told)
        assert set(event.pools) == {"kept", "later"}
        assert bool((pool.tensor("main", "k")[:, ids] == 7.0).all().cpu()), "a process that has mapped it keeps it"
        pool.close()
        with mapped(client) as anew:
            assert not anew.tensor("main", "k").any()
            assert keeper_pid(client)


def test_what_no_daemon_claims_is_freed(life: Daemon, simulator: Simulator) -> None:
    life.configure(CONFIG + "[keeper]\ngrace_s = 1\n")
    life.restart()
    before = simulator.memory_used(0)
    with engine(life, reconnect=False) as client:
        made(client).close()
        pid = keeper_pid(client)
    with faults.ending(pid):
        life.kill()
    assert simulator.memory_used(0) == before
    life.start()
    with engine(life) as client, pytest.raises(PoolLostError, match="the keeper has no"):
        client.attach_pool("kept")


def test_what_ends_with_its_instance_or_is_deleted_is_freed(life: Daemon, simulator: Simulator) -> None:
    life.configure("[service]\nresume_grace_s = 3.0\n")
    life.restart()
    with engine(life) as client:
        made(client).close()
        used = simulator.memory_used(0)
        made(client, "second").close()
        client.delete_pool("second")
        assert soon(lambda: simulator.memory_used(0) == used)
        with engine(life, name="leaving", instance="leaving") as leaving:
            leaving.create_pool("third", SPEC, device=DEVICE.name, lifetime="instance").close()
            life.kill()
    life.start()
    assert soon(lambda: simulator.memory_used(0) == used)
    with engine(life) as client:
        assert client.attach_pool("kept").manifest.pages == 5


def test_pools_of_a_lost_device_are_lost_and_those_of_another_stay(life: Daemon, simulator: Simulator) -> None:
    with engine(life, reconnect=False) as client:
        made(client).close()
        before = simulator.memory_used(1)
        client.create_pool("other", SPEC, device="npu:1", deadline_s=OPENING_S).close()
        simulator.lose_device(1)
        try:
            with pytest.raises(KvferryError):
                client.create_pool("more", SPEC, device="npu:1")
            assert life.process.wait(OPENING_S) == EXIT_DEVICE_LOST
        finally:
            simulator.lose_device(1, 0)
    life.start()
    with engine(life) as client:
        assert client.attach_pool("kept").manifest.pages == 5
        with pytest.raises(PoolLostError):
            client.attach_pool("other")
        assert soon(lambda: simulator.memory_used(1) <= before)


def test_an_older_daemon_is_refused(life: Daemon, simulator: Simulator) -> None:
    """And the newer one has the memory that the older one made."""
    with engine(life) as client, mapped(client):
        used = simulator.memory_used(0)
        newer = DeviceKeeper(life.runtime_dir, 300, may_start=False)
        assert [one.size_bytes for one in newer.found.values()] == [POOL_BYTES]
        assert not newer.is_passed(), "the older one lives"
        with mapped(client, "own"):
            assert "a newer daemon writes" in life.log.read_text()
        with engine(life, name="other") as other, pytest.raises(DeviceUnavailableError, match="a newer daemon writes"):
            other.attach_pool("kept")
        client.delete_pool("own")
        assert soon(lambda: simulator.memory_used(0) == used)
        life.kill()
        assert soon(newer.is_passed), "the driver has taken it apart"
        newer.close()


@pytest.mark.full
def test_a_pool_is_adopted_once_the_driver_has_taken_the_dead_daemon_apart(life: Daemon, simulator: Simulator) -> None:
    told: list[Reconnected] = []
    simulator.late_teardown(LATE_MS)
    try:
        life.restart()  # it opens the device from now on
        with engine(life, on_reconnect=told.append) as client, mapped(client) as pool:
            ids = client.allocate("kept", 2)
            pool.tensor("main", "k")[:, ids] = 4.0
            torch.accelerator.synchronize()
            life.kill()
            killed_s = time.monotonic()
            life.start()
            assert soon(lambda: client.poll(0) is not None and bool(told))
            assert time.monotonic() - killed_s >= LATE_MS / 1000
            assert 0 < client.status().counters["adoption.fence_ms"] <= LATE_MS
            assert (told.pop().pools, client.owned_pages("kept")["main"].tolist()) == ((), ids.tolist())
            assert (pool.tensor("main", "k")[:, ids] == 4.0).all().cpu()
    finally:
        simulator.late_teardown(0)
