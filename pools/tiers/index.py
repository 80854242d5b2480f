"""The index of the prefix cache: which blocks it has, in which tiers, who pins them, and which are evicted next.

A store has two phases: ``begin`` registers blocks, which are not visible yet, and ``commit`` makes them visible once
their bytes are there. There is one copy of a block however many sessions store it. Handles no bytes, files or clock:
whoever moves bytes reports it here, and changes of visibility are recorded in the journal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.pools.integrity import WALKED, Problem, Walk, check
from kvferry.pools.tiers.arena import Extent, Freed, Offsets
from kvferry.pools.tiers.cached_block import (
    NO_PINS,
    BlockListing,
    BlockState,
    CachedBlock,
    Digests,
    ListPage,
    Namespace,
    Tier,
    place_all,
    place_of,
)
from kvferry.pools.tiers.fairness import NO_PARTS, fairest
from kvferry.pools.tiers.journal import CacheJournal
from kvferry.pools.tiers.policies import Deferred, make_policy
from kvferry.pools.tiers.split_dict import SplitDict

NO_BOUNDS: Final[Mapping[int, int]] = MappingProxyType({})


def _nobody() -> None:
    """Do nothing: whoever asks for a victim has the policies catch up."""


class TenantAccount:
    """What one tenant has in the host tier, in bytes, and the eviction policy of its blocks there.

    Attributes:
        cached_bytes: blocks in the tier, including removed ones that are still being read.
        writing_bytes: blocks that are being written.
        awaited_bytes: those of these that have no memory yet; see ``HostTier.awaits``.
        charged_bytes: anything else, mainly snapshots.
        evictable_bytes: cached blocks without a pin.
        most_bytes: what it may have.
    """

    __slots__ = (
        "awaited_bytes",
        "cached_bytes",
        "charged_bytes",
        "evictable_bytes",
        "most_bytes",
        "policy",
        "writing_bytes",
    )

    def __init__(self, most_bytes: int, policy: Deferred[CachedBlock]) -> None:
        self.most_bytes = most_bytes
        self.policy = policy
        self.cached_bytes = self.writing_bytes = self.awaited_bytes = self.charged_bytes = self.evictable_bytes = 0

    @property
    def used_bytes(self) -> int:
        """Return the bytes that it has, or awaits."""
        return self.cached_bytes + self.writing_bytes + self.charged_bytes

    @property
    def taken_bytes(self) -> int:
        """Return the bytes that it has."""
        return self.used_bytes - self.awaited_bytes


class HostAccounts:
    """The accounts of all tenants, created on first use."""

    def __init__(
        self,
        *,
        most_bytes: int,
        bounds: Mapping[int, int],
        parts: Mapping[int, float],
        policy: str,
        fell_behind: Callable[[], None],
    ) -> None:
        """Start without any account.

        Args:
            most_bytes: what a tenant may have.
            bounds: the same for tenants that have a bound of their own.
            parts: the shares of tenants that have one; see ``fairness``.
            policy: one of ``POLICY_NAMES``; each tenant has its own instance.
            fell_behind: called when a policy has not been told of all uses any more; ``catch_up`` then.
        """
        self._most_bytes = most_bytes
        self._bounds = bounds
        self._parts = parts
        self._policy = policy
        self._accounts: dict[int, TenantAccount] = {}
        self._fell_behind = fell_behind

    def __repr__(self) -> str:
        """Show the current counts."""
        used = sum(account.used_bytes for account in self._accounts.values())
        return f"<HostAccounts tenants={len(self._accounts)} used_bytes={used} policy={self._policy}>"

    def __getitem__(self, tenant: int) -> TenantAccount:
        """Return a tenant's account, which the index updates."""
        account = self._accounts.get(tenant)
        if account is None:
            most_bytes = self._bounds.get(tenant, self._most_bytes)
            policy: Deferred[CachedBlock] = Deferred(make_policy(self._policy), place_of, self._fell_behind)
            account = self._accounts[tenant] = TenantAccount(most_bytes, policy)
        return account

    def items(self) -> ItemsView[int, TenantAccount]:
        """Return each tenant that was ever asked about, with its account."""
        return self._accounts.items()

    @property
    def blocks(self) -> int:
        """Return the number of visible blocks in the host tier, over all tenants."""
        return sum(len(account.policy) for account in self._accounts.values())

    @property
    def evictable_bytes(self) -> int:
        """Return the bytes of all cached blocks without a pin."""
        return sum(account.evictable_bytes for account in self._accounts.values())

    @property
    def behind(self) -> int:
        """Return how many uses the policies have not been told of."""
        return sum([account.policy.behind for account in self._accounts.values()])

    def catch_up(self, count: int) -> None:
        """Tell each policy of the next ``count`` uses: they are told of all when there is something to evict."""
        for account in self._accounts.values():
            account.policy.catch_up(count)

    def victims(self, tenant: int | None) -> Iterator[CachedBlock]:
        """Yield evictable blocks; see ``BlockIndex.host_victims``."""
        accounts = self._accounts if tenant is None else {tenant: self[tenant]}
        return fairest(accounts, self._parts, lambda account: account.taken_bytes, _evictable)


def _evictable(account: TenantAccount) -> Callable[[], CachedBlock | None]:
    """Return what returns the next victim without a pin; it does not search if the counts say that there is none."""
    victims = account.policy.victims()

    def following() -> CachedBlock | None:
        while account.evictable_bytes:
            block = next(victims, None)
            if block is None or not block.pins:
                return block
        return None

    return following


OPERATOR: Final = -1
"""The holder of pins set from the command line; session ids are above 0."""


_COUNTED: Final = ("cached bytes", "bytes being written", "evictable bytes", "blocks in the eviction policy")


_NO_BLOCKS: Final[SplitDict[bytes, CachedBlock]] = SplitDict()


class PinnedBlocks(NamedTuple):
    """Blocks that something pins, as that thing says itself: one pin of each, several if it lists one several times."""

    holder: int
    blocks: Iterable[CachedBlock]


class Begun(NamedTuple):
    """The block that ``begin`` found or created for one hash."""

    block: CachedBlock
    fresh: bool
    """The caller must write it. Otherwise it exists: READY, or WRITING by another caller."""


class BlockIndex:
    """The cached blocks of all tenants; sans I/O, for one thread.

    Attributes:
        accounts: what each tenant has in the host tier, and may have.
    """

    def __init__(
        self,
        journal: CacheJournal,
        *,
        most_bytes: int,
        bounds: Mapping[int, int] = NO_BOUNDS,
        parts: Mapping[int, float] = NO_PARTS,
        policy: str = "reuse",
        fell_behind: Callable[[], None] = _nobody,
    ) -> None:
        """Start empty.

        Args:
            journal: where changes are recorded.
            most_bytes: what a tenant may have in the host tier.
            bounds: the same for tenants that have a bound of their own.
            parts: the shares of tenants that have one; see ``fairness``.
            policy: one of ``POLICY_NAMES``; each tenant has its own instance.
            fell_behind: called when ``accounts`` has to ``catch_up``, which it does at the latest for a victim.
        """
        self._journal = journal
        self.accounts = HostAccounts(
            most_bytes=most_bytes, bounds=bounds, parts=parts, policy=policy, fell_behind=fell_behind
        )
        self._ready: dict[Namespace, SplitDict[bytes, CachedBlock]] = {}
        self._writing: dict[tuple[Namespace, bytes], CachedBlock] = {}
        self._held: dict[int, set[CachedBlock]] = {}
        self._listing = BlockListing()
        self.changes = 0
        """Grows with each change of blocks, tiers and pins; for walks."""

    def __repr__(self) -> str:
        """Show the current counts."""
        return f"<BlockIndex blocks={len(self)} writing={len(self._writing)} {self.accounts}>"

    def __len__(self) -> int:
        """Return the number of visible blocks."""
        return len(self._listing)

    # --- look ---

    def longest_prefix(self, namespace: Namespace, hashes: Iterable[bytes]) -> list[CachedBlock]:
        """Return the blocks of the longest prefix of the hashes that is visible, in any tier; [] if there is none.

        Does not count as a use: ``touch`` the blocks that are used, and ``pin`` them before anything else runs.
        """
        blocks = self._ready.get(namespace)
        return [] if blocks is None else blocks.leading(hashes)

    def get(self, namespace: Namespace, block_hash: bytes) -> CachedBlock | None:
        """Return a visible block, or None."""
        blocks = self._ready.get(namespace)
        return None if blocks is None else blocks.get(block_hash)

    def page(self, position: int, limit: int) -> ListPage:
        """Return up to ``limit`` (at least 1) of all visible blocks, after ``position``.

        Begin at 0 and continue at ``next_position`` until it is None. For a consistent view, take
        ``journal.position()`` before the first part and apply the changes since then to the parts.
        """
        return self._listing.page(position, limit)

    # --- store ---

    def begin(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes | None, size_bytes: int
    ) -> list[Begun]:
        """Begin to write the missing blocks of a chain; their bytes are charged to the tenant from now on.

        Args:
            namespace: of all the blocks.
            hashes: 16 bytes each; each one is the parent of the next.
            parent: of the first one; None if it has none.
            size_bytes: of one block.

        Returns:
            The existing or new block of each hash, in order. Each fresh one must be committed or abandoned.
        """
        self.changes += 1
        ready, writing, begun = self._ready.get(namespace, _NO_BLOCKS), self._writing, []
        for depth, block_hash in enumerate(hashes, self._depth_below(namespace, parent)):
            key = namespace, block_hash
            block = ready.get(block_hash) or writing.get(key)
            is_fresh = block is None
            if block is None:
                block = writing[key] = CachedBlock(namespace, block_hash, parent, size_bytes, depth)
            begun.append(Begun(block, is_fresh))
            parent = block_hash
        self.accounts[namespace.tenant].writing_bytes += size_bytes * sum([one.fresh for one in begun])
        return begun

    def commit(
        self, blocks: Sequence[CachedBlock], offsets: Offsets, digests: npt.NDArray[np.uint64] | None = None
    ) -> None:
        """Make blocks visible whose bytes are now in the host tier.

        Of blocks that are committed together the last ones are evicted first: a block is useless without those before.

        Args:
            blocks: WRITING, of one namespace, in the order of their chain.
            offsets: ``(blocks, block_pages)`` int64.
            digests: ``(blocks, block_pages)`` uint64, of each page's bytes; None if checksums are off.
        """
        self.changes += 1
        assert all(one.state is BlockState.WRITING for one in blocks), f"commit of {blocks}"
        place_all(blocks, offsets, digests)
        self._publish(blocks)
        if blocks:
            self.accounts[blocks[0].namespace.tenant].writing_bytes -= sum([one.size_bytes for one in blocks])
        self._enter(blocks[::-1])

    def abandon(self, blocks: Iterable[CachedBlock]) -> None:
        """Stop writing blocks; the caller frees what it allocated for them. A block in another tier becomes visible."""
        self.changes += 1
        for block in blocks:
            assert block.state is BlockState.WRITING, f"abandoning {block}"
            self.accounts[block.namespace.tenant].writing_bytes -= block.size_bytes
            if block.on_disk or block.in_remote:
                self._publish([block])
            else:
                del self._writing[block.namespace, block.hash]
                block.state = BlockState.GONE

    def adopt(
        self,
        namespace: Namespace,
        block_hash: bytes,
        parent: bytes | None,
        size_bytes: int,
        *,
        tier: Tier,
        digests: Digests = (),
    ) -> CachedBlock:
        """Add a block that was found in the disk or the remote tier; return the one block of that key."""
        self.changes += 1
        assert tier is not Tier.HOST, "blocks in host memory are stored by commit"
        block = self._known(namespace, block_hash)
        if block is not None:
            self.set_tier(block, tier, present=True)
            return block
        block = CachedBlock(namespace, block_hash, parent, size_bytes, self._depth_below(namespace, parent))
        block.digests = digests
        self.set_tier(block, tier, present=True)
        self._publish([block])
        return block

    def adopt_in_host(
        self,
        namespace: Namespace,
        names: Iterable[tuple[bytes, bytes | None, int]],
        size_bytes: int,
        offsets: Offsets,
        digests: npt.NDArray[np.uint64] | None,
    ) -> list[int]:
        """Add blocks whose bytes an earlier daemon has left in the host tier.

        Args:
            namespace: of all.
            names: of each the hash, the parent and the depth; a parent before its children.
            size_bytes: of one block.
            offsets: ``(blocks, block_pages)`` int64.
            digests: of the same shape; None if they have none.

        Returns:
            Which of them, by number, were in the host tier already: the caller frees their bytes.
        """
        fresh: list[CachedBlock] = []
        at, refused = list[int](), list[int]()
        for number, (block_hash, parent, depth) in enumerate(names):
            [(block, is_fresh)] = self.begin(namespace, [block_hash], parent, size_bytes)
            if is_fresh:
                block.depth = depth
                fresh.append(block)
                at.append(number)
                continue
            its = () if digests is None else tuple(digests[number].tolist())
            if not self.enter_host(block, offsets[number], its):
                refused.append(number)
        self.commit(fresh, offsets[at], None if digests is None else digests[at])
        return refused

    # --- tiers ---

    def enter_host(self, block: CachedBlock, offsets: Offsets, digests: Digests | None = None) -> bool:
        """Record that a block was promoted into the host tier.

        Returns:
            False if the block was removed meanwhile, or is already there: the caller must free the bytes.
        """
        self.changes += 1
        if block.state is not BlockState.READY or block.in_host:
            return False
        block.offsets = offsets
        block.digests = block.digests if digests is None else digests
        self._journal.stored(Tier.HOST, block.namespace, [block.hash], [block.parent])
        self._enter([block])
        return True

    def drop_host(self, block: CachedBlock) -> Freed:
        """Remove an evictable block from the host tier; it is gone if no other tier has it.

        Returns:
            The bytes that the caller must free.
        """
        self.changes += 1
        assert block.evictable, f"dropping {block}"
        self._leave(block)
        freed = self._give_up(block)
        self._journal.evicted(Tier.HOST, block.namespace, block.hash)
        self._forget_if_nowhere(block)
        return freed

    def set_tier(self, block: CachedBlock, tier: Tier, *, present: bool) -> bool:
        """Record that the disk or the remote tier has a block, or no longer has it; a block in no tier is gone.

        Returns:
            False if the block was removed before: the caller must delete it from that tier.
        """
        self.changes += 1
        if block.state not in {BlockState.READY, BlockState.WRITING}:
            return False
        flag = "on_disk" if tier is Tier.DISK else "in_remote"
        changed = getattr(block, flag) is not present
        setattr(block, flag, present)
        if block.state is BlockState.READY and changed:
            if present:
                self._journal.stored(tier, block.namespace, [block.hash], [block.parent])
            else:
                self._journal.evicted(tier, block.namespace, block.hash)
                self._forget_if_nowhere(block)
        return True

    def remove(self, block: CachedBlock) -> list[Freed]:
        """Remove a block from all tiers; one that is being written, or is gone, is left alone.

        Its ``on_disk`` and ``in_remote`` still say what the caller has to delete there.

        Returns:
            The bytes to free now: none if the host tier has none, or if they are pinned; ``unpin`` then returns them.
        """
        self.changes += 1
        if block.state is not BlockState.READY:
            return []
        for tier in block.tiers:
            self._journal.evicted(tier, block.namespace, block.hash)
        if block.in_host:
            self._leave(block)
        self._forget(block)
        if not block.in_host:
            return []
        if block.pins:
            block.state = BlockState.DOOMED
            return []
        return [self._give_up(block)]

    # --- use ---

    def touch(self, blocks: Sequence[CachedBlock]) -> None:
        """Record a use of blocks of one namespace, in order: the first ones count as the most recently used."""
        its = [block for block in reversed(blocks) if block.in_host and block.state is BlockState.READY]
        if its:
            self.accounts[its[0].namespace.tenant].policy.hit(its)

    def pin(self, blocks: Iterable[CachedBlock], holder: int) -> None:
        """Add a pin of ``holder`` to each block, which keeps it in the host tier. Pins do not keep other tiers' copies.

        A block that is in no tier any more is gone despite its pins.
        """
        self.changes += 1
        held = self._held.setdefault(holder, set())
        only = {holder: 1}  # of all that nobody else pins: it is not changed
        for block in blocks:
            pins = block.pins
            if not pins and block.evictable:
                self.accounts[block.namespace.tenant].evictable_bytes -= block.size_bytes
            block.pins = {**pins, holder: pins.get(holder, 0) + 1} if pins else only
            held.add(block)
        if not held:
            del self._held[holder]

    def unpin(self, blocks: Iterable[CachedBlock], holder: int) -> list[Freed]:
        """Remove one pin from each block; return bytes that are no longer used, for the caller to free.

        Raises:
            KeyError: ``holder`` does not pin one of them.
        """
        self.changes += 1
        freed: list[Freed] = []
        for block in blocks:
            if block.pins[holder] == 1:
                self._unhold(block, holder, freed)
            else:
                block.pins = {**block.pins, holder: block.pins[holder] - 1}
        return freed

    def pinned_by(self, tenant: int | None = None) -> dict[int, int]:
        """Return the bytes in the host tier, of a tenant or of all, that each holder pins; two holders count for both.

        A holder that pins nothing there is left out.
        """
        pinned = {
            holder: sum(
                block.size_bytes for block in held if block.in_host and tenant in {None, block.namespace.tenant}
            )
            for holder, held in self._held.items()
        }
        return {holder: size_bytes for holder, size_bytes in pinned.items() if size_bytes}

    def host_victims(self, tenant: int | None = None) -> Iterator[CachedBlock]:
        """Yield evictable blocks of the host tier in eviction order, each at most once.

        The caller drops a block (``drop_host``, ``remove``) or skips it before it asks for the next. Without a tenant,
        each block is from the tenant that has most by its share at that moment and has a victim left.
        """
        return self.accounts.victims(tenant)

    # --- inside ---

    def check_integrity(self) -> None:
        """Check that all counts, sets and flags agree.

        Raises:
            AssertionError: they do not; says what is wrong.
        """
        check(self.problems())

    def problems(self) -> Walk:
        """Yield what is wrong with the blocks, the tenants' accounts and the pins."""
        yield from self._block_problems()
        yield from self._held_problems()
        yield from self._account_problems()

    def pin_problems(self, pinned: Iterable[PinnedBlocks]) -> Walk:
        """Yield where the pins differ from what their holders say, each of whom tells all blocks that it pins."""
        by_operators = dict.fromkeys(self._held.get(OPERATOR, ()), 1)  # nothing else says which ones they are
        said: dict[int, dict[CachedBlock, int]] = {OPERATOR: by_operators} if by_operators else {}
        for number, (holder, block) in enumerate((one.holder, block) for one in pinned for block in one.blocks):
            its = said.setdefault(holder, {})
            its[block] = its.get(block, 0) + 1
            if number % WALKED == 0:
                yield None
        for holder in said.keys() | self._held.keys():
            its, wrong = said.get(holder, {}), []
            for number, block in enumerate([*its, *(self._held.get(holder, set()) - its.keys())]):
                if block.pins.get(holder, 0) != its.get(block, 0):
                    wrong.append(block)
                if number % WALKED == 0:
                    yield None
            if wrong:
                first = wrong[0]
                what = f"{first} has {first.pins.get(holder, 0)} pins of {holder}, who says {its.get(first, 0)}"
                yield Problem(what, total=len(wrong), holder=str(holder))

    def writing_problems(self, writing: Iterable[Iterable[CachedBlock]]) -> Walk:
        """Yield the blocks that are being written by none or several of the stores that say which ones they write."""
        said = [block for blocks in writing for block in blocks]
        lost = self._writing.keys() - {block.key for block in said}
        if lost:
            yield Problem("a block is being written, and no STORE writes it", total=len(lost))
        if len(said) > len(self._writing) - len(lost):
            yield Problem(f"{len(said)} blocks are being written by a STORE, {len(self._writing)} are known to be")
        yield None

    def extents(self) -> Iterator[Extent]:
        """Yield the memory of every block that is in the host tier, also of removed ones that are still pinned."""
        for block in self._listed():
            offsets = block.offsets
            if offsets is not None:
                yield Extent(offsets, block.page_bytes, "cached blocks")

    def on_disk(self) -> Iterator[CachedBlock]:
        """Yield every block that the disk tier is said to have."""
        return (block for block in itertools.chain(self._listed(), self._writing.values()) if block.on_disk)

    def _listed(self) -> Iterator[CachedBlock]:
        """Yield the visible blocks, and the removed ones that are still pinned."""
        for blocks in self._ready.values():
            yield from blocks.values()
        yield from {block for held in self._held.values() for block in held if block.state is BlockState.DOOMED}

    def _block_problems(self) -> Walk:
        ready = 0
        for namespace, blocks in self._ready.items():
            if not blocks:
                yield Problem(f"a namespace without a block: {namespace}")
            for block_hash, block in blocks.items():
                ready += 1
                problem = _problem_of(block, namespace, block_hash)
                if problem:
                    yield Problem(f"{problem}: {block}")
                if ready % WALKED == 0:
                    yield None
        if ready != len(self):
            yield Problem(f"{ready} blocks are visible, {len(self)} are listed")
        for block in self._writing.values():
            if block.state is not BlockState.WRITING:
                yield Problem(f"a block that is not being written, among those that are: {block}")

    def _held_problems(self) -> Walk:
        for holder, held in self._held.items():
            if not held:
                yield Problem(f"holder {holder} pins nothing")
            for number, block in enumerate(held):
                if block.pins.get(holder, 0) <= 0:
                    yield Problem(f"a block without a pin of its holder {holder}: {block}")
                if number % WALKED == 0:
                    yield None

    def _account_problems(self) -> Walk:
        sums: dict[int, list[int]] = {tenant: [0, 0, 0, 0] for tenant, _ in self.accounts.items()}
        for number, block in enumerate(itertools.chain(self._listed(), self._writing.values())):
            its = sums.setdefault(block.namespace.tenant, [0, 0, 0, 0])
            if block.state is BlockState.WRITING:
                its[1] += block.size_bytes
            elif block.in_host:
                its[0] += block.size_bytes
                its[2] += block.size_bytes if block.evictable else 0
                its[3] += block.state is BlockState.READY
            if number % WALKED == 0:
                yield None
        for tenant, found in sums.items():
            account = self.accounts[tenant]
            counted = [account.cached_bytes, account.writing_bytes, account.evictable_bytes, len(account.policy)]
            for what, has, said in zip(_COUNTED, found, counted, strict=True):
                if has != said:
                    yield Problem(f"user {tenant} has {has} {what}, {said} are counted")

    def _known(self, namespace: Namespace, block_hash: bytes) -> CachedBlock | None:
        """Return a block that is visible or being written, or None."""
        return self.get(namespace, block_hash) or self._writing.get((namespace, block_hash))

    def _depth_below(self, namespace: Namespace, parent: bytes | None) -> int:
        """Return the depth of a block with this parent; 0 where the parent is not known."""
        before = None if parent is None else self._known(namespace, parent)
        return 0 if before is None else before.depth + 1

    def _publish(self, blocks: Sequence[CachedBlock]) -> None:
        """Make blocks of one namespace visible that are new or were being written."""
        if not blocks:
            return
        namespace = blocks[0].namespace
        ready = self._ready.get(namespace)
        if ready is None:
            ready = self._ready[namespace] = SplitDict()
        for block in blocks:
            self._writing.pop((namespace, block.hash), None)
            ready[block.hash] = block
            block.state = BlockState.READY
            self._listing.add(block)
        for tier, its in (
            (Tier.HOST, [block for block in blocks if block.in_host]),
            (Tier.DISK, [block for block in blocks if block.on_disk]),
            (Tier.REMOTE, [block for block in blocks if block.in_remote]),
        ):
            if its:
                self._journal.stored(tier, namespace, [one.hash for one in its], [one.parent for one in its])

    def _enter(self, blocks: Sequence[CachedBlock]) -> None:
        """Account for visible blocks of one namespace that are now in the host tier, in the order of their use."""
        if not blocks:
            return
        account = self.accounts[blocks[0].namespace.tenant]
        account.cached_bytes += sum([one.size_bytes for one in blocks])
        account.evictable_bytes += sum([one.size_bytes for one in blocks if not one.pins])
        account.policy.add(blocks)

    def _leave(self, block: CachedBlock) -> None:
        """Make a visible block no longer a candidate for eviction; its bytes stay."""
        account = self.accounts[block.namespace.tenant]
        account.evictable_bytes -= block.size_bytes if block.evictable else 0
        account.policy.remove(block)

    def _give_up(self, block: CachedBlock) -> Freed:
        """Stop accounting for a block's bytes in the host tier, and return them to be freed."""
        offsets = block.offsets
        assert offsets is not None, f"no bytes of {block} in the host tier"
        self.accounts[block.namespace.tenant].cached_bytes -= block.size_bytes
        freed = Freed(offsets, block.page_bytes)
        block.offsets = None
        return freed

    def _forget_if_nowhere(self, block: CachedBlock) -> None:
        if not block.tiers:
            self._forget(block)

    def _forget(self, block: CachedBlock) -> None:
        blocks = self._ready[block.namespace]
        blocks.pop(block.hash)
        if not blocks:
            del self._ready[block.namespace]
        block.state = BlockState.GONE
        self._listing.discard(block)

    def _unhold(self, block: CachedBlock, holder: int, freed: list[Freed]) -> None:
        """Remove a holder whose last pin of a block was removed."""
        pins = block.pins
        block.pins = NO_PINS if len(pins) == 1 else {other: count for other, count in pins.items() if other != holder}
        held = self._held[holder]
        held.discard(block)
        if not held:
            del self._held[holder]
        if block.evictable:
            self.accounts[block.namespace.tenant].evictable_bytes += block.size_bytes
        elif block.state is BlockState.DOOMED and not block.pins:
            block.state = BlockState.GONE
            freed.append(self._give_up(block))


def _problem_of(block: CachedBlock, namespace: Namespace, block_hash: bytes) -> str:
    """Return what is wrong with a visible block of that key; empty where nothing is."""
    if block.state is not BlockState.READY:
        return "a visible block that is not READY"
    if (block.namespace, block.hash) != (namespace, block_hash):
        return "a block under another one's name"
    if not block.tiers:
        return "a visible block in no tier"
    offsets = block.offsets
    if offsets is not None and len(offsets) != namespace.block_pages:
        return f"a block with memory for {len(offsets)} of its {namespace.block_pages} pages"
    return ""
