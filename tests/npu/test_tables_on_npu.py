"""Graph tables in a device's memory: accounted, given back, and at the same bytes for as long as they live."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.clients import Client, MhaSpec
from kvferry.protocol.errors import OutOfMemoryError
from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE

SPEC = MhaSpec(layers=1, tokens=252, page_size=4, kv_heads=1, head_dim=2, dtype="float32")
MIB = 1 << 20
POOLS = {"pool": SPEC}


def wait_until(condition: Callable[[], bool]) -> None:
    ends_at = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends_at


def test_their_memory_is_given_back_with_the_session(daemon: Daemon, simulator: Simulator) -> None:
    before = simulator.memory_used(0)
    with Client.connect(daemon.runtime_dir, name="short") as engine:
        tables = engine.create_tables("decode", "pool", max_batch=4096, max_context_tokens=1024)
        assert simulator.memory_used(0) >= before + 4 * MIB
        [status] = engine.status().tables
        assert (status.device, status.max_batch, status.columns) == (DEVICE.name, 4096, 256)
        tables.close()
    wait_until(lambda: simulator.memory_used(0) == before)


def test_their_memory_is_given_back_when_they_are_deleted(client: Client, simulator: Simulator) -> None:
    before = simulator.memory_used(0)
    tables = client.create_tables("decode", "pool", max_batch=4096, max_context_tokens=1024)
    client.wait(client.update_tables(tables, [3], rows={0: [1]}))
    client.delete_tables(tables)
    wait_until(lambda: simulator.memory_used(0) == before)


def test_tables_that_do_not_fit_the_device_are_refused(client: Client, simulator: Simulator) -> None:
    before = simulator.memory_used(0)
    simulator.out_of_memory()
    try:
        with pytest.raises(OutOfMemoryError):
            client.create_tables("decode", "pool", max_batch=4, max_context_tokens=64)
    finally:
        simulator.out_of_memory(0)
    wait_until(lambda: simulator.memory_used(0) == before)
    tables = client.create_tables("decode", "pool", max_batch=4, max_context_tokens=64)
    client.wait(client.update_tables(tables, [3], rows={0: [1]}))
    tables.order()
    assert tables.block_tables[0, 0].item() == 1
    client.delete_tables(tables)


def test_a_view_made_before_all_updates_shows_the_last_one(client: Client, device: str) -> None:
    """The bytes that a graph has captured are the ones that every update changes."""
    tables = client.create_tables("decode", "pool", max_batch=4, max_context_tokens=64)
    ring = client.open_events(device)
    table, lengths = tables.block_tables, tables.seq_lens
    for step in range(20):
        client.wait(
            client.update_tables(tables, [step + 1], rows={0: range(step + 1, step + 9)}, after=ring.record_event())
        )
        tables.order()
        wanted = [*range(step + 1, step + 2 + step // 4), *[0] * (15 - step // 4)]
        assert table[0].tolist() == wanted
        assert lengths.tolist() == [step + 1, 0, 0, 0]
    client.delete_tables(tables)


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


def test_an_engine_that_hangs_in_its_replay_holds_nobody_else_up(
    daemon: Daemon, client: Client, device: str, simulator: Simulator
) -> None:
    """Its update waits on the device for the replay; other engines' updates go on, and its death ends it."""
    tables = client.create_tables("decode", "pool", max_batch=4, max_context_tokens=64)
    ring = client.open_events(device)

    def update(*arguments: Any, **more: Any) -> None:  # noqa: ANN401  an update's
        client.wait(client.update_tables(tables, *arguments, **more, after=ring.record_event(), deadline_s=5))

    with Child(simulator) as victim:
        stream = victim.do(ENGINE.format(directory=str(daemon.runtime_dir), device=device))
        with simulator.held(process=victim.pid, stream=stream):
            assert victim.do(UPDATE) == 1
            for step in range(5):
                update([step + 1], rows={0: [step + 1, 9]})
                tables.order()
                assert tables.block_tables[0].tolist()[: 1 + step // 4] == [step + 1, 9][: 1 + step // 4]
            victim.kill()
            wait_until(lambda: len(client.status().tables) == 1)
            update([2])
    tables.order()
    assert tables.seq_lens.tolist() == [2, 0, 0, 0]
    client.delete_tables(tables)
