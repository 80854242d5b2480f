"""The host tier's memory from one daemon to the next: what is adopted, in which order, and what is begun anew."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import numpy as np
import pytest

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.process.fd_store import FdStoreError, NoStore
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.tiers import host_tier
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.daemon.tiers.kept_tier import MEMORY, RECORD, KeptTier, open_kept_tier
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.integrity import check
from kvferry.pools.tiers.cached_block import Namespace
from kvferry.protocol.errors import OutOfMemoryError
from tests.kit.tiers import UNIT, names, tiers_config

UNITS: Final = 1200
SPACE: Final = Namespace(tenant=7, layout_digest="0" * 32, identity="1" * 32, group="main", block_pages=2)
BLOCKS: Final = 500


class Store(NoStore):
    """Keeps descriptors in this process; ``full``: or does not."""

    def __init__(self, *, full: bool = False) -> None:
        self.kept: dict[str, int] = {}
        self.full = full

    def put(self, descriptors: Mapping[str, int]) -> None:
        if self.full:
            raise FdStoreError("it is full")
        self.kept |= {name: os.dup(fd) for name, fd in descriptors.items()}

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            if (fd := self.kept.pop(name, None)) is not None:
                os.close(fd)

    def left(self) -> dict[str, int]:
        return {name: os.dup(fd) for name, fd in self.kept.items()}


@pytest.fixture
def store() -> Iterator[Store]:
    """Return a store, which is empty in the end."""
    one = Store()
    yield one
    one.remove(list(one.kept))


@contextlib.contextmanager
def tier(
    store: Store,
    units: int = UNITS,
    call_soon: Callable[[Callable[[], None]], object] | None = None,
    memory: HostMemory | None = None,
) -> Iterator[tuple[HostTier, KeptTier, Counters]]:
    """Yield the host tier of one daemon."""
    memory, counters, left = memory or HostMemory(), Counters(), store.left()
    kept = open_kept_tier(store, left, memory, units * UNIT, checksums=True)
    assert kept is not None
    assert not left
    host = HostTier(tiers_config(units), counters, memory, call_soon=call_soon, kept=kept)
    with contextlib.closing(host):
        yield host, kept, counters
    kept.close()


def fill(host: HostTier, blocks: int = BLOCKS) -> None:
    """Store a chain of blocks, of two pages each."""
    host.know(SPACE, UNIT, "a model")
    begun = [one.block for one in host.index.begin(SPACE, names(*range(blocks)), None, 2 * UNIT)]
    host.index.accounts[SPACE.tenant].awaited_bytes += blocks * 2 * UNIT
    offsets = host.reserve(SPACE.tenant, 2 * blocks, UNIT, counted=True).reshape(-1, 2)
    host.commit(begun, offsets, (offsets + 1).astype(np.uint64))


def add_up(host: HostTier) -> None:
    for one in host.checks(lambda: (), lambda: ()):
        check(one.walk())


def test_many_blocks_come_in_turns_the_deepest_first_and_all_adds_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_tier, "ADOPTED_FIRST", 200)
    monkeypatch.setattr(host_tier, "ADOPTED_AT_ONCE", 100)
    with tier(store) as (host, _, _):
        fill(host)
    calls: deque[Callable[[], None]] = deque()
    with tier(store, call_soon=calls.append) as (host, _, counters):
        assert host.adopt() == []
        add_up(host)
        assert 200 <= len(host.index) < BLOCKS
        used = host.arena.used_bytes
        again = names(0, 1)
        assert host.index.longest_prefix(SPACE, again) == [], "not yet"
        [first, second] = [one.block for one in host.index.begin(SPACE, again, None, 2 * UNIT)]  # stored meanwhile
        host.index.accounts[SPACE.tenant].awaited_bytes += 2 * 2 * UNIT
        its = host.reserve(SPACE.tenant, 4, UNIT, counted=True).reshape(2, 2)
        host.commit([first, second], its, (its + 1).astype(np.uint64))
        while calls:
            calls.popleft()()
            add_up(host)
        assert len(host.index) == BLOCKS
        assert host.arena.used_bytes == used
        assert counters.snapshot()["adoption.blocks"] == BLOCKS - 2
        chain = host.index.longest_prefix(SPACE, names(*range(BLOCKS)))
        assert [one.depth for one in chain] == list(range(BLOCKS))
        assert all(one.digests == tuple((one.offsets + 1).tolist()) for one in chain if one.offsets is not None)
        assert [one.depth for one in host.index.host_victims()][:100] == [*range(BLOCKS - 1, BLOCKS - 101, -1)]
    with tier(store, call_soon=calls.append) as (host, kept, _):
        assert sum(len(one.hashes) for one in kept.found.blocks) == BLOCKS
        host.adopt()
        while calls:
            calls.popleft()()
        host.remove(host.index.longest_prefix(SPACE, names(*range(BLOCKS))))
        add_up(host)
        assert host.arena.used_bytes == 0
        assert kept.is_empty


def test_a_removed_block_that_is_still_read_does_not_come_back(store: Store) -> None:
    with tier(store) as (host, _, _):
        fill(host, 2)
        blocks = host.index.longest_prefix(SPACE, names(0, 1))
        host.index.pin(blocks, 1)
        host.remove(blocks[1:])
        assert host.arena.used_bytes == 4 * UNIT
    with tier(store) as (host, _, _):
        host.adopt()
        assert len(host.index) == 1
        add_up(host)


@pytest.mark.parametrize("how", ["smaller", "memory", "record", "swapped"])
def test_what_does_not_belong_together_is_begun_anew(store: Store, how: str) -> None:
    with tier(store) as (host, _, _):
        fill(host)
    other = Store()
    if how in {MEMORY.rpartition(".")[2], RECORD.rpartition(".")[2]}:
        store.remove([MEMORY if how == "memory" else RECORD])
    if how == "swapped":
        with tier(other):
            store.remove([MEMORY])
            store.put({MEMORY: other.kept[MEMORY]})
    units = UNITS - 1 if how == "smaller" else UNITS
    for wanted in (0, 100):
        with tier(store, units) as (host, _, _):
            host.adopt()
            add_up(host)
            assert len(host.index) == wanted
            if not wanted:
                fill(host, 100)
    other.remove(list(other.kept))


class NoMemory(HostMemory):
    """Has nothing for regions that grow."""

    def count_on(self, region: HostRegion, up_to: int, process: int | None = None) -> None:
        del process
        raise OutOfMemoryError(f"{region} would have {up_to} bytes")


def test_memory_that_cannot_be_had_any_more_is_dropped(store: Store) -> None:
    with tier(store) as (host, _, _):
        fill(host)
    with tier(store, memory=NoMemory()) as (host, kept, counters):
        host.adopt()
        add_up(host)
        assert kept.is_empty
        assert counters.snapshot()["adoption.blocks_dropped"] == BLOCKS


def test_where_nobody_keeps_it_there_is_a_tier_all_the_same() -> None:
    store = Store(full=True)
    assert open_kept_tier(store, {}, HostMemory(), UNIT, checksums=True) is None
    assert not store.kept
