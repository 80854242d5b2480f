"""A captured graph over a registered pool and its tables is replayed while the daemon is killed, and after it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, Final

import numpy as np
import pytest
import torch

from kvferry.attention.table_layout import TableShape, table_layout, views
from kvferry.attention.table_mirror import TableMirror, shared_bytes
from kvferry.clients import BlockTableEntries, Client, MhaSpec
from kvferry.clients.connection import Reconnected
from kvferry.clients.device_tables import DeviceTables
from kvferry.clients.devices import EngineDevices
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import TableHoleError, UnknownTablesError
from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.conftest import simulated_host
from tests.kit.daemons import Daemon, soon
from tests.kit.devices import DEVICE
from tests.npu.conftest import OPENING_S
from tests.npu.paged_attention import HEAD_DIM, HEADS, KV_HEADS, Cache, CapturedAttention, reference

CONFIG: Final = "[service]\nresume_grace_s = 60.0\n"
PAGE: Final = 8
PAGES: Final = 64
SPEC: Final = MhaSpec(
    layers=1, tokens=PAGE * (PAGES - 1), page_size=PAGE, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32"
)
CLOSE: Final = 1e-5
FAR: Final = 1e-2
LATE_MS: Final = 12_000
"""More than the next daemon takes to open the device."""


@pytest.fixture(scope="module")
def life() -> Iterator[Daemon]:
    """Return a daemon that outlives its process, and this process's device, open."""
    DEVICE.accelerator  # noqa: B018
    with kit.daemon(CONFIG, keep=True) as one:
        yield one


class Engine:
    """An engine whose pool and tables are its own memory, and a graph of two rows over them."""

    def __init__(self, life: Daemon) -> None:
        self.life = life
        self.told: list[Reconnected] = []
        self.client = Client.connect(life.runtime_dir, name="engine", on_reconnect=self.told.append)
        shape = (1, PAGES, PAGE, KV_HEADS, HEAD_DIM)
        random = torch.Generator().manual_seed(5)
        host = [torch.randn(shape[1:], generator=random) for _ in range(2)]
        self.tensors = {("main", role): one[None].to(DEVICE.name) for role, one in zip("kv", host, strict=True)}
        self.client.register_pool("own", SPEC, self.tensors, device=DEVICE.name, deadline_s=OPENING_S)
        self.tables = self.client.create_tables("tables", "own", max_batch=2, max_context_tokens=40)
        keys, values = (self.tensors["main", role][0] for role in "kv")
        self.cache = Cache(keys, values, *host)
        self.graph = CapturedAttention(self.cache, self.tables, 2)
        self.queries = torch.randn(2, 1, HEADS, HEAD_DIM, generator=random)
        self.graph.queries.copy_(self.queries)
        self._addresses = self.addresses()

    def addresses(self) -> list[int]:
        return [self.tables.block_tables.data_ptr(), self.tables.seq_lens.data_ptr()]

    def begin(self, lengths: Sequence[int], rows: Sequence[Any] = (), **more: Any) -> Any:  # noqa: ANN401
        """Send an update behind what was replayed so far."""
        whole, after = dict(enumerate(rows)), self.tables.replayed()
        return self.client.update_tables(self.tables, lengths, rows=whole, after=after, **more)

    def update(self, lengths: Sequence[int], rows: Sequence[Any] = (), **more: Any) -> None:  # noqa: ANN401
        self.client.wait(self.begin(lengths, rows, **more))

    def assert_reads(self, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Replay, and compare with these rows; those of others are told apart."""
        self.graph.start()
        self.assert_read(rows, lengths)

    def assert_read(self, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        found = self.graph.out(2)
        assert float((found - reference(self.cache, self.queries, rows, lengths)).abs().max()) < CLOSE
        wrong = [[page % (PAGES - 1) + 1 for page in row] for row in rows]
        assert float((found - reference(self.cache, self.queries, wrong, lengths)).abs().max()) > FAR
        assert self.addresses() == self._addresses

    def return_to_daemon(self) -> Reconnected:
        assert soon(lambda: self.client.poll(0) is not None and bool(self.told))
        return self.told.pop()

    def go_on(self, rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        assert self.return_to_daemon().emptied == ()
        self.update(lengths, rows)

    def close(self) -> None:
        self.tables.close()
        self.client.close()


@pytest.fixture
def engine(life: Daemon) -> Iterator[Engine]:
    one = Engine(life)
    yield one
    one.close()


FIRST: Final = ([[3, 9], [20, 30, 40]], [13, 20])
SECOND: Final = ([[11, 12, 13], [5]], [24, 7])


def nobody_watches() -> bool:
    """Return whether all that was to be done in the place of daemons that have ended is done."""
    return not any(one.name == "tables" for one in threading.enumerate())


def test_replays_go_on_without_a_daemon_and_the_next_one_goes_on_with_the_tables(engine: Engine) -> None:
    """Three times: what is shown stays, one row's next page is enough, and no address changes."""
    rows, lengths = [list(row) for row in FIRST[0]], list(FIRST[1])
    engine.update(lengths, rows)
    engine.assert_reads(rows, lengths)
    for turn in range(3):
        engine.life.kill()
        for _ in range(3):
            engine.assert_reads(rows, lengths)
        engine.life.start()
        event = engine.return_to_daemon()
        assert (event.tables, event.emptied, event.pools) == ((), (), ())
        engine.assert_reads(rows, lengths)
        lengths[0] = PAGE * len(rows[0]) + 1
        rows[0].append(50 + turn)
        engine.update(lengths, entries=BlockTableEntries([0], [len(rows[0]) - 1], [rows[0][-1]]))
        assert engine.tables.host_lengths().sequence == 2 + turn
        engine.assert_reads(rows, lengths)


def test_an_update_that_a_killed_daemon_has_not_copied_is_shown(engine: Engine, simulator: Simulator) -> None:
    """A replay that waits for it when the daemon is killed comes to its end, and so do the next ones."""
    engine.update(FIRST[1], FIRST[0])
    engine.assert_reads(*FIRST)
    with simulator.held(process=engine.life.process.pid):
        engine.update(SECOND[1], SECOND[0])
        engine.graph.start()
        with ThreadPoolExecutor(1) as waiting:
            read = waiting.submit(engine.assert_read, *SECOND)
            assert not read.done()
            engine.life.kill()
            read.result(timeout=20)
    engine.assert_reads(*SECOND)
    engine.life.start()
    assert engine.return_to_daemon().emptied == ()
    engine.assert_reads(*SECOND)
    engine.update(FIRST[1], FIRST[0])
    engine.assert_reads(*FIRST)


def test_it_does_not_overtake_the_replay_before_it(engine: Engine, simulator: Simulator) -> None:
    engine.update(FIRST[1], FIRST[0])
    engine.assert_reads(*FIRST)
    compute = torch.get_device_module("npu").current_stream().npu_stream
    with simulator.held(process=os.getpid(), stream=compute):
        engine.graph.start()
        first = engine.graph.clone()
        engine.update(SECOND[1], SECOND[0])
        engine.life.kill()
        engine.graph.start()
        engine.life.start()
    assert float((first.cpu() - reference(engine.cache, engine.queries, *FIRST)).abs().max()) < CLOSE
    engine.assert_read(*SECOND)
    assert engine.return_to_daemon().emptied == ()
    engine.assert_reads(*SECOND)


def test_a_daemon_that_is_killed_before_it_has_adopted_them_loses_nothing(engine: Engine, simulator: Simulator) -> None:
    engine.update(FIRST[1], FIRST[0])
    engine.assert_reads(*FIRST)
    with simulator.held(process=engine.life.process.pid):
        engine.update(SECOND[1], SECOND[0])
        engine.life.kill()
    engine.life.restart()
    engine.life.restart()
    assert engine.return_to_daemon().emptied == ()
    engine.assert_reads(*SECOND)
    engine.update(FIRST[1], FIRST[0])
    engine.assert_reads(*FIRST)


def test_killed_at_random_while_updates_come(engine: Engine, request: pytest.FixtureRequest) -> None:
    """An update without an answer is shown as a whole or not at all, and its number says which.

    Of a dead daemon's last copies the record has no order with those in its place, which write the same, and has not if
    it is killed as it writes their number.
    """
    killed = []
    random = np.random.default_rng(44)
    shown = FIRST
    engine.update(shown[1], shown[0])
    for _ in range(8):
        process = engine.life.process
        timer = threading.Timer(float(random.uniform(0.001, 0.02)), process.kill)
        timer.start()
        while process.poll() is None:
            lengths = random.integers(1, 41, 2).tolist()
            rows = [random.permutation(np.arange(1, PAGES))[: -(-length // PAGE)].tolist() for length in lengths]
            sequence, pending = engine.tables.host_lengths().sequence, engine.begin(lengths, rows)
            assert soon(lambda: process.poll() is not None or engine.client.is_ready(pending))  # noqa: B023
            if engine.tables.host_lengths().sequence > sequence:
                shown = (rows, lengths)
                engine.assert_reads(*shown)
        timer.join()
        killed.append(process.pid)
        engine.assert_reads(*shown)
        engine.life.start()
        event = engine.return_to_daemon()
        assert (event.tables, event.emptied) == ((), ())
        engine.assert_reads(*shown)
    host = request.config.stash[simulated_host]
    assert host is None or not host.new_races(killed)


@contextlib.contextmanager
def taken_apart_late(life: Daemon, simulator: Simulator) -> Iterator[Engine]:
    """Have a daemon that is taken apart late, and return an engine whose tables show FIRST."""
    simulator.late_teardown(LATE_MS)
    try:
        life.restart()
        engine = Engine(life)
        engine.update(FIRST[1], FIRST[0])
        engine.assert_reads(*FIRST)
        yield engine
        engine.close()
    finally:
        simulator.late_teardown(0)
        life.restart()


@pytest.mark.full
def test_no_update_comes_before_the_late_copies_of_a_daemon_that_was_killed(
    life: Daemon, simulator: Simulator, request: pytest.FixtureRequest
) -> None:
    """They write what that daemon's last update has shown, and would come over the next one's."""
    with taken_apart_late(life, simulator) as engine:
        killed = life.process.pid
        with simulator.held(process=killed):
            engine.update(SECOND[1], SECOND[0])
            life.kill()
        ended_at = time.monotonic()
        engine.assert_reads(*SECOND)
        life.start()
        assert engine.return_to_daemon().emptied == ()
        assert time.monotonic() < ended_at + LATE_MS / 1000, "the machine is too slow for this test"
        engine.update(FIRST[1], FIRST[0])
        assert soon(lambda: time.monotonic() > ended_at + LATE_MS / 1000 + 0.5)
        engine.assert_reads(*FIRST)
    host = request.config.stash[simulated_host]
    assert host is None or not host.new_races([killed])


@pytest.mark.full
def test_no_update_comes_before_what_is_copied_in_the_place_of_a_daemon_that_was_killed(
    life: Daemon, simulator: Simulator, request: pytest.FixtureRequest
) -> None:
    """Its own late copies say that the update is shown, while those of this process are still to come."""
    streams: Any = EngineDevices({}).open(DEVICE.name).streams
    own = streams.host_to_device.npu_stream
    with (
        taken_apart_late(life, simulator) as engine,
        simulator.held(os.getpid(), own),
        ThreadPoolExecutor(1) as threads,
    ):
        killed = life.process.pid
        simulator.hold(killed)
        engine.update(SECOND[1], SECOND[0])
        life.kill()
        life.start()
        updated = threads.submit(engine.go_on, *FIRST)
        with Client.connect(life.runtime_dir, name="another") as other:
            assert soon(lambda: len(other.status().tables) == 1)
        wait([updated], timeout=2)
        simulator.release()
        updated.result()
        engine.assert_reads(*FIRST)
    host = request.config.stash[simulated_host]
    assert host is None or not host.new_races([killed])


def test_what_updates_could_not_have_led_to_is_not_believed(engine: Engine) -> None:
    """The tables stay, and the next update writes all of them."""
    engine.update(FIRST[1], FIRST[0])
    engine.life.kill()
    engine.tables.order()
    assert soon(nobody_watches)
    engine.tables.block_tables[0, 1] = PAGES
    torch.accelerator.synchronize()
    engine.life.start()
    event = engine.return_to_daemon()
    assert (event.tables, event.emptied) == ((), ("tables",))
    with pytest.raises(TableHoleError):
        engine.update(FIRST[1])
    engine.update(SECOND[1][1:], SECOND[0][1:])
    engine.tables.order()
    assert engine.tables.block_tables.tolist() == [[5, 0, 0, 0, 0], [0] * 5]
    engine.update(FIRST[1], FIRST[0])
    engine.assert_reads(*FIRST)


def test_what_an_engine_has_written_itself_is_taken_for_empty(engine: Engine) -> None:
    engine.update(FIRST[1], FIRST[0])
    engine.life.kill()
    engine.tables.overwritten = True
    engine.tables.order()
    assert soon(nobody_watches)
    engine.tables.block_tables[1, 2] = 33
    engine.life.start()
    assert engine.return_to_daemon().emptied == ("tables",)
    engine.update([1], [[7]])
    engine.tables.order()
    assert engine.tables.block_tables.tolist() == [[7, 0, 0, 0, 0], [0] * 5]


def test_a_word_that_no_update_has_written_is_refused(engine: Engine) -> None:
    engine.update(FIRST[1], FIRST[0])
    engine.life.kill()
    engine.tables.order()
    assert engine.tables.memory is not None
    assert soon(nobody_watches)
    engine.tables.memory.tensor[-512:-504] = 255
    torch.accelerator.synchronize()
    engine.life.start()
    assert engine.return_to_daemon().tables == ("tables",)
    with pytest.raises(UnknownTablesError):
        engine.update(FIRST[1], FIRST[0])


def test_they_go_on_over_a_pool_of_the_daemon_that_a_keeper_has(life: Daemon) -> None:
    told: list[Reconnected] = []
    with Client.connect(life.runtime_dir, name="engine", on_reconnect=told.append) as client:
        pool = client.create_pool("kept", SPEC, device=DEVICE.name, deadline_s=OPENING_S)
        tables = client.create_tables("tables", "kept", max_batch=2, max_context_tokens=40)
        client.wait(client.update_tables(tables, [PAGE], rows={0: [3]}, after=tables.replayed()))
        life.restart()
        assert soon(lambda: client.poll(0) is not None and bool(told))
        assert (told[0].pools, told[0].tables, told[0].emptied) == ((), (), ())
        client.wait(client.update_tables(tables, [PAGE + 1], entries=BlockTableEntries([0], [1], [4])))
        tables.order()
        assert tables.block_tables[0].tolist() == [3, 4, 0, 0, 0]
        client.delete_tables(tables)
        pool.close()
        client.delete_pool("kept")


def test_they_are_lost_with_their_pool(engine: Engine) -> None:
    engine.update(FIRST[1], FIRST[0])
    engine.life.kill()
    torch.accelerator.synchronize()
    engine.tensors["main", "k"].untyped_storage().resize_(0)
    engine.life.start()
    event = engine.return_to_daemon()
    assert (event.pools, event.tables) == (("own",), ("tables",))


# -- each moment at which a daemon may be killed, without one


class Remains:
    """What a daemon leaves: tables that show ones, a mirror of twos, and a process that ends."""

    shape: Final = TableShape(max_batch=2, columns=4, page_size=8)

    def __init__(self, *, mirrored: int, shown: int) -> None:
        layout = table_layout(self.shape)
        self.memory = EngineDevices({}).tables_memory(DEVICE.name, layout.size_bytes)
        self.host = HostRegion.create("remains", shared_bytes(self.shape, mirrored=True))
        mirror = TableMirror(self.host.view(), self.shape)
        mirror.bytes[:] = 2
        self.memory.tensor[: layout.words] = 1
        self.memory.tensor[layout.words] = shown
        torch.accelerator.synchronize()
        with subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE) as process:
            self.tables = DeviceTables(self.memory, self.host, self.shape, os.pidfd_open(process.pid))
            mirror.end(mirrored, after=0)

    def found(self) -> tuple[int, int]:
        """Return which bytes the tables show, and the word, behind what they wait for."""
        self.tables.order(None)
        layout = table_layout(self.shape)
        found = self.memory.tensor.cpu().numpy()
        tables = views(self.shape, found)
        [byte] = np.unique(np.concatenate([tables.block_tables.reshape(-1), tables.seq_lens]).view(np.uint8)).tolist()
        return byte, int(found[layout.words :][:8].view(np.uint64)[0])


def test_an_update_that_is_whole_in_the_mirror_is_shown() -> None:
    assert Remains(mirrored=5, shown=4).found() == (2, 5)


def test_what_is_shown_is_not_written_again() -> None:
    """A later update may be half in the mirror, or the engine may have written the tables itself since."""
    remains = Remains(mirrored=5, shown=5)
    assert soon(nobody_watches)
    assert remains.found() == (1, 5)
