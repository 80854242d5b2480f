"""The leases of the prefix cache: which blocks LOOKUPs have pinned for an instance, until when, within which bounds.

Knows neither requests nor pools. Pins of many blocks are given back some in each turn of the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.tiers.host_tier import HostTier
from kvferry.pools.tiers.blocks import BlockLayout
from kvferry.pools.tiers.cached_block import CachedBlock, Namespace
from kvferry.pools.tiers.index import PinnedBlocks
from kvferry.protocol.errors import RETRY_LATER_MS, OverloadedError, UnknownComponentError, UnknownLeaseError
from kvferry.protocol.ids import new_number
from kvferry.protocol.tier_messages import LEASE_S

MAX_LEASES = 4096
MAX_PINS = 1 << 20
"""Bounds of one instance; a block counts once in each lease."""

EXPIRED_AT_ONCE = 256
"""Leases, in a turn of the loop."""

UNPINNED_AT_ONCE = 1024
"""Blocks, in a turn of the loop."""


class GroupBlocks(msgspec.Struct, eq=False):
    """The blocks of one group that a LOOKUP has found, in the order of the prompt.

    Attributes:
        namespace: of the blocks.
        layout: of the blocks.
        last: how many before a prefix's end it needs; None: all.
        first: the number of the first one in the prompt.
        blocks: without a gap.
    """

    namespace: Namespace
    layout: BlockLayout
    last: int | None = None
    first: int = 0
    blocks: list[CachedBlock] = msgspec.field(default_factory=list)


class Lease(msgspec.Struct):
    """The blocks that an instance's LOOKUPs have pinned.

    Attributes:
        number: for the engine.
        groups: their blocks, each pinned by the instance.
        length: blocks of the prompt.
        owner_id: the instance.
        used_at_s: the loop's time.
        loads: LOADs of it that are under way.
    """

    number: int
    groups: list[GroupBlocks]
    length: int = 0
    owner_id: int = 0
    used_at_s: float = 0.0
    loads: int = 0

    @property
    def pins(self) -> int:
        """Return how many blocks it pins."""
        return sum([len(one.blocks) for one in self.groups])

    def group(self, name: str) -> GroupBlocks:
        """Return a group's blocks.

        Raises:
            UnknownComponentError: it has none of that group.
        """
        for one in self.groups:
            if one.namespace.group == name:
                return one
        names = ", ".join(one.namespace.group for one in self.groups)
        raise UnknownComponentError(f"lease {self.number} has blocks of {names}, not of {name!r}", field="group")


class _Unpinning(NamedTuple):
    """Blocks that nobody needs to be pinned any more; the first ``done`` ones are not."""

    holder: int
    blocks: Sequence[CachedBlock]
    done: int


class Leases:
    """The leases of all instances; owns their pins."""

    def __init__(self, host: HostTier, counters: Counters) -> None:
        self._host = host
        self._counters = counters
        self._numbers = itertools.count(new_number())
        self._of: dict[int, dict[int, Lease]] = {}  # by instance and number
        self._blocks: Counter[int] = Counter()  # in the leases of each instance
        self._by_use: OrderedDict[int, Lease] = OrderedDict()  # all leases, the one used longest ago first
        self._ended: dict[int, Lease] = {}
        """The leases that have ended and are still being loaded."""
        self._unpinning: deque[_Unpinning] = deque()
        self._unpin_rest = host.in_turns(self._unpin_some)
        self._loop = asyncio.get_running_loop()
        self._expiry: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<Leases {len(self._by_use)}>"

    def close(self) -> None:
        """Let none expire any more."""
        if self._expiry is not None:
            self._expiry.cancel()

    def pinned(self) -> Iterator[PinnedBlocks]:
        """Yield the blocks that leases pin, and those that are to be unpinned; others may come and go meanwhile."""
        for owner_id, leases in list(self._of.items()):
            for lease in list(leases.values()):
                for group in lease.groups:
                    yield PinnedBlocks(owner_id, group.blocks)
        for lease in list(self._ended.values()):
            for group in lease.groups:
                yield PinnedBlocks(lease.owner_id, group.blocks)
        for holder, blocks, done in tuple(self._unpinning):
            yield PinnedBlocks(holder, blocks[done:])

    def check_number(self, owner_id: int) -> None:
        """Check that an instance may have another lease.

        Raises:
            OverloadedError: it has reached its bound.
        """
        if len(self._of.get(owner_id, ())) >= MAX_LEASES:
            raise OverloadedError(f"the instance has {MAX_LEASES} leases: UNPIN some").after(RETRY_LATER_MS)

    def check_blocks(self, owner_id: int, more: int) -> None:
        """Check that an instance's leases may have so many blocks more.

        Raises:
            OverloadedError: it would exceed its bound.
        """
        pins = self._blocks[owner_id]
        if pins + more > MAX_PINS:
            raise OverloadedError(f"the instance's leases have {pins} blocks; {more} more exceed {MAX_PINS}").after(
                RETRY_LATER_MS
            )

    def add(self, owner_id: int, groups: list[GroupBlocks], length: int) -> Lease:
        """Return a new lease of an instance over blocks that it has pinned."""
        lease = Lease(next(self._numbers), groups, length, owner_id)
        self._of.setdefault(owner_id, {})[lease.number] = lease
        self._blocks[owner_id] += lease.pins
        self._use(lease)
        return lease

    def extend(self, lease: Lease, groups: Sequence[GroupBlocks], length: int) -> None:
        """Add the next blocks of the prompt, of the lease's groups in their order, which the instance has pinned."""
        for group, more in zip(lease.groups, groups, strict=True):
            group.blocks.extend(more.blocks)
            self._blocks[lease.owner_id] += len(more.blocks)
        lease.length += length

    def get(self, owner_id: int, number: int) -> Lease:
        """Return a lease of an instance, which is used now.

        Raises:
            UnknownLeaseError: the instance has no lease of that number, or has not used it for LEASE_S.
        """
        lease = self._of.get(owner_id, {}).get(number)
        if lease is None:
            raise UnknownLeaseError(f"this session's instance has no lease {number}", field="lease")
        self._use(lease)
        return lease

    def end(self, lease: Lease) -> None:
        """End a lease and unpin its blocks, many in the next turns of the loop; does nothing if it has ended."""
        if self._of.get(lease.owner_id, {}).pop(lease.number, None) is not None:
            self._blocks[lease.owner_id] -= lease.pins
            self._unpin_all([lease])

    def instance_lost(self, owner_id: int) -> None:
        """End all leases of an instance."""
        self._blocks.pop(owner_id, None)
        self._unpin_all(self._of.pop(owner_id, {}).values())

    @contextlib.contextmanager
    def loading(self, lease: Lease, *, ends: bool) -> Iterator[None]:
        """Keep a lease's blocks pinned until a LOAD of them is over; ``ends``: and the lease with it."""
        lease.loads += 1
        try:
            yield
        finally:
            lease.loads -= 1
            if ends:
                self.end(lease)
            elif lease.number in self._by_use:
                self._use(lease)
            if not lease.loads and self._ended.pop(lease.number, None) is not None:
                self._unpin_all([lease])

    def unpin(self, holder: int, blocks: Sequence[CachedBlock]) -> None:
        """Unpin blocks that are in no lease; what is much goes in the next turns of the loop."""
        self._unpinning.append(_Unpinning(holder, blocks, 0))
        self._begin_unpinning()

    def _use(self, lease: Lease) -> None:
        """Let a lease last from now on for LEASE_S."""
        lease.used_at_s = self._loop.time()
        self._by_use[lease.number] = lease
        self._by_use.move_to_end(lease.number)
        if self._expiry is None:
            self._expiry = self._loop.call_later(LEASE_S, self._expire)

    def _expire(self) -> None:
        """End the leases that were not used for LEASE_S, a few in a turn; one that is being loaded is used."""
        self._expiry = None
        now = self._loop.time()
        for lease in list(itertools.islice(self._by_use.values(), EXPIRED_AT_ONCE)):
            if lease.used_at_s + LEASE_S > now:
                break
            if lease.loads > 0:
                self._use(lease)
            else:
                self.end(lease)
                self._counters.add("cache.expired_leases")
        oldest = next(iter(self._by_use.values()), None)
        if oldest is not None and self._expiry is None:
            self._expiry = self._loop.call_at(oldest.used_at_s + LEASE_S, self._expire)

    def _unpin_all(self, leases: Iterable[Lease]) -> None:
        """Unpin the blocks of leases that have ended, once no LOAD reads them any more."""
        for lease in leases:
            self._by_use.pop(lease.number, None)
            if lease.loads:
                self._ended[lease.number] = lease
            else:
                self._unpinning.extend([_Unpinning(lease.owner_id, one.blocks, 0) for one in lease.groups])
        self._begin_unpinning()

    def _begin_unpinning(self) -> None:
        if self._unpin_some():
            self._unpin_rest()

    def _unpin_some(self) -> bool:
        """Unpin some of the blocks that nobody needs to be pinned; return whether there are more."""
        left = UNPINNED_AT_ONCE
        while self._unpinning and left:
            holder, blocks, done = self._unpinning.popleft()
            some = blocks[done : done + left]
            if done + len(some) < len(blocks):
                self._unpinning.appendleft(_Unpinning(holder, blocks, done + len(some)))
            self._host.free_all(self._host.index.unpin(some, holder))
            left -= len(some)
        return bool(self._unpinning)
