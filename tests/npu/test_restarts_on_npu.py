"""Engines with device memory that ride through their daemon's restart: what is lost, and what goes on by itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from kvferry.clients import AsyncClient, BlockTableEntries, Client, MhaSpec, new_request_id, pages
from kvferry.clients.connection import Reconnected
from kvferry.protocol.errors import PoolLostError, StaleBootError
from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.kit import faults
from tests.kit.blocking import connected
from tests.kit.daemons import Daemon, soon
from tests.kit.devices import DEVICE
from tests.npu.conftest import OPENING_S

CONFIG: Final = "[service]\nresume_grace_s = 60.0\n"
SPEC: Final = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=2, head_dim=8, dtype="float16")
POOL_BYTES: Final = 2 << 20  # the least that there is
SHAPE: Final = (2, 5, 16, 2, 8)


@pytest.fixture(scope="module")
def life() -> Iterator[Daemon]:
    """Return a daemon that outlives its process, and this process's device, open."""
    DEVICE.accelerator  # noqa: B018
    with kit.daemon(CONFIG, keep=True) as one:
        yield one


def own_memory() -> dict[tuple[str, str], torch.Tensor]:
    return {("main", role): torch.zeros(SHAPE, dtype=torch.float16, device=DEVICE.name) for role in ("k", "v")}


def restart(life: Daemon, client: Client, told: list[Reconnected]) -> Reconnected:
    """Kill the daemon, start it again, and return what the client says of it."""
    life.restart()
    assert soon(lambda: client.poll(0) is not None and bool(told))
    return told.pop()


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_memory_of_the_engine_is_registered_again(life: Daemon, kind: type[Client | AsyncClient]) -> None:
    """Transfers go on between the same addresses, restart after restart."""
    told: list[Reconnected] = []
    source, target = own_memory(), own_memory()
    before = [one.data_ptr() for one in (*source.values(), *target.values())]
    with connected(kind, life.runtime_dir, name="engine", on_reconnect=told.append) as client:
        for name, tensors in (("source", source), ("target", target)):
            client.register_pool(name, SPEC, tensors, device=DEVICE.name, deadline_s=OPENING_S)
        for turn in range(1, 3):
            event = restart(life, client, told)
            assert (event.pools, event.pages) == ((), {})
            source["main", "k"].fill_(turn)
            torch.accelerator.synchronize()
            request_id = new_request_id()
            receiving = client.receive("target", request_id, [pages([2, 4])])
            sending = client.send("source", request_id, [pages([1, 3])])
            client.wait_finished(receiving)
            client.wait_settled(sending)
            found = target["main", "k"].cpu()
            assert (found[:, [2, 4]] == turn).all()
            assert not found[:, [1, 3]].any()
        assert [one.data_ptr() for one in (*source.values(), *target.values())] == before


@pytest.mark.full
def test_memory_that_is_no_more_is_lost_alone(life: Daemon) -> None:
    """The engine has given one pool's memory up meanwhile: the other is there, and so is the client."""
    told: list[Reconnected] = []
    gone, there = own_memory(), own_memory()
    with Client.connect(life.runtime_dir, name="engine", on_reconnect=told.append) as client:
        for name, tensors in (("gone", gone), ("there", there)):
            client.register_pool(name, SPEC, tensors, device=DEVICE.name, deadline_s=OPENING_S)
        gone["main", "k"].untyped_storage().resize_(0)
        assert restart(life, client, told).pools == ("gone",)
        with pytest.raises(PoolLostError):
            client.allocate("gone", 1)
        assert len(client.owned_pages("there")["main"]) == 4


def test_a_pool_of_the_daemon_is_lost_with_its_keeper(life: Daemon, simulator: Simulator) -> None:
    """Each call that names it says so, and what to do; whoever does that goes on."""
    told: list[Reconnected] = []
    missing: list[Reconnected] = []
    with (
        Client.connect(life.runtime_dir, name="engine", on_reconnect=told.append) as client,
        Client.connect(life.runtime_dir, name="scheduler", on_reconnect=missing.append) as scheduler,
    ):
        pool = client.create_pool("lost", SPEC, device=DEVICE.name, deadline_s=OPENING_S)
        ids = client.allocate("lost", 2)
        scheduled = scheduler.allocate("lost", 1)
        pool.tensor("main", "k").fill_(2)
        torch.accelerator.synchronize()
        used = simulator.memory_used(0)
        [device] = client.status().devices
        faults.kill(int(device.keeper.removeprefix("process ")))
        event = restart(life, client, told)
        assert bool((pool.tensor("main", "k") == 2).all().cpu()), "a process that has mapped it keeps it"
        assert simulator.memory_used(0) <= used + 2 * POOL_BYTES, "what the killed daemon had has come back"
        assert (event.pools, {where: its.tolist() for where, its in event.pages.items()}) == (
            ("lost",),
            {("lost", "main"): ids.tolist()},
        )
        assert soon(lambda: scheduler.poll(0) is not None and bool(missing))
        [(where, its)] = missing[0].pages.items()
        assert (where, its.tolist()) == (("lost", "main"), scheduled.tolist()), "it has nothing mapped"
        calls: list[Any] = [
            lambda: client.allocate("lost", 1),
            lambda: client.free("lost", ids),
            lambda: client.receive("lost", new_request_id(), [pages(ids)]),
            lambda: scheduler.allocate("lost", 1),
            lambda: scheduler.free("lost", scheduled),
            lambda: client.attach_pool("lost"),
        ]
        for call in calls:
            with pytest.raises(PoolLostError, match="lost") as refused:
                call()
            assert refused.value.remedy.startswith("create or register it again")
        pool.close()
        again = client.create_pool("lost", SPEC, device=DEVICE.name, deadline_s=OPENING_S)
        assert not again.tensor("main", "k").any()
        assert client.free("lost", client.allocate("lost", 4)).freed == 4
        client.delete_pool("lost")


def test_event_rings_end_and_tables_go_on(life: Daemon) -> None:
    told: list[Reconnected] = []
    with Client.connect(life.runtime_dir, name="engine", on_reconnect=told.append) as client:
        client.register_pool("own", SPEC, own_memory(), device=DEVICE.name, deadline_s=OPENING_S)
        tables = client.create_tables("tables", "own", max_batch=2, max_context_tokens=32)
        ring = client.open_events(DEVICE.name, events=2, deadline_s=OPENING_S)
        client.wait(client.update_tables(tables, [4], rows={0: [3]}, after=tables.replayed()))
        event = restart(life, client, told)
        assert (event.rings, event.tables, event.emptied, event.pools) == (True, (), (), ())
        with pytest.raises(StaleBootError, match="event ring"):
            ring.record_event()
        ring.close()
        client.wait(client.update_tables(tables, [17], entries=BlockTableEntries([0], [1], [2])))
        tables.order()
        assert tables.block_tables[0].tolist() == [3, 2]
        with client.open_events(DEVICE.name, events=2) as again:
            again.record_event()
