"""The cache for operators and routers: CACHE_LIST, CACHE_PIN, CACHE_EVICT, CACHE_EVENTS."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.services.prefix_cache import model_of, split_hashes
from kvferry.daemon.tiers.host_tier import HostTier, holder_name
from kvferry.daemon.tiers.lower_tiers import LowerTiers
from kvferry.pools.tiers.cached_block import CachedBlock, Namespace, identity_of
from kvferry.pools.tiers.index import OPERATOR
from kvferry.pools.tiers.journal import Change
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.tier_messages import (
    CacheChange,
    CacheChanges,
    CachedBlockStatus,
    CacheEvents,
    CacheEvict,
    CacheEvicted,
    CacheList,
    CacheListed,
    CachePin,
    CachePinned,
)

LOOK_AT = 1000
"""How many blocks or changes are handled before other requests get their turn."""


class _Waiting:
    """A CACHE_EVENTS for which there is no change yet, and the cursor up to which changes were looked at."""

    def __init__(self, call: Call, cursor: int) -> None:
        self.call = call
        self.cursor = cursor
        self.timer: asyncio.TimerHandle | None = None

    def cancel(self) -> None:
        """Cancel the deadline timer."""
        if self.timer is not None:
            self.timer.cancel()


class _Scope(NamedTuple):
    """The blocks that a request is about: of one tenant, and of one identity, layout and list of hashes if given."""

    tenant: int
    identity: str | None
    layout_digest: str | None
    hashes: frozenset[bytes] | None

    def has(self, block: CachedBlock) -> bool:
        """Return whether a block is one of them."""
        return self._has_namespace(block.namespace) and (self.hashes is None or block.hash in self.hashes)

    def _has_namespace(self, namespace: Namespace) -> bool:
        return (
            namespace.tenant == self.tenant
            and self.identity in {None, namespace.identity}
            and self.layout_digest in {None, namespace.layout_digest}
        )


class CacheReports:
    """Answers the CACHE_* requests. Each user sees and changes only its own blocks."""

    def __init__(self, dispatcher: Dispatcher, pools: PoolRegistry, host: HostTier, lower: LowerTiers) -> None:
        self._dispatcher = dispatcher
        self._pools = pools
        self._host = host
        self._lower = lower
        self._loop = asyncio.get_running_loop()
        self._waiting: list[_Waiting] = []
        host.journal.subscribe(self._changed)
        self._flushing = False
        dispatcher.handle("CACHE_LIST", self._list)
        dispatcher.handle("CACHE_PIN", self._pin)
        dispatcher.handle("CACHE_EVICT", self._evict)
        dispatcher.handle("CACHE_EVENTS", self._events)

    def __repr__(self) -> str:
        """Show how many requests wait."""
        return f"<CacheReports waiting={len(self._waiting)}>"

    def session_lost(self, session_id: int) -> None:
        """Drop a session's waiting CACHE_EVENTS."""
        for one in [one for one in self._waiting if one.call.session.session_id == session_id]:
            one.cancel()
            self._waiting.remove(one)

    # -- CACHE_LIST, CACHE_PIN, CACHE_EVICT

    def _list(self, call: Call) -> Answer:
        body = expect(call, CacheList)
        cursor = self._host.journal.position()
        page = self._host.index.page(body.position, min(body.limit, LOOK_AT))
        mine = (block for block in page.blocks if block.namespace.tenant == call.session.tenant)
        return Answer(
            CacheListed(blocks=tuple(map(self._status, mine)), cursor=cursor, position=page.next_position),
        )

    async def _pin(self, call: Call) -> Answer:
        body, count = expect(call, CachePin), 0
        index = self._host.index
        async for blocks in self._blocks_of(self._scope(call, body)):
            count += len(blocks)
            if body.pinned:
                self._host.check_share(call.session.tenant, sum([one.size_bytes for one in blocks if one.evictable]))
                index.pin([block for block in blocks if OPERATOR not in block.pins], OPERATOR)
            else:
                self._host.free_all(index.unpin([block for block in blocks if OPERATOR in block.pins], OPERATOR))
        return Answer(CachePinned(blocks=count))

    async def _evict(self, call: Call) -> Answer:
        body = expect(call, CacheEvict)
        if body.everything == bool(body.hashes):
            raise InvalidFieldError("no block named: give hashes, or everything=true", field="hashes")
        count = size_bytes = kept = 0
        async for blocks in self._blocks_of(self._scope(call, body)):
            going = [block for block in blocks if not block.pins]
            kept += len(blocks) - len(going)
            count, size_bytes = count + len(going), size_bytes + sum(block.size_bytes for block in going)
            self._host.remove(going)
            self._lower.remove(going)
        return Answer(CacheEvicted(blocks=count, size_bytes=size_bytes, kept=kept))

    def _scope(self, call: Call, body: CachePin | CacheEvict) -> _Scope:
        """Return which blocks a request is about.

        Raises:
            InvalidFieldError: it names hashes without saying of which identity, or gives both a pool and an identity.
            UnknownPoolError, NoModelError: of the pool.
        """
        everything = isinstance(body, CacheEvict) and body.everything
        hashes = None if everything else frozenset(split_hashes(body.hashes))
        tenant, identity, layout_digest = call.session.tenant, body.identity, None
        if body.pool is not None:
            if identity is not None:
                raise InvalidFieldError("a pool and an identity are given: give one of them", field="identity")
            pool = self._pools.get(tenant, body.pool)
            identity, layout_digest = identity_of(model_of(pool)), pool.manifest.layout_digest
        elif hashes is not None and identity is None:
            raise InvalidFieldError(
                "a hash names a block of one identity only: give its pool, or its identity as CACHE_LIST shows it",
                field="identity",
            )
        return _Scope(tenant, identity, layout_digest, hashes)

    async def _blocks_of(self, scope: _Scope) -> AsyncIterator[list[CachedBlock]]:
        """Yield blocks in parts, letting other requests run in between; those on disk, too, once they are known."""
        await self._lower.known()
        position: int | None = 0
        while position is not None:
            page = self._host.index.page(position, LOOK_AT)
            yield [block for block in page.blocks if scope.has(block)]
            position = page.next_position
            await asyncio.sleep(0)

    # -- CACHE_EVENTS

    def _events(self, call: Call) -> Answer | None:
        one = _Waiting(call, expect(call, CacheEvents).cursor)
        answer = self._changes(one)
        if answer is None:
            self._waiting.append(one)
            # Fires before the dispatcher's timer, which is set later: the client gets an empty answer, not DEADLINE.
            one.timer = self._loop.call_later(call.deadline_s, self._nothing_new, one)
        return answer

    def _changes(self, one: _Waiting) -> Answer | None:
        """Return this tenant's changes, or None; the cursor moves past the changes of other tenants."""
        limit, tenant = min(expect(one.call, CacheEvents).limit, LOOK_AT), one.call.session.tenant
        found = self._host.journal.since(one.cursor, limit)
        mine = tuple(self._change(change) for change in found.changes if change.namespace.tenant == tenant)
        if not mine and not found.lost:
            one.cursor = found.next_cursor
            if len(found.changes) == limit:  # there may be more
                self._changed(waits=True)
            return None
        return Answer(CacheChanges(changes=mine, cursor=found.next_cursor, lost=found.lost))

    def _changed(self, *, waits: bool = False) -> None:
        if (waits or self._waiting) and not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        waiting, self._waiting = self._waiting, []
        for one in waiting:
            call = one.call
            answer = self._changes(one) if call.session.is_pending(call.message_id) else None
            if answer is not None:
                one.cancel()
                self._dispatcher.answer(call.session, call.message_id, answer)
            elif call.session.is_pending(call.message_id):
                self._waiting.append(one)

    def _nothing_new(self, one: _Waiting) -> None:
        """Answer with no changes, at the deadline."""
        if one in self._waiting:
            self._waiting.remove(one)
            answer = Answer(CacheChanges(changes=(), cursor=one.cursor))
            self._dispatcher.answer(one.call.session, one.call.message_id, answer)

    def _status(self, block: CachedBlock) -> CachedBlockStatus:
        return CachedBlockStatus(
            hash=block.hash.hex(),
            layout_digest=block.namespace.layout_digest,
            group=block.namespace.group,
            block_pages=block.namespace.block_pages,
            size_bytes=block.size_bytes,
            tiers=tuple(tier.value for tier in block.tiers),
            parent=block.parent.hex() if block.parent else "",
            pinned_by=tuple(sorted(map(holder_name, block.pins))),
            identity=block.namespace.identity,
            model=self._host.models.get(block.namespace.identity, ""),
        )

    def _change(self, change: Change) -> CacheChange:
        return CacheChange(
            kind=change.kind.value,
            tier=change.tier.value,
            layout_digest=change.namespace.layout_digest,
            group=change.namespace.group,
            block_pages=change.namespace.block_pages,
            hashes=b"".join(change.hashes),
            parent=change.parent or b"",
            identity=change.namespace.identity,
            model=self._host.models.get(change.namespace.identity, ""),
        )
