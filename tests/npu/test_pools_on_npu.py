"""Pools on a device with a real daemon: transfers between devices, layer steps, registered pools, what is lost."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
import torch

from kvferry.clients import AttachedPool, Client, MhaSpec, MlaSpec, calls, new_request_id, pages
from kvferry.clients.events import EventRing
from kvferry.protocol import errors
from kvferry.protocol.manifests import PoolSpec
from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE

MIB = 1 << 20
WAIT_S = 30.0
CONFIG = f"[tiers]\nhost_bytes = {4 * MIB}\n"
SPEC = MhaSpec(layers=3, tokens=64 * 16, page_size=16, kv_heads=4, head_dim=8, v_head_dim=6, dtype="bfloat16")
FIA = msgspec.structs.replace(SPEC, view="fia")
MLA = MlaSpec(
    layers=3, tokens=64 * 16, page_size=16, kv_lora_rank=32, qk_rope_head_dim=8, index_head_dim=16, dtype="bfloat16"
)

LENDER = """
from kvferry.clients import Client, MhaSpec, ModelIdentity, new_request_id, pages
import msgspec, numpy as np
spec = msgspec.json.decode({spec!r}, type=MhaSpec)
client = Client.connect({directory!r}, name="owner")
k = torch.full((3 * 65 * 16 * 4 * 8 + 1,), 3.0, dtype=torch.bfloat16, device={device!r})[1:].view(3, 65, 16, 4, 8)
v = [torch.full((65, 16, 4, 6), 4.0 + layer, dtype=torch.bfloat16, device={device!r}) for layer in range(3)]
torch.npu.synchronize()
def register():
    arrays = {{("main", "k"): k, **{{("main", "v", layer): one for layer, one in enumerate(v)}}}}
    client.register_pool({name!r}, spec, arrays, device={device!r}, model=ModelIdentity(name="registered/model"))
register()
"""

_numbers = itertools.count()


@pytest.fixture
def name() -> str:
    return f"pool-{next(_numbers)}"


@contextmanager
def owner(simulator: Simulator, daemon: Daemon, device: str, name: str) -> Iterator[Child]:
    """Run an engine that registers a pool of its own: ``k`` of all layers, and ``v`` layer by layer."""
    with Child(simulator) as engine:
        spec = msgspec.json.encode(SPEC).decode()
        engine.do(LENDER.format(spec=spec, directory=str(daemon.runtime_dir), device=device, name=name))
        yield engine


def fill(pool: AttachedPool) -> None:
    """Fill a pool with random numbers, and wait until they are there."""
    for component, role in dict.fromkeys((one.component, one.role) for one in pool.manifest.entries):
        whole = pool.tensor(component, role)
        whole.copy_(torch.randn(whole.shape).to(whole.dtype))
    DEVICE.synchronize()


def paged(pool: AttachedPool, role: str) -> torch.Tensor:
    """Return all layers of a role by pages, as a copy on the host: ``(layers, pages, elements of a page)``."""
    whole = pool.tensor("main", role).cpu()
    return whole.reshape(whole.shape[0], pool.manifest.pages, -1)


def values(tensor: torch.Tensor) -> set[float]:
    return set(tensor.float().flatten().tolist())


def send_and_receive(
    source: Client, sent: AttachedPool, destination: Client, received: AttachedPool, count: int = 20
) -> None:
    """Hand pages off to others in any order; compare every entry, and that no other page has changed."""
    roles = list(dict.fromkeys(one.role for one in sent.manifest.entries))
    before = {role: paged(received, role) for role in roles}
    ours = source.allocate(sent.name, count)
    theirs = np.random.default_rng(count).permutation(destination.allocate(received.name, count))
    beside = np.setdiff1d(np.arange(received.manifest.pages), theirs)
    request = new_request_id()
    transfer = destination.receive(received.name, request, [pages(theirs)])
    send_request = source.send(sent.name, request, [pages(ours)])
    assert destination.wait_finished(transfer, WAIT_S).pages == count
    for role in roles:
        after = paged(received, role)
        assert torch.equal(after[:, theirs], paged(sent, role)[:, ours]), role
        assert torch.equal(after[:, beside], before[role][:, beside]), role
    destination.wait_settled(transfer, WAIT_S)
    source.wait_settled(send_request, WAIT_S)


# -- transfers


@pytest.mark.parametrize("spec", [SPEC, FIA, MLA], ids=["paged", "fia", "mla"])
@pytest.mark.parametrize(("ours", "theirs"), [("npu", "npu"), ("npu", "host"), ("host", "npu")])
def test_pages_arrive_on_any_device(
    client: Client, other: Client, device: str, name: str, spec: PoolSpec, ours: str, theirs: str
) -> None:
    names = {"npu": device, "host": "host"}
    source = client.create_pool(f"{name}-send", spec, device=names[ours])
    destination = other.create_pool(f"{name}-receive", spec, device=names[theirs])
    assert (source.device, destination.device) == (names[ours], names[theirs])
    fill(source)
    fill(destination)
    send_and_receive(client, source, other, destination)
    send_and_receive(client, source, other, destination, count=7)


def test_layers_go_as_their_events_are_done_and_not_before(
    client: Client, other: Client, simulator: Simulator, device: str, name: str
) -> None:
    source = client.create_pool(f"{name}-send", SPEC, device=device)
    destination = other.create_pool(f"{name}-receive", SPEC, device=device)
    with client.open_events(device) as ring:
        ours, theirs = client.allocate(source.name, 9), other.allocate(destination.name, 9)
        steps = [ring.step(layer, 1) for layer in range(3)]
        request = new_request_id()
        transfer = other.receive(destination.name, request, [pages(theirs)])
        send_request = client.send(source.name, request, [pages(ours)], steps=steps)
        with simulator.held(process=os.getpid()):
            for layer, step in enumerate(steps):
                for role in ("k", "v"):
                    source.tensor("main", role)[layer].fill_(layer + 1)
                ring.record(step)
            other.ping()
            assert not transfer.is_finished, "no layer has been computed"
            assert other.poll(0.05) in ([], [transfer])
            assert not transfer.is_finished
        assert other.wait_finished(transfer, WAIT_S).pages == 9
        for role in ("k", "v"):
            got = paged(destination, role)[:, theirs]
            assert [values(got[layer]) for layer in range(3)] == [{1.0}, {2.0}, {3.0}]
        other.wait_settled(transfer, WAIT_S)
        client.wait_settled(send_request, WAIT_S)


def test_a_transfer_is_made_only_once_its_pages_are_read_no_more(
    client: Client, other: Client, simulator: Simulator, device: str, name: str
) -> None:
    source = client.create_pool(f"{name}-send", SPEC, device=device)
    destination = other.create_pool(f"{name}-receive", SPEC, device=device)
    fill(source)
    ours, theirs = client.allocate(source.name, 5), other.allocate(destination.name, 5)
    k = destination.tensor("main", "k")
    with other.open_events(device) as ring:
        request = new_request_id()
        send_request = client.send(source.name, request, [pages(ours)])
        with simulator.held(process=os.getpid()):
            reads = k.sum()
            transfer = other.receive(destination.name, request, [pages(theirs)], after=ring.record_event())
            assert other.poll(0.1) == [], "neither refused nor accepted"
        assert other.wait_finished(transfer, WAIT_S).pages == 5
        assert float(reads.cpu()) == 0, "it has read what was there before"
        other.wait_settled(transfer, WAIT_S)
        client.wait_settled(send_request, WAIT_S)


def test_pages_that_are_read_still_go_to_nobody_else(
    client: Client, other: Client, simulator: Simulator, device: str, name: str
) -> None:
    pool = client.create_pool(name, SPEC, device=device)
    ids = client.allocate(name, 64)
    with client.open_events(device) as ring:
        with simulator.held(process=os.getpid()):
            pool.tensor("main", "k").fill_(1)
            freeing = client.begin(calls.free(name, ids, "main", ring.record_event()))
            client.ping()
            with pytest.raises(errors.PoolFullError, match="0 of 64 free"):
                other.allocate(name, 1)
        assert client.wait(freeing).freed == 64
    assert len(other.allocate(name, 64)) == 64


def test_pages_are_offloaded_only_once_they_are_written(
    client: Client, simulator: Simulator, device: str, name: str
) -> None:
    pool = client.create_pool(name, SPEC, device=device)
    ids = client.allocate(name, 3)
    with client.open_events(device) as ring:
        with simulator.held(process=os.getpid()):
            pool.tensor("main", "k").fill_(5)
            operation = client.offload(name, [pages(ids)], release=True, after=ring.record_event())
            with pytest.raises(errors.DeadlineError):
                client.wait_done(operation, timeout_s=0.2)
        client.wait_done(operation)
    pool.tensor("main", "k").fill_(6)
    DEVICE.synchronize()
    back = client.restore(name, operation.snapshot, drop=True)
    client.wait_done(back)
    found = paged(pool, "k")
    assert values(found[:, back.pages["main"]]) == {5.0}
    assert values(found[:, np.setdiff1d(np.arange(pool.manifest.pages), back.pages["main"])]) == {6.0}


def test_an_event_recorded_again_before_it_was_seen_counts_for_both(
    client: Client, simulator: Simulator, device: str, name: str
) -> None:
    pool = client.create_pool(name, SPEC, device=device)
    with client.open_events(device, events=1) as ring:
        with simulator.held(process=os.getpid()):
            freeing = []
            for page in client.allocate(name, 3):
                pool.tensor("main", "k")[:, page] = 1
                freeing.append(client.begin(calls.free(name, np.array([page]), "main", ring.record_event())))
            client.ping()
            assert not any(client.is_ready(one) for one in freeing)
        assert [client.wait(one).freed for one in freeing] == [1, 1, 1]


# -- pools that engines register


def test_a_registered_pool_takes_part_in_transfers(
    client: Client, daemon: Daemon, simulator: Simulator, device: str, name: str
) -> None:
    received = client.create_pool(f"{name}-receive", SPEC, device=device)
    with owner(simulator, daemon, device, f"{name}-registered") as engine:
        (shown,) = [one for one in client.status().pools if one.pool == f"{name}-registered"]
        assert (shown.device, shown.free, shown.registered_by is not None) == (device, 0, True)
        assert shown.model is not None
        assert shown.model.label == "registered/model"
        request = new_request_id()
        theirs = client.allocate(received.name, 4)
        transfer = client.receive(received.name, request, [pages(theirs)])
        engine.do(
            f"send_request = client.send('{name}-registered', '{request}', [pages(np.array([9, 2, 30, 64]))])\n"
            "client.wait_settled(send_request)"
        )
        assert client.wait_finished(transfer, WAIT_S).pages == 4
        assert values(paged(received, "k")[:, theirs]) == {3.0}
        assert [values(paged(received, "v")[layer, theirs]) for layer in range(3)] == [{4.0}, {5.0}, {6.0}]
        client.wait_settled(transfer, WAIT_S)
        received.tensor("main", "k").fill_(8)
        DEVICE.synchronize()
        request = new_request_id()
        engine.do(f"transfer = client.receive('{name}-registered', '{request}', [pages(np.arange(5, 9))])")
        send_request = client.send(received.name, request, [pages(theirs)])
        assert engine.do("client.wait_finished(transfer); result = k[:, 5:9].cpu().float().unique().tolist()") == [8.0]
        assert engine.do("result = k[:, :5].cpu().float().unique().tolist()") == [3.0]
        client.wait_settled(send_request, WAIT_S)
        with pytest.raises(errors.InvalidFieldError, match="its engine has the memory"):
            client.attach_pool(f"{name}-registered")
        with pytest.raises(errors.PoolInUseError, match="registered by session"):
            client.delete_pool(f"{name}-registered")
        engine.do(f"client.delete_pool('{name}-registered'); client.close()")


def test_an_engine_killed_with_its_pool_registered_fails_its_transfers_only(
    client: Client, daemon: Daemon, simulator: Simulator, device: str, name: str
) -> None:
    received = client.create_pool(f"{name}-receive", SPEC, device=device)
    theirs, request = client.allocate(received.name, 4), new_request_id()
    with owner(simulator, daemon, device, f"{name}-registered") as engine:
        transfer = client.receive(received.name, request, [pages(theirs)])
        engine.do(
            f"send_request = client.send('{name}-registered', '{request}', [pages(np.arange(1, 3))], last=False)\n"
            "while send_request.accepted is None: client.poll(1.0)"
        )
        engine.process.kill()
        engine.process.wait(WAIT_S)
        with pytest.raises(errors.PeerLostError):
            client.wait_finished(transfer, WAIT_S)
        client.wait_settled(transfer, WAIT_S)
        with pytest.raises(errors.PoolLostError, match="was registered by an engine that is gone"):
            client.attach_pool(f"{name}-registered")
    source = client.create_pool(f"{name}-send", SPEC, device=device)
    fill(source)
    send_and_receive(client, source, client, received)
    with owner(simulator, daemon, device, f"{name}-registered"):
        assert f"{name}-registered" in [one.pool for one in client.status().pools], (
            "registered again, it is lost no longer"
        )


# -- what a device does not have


def test_more_than_the_device_has_is_refused_and_what_a_pool_has_goes_back_with_it(
    client: Client, simulator: Simulator, device: str, name: str
) -> None:
    small = client.create_pool(f"{name}-small", SPEC, device=device)
    before = simulator.memory_used(0)
    simulator.out_of_memory(1)
    try:
        with pytest.raises(errors.OutOfMemoryError, match=r"\d+ are needed") as refused:
            client.create_pool(name, SPEC, device=device)
    finally:
        simulator.out_of_memory(0)
    assert refused.value.field == "spec"
    assert simulator.memory_used(0) == before
    for one in (name, f"{name}-next", f"{name}-last"):  # made by the same thread, one after the other
        pool = client.create_pool(one, SPEC, device=device)
        assert simulator.memory_used(0) > before
        pool.close()
        client.delete_pool(one)
    client.create_pool(name, SPEC, device=device).close()
    assert simulator.memory_used(0) <= before + 2 * MIB * -(-small.manifest.region_bytes // (2 * MIB))


def test_a_closed_client_has_let_its_events_go(daemon: Daemon, device: str) -> None:
    """Whoever keeps its rings keeps none of the driver's events between processes, of which the simulator has 1024."""
    rings: list[EventRing] = []
    while 64 * len(rings) <= 1024:
        with Client.connect(daemon.runtime_dir) as client:
            rings.append(client.open_events(device, events=64))
    with pytest.raises(errors.ClientClosedError):
        rings[0].record_event()
