"""LOOKUP and UNPIN: find the longest cached prefix, and pin it for the instance until UNPIN or the instance's end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import structlog

from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.control.sessions import SessionRegistry
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.background import Background
from kvferry.daemon.tiers.cached_pages import hashes_of, model_of, namespace_of
from kvferry.daemon.tiers.host_tier import LOOKUPS, HostTier
from kvferry.daemon.tiers.lower_tiers import LowerTiers
from kvferry.pools.tiers.blocks import BlockLayout
from kvferry.pools.tiers.cached_block import BlockState, CachedBlock
from kvferry.pools.tiers.namespaces import Namespace
from kvferry.protocol.cache_messages import HASH_BYTES, Found, Lookup, Unpin, Unpinned
from kvferry.protocol.errors import InvalidFieldError, KvferryError, OverloadedError, UnknownLeaseError

MAX_LEASES = 4096
MAX_PINS = 1 << 20
"""Bounds of one instance; a block counts once in each lease."""

log = structlog.get_logger(__name__)


class Lease(msgspec.Struct):
    """The blocks that an instance's LOOKUPs have pinned, in the order of the prompt."""

    number: int
    namespace: Namespace
    layout: BlockLayout
    blocks: list[CachedBlock]


class Lookups:
    """Answers LOOKUP and UNPIN, and keeps the leases."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        pools: PoolRegistry,
        sessions: SessionRegistry,
        host: HostTier,
        lower: LowerTiers,
        counters: Counters,
    ) -> None:
        self._dispatcher = dispatcher
        self._pools = pools
        self._sessions = sessions
        self._host = host
        self._lower = lower
        self._counters = counters
        self._numbers = itertools.count(1)
        self._leases: dict[int, dict[int, Lease]] = {}
        self._background = Background("a lookup")
        dispatcher.handle("LOOKUP", self._lookup)
        dispatcher.handle("UNPIN", self._unpin)

    def __repr__(self) -> str:
        """Show how many leases there are."""
        return f"<Lookups leases={sum(map(len, self._leases.values()))}>"

    @property
    def under_way(self) -> int:
        """Return how many lookups wait for lower tiers."""
        return len(self._background)

    def lease(self, call: Call, number: int) -> Lease:
        """Return a lease of the session's instance.

        Raises:
            UnknownLeaseError: the instance has no lease of that number.
        """
        lease = self._leases.get(call.session.owner_id, {}).get(number)
        if lease is None:
            raise UnknownLeaseError(f"this session's instance has no lease {number}", field="lease")
        return lease

    def end(self, owner_id: int, lease: Lease) -> None:
        """End a lease and unpin its blocks; does nothing if it has ended."""
        if self._leases.get(owner_id, {}).pop(lease.number, None) is not None:
            self._host.free_all(self._host.index.unpin(lease.blocks, owner_id))

    def instance_lost(self, owner_id: int) -> None:
        """End all leases of an instance."""
        self._leases.pop(owner_id, None)
        self._host.free_all(self._host.index.unpin_holder(owner_id))

    async def close(self) -> None:
        """Cancel the lookups that wait for lower tiers."""
        await self._background.close()

    def _lookup(self, call: Call) -> Answer | None:
        body = expect(call, Lookup)
        pool = self._pools.get(call.session.tenant, body.pool)
        self._host.region  # noqa: B018  raises TierOffError
        hashes = hashes_of(body.hashes)
        layout = pool.block_layout(body.space)
        namespace = namespace_of(pool, body.space, body.block_pages)
        self._host.know(namespace, layout.block_bytes, model_of(pool).label)
        lease = None
        if body.lease is not None:
            lease = self.lease(call, body.lease)
            if lease.namespace != namespace:
                raise InvalidFieldError(
                    f"lease {lease.number} has blocks of another namespace: {lease.namespace}", field="lease"
                )
        elif body.pin:
            self._check_leases(call.session.owner_id)
        found = self._host.index.longest_prefix(namespace, hashes)
        rest = hashes[len(found) :]
        if not rest or not self._lower.has_remote:
            return self._found(call, lease, Lease(0, namespace, layout, found))
        self._host.index.pin(found, LOOKUPS)  # the prefix must not be evicted meanwhile
        self._background.spawn(self._look_remote(call, lease, Lease(0, namespace, layout, found), rest))
        return None

    async def _look_remote(self, call: Call, lease: Lease | None, near: Lease, rest: Sequence[bytes]) -> None:
        blocks = near.blocks
        parent = blocks[-1].hash if blocks else lease.blocks[-1].hash if lease is not None and lease.blocks else None
        try:
            far = await self._lower.find(near.namespace, rest, parent, near.layout.block_bytes)
        finally:
            self._host.free_all(self._host.index.unpin(blocks, LOOKUPS))
        still = list(itertools.takewhile(lambda one: one.state is BlockState.READY, [*blocks, *far]))
        if not call.session.is_pending(call.message_id) or self._sessions.get(call.session.session_id) is None:
            return
        try:
            if lease is not None:
                self.lease(call, lease.number)  # it may have ended meanwhile
            answer = self._found(call, lease, msgspec.structs.replace(near, blocks=still))
        except KvferryError as error:
            self._dispatcher.answer_error(call.session, call.message_id, error)
        else:
            self._dispatcher.answer(call.session, call.message_id, answer)

    def _found(self, call: Call, lease: Lease | None, found: Lease) -> Answer:
        """Pin the blocks found, start their promotion, and return the reply.

        Raises:
            OverloadedError: the instance has reached its bound of leases or pinned blocks.
        """
        body, blocks = expect(call, Lookup), found.blocks
        if body.pin:
            self._check_pins(call.session.owner_id, len(blocks))
            if lease is None:
                self._check_leases(
                    call.session.owner_id
                )  # again: leases may have been added while lower tiers were asked
        self._counters.add("cache.lookups")
        self._counters.add("cache.asked_blocks", len(body.hashes) // HASH_BYTES)
        self._counters.add("cache.hit_blocks", len(blocks))
        self._host.index.touch(blocks)
        self._lower.used(blocks)
        host = sum(block.in_host for block in blocks)
        disk = sum(block.on_disk and not block.in_host for block in blocks)
        if body.pin and (blocks or lease is not None):
            owner_id = call.session.owner_id
            self._host.index.pin(blocks, owner_id)
            if lease is None:
                lease = msgspec.structs.replace(found, number=next(self._numbers), blocks=[])
                self._leases.setdefault(owner_id, {})[lease.number] = lease
            lease.blocks.extend(blocks)
            for block in blocks:
                self._lower.promote(block)
        return Answer(
            Found(
                blocks=len(blocks),
                lease=lease.number if lease is not None else 0,
                host=host,
                disk=disk,
                remote=len(blocks) - host - disk,
                lease_blocks=len(lease.blocks) if lease is not None else 0,
            )
        )

    def _check_leases(self, owner_id: int) -> None:
        if len(self._leases.get(owner_id, ())) >= MAX_LEASES:
            raise OverloadedError(f"the instance has {MAX_LEASES} leases: UNPIN some")

    def _check_pins(self, owner_id: int, more: int) -> None:
        pins = sum(len(lease.blocks) for lease in self._leases.get(owner_id, {}).values())
        if pins + more > MAX_PINS:
            raise OverloadedError(f"the instance's leases have {pins} blocks; {more} more exceed {MAX_PINS}")

    def _unpin(self, call: Call) -> Answer:
        lease = self.lease(call, expect(call, Unpin).lease)
        self.end(call.session.owner_id, lease)
        return Answer(Unpinned(blocks=len(lease.blocks)))
