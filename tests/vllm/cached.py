"""What the daemon has of engines' prefix caches, as an operator sees it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvferry.clients import Client
from kvferry.protocol.tier_messages import CachedBlockStatus
from tests.kit.daemons import Daemon, soon

HOST_TIER = "[tiers]\nhost_bytes = 1073741824\n"
"""A daemon's configuration."""


class Left(NamedTuple):
    """What is still held or under way in a daemon."""

    pinned_bytes: int
    operations: int
    transfers: int


NOTHING = Left(0, 0, 0)


def left(runtime_dir: Path) -> Left:
    """Return it, once it is nothing, or has been something else for long."""
    with Client.connect(runtime_dir) as client:

        def now() -> Left:
            status = client.status()
            pinned = sum(one.pinned_bytes for one in status.tiers)
            return Left(pinned, len(status.operations), len(status.transfers))

        soon(lambda: now() == NOTHING)
        return now()


def pinned_bytes(runtime_dir: Path) -> int:
    """Return how many bytes of cached blocks leases and operations keep."""
    with Client.connect(runtime_dir) as client:
        return sum(one.pinned_bytes for one in client.status().tiers)


def cached_blocks(runtime_dir: Path) -> list[CachedBlockStatus]:
    """Return all cached blocks."""
    with Client.connect(runtime_dir) as client:
        return list(client.cached_blocks())


def forget_cached(runtime_dir: Path) -> None:
    """Drop all cached blocks that nobody has pinned."""
    with Client.connect(runtime_dir) as client:
        client.evict_cached()


@contextlib.contextmanager
def instance_client(daemon: Daemon, pool: str) -> Iterator[Client]:
    """Return a client of the instance of the engine that has a pool."""
    with Client.connect(daemon.runtime_dir) as client:
        instance = next(one.instance for one in client.status().sessions if one.name == f"{pool}-scheduler")
    with Client.connect(daemon.runtime_dir, instance=instance) as same:
        yield same
