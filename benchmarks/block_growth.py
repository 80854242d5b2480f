"""What a block of the prefix cache costs as the index grows to ten million of them: in this process, without its bytes.

Times are of the processor, so that other processes on this machine do not count.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.curves import BYTES, Point, rounds_of, row_of_curve
from benchmarks.measure import MICROSECONDS, MILLISECONDS, Contender, Effort, Row, Target
from benchmarks.processes import anonymous_bytes
from kvferry.daemon.process.garbage import collect_new_only
from kvferry.pools.tiers.cached_block import Namespace
from kvferry.pools.tiers.index import BlockIndex
from kvferry.pools.tiers.journal import CacheJournal

PAGE_BYTES = 4096
CHAIN = 64
"""Blocks of a prompt."""

CACHES = Target(4.0)
"""Ten thousand blocks fit into a processor's caches, ten millions do not: each look at one waits for memory."""

STALL = Target(20, "ours")
"""In milliseconds: for how long a STORE may keep the control loop from all else."""


def chain_hashes(number: int) -> list[bytes]:
    """Return the hashes of a chain, which follow from its number."""
    data = random.Random(number).randbytes(16 * CHAIN)  # noqa: S311  no secret
    return [data[at : at + 16] for at in range(0, len(data), 16)]


class Index:
    """The daemon's index, without memory for the blocks' bytes."""

    def __init__(self, block_pages: int) -> None:
        self._index = BlockIndex(CacheJournal(1 << 16), most_bytes=1 << 60)
        self._namespace = Namespace(0, "0" * 32, "1" * 32, "main", block_pages)
        self._next = 0
        self._chains: list[int] = []
        """Those of which all is there."""
        self._ends: dict[bytes, int] = {}
        """Where each is in that list, by its last hash: a chain goes from its end."""
        self._random = random.Random(0)  # noqa: S311  no secret
        self.longest_ms = 0.0
        """The longest STORE so far, and the longest eviction of as much."""

    def grow(self, count: int) -> None:
        """Store chains until there are so many blocks."""
        while len(self._index) < count:
            self.longest_ms = max(self.longest_ms, self._store() / 1e3)
            self._tell()

    def store(self) -> float:
        """Store a chain and evict as many blocks; return the microseconds."""
        return self._store() + self._tell() + self._evict()

    def lookup(self) -> float:
        """Look any chain up; return the microseconds."""
        hashes = chain_hashes(self._random.choice(self._chains))
        started = time.thread_time()
        found = self._index.longest_prefix(self._namespace, hashes)
        elapsed_s = time.thread_time() - started
        assert len(found) == CHAIN
        return elapsed_s * 1e6

    def shrink(self, share: float) -> None:
        """Evict that share of the blocks, a chain at a time."""
        for _ in range(int(len(self._chains) * share)):
            self.longest_ms = max(self.longest_ms, self._evict() / 1e3)

    def _store(self) -> float:
        hashes, pages = chain_hashes(self._next), self._namespace.block_pages
        offsets = np.arange(CHAIN * pages, dtype=np.int64).reshape(CHAIN, pages) * PAGE_BYTES
        digests = np.frombuffer(self._random.randbytes(8 * CHAIN * pages), np.uint64).reshape(CHAIN, pages)
        self._ends[hashes[-1]] = len(self._chains)
        self._chains.append(self._next)
        self._next += 1
        started = time.thread_time()
        begun = self._index.begin(self._namespace, hashes, None, PAGE_BYTES * pages)
        self._index.commit([one.block for one in begun], offsets, digests)
        return (time.thread_time() - started) * 1e6

    def _tell(self) -> float:
        """Tell the eviction policy of the uses so far, which a daemon does by and by."""
        started = time.thread_time()
        self._index.accounts.catch_up(CHAIN)
        return (time.thread_time() - started) * 1e6

    def _evict(self) -> float:
        evicted = []
        started = time.thread_time()
        for _, block in zip(range(CHAIN), self._index.host_victims(), strict=False):
            self._index.drop_host(block)
            evicted.append(block.hash)
        elapsed_s = time.thread_time() - started
        for block_hash in evicted:
            place = self._ends.pop(block_hash, None)
            if place is not None:
                self._forget(place)
        return elapsed_s * 1e6

    def _forget(self, place: int) -> None:
        """Take a chain from the list; the last one comes into its place."""
        last = self._chains.pop()
        if place < len(self._chains):
            self._chains[place] = last
            self._ends[chain_hashes(last)[-1]] = place


def blocks(effort: Effort) -> list[Row]:
    """Measure a chain stored and looked up, the longest pause, and the memory, at up to ten million blocks."""
    sizes = (1000, 4000) if effort.quick else (10_000, 100_000, 1_000_000, 10_000_000)
    rounds, count = effort.pick(7, 1), effort.pick(200, 2)
    collect_new_only()
    small, grown = Index(1), Index(1)
    small.grow(sizes[0])
    points: dict[str, list[Point]] = {}
    had, had_bytes = 0, anonymous_bytes("self")
    for size in sizes:
        began_bytes = anonymous_bytes("self")
        grown.grow(size)
        each = [max(1.0, (anonymous_bytes("self") - began_bytes) / (size - had))]
        had = size
        pause = [grown.longest_ms]
        for name, found in (
            ("lookup", rounds_of(rounds, _mean(grown.lookup, count), _mean(small.lookup, count))),
            ("store", rounds_of(rounds, _mean(grown.store, count), _mean(small.store, count))),
            ("memory", [each, each]),
            ("longest", [pause, pause]),
        ):
            ours, peer = found
            first = points.setdefault(name, [])
            first.append(Point(size, ours, first[0].ours if first and name in {"memory", "longest"} else peer))
    grown.shrink(0.75)
    note = f"{CHAIN} blocks of one page"
    row = partial(row_of_curve, of="blocks")
    return [
        row("growth/blocks/lookup", MICROSECONDS, points["lookup"], target=CACHES, note=note),
        row("growth/blocks/store", MICROSECONDS, points["store"], target=CACHES, note=f"{note}, and as many evicted"),
        row(
            "growth/blocks/longest",
            MILLISECONDS,
            points["longest"],
            target=STALL,
            note=f"of all STOREs so far; {grown.longest_ms:.0f} ms with evicting three quarters",
        ),
        row(
            "growth/blocks/memory",
            BYTES,
            points["memory"],
            note=f"{(anonymous_bytes('self') - had_bytes) / sizes[-1]:.0f} in all",
        ),
    ]


class Router:
    """What a router keeps of one daemon's blocks: where each is, as docs/tiers.md says."""

    def __init__(self) -> None:
        self._where: dict[tuple[str, bytes], set[str]] = {}
        self._stored = 0

    def grow(self, count: int) -> None:
        """Take in changes until there are so many blocks."""
        while len(self._where) < count:
            self.change()

    def change(self) -> float:
        """Take in a change: a chain that was stored; return the microseconds."""
        hashes = b"".join(chain_hashes(self._stored))
        self._stored += 1
        started = time.thread_time()
        for at in range(0, len(hashes), 16):
            self._where.setdefault(("identity", hashes[at : at + 16]), set()).add("host")
        return (time.thread_time() - started) * 1e6

    def lookup(self) -> float:
        """Look a chain up; return the microseconds."""
        hashes = chain_hashes(random.randrange(self._stored))  # noqa: S311  no secret
        started = time.thread_time()
        found = [self._where.get(("identity", one)) for one in hashes]
        elapsed_s = time.thread_time() - started
        assert all(found)
        return elapsed_s * 1e6


def router(effort: Effort) -> list[Row]:
    """Measure what a router keeps of the daemons' blocks, up to a million of them: in this process."""
    sizes = (1000, 4000) if effort.quick else (10_000, 100_000, 1_000_000)
    rounds, count = effort.pick(5, 1), effort.pick(100, 2)
    small, grown = Router(), Router()
    small.grow(sizes[0])
    points: dict[str, list[Point]] = {"change": [], "lookup": [], "memory": []}
    had = 0
    for size in sizes:
        began_bytes = anonymous_bytes("self")
        grown.grow(size)
        each = [max(1.0, (anonymous_bytes("self") - began_bytes) / (size - had))]
        had = size
        points["memory"].append(Point(size, each, points["memory"][0].ours if points["memory"] else each))
        for name in ("change", "lookup"):
            pair = (_mean(getattr(one, name), count) for one in (grown, small))
            points[name].append(Point(size, *rounds_of(rounds, *pair)))
    units = {"change": MICROSECONDS, "lookup": MICROSECONDS, "memory": BYTES}
    return [
        row_of_curve(f"growth/router/{name}", unit, points[name], of="blocks", target=None, note=NOTES[name])
        for name, unit in units.items()
    ]


NOTES = {"change": f"{CHAIN} blocks stored", "lookup": f"{CHAIN} blocks", "memory": "of a block"}


def _mean(action: Callable[[], float], count: int) -> Contender:
    return lambda: sum(action() for _ in range(count)) / count
