"""Blocks to keep on disk, and what lies there."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import xxhash

from kvferry.pools.tiers.block_file import file_name, folder_of
from kvferry.pools.tiers.cached_block import BlockKey, Namespace
from kvferry.pools.tiers.disk import DiskStore, FoundBlock

LAYOUT = "0123456789abcdef" * 2
IDENTITY = "fedcba9876543210" * 2


class Block(NamedTuple):
    """A block as its caller has it."""

    key: BlockKey
    pages: list[bytes]
    parent: bytes | None

    @property
    def buffers(self) -> list[memoryview]:
        """Return its pages as a store wants them."""
        return [memoryview(page) for page in self.pages]

    @property
    def digests(self) -> list[int]:
        """Return its pages' checksums."""
        return [xxhash.xxh3_64_intdigest(page) for page in self.pages]

    def write_to(self, store: DiskStore) -> int:
        """Write it; return its file's bytes."""
        return written(store, self.key, self.buffers, self.digests, self.parent)

    def file_in(self, store: DiskStore) -> Path:
        """Return where its file is, or would be."""
        return store.root / folder_of(self.key) / file_name(self.key)


def block(seed: int = 0, pages: int = 3, page_bytes: int = 1000, parent: bytes | None = None, tenant: int = 7) -> Block:
    """Return a block of random bytes, another one for each seed."""
    bits = random.Random(seed)  # noqa: S311 - test data
    key = BlockKey(Namespace(tenant, LAYOUT, IDENTITY, "main", pages), bits.randbytes(16))
    return Block(key, [bits.randbytes(page_bytes) for _ in range(pages)], parent)


def written(
    store: DiskStore, key: BlockKey, buffers: list[memoryview], digests: list[int], parent: bytes | None = None
) -> int:
    """Write a block at once; return its file's bytes."""
    with store.begin_write(key, buffers, digests, parent) as writer:
        while not writer.step():
            pass
        return writer.finish()


def read(store: DiskStore, wanted: Block) -> list[bytes]:
    """Return the pages that the store has for a block."""
    pages = [bytearray(len(page)) for page in wanted.pages]
    with store.begin_read(wanted.key, [memoryview(page) for page in pages]) as reader:
        while not reader.step():
            pass
    return [bytes(page) for page in pages]


def files_under(root: Path) -> list[Path]:
    """Return all files but the lock, relative to the root."""
    return sorted(one.relative_to(root) for one in root.rglob("*") if one.is_file() and one.name != "kvferry.lock")


def scanned(store: DiskStore) -> list[FoundBlock]:
    """Return what a whole scan finds."""
    return [found for step in store.scan() for found in step]


@contextmanager
def reopened(store: DiskStore) -> Iterator[DiskStore]:
    """Give the root to the next daemon."""
    store.close()
    with DiskStore(store.root, store.fsync) as after:
        yield after
