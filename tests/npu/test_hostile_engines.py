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
    client.attach_pool("pool")
    return client.create_tables("tables", "pool", max_batch=max_batch, max_context_tokens=64)


def test_what_tables_that_are_over_had_is_let_go(daemon: Daemon, client: Client, simulator: Simulator) -> None:
    """The daemon holds nothing of their memory, which is the engine's, whether they were deleted or it was killed."""
    client.attach_pool("pool")
    before = simulator.memory_used(0)
    with Child(simulator) as victim:
        victim.do(ENGINE.format(directory=str(daemon.runtime_dir), device=DEVICE.name, rows=65_536))
        assert simulator.memory_used(0) > before
        [status] = client.status().tables
        assert (status.device, status.max_batch, status.columns) == (DEVICE.name, 65_536, 4)
        victim.do("client.delete_tables(tables)")
        assert not client.status().tables
        victim.do('tables = client.create_tables("decode", "pool", max_batch=65_536, max_context_tokens=64)')
        victim.do(UPDATE)
        victim.kill()
    assert soon(lambda: simulator.memory_used(0) == before)
    assert not client.status().tables


def test_tables_for_which_the_engine_has_no_memory_are_refused(client: Client, simulator: Simulator) -> None:
    simulator.out_of_memory()
    try:
        with pytest.raises(OutOfMemoryError):
            made(client, max_batch=65_536)
    finally:
        simulator.out_of_memory(0)
    made(client)


def test_an_engine_that_hangs_holds_up_no_other(
    client: Client, other: Client, device: str, simulator: Simulator
) -> None:
    ours, theirs = made(client), made(other)
    operation = torch.zeros(16, device=device)
    torch.accelerator.synchronize()
    with simulator.held(os.getpid()):
        operation.add_(1)
        other.wait(other.update_tables(theirs, [1], rows={0: [1]}, after=theirs.replayed()))
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
pool = client.attach_pool("pool")
tables = client.create_tables("decode", "pool", max_batch={rows}, max_context_tokens=64)
x = torch.zeros(64, device={device!r})
torch.accelerator.synchronize()
result = torch.npu.current_stream().npu_stream
"""
UPDATE = """
x.add_(1)
result = client.wait(client.update_tables(tables, [3], rows={0: [1]}, after=tables.replayed())).sequence
"""


def test_an_engine_that_is_killed_as_its_replay_hangs_holds_nobody_up(
    daemon: Daemon, client: Client, device: str, simulator: Simulator
) -> None:
    """Its update waits on the device for the replay; other engines' updates go on, and its death ends it."""
    tables = made(client)

    def update(*arguments: Any, **more: Any) -> None:  # noqa: ANN401  an update's
        client.wait(client.update_tables(tables, *arguments, **more, after=tables.replayed(), deadline_s=5))

    with Child(simulator) as victim:
        stream = victim.do(ENGINE.format(directory=str(daemon.runtime_dir), device=device, rows=4))
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
    operation = torch.zeros(16, device=device)
    torch.accelerator.synchronize()
    theirs = made(other)
    with simulator.held(os.getpid()):
        operation.add_(1)
        other.wait(other.update_tables(theirs, [1], rows={0: [1]}, after=theirs.replayed()))
        other.delete_tables(theirs)
        client.create_pool("another", SPEC, device=device)
    assert client.status().devices[0].state == "ready"
    made(client)
