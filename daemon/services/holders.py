"""Texts that say who holds a pool's pages, for errors that are raised because of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from kvferry.daemon.control.sessions import Session, SessionRegistry
from kvferry.pools.allocator import PageAllocator
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import PoolFullError

NAMED: Final = 4
"""How many holders, or pools, a text names; the others are counted."""


def in_words(parts: Iterable[str]) -> str:
    """Return the first ``NAMED`` parts, joined, and how many more there are."""
    every = list(parts)
    more = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
    return ", ".join(every[:NAMED]) + more


def session_text(sessions: SessionRegistry, session_id: int, asking: int) -> str:
    """Return a session's number, engine name and process; ``asking`` is the session whose request is refused."""
    session = sessions.get(session_id)
    known = _text_of(session) if session else "an engine that is gone"
    return f"{known}, the caller" if session_id == asking else known


def owner_text(sessions: SessionRegistry, owner_id: int, asking: int) -> str:
    """Return an instance's name, if any, and its sessions; ``asking`` is the instance whose request is refused."""
    its = sessions.of_instance(owner_id)
    known = in_words(map(_text_of, its)) or "an engine that is gone"
    if its and its[0].instance:
        known = f"instance {its[0].instance!r} ({known})"
    return f"{known}, the caller" if owner_id == asking else known


def _text_of(session: Session) -> str:
    return f"session {session.session_id} {session.name!r} of process {session.peer.pid}"


def holders_text(sessions: SessionRegistry, allocators: Iterable[PageAllocator], asking: int) -> str:
    """Return which instances hold how many pages, largest count first; empty where none holds any."""
    held: dict[int, int] = {}
    in_flight = 0
    for allocator in allocators:
        owned = allocator.pages_by_owner()
        for owner, count in owned.items():
            held[owner] = held.get(owner, 0) + count
        in_flight += allocator.capacity - allocator.free_count - sum(owned.values())
    parts = [
        f"{count} held by {owner_text(sessions, owner, asking)}"
        for owner, count in sorted(held.items(), key=lambda one: -one[1])
    ]
    if in_flight:
        parts.append(f"{in_flight} freed and still in flight")
    return in_words(parts)


def pool_full(error: PoolFullError, sessions: SessionRegistry, pool: Pool, space: str, asking: int) -> PoolFullError:
    """Return the error with the pool's name and the holders of its pages added."""
    holders = holders_text(sessions, (pool.space(space),), asking)
    return PoolFullError(f"pool {pool.name!r}: {error.detail}{holders and f'; {holders}'}", field=error.field)
