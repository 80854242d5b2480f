"""Engines on a device that hang, lie about what they share, or leave while their work goes on: no other pays for it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from kvferry.clients import Client
from kvferry.clients.tables import Tables
from kvferry.daemon.daemon import Tuning
from kvferry.protocol.errors import DeadlineError, OutOfMemoryError
from kvferry.protocol.manifests import MhaSpec
from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon, soon
from tests.kit.devices import DEVICE

SPEC = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")
TUNING = Tuning(stuck_after_s=5.0)  # it soon takes a device for stuck
POOLS = {"pool": SPEC}


def made(client: Client, max_batch: int = 4) -> Tables:
    return client.create_tables("tables", "pool", max_batch=max_batch, max_context_tokens=64)


def test_memory_of_tables_is_given_back_and_what_does_not_fit_is_refused(daemon: Daemon, simulator: Simulator) -> None:
    before = simulator.memory_used(0)
    with Client.connect(daemon.runtime_dir, name="short") as engine:
        for deleted in (True, False):
            tables = made(engine, max_batch=65_536)
            assert simulator.memory_used(0) > before
            [status] = engine.status().tables
            assert (status.device, status.max_batch, status.columns) == (DEVICE.name, 65_536, 4)
            engine.wait(engine.update_tables(tables, [3], rows={0: [1]}))
            if deleted:
                engine.delete_tables(tables)
                assert soon(lambda: simulator.memory_used(0) == before)
            else:
                tables.close()
    assert soon(lambda: simulator.memory_used(0) == before)
    with Client.connect(daemon.runtime_dir, name="late") as engine:
        simulator.out_of_memory()
        try:
            with pytest.raises(OutOfMemoryError):
                made(engine)
        finally:
            simulator.out_of_memory(0)
        made(engine)


def test_an_engine_that_hangs_holds_up_no_other(
    client: Client, other: Client, device: str, simulator: Simulator
) -> None:
    ours, theirs, ring = made(client), made(other), other.open_events(device)
    operation = torch.zeros(16, device=device)
    torch.accelerator.synchronize()
    with simulator.held(os.getpid()):
        operation.add_(1)
        other.wait(other.update_tables(theirs, [1], rows={0: [1]}, after=ring.record_event()))
        late = other.update_tables(theirs, [2], deadline_s=7)  # longer than a call to the device may take
        for length in range(1, 33):
            client.wait(client.update_tables(ours, [length], rows={0: [1, 2]}))
        with pytest.raises(DeadlineError):
            other.wait(late)
        client.wait(client.update_tables(ours, [5]))
    other.wait(other.update_tables(theirs, [3]))
    assert client.status().devices[0].state == "ready"
    theirs.order()
    ours.order()
    assert [int(one.seq_lens[0].cpu()) for one in (theirs, ours)] == [3, 5]


ENGINE = """
from kvferry.clients import Client
client = Client.connect({directory!r}, name="victim")
tables = client.create_tables("decode", "pool", max_batch=4, max_context_tokens=64)
ring = client.open_events({device!r})
x = torch.zeros(64, device={device!r})
torch.accelerator.synchronize()
result = torch.npu.current_stream().npu_stream
"""
UPDATE = """
x.add_(1)
result = client.wait(client.update_tables(tables, [3], rows={0: [1]}, after=ring.record_event())).sequence
"""


def test_an_engine_that_is_killed_as_its_replay_hangs_holds_nobody_up(
    daemon: Daemon, client: Client, device: str, simulator: Simulator
) -> None:
    """Its update waits on the device for the replay; other engines' updates go on, and its death ends it."""
    tables = made(client)
    ring = client.open_events(device)

    def update(*arguments: Any, **more: Any) -> None:  # noqa: ANN401  an update's
        client.wait(client.update_tables(tables, *arguments, **more, after=ring.record_event(), deadline_s=5))

    with Child(simulator) as victim:
        stream = victim.do(ENGINE.format(directory=str(daemon.runtime_dir), device=device))
        with simulator.held(process=victim.pid, stream=stream):
            assert victim.do(UPDATE) == 1
            for step in range(3):
                update([step + 1], rows={0: [step + 1, 4]})
                tables.order()
                assert tables.block_tables[0].tolist() == [step + 1, 0, 0, 0]
            victim.kill()
            assert soon(lambda: len(client.status().tables) == 1)
            update([2])
    tables.order()
    assert tables.seq_lens.tolist() == [2, 0, 0, 0]
    client.delete_tables(tables)


def test_tables_that_are_given_up_stay_mapped_until_their_copies_are_done(
    client: Client, other: Client, device: str, simulator: Simulator
) -> None:
    ring, operation = other.open_events(device), torch.zeros(16, device=device)
    torch.accelerator.synchronize()
    with simulator.held(os.getpid()):
        operation.add_(1)
        theirs = made(other)
        other.wait(other.update_tables(theirs, [1], rows={0: [1]}, after=ring.record_event()))
        other.delete_tables(theirs)
        client.create_pool("another", SPEC, device=device)
    assert client.status().devices[0].state == "ready"
    made(client)
