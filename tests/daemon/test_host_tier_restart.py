"""Snapshots and cached blocks in host memory outlive their daemon, byte by byte, or are gone; never anything else."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from random import Random
from subprocess import PIPE
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from kvferry.clients import CacheGroup, Client, MhaSpec, ModelIdentity, pages
from kvferry.clients.connection import Reconnected
from kvferry.pools.tiers.tier_record import record_bytes
from kvferry.protocol import errors
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.devices import DEVICE
from tests.kit.pools import GROUPED, Filled

UNIT: Final = 4096
UNITS: Final = 40
SPEC: Final = MhaSpec(layers=2, tokens=128, page_size=4, kv_heads=2, head_dim=16, dtype="float16")
"""32 pages of 1 KiB: each takes an allocation unit."""

ALL: Final = 32
MODEL: Final = ModelIdentity(name="some/model")
POOL: Final = "pool"
NUMBERS: Final = 300
SIGNALS: Final = {"killed": signal.SIGKILL, "ended": signal.SIGTERM}
KILLS: Final = 30 if DEVICE.full else 6


def config(more: str = "", units: int = UNITS) -> str:
    return f"[service]\nresume_grace_s = 600.0\n[tiers]\nhost_bytes = {units * UNIT}\n{more}"


@pytest.fixture
def life() -> Iterator[Daemon]:
    """Return a daemon whose host tier outlives it."""
    with kit.daemon(config(), keep=True) as one:
        yield one


class Engine:
    """A session with a pool, and what it is told when its daemon was restarted."""

    def __init__(self, client: Client, boots: list[Reconnected]) -> None:
        self.client = client
        self.boots = boots
        pool = client.create_pool(POOL, SPEC, model=MODEL)
        self._arrays = [pool.entry_array(entry) for entry in pool.manifest.entries]

    def write(self, ids: npt.ArrayLike, value: int) -> None:
        for array in self._arrays:
            array[np.asarray(ids)] = value

    def read(self, ids: npt.ArrayLike) -> list[set[int]]:
        """Return which values are in each page."""
        return [
            {int(one) for array in self._arrays for one in np.unique(array[page])} for page in np.asarray(ids).tolist()
        ]

    def offload(self, *values: int) -> str:
        """Make a snapshot of pages that are full of these numbers; return its name."""
        with self.holding(len(values)) as ids:
            for page, value in zip(ids, values, strict=True):
                self.write([page], value)
            operation = self.client.offload(POOL, [pages(ids)])
            self.client.wait_done(operation)
        return operation.snapshot

    def restore(self, snapshot: str, *, drop: bool = False) -> list[set[int]]:
        """Return what is in a snapshot's pages."""
        operation = self.client.restore(POOL, snapshot, drop=drop)
        self.client.wait_done(operation)
        ids = operation.pages["main"]
        found = self.read(ids)
        self.client.free(POOL, ids)
        return found

    def store(self, *numbers: int, block_pages: int = 1) -> None:
        """Store a chain of blocks, each full of its number."""
        with self.holding(len(numbers) * block_pages) as ids:
            for its, number in zip(ids.reshape(-1, block_pages), numbers, strict=True):
                self.write(its, number)
            self.client.wait_done(self.client.store(POOL, names(*numbers), ids, block_pages=block_pages))

    def load(self, *numbers: int, block_pages: int = 1) -> list[set[int]]:
        """Return what is in the pages of those leading blocks of a chain that are cached and intact."""
        found = self.client.lookup(POOL, names(*numbers), groups=[CacheGroup(block_pages=block_pages)])
        if not found.blocks:
            return []
        with self.holding(found.blocks * block_pages) as ids:
            operation = self.client.load(POOL, found.lease, ids, unpin=True)
            with contextlib.suppress(errors.CacheMissError):
                self.client.wait_done(operation)
            loaded = operation.done.loaded if operation.done else 0
            return self.read(ids[: loaded * block_pages])

    @contextlib.contextmanager
    def holding(self, count: int) -> Iterator[npt.NDArray[np.int64]]:
        ids = self.client.allocate(POOL, count)
        try:
            yield ids
        finally:
            with contextlib.suppress(errors.StaleBootError):
                self.client.free(POOL, ids)

    def counters(self) -> dict[str, int]:
        every = self.client.status().counters
        return {name.removeprefix("adoption."): count for name, count in every.items() if "adoption." in name}

    def verified(self) -> None:
        """Check that all books of the daemon add up."""
        assert self.client.verify().findings == ()


@contextlib.contextmanager
def engine(life: Daemon, name: str = "engine", **options: Any) -> Iterator[Engine]:  # noqa: ANN401  connect's
    boots: list[Reconnected] = []
    with Client.connect(life.runtime_dir, name=name, on_reconnect=boots.append, **options) as client:
        yield Engine(client, boots)


def names(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16, "big") for number in numbers]


@contextlib.contextmanager
def left_by(life: Daemon) -> Iterator[Mapping[str, int]]:
    """Yield what is in the store between two lives."""
    with life.store() as store:
        held = store.take()
        try:
            yield held
        finally:
            for fd in held.values():
                os.close(fd)


@pytest.mark.parametrize("how", ["killed", "ended", "upgraded"])
def test_snapshots_and_blocks_are_there_with_their_bytes(how: str) -> None:
    environment = {"PYTHONUNBUFFERED": "1"} if how == "upgraded" else None  # started by its command
    with kit.daemon(config(), keep=True, environment=environment) as life:
        replace = life.upgrade if how == "upgraded" else partial(life.restart, SIGNALS[how])
        see_them_outlive(life, replace)


def test_blocks_of_every_group_are_there_with_their_bytes(life: Daemon) -> None:
    with Client.connect(life.runtime_dir, name="engine", on_reconnect=lambda _: None) as client:
        pool = Filled(client, "grouped", GROUPED)
        ids, names_of = client.allocate("grouped", 10), names(1, 2, 3)
        contents = pool.write(ids[:3], 4), pool.write(ids[3:5], 5, "group1")
        client.wait_done(client.store("grouped", names_of, ids[:3]))
        client.wait_done(client.store("grouped", names_of[1:], ids[3:5], group="group1", parent=names_of[0]))
        life.restart(signal.SIGKILL)
        found = client.lookup("grouped", names(1, 2, 3, 4), groups=[CacheGroup(), CacheGroup(group="group1", last=2)])
        assert (found.blocks, found.host) == (3, 5)
        client.wait_done(client.load("grouped", found.lease, ids[5:8]))
        client.wait_done(client.load("grouped", found.lease, ids[8:], group="group1", first_block=1))
        assert pool.holds(ids[5:8], contents[0])
        assert pool.holds(ids[8:], contents[1], "group1")
        assert client.verify().findings == ()


def see_them_outlive(life: Daemon, replace: Callable[[], None]) -> None:
    with engine(life) as one:
        snapshot = one.offload(1, 2, 3)
        one.store(*range(10, 18))
        one.store(*range(20, 24), block_pages=2)
        before = one.client.snapshots()
        replace()
        assert one.load(*range(10, 18)) == [{value} for value in range(10, 18)]
        assert one.load(*range(20, 24), block_pages=2) == [{value} for value in range(20, 24) for _ in range(2)]
        [status] = one.client.snapshots()
        assert (status.snapshot, status.session, status.checksum) == (snapshot, before[0].session, before[0].checksum)
        assert status.age_ms >= before[0].age_ms
        assert one.counters() == {"sessions": 1, "pools": 1, "blocks": 12, "snapshots": 1}
        one.verified()
        replace()
        assert one.restore(snapshot, drop=True) == [{1}, {2}, {3}]
        replace()
        with pytest.raises(errors.SnapshotLostError):
            one.restore(snapshot)
        assert len(one.load(*range(10, 18))) == 8
        one.verified()


def test_what_was_dropped_evicted_or_not_whole_is_not_there(life: Daemon) -> None:
    with engine(life) as one:
        dropped = one.offload(1)
        one.client.drop_snapshot(dropped)
        one.store(10, 11)
        one.client.evict_cached(names(11), pool=POOL)
        many = range(20, 20 + UNITS)
        for first in many[::4]:
            one.store(*range(first, first + 4))
        one.store(90, 91, 92)  # evicts some of those before
        there = [number for number in many if one.client.lookup(POOL, names(number), pin=False).blocks]
        assert len(there) < UNITS
        life.restart()
        with pytest.raises(errors.SnapshotLostError):
            one.restore(dropped)
        assert not one.load(11)
        assert [number for number in many if one.load(number) == [{number}]] == there
        assert one.load(90, 91, 92) == [{90}, {91}, {92}]
        one.verified()


def test_a_snapshot_of_an_instance_that_is_no_more_ends_after_the_grace(life: Daemon) -> None:
    life.configure(config("snapshot_grace_s = 600.0\n"))
    life.restart()
    with engine(life, "stays") as stays:
        with engine(life, "gone") as gone:
            its = gone.offload(1)
        mine = stays.offload(7)
        assert soon(lambda: {one.snapshot: one.session is None for one in stays.client.snapshots()}[its])
        life.restart()
        assert {one.snapshot: one.session is None for one in stays.client.snapshots()} == {its: True, mine: False}
        assert stays.restore(its) == [{1}]
        life.configure(config("snapshot_grace_s = 0.5\n"))
        life.restart()
        assert soon(lambda: [one.snapshot for one in stays.client.snapshots()] == [mine])
        stays.verified()


def test_a_restore_that_waited_goes_on_with_the_next_daemon(life: Daemon) -> None:
    with engine(life) as one, engine(life, "other") as other:
        snapshot = one.offload(*range(1, 9))
        ids = other.client.allocate(POOL, ALL - 4)
        operation = one.client.restore(POOL, snapshot, deadline_s=60.0)
        one.client.wait_accepted(operation)
        life.restart()
        one.client.ping()
        assert not one.boots[0].operations
        assert not operation.is_done
        other.client.free(POOL, ids)
        one.client.wait_done(operation)
        assert one.read(operation.pages["main"]) == [{value} for value in range(1, 9)]
        one.verified()


def flip(fd: int, at: int) -> None:
    os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1]), at)


def test_bytes_that_were_damaged_are_a_miss_or_an_error(life: Daemon) -> None:
    with engine(life) as one:
        one.store(10)
        snapshot = one.offload(1)
        life.kill()
        with left_by(life) as held:
            memory = held["kvferry.tier.memory"]
            for unit in range(2):
                flip(memory, unit * UNIT + 100)
        life.start()
        assert one.load(10) == []
        assert not one.client.lookup(POOL, names(10)).blocks
        with pytest.raises(errors.SnapshotDamagedError):
            one.restore(snapshot)
        one.verified()


@pytest.mark.parametrize("seed", range(8 if DEVICE.full else 2))
def test_a_damaged_record_is_of_nothing_or_of_what_was_there(life: Daemon, seed: int) -> None:
    random = Random(seed)  # noqa: S311  a test repeats what it did
    with engine(life) as one:
        snapshots = {one.offload(value): value for value in range(1, 4)}
        one.store(*range(10, 18))
        life.kill()
        with left_by(life) as held:
            record = held["kvferry.tier.record"]
            size = record_bytes(UNITS * UNIT)
            written = [at for at, byte in enumerate(os.pread(record, size, 0)) if byte]
            for _ in range(random.randint(1, 12)):
                flip(record, random.choice(written))
        life.start()
        for number in range(10, 18):
            assert one.load(number) in ([], [{number}])
        for name, value in snapshots.items():
            with contextlib.suppress(errors.SnapshotLostError):
                assert one.restore(name) == [{value}]
        one.store(*range(30, 40))
        assert one.load(*range(30, 40)) == [{value} for value in range(30, 40)]
        one.verified()


@pytest.mark.parametrize("change", ["size", "off", "checksums"])
def test_another_configuration(life: Daemon, change: str) -> None:
    if change == "checksums":
        life.configure(config("checksums = false\n"))
        life.restart()
    with engine(life) as one:
        one.store(10)
        snapshot = one.offload(1)
        life.restart()
        if change == "checksums":
            assert one.load(10) == [{10}]
            assert one.restore(snapshot) == [{1}]
        life.configure({"size": config(units=UNITS + 1), "off": config(units=0), "checksums": config()}[change])
        life.restart()
        with pytest.raises(errors.SnapshotLostError):
            one.restore(snapshot)
        if change != "off":
            assert not one.load(10)
            one.store(11)
            assert one.load(11) == [{11}]
        one.verified()
        life.configure(config())
        life.restart()
        one.store(12)
        assert one.load(12) == [{12}]
        one.verified()


def test_a_user_keeps_its_books_over_a_restart(life: Daemon) -> None:
    """What was adopted counts against the tier: a snapshot that does not fit beside it is refused, blocks make room."""
    with engine(life) as one:
        kept = [one.offload(*range(1, 11)) for _ in range(2)]
        one.store(*range(20, 30))
        life.restart()
        one.offload(*range(1, 16))
        assert not one.load(*range(20, 30))[8:], "evicted"
        with pytest.raises(errors.OverloadedError, match="the host tier is full"):
            one.offload(*range(1, 20))
        for name in kept:
            one.client.drop_snapshot(name)
        one.offload(*range(1, 20))
        one.verified()


def test_nothing_new_is_taken_while_a_helper_of_the_daemon_before_may_still_write(life: Daemon) -> None:
    program = "import sys; from kvferry.daemon.process.writers import opened_for_helper as helper; "
    program += "fd = helper(int(sys.argv[1])); print('there', flush=True); sys.stdin.read()"
    with engine(life) as one:
        one.store(10)
        life.kill()
        with contextlib.ExitStack() as ends:
            with left_by(life) as held:
                fd = held["kvferry.tier.memory"]
                command = [sys.executable, "-c", program, str(fd)]
                helper = subprocess.Popen(command, pass_fds=[fd], stdin=PIPE, stdout=PIPE, text=True)
                ends.enter_context(helper)
                ends.callback(helper.kill)
            assert helper.stdout is not None
            assert helper.stdout.readline() == "there\n"
            life.start()
            assert one.load(10) == [{10}]
            with pytest.raises(errors.OverloadedError, match="may still write"):
                one.offload(1)
            with pytest.raises(errors.OverloadedError, match="may still write"):
                one.store(11)
            helper.kill()
            helper.wait()
            assert soon(lambda: takes_something(one))
            one.store(11)
        assert one.load(11) == [{11}]
        one.verified()


def takes_something(one: Engine) -> bool:
    with contextlib.suppress(errors.OverloadedError):
        return bool(one.offload(1))
    return False


class Load:
    """Stores, offloads, drops and evicts, without a pause, until its daemon is gone; knows what must be there.

    Attributes:
        snapshots: the values of each snapshot whose OFFLOAD was done.
    """

    def __init__(self, one: Engine, random: Random) -> None:
        self.one = one
        self.random = random
        self.number = 100
        self.snapshots: dict[str, Sequence[int]] = {}
        self.steps = 0

    def step(self) -> None:
        does = (self._store, self._store, self._offload, self._restore, self._drop)
        self.random.choice(does)()
        self.steps += 1

    def _some(self, most: int) -> range:
        first = self.number
        self.number += self.random.randint(1, most)
        return range(first, self.number)

    def _store(self) -> None:
        self.one.store(*[number % NUMBERS for number in self._some(8)])

    def _offload(self) -> None:
        values = [number % NUMBERS for number in self._some(6)]
        if len(self.snapshots) < 4:
            self.snapshots[self.one.offload(*values)] = values

    def _restore(self) -> None:
        if self.snapshots:
            name = self.random.choice(sorted(self.snapshots))
            assert self.one.restore(name) == [{value} for value in self.snapshots[name]]

    def _drop(self) -> None:
        if self.snapshots:
            name = self.random.choice(sorted(self.snapshots))
            del self.snapshots[name]
            with contextlib.suppress(errors.SnapshotLostError):  # dropped, and killed before it could answer
                self.one.client.drop_snapshot(name)

    def check(self) -> None:
        """Check each block that is found, and each snapshot that was answered."""
        for number in range(NUMBERS):
            if self.one.client.lookup(POOL, names(number), pin=False).blocks:
                assert self.one.load(number) in ([], [{number}])
        for name, values in self.snapshots.items():
            assert self.one.restore(name) == [{value} for value in values]
        self.one.verified()


@pytest.mark.parametrize("checksums", [True, False])
def test_killed_at_random_under_stores_offloads_and_evictions(life: Daemon, *, checksums: bool) -> None:
    """Without checksums only the order of the writes keeps wrong bytes from being found."""
    random = Random(7)  # noqa: S311  a test repeats what it did
    life.configure(config(f"checksums = {str(checksums).lower()}\n"))
    life.restart()
    with engine(life) as one:
        load = Load(one, random)
        for _ in range(KILLS):
            timer = threading.Timer(random.uniform(0.01, 0.4), life.restart)
            timer.start()
            while timer.is_alive():
                with contextlib.suppress(errors.StaleBootError):
                    load.step()
            timer.join()
            load.check()
        assert load.steps > KILLS
