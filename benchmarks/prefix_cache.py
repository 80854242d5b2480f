"""The prefix cache through a real daemon: 64 MiB stored, looked up and loaded, against memcpy and LMCache's server.

A prompt of 2048 tokens: 128 pages of 16 tokens, eight cached blocks of 16 pages, which is what LMCache's server has as
well. Ours are random pages, loaded into other ones; LMCache's client takes them in order. A lookup counts from the
tokens to the number of blocks found: hashing them is part of it on either side. Neither takes memory while the clock
runs: LMCache has it from the start, our cache is full before, so that every store evicts as much as it writes. All that
is loaded is compared with what was stored, outside the clock.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from benchmarks.bare_copies import tier_limits
from benchmarks.measure import (
    MILLISECONDS,
    SETTLE,
    Contender,
    Effort,
    Limit,
    Row,
    Target,
    compare,
    memcpy,
    milliseconds,
)
from benchmarks.peers import lmcache
from benchmarks.peers.lmcache import LMCacheClient, Shape
from benchmarks.pools import MIB, TIMEOUT_S, Pair
from benchmarks.processes import running_daemon
from kvferry.clients import CacheGroup, Client, MhaSpec, ModelIdentity
from kvferry.clients.hashing import block_hashes
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.protocol.tier_messages import HASH_BYTES

BLOCK_TOKENS = 256
CACHED_PROMPTS = 16
LMCACHE_GB = 4
MEMCPY = "one memcpy of as many bytes"
PING = "one PING from the same client"
BARE_LOOKUP = "hashing the tokens with hashlib, and one PING from the same client"


def measure(effort: Effort) -> list[Row]:
    """Measure store, load and lookup; against LMCache too where ``make peers`` was run, unless in a hurry."""
    keep_freed_memory()
    shape = Shape(tokens=effort.pick(2048, 512), page_size=16, layers=8, kv_heads=8, head_dim=128)
    with (
        running_daemon(f"[tiers]\nhost_bytes = {effort.pick(CACHED_PROMPTS, 2) * shape.size_bytes}\n") as runtime_dir,
        Client.connect(runtime_dir, name="bench") as client,
        pools(client, shape) as pair,
    ):
        engine = Engine(pair, shape)
        for _ in range(effort.pick(CACHED_PROMPTS, 2)):
            engine.store()
        rows = _rows(engine, effort)
        peer = None if effort.quick else lmcache.find()
        if peer is not None:
            with lmcache.running_lmcache(peer, shape, LMCACHE_GB) as theirs:
                rows += against_lmcache(engine, theirs, f"LMCache {peer.version}'s server and client, CPU mode", effort)
        return rows


def pools(client: Client, shape: Shape) -> Pair:
    """Return pools for prompts of this shape, which find each other's blocks."""
    spec = MhaSpec(
        layers=shape.layers,
        tokens=shape.tokens,
        page_size=shape.page_size,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        dtype="float16",
    )
    return Pair((client, client), spec, model=ModelIdentity(name="bench"))


class Engine:
    """Stores the source's pages as prompts, and loads them into the target's."""

    def __init__(self, pair: Pair, shape: Shape) -> None:
        self._client = pair.source.client
        self._pair = pair
        self.size_bytes = shape.size_bytes
        self._prompts = 0
        self._block_pages = BLOCK_TOKENS // shape.page_size
        self._tokens = np.zeros(shape.tokens, np.int64)

    def store(self) -> float:
        """Store a prompt that is not there yet; return the milliseconds."""
        source, hashes = self._pair.source, self._hashes(self._prompts)
        self._prompts += 1
        started = time.perf_counter()
        operation = self._client.store(source.pool.name, hashes, source.ids, block_pages=self._block_pages)
        done = self._client.wait_done(operation, TIMEOUT_S)
        elapsed_s = time.perf_counter() - started
        assert (done.stored, done.present) == (len(hashes), 0), done
        return elapsed_s * 1e3

    def lookup(self) -> float:
        """Look the newest prompt up; return the milliseconds from its tokens to what was found."""
        started = time.perf_counter()
        lease = self._found()
        elapsed_s = time.perf_counter() - started
        self._client.unpin(lease)
        return elapsed_s * 1e3

    def load(self) -> float:
        """Load the newest prompt, and compare every byte; return the milliseconds of the load alone."""
        self._pair.clear()
        target, lease = self._pair.target, self._found()
        started = time.perf_counter()
        self._client.wait_done(self._client.load(target.pool.name, lease, target.ids), TIMEOUT_S)
        elapsed_s = time.perf_counter() - started
        self._client.unpin(lease)
        self._pair.check()
        return elapsed_s * 1e3

    @contextmanager
    def limits(self) -> Iterator[dict[str, Limit]]:
        """Yield how fast each could be, if there were nothing but its copies and a PING."""
        with tier_limits(self._pair, milliseconds, checksums=True) as (out, back):
            yield {"store": out, "lookup": Limit((self.bare_lookup_ms,), BARE_LOOKUP), "load": back}

    def ping_ms(self) -> float:
        """Return the milliseconds of one round trip."""
        return self._client.ping() * 1e3

    def bare_lookup_ms(self) -> float:
        """Return the milliseconds of what no lookup can do without: as many hashes, and one round trip."""
        data, block_bytes, before = self._tokens.tobytes(), BLOCK_TOKENS * self._tokens.itemsize, b""
        started = time.perf_counter()
        for end in range(block_bytes, len(data) + 1, block_bytes):
            before = hashlib.sha256(before + data[end - block_bytes : end]).digest()[:HASH_BYTES]
        self._client.ping()
        return (time.perf_counter() - started) * 1e3

    def _found(self) -> int:
        hashes = self._hashes(self._prompts - 1)
        groups = [CacheGroup(block_pages=self._block_pages)]
        found = self._client.lookup(self._pair.target.pool.name, hashes, groups=groups)
        assert found.blocks == len(hashes), found
        return found.lease

    def _hashes(self, number: int) -> list[bytes]:
        self._tokens[0] = number
        return block_hashes(self._tokens, BLOCK_TOKENS)


def against_lmcache(engine: Engine, theirs: LMCacheClient, peer_is: str, effort: Effort) -> list[Row]:
    """Compare with LMCache's operations; both store prompts of their own and look up and load the newest of them."""
    stored = 0

    def store() -> float:
        nonlocal stored
        stored += 1
        return theirs.run("store", stored)

    peers: dict[str, Contender] = {
        "store": store,
        "lookup": lambda: theirs.run("lookup", stored),
        "retrieve": lambda: theirs.run("retrieve", stored),
    }
    ours: dict[str, tuple[str, Contender]] = {
        "store": ("store", engine.store),
        "lookup": ("lookup", engine.lookup),
        "load": ("retrieve", engine.load),
    }
    with engine.limits() as limits:
        return [
            compare(
                f"prefix_cache/{what}/against_lmcache",
                MILLISECONDS,
                ours=contender,
                peer=peers[operation],
                peer_is=peer_is,
                rounds=effort.pick(11, 1),
                settle=effort.pick(SETTLE, 1),
                target=Target(_TARGETS[what]),
                note=_NOTES[what],
                limit=limits[what],
            )
            for what, (operation, contender) in ours.items()
        ]


_TARGETS = {"store": 0.25, "lookup": 0.25, "load": 0.3}
_NOTES = {
    "store": "ours makes checksums; its bytes are compared by the loads",
    "lookup": "hashing the tokens is part of both",
    "load": "LMCache calls it retrieve; ours verifies checksums",
}


def _rows(engine: Engine, effort: Effort) -> list[Row]:
    copy = milliseconds(memcpy(engine.size_bytes))
    note = f"{engine.size_bytes / MIB:.0f} MiB, with checksums"
    return [
        compare(
            f"prefix_cache/{operation}",
            MILLISECONDS,
            ours=ours,
            peer=peer,
            peer_is=peer_is,
            rounds=effort.pick(11, 1),
            settle=effort.pick(SETTLE, 1),
            note=note,
        )
        for operation, ours, peer, peer_is in (
            ("store", engine.store, copy, MEMCPY),
            ("load", engine.load, copy, MEMCPY),
            ("lookup", engine.lookup, engine.ping_ms, PING),
        )
    ]
