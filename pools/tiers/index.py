"""Which blocks the prefix cache has, in which tiers, who pins them, and which of them go next.

A store has two phases: ``begin`` names blocks, which nobody sees, ``commit`` makes them visible once their bytes are
there. There is one copy of a block however many store it. Knows no bytes, no files and no clock: whoever moves bytes
says so here, and the journal hears of what becomes visible and what goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from kvferry.pools.tiers.accounts import HostAccounts, TenantAccount
from kvferry.pools.tiers.arena import Freed, Offsets
from kvferry.pools.tiers.cached_block import BlockListing, BlockState, CachedBlock, Digests, ListPage
from kvferry.pools.tiers.journal import CacheJournal, Tier
from kvferry.pools.tiers.namespaces import Namespace

OPERATOR: Final = -1
"""The holder of pins that the command line sets; sessions are above 0."""


class Begun(NamedTuple):
    """What ``begin`` found or made of one hash."""

    block: CachedBlock
    fresh: bool
    """The caller is to write it. Else it is there already: its state says whether it is READY or somebody's WRITING."""


class BlockIndex:
    """The cached blocks of all tenants; sans I/O, for one thread.

    Attributes:
        accounts: what each tenant has in the host tier, and may have.
    """

    def __init__(
        self,
        journal: CacheJournal,
        *,
        quota_bytes: int,
        quotas: Mapping[int, int] | None = None,
        policy: str = "sieve",
    ) -> None:
        """Start empty.

        Args:
            journal: hears of every change.
            quota_bytes: what a tenant may have in the host tier.
            quotas: the same for tenants that are named.
            policy: one of ``POLICY_NAMES``; each tenant has its own.
        """
        self._journal = journal
        self.accounts = HostAccounts(quota_bytes=quota_bytes, quotas=quotas, policy=policy)
        self._ready: dict[Namespace, dict[bytes, CachedBlock]] = {}
        self._writing: dict[tuple[Namespace, bytes], CachedBlock] = {}
        self._held: dict[int, set[CachedBlock]] = {}
        self._listing = BlockListing()

    def __repr__(self) -> str:
        """Show the live counts."""
        return f"<BlockIndex blocks={len(self)} writing={len(self._writing)} {self.accounts}>"

    def __len__(self) -> int:
        """Return how many blocks are visible."""
        return len(self._listing)

    # --- look ---

    def longest_prefix(self, namespace: Namespace, hashes: Iterable[bytes]) -> list[CachedBlock]:
        """Return the blocks of the first hashes, as far as all are visible, in whatever tier; [] without any.

        Counts as no use: ``touch`` those that are taken, ``pin`` them before anything else runs.
        """
        found: list[CachedBlock] = []
        for block in map(self._ready.get(namespace, {}).get, hashes):
            if block is None:
                break
            found.append(block)
        return found

    def get(self, namespace: Namespace, block_hash: bytes) -> CachedBlock | None:
        """Return a block that is visible, or None."""
        return self._ready.get(namespace, {}).get(block_hash)

    def page(self, position: int, limit: int) -> ListPage:
        """Return a part of the list of all visible blocks, of at most ``limit`` (at least 1), after ``position``.

        Begin at 0 and go on at ``next_position`` until it is None. Whoever took ``journal.position()`` before the first
        part, and applies the changes since then to what the parts said, has what there is.
        """
        return self._listing.page(position, limit)

    # --- store ---

    def begin(
        self, namespace: Namespace, hashes: Sequence[bytes], parent: bytes | None, size_bytes: int
    ) -> list[Begun]:
        """Begin to write those of a chain of blocks that are not there; each is its tenant's bytes from now on.

        Args:
            namespace: of all of them.
            hashes: 16 bytes each; each one is the parent of the next.
            parent: of the first one; None where it has none.
            size_bytes: of one block.

        Returns:
            what is there or was made of each hash, in order. Each fresh one must be committed or abandoned.
        """
        account = self.accounts.account(namespace.tenant)
        begun = []
        for block_hash in hashes:
            block = self.get(namespace, block_hash) or self._writing.get((namespace, block_hash))
            begun.append(Begun(block or self._write(account, namespace, block_hash, parent, size_bytes), block is None))
            parent = block_hash
        return begun

    def commit(
        self, blocks: Sequence[CachedBlock], offsets: Iterable[Offsets], digests: Sequence[Digests] | None = None
    ) -> None:
        """Make blocks visible whose bytes are in the host tier now.

        Of blocks that are committed together the last ones go first: a block is of no use without those before it.

        Args:
            blocks: WRITING, in the order of their chain.
            offsets: of each block, (block_pages,); an array (blocks, block_pages) will do.
            digests: of each block; None where checksums are off.
        """
        for block, at in zip(blocks, offsets, strict=True):
            assert block.state is BlockState.WRITING, f"commit of {block}"
            self.accounts.account(block.namespace.tenant).writing_bytes -= block.size_bytes
            block.offsets = at
            self._publish(block)
        for block, digest in zip(blocks, digests or (), strict=bool(digests)):
            block.digests = digest
        for block in reversed(blocks):
            self._enter(block)

    def abandon(self, blocks: Iterable[CachedBlock]) -> None:
        """Give up writing blocks; the caller has what it allocated for them. One that another tier has is visible."""
        for block in blocks:
            assert block.state is BlockState.WRITING, f"abandoning {block}"
            self.accounts.account(block.namespace.tenant).writing_bytes -= block.size_bytes
            if block.on_disk or block.in_remote:
                self._publish(block)
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
        """Take in a block that the disk or the remote tier was found to have; return the one block of that name."""
        assert tier is not Tier.HOST, "what is in host memory is stored by commit"
        block = self.get(namespace, block_hash) or self._writing.get((namespace, block_hash))
        if block is not None:
            self._set_tier(block, tier, present=True)
            return block
        block = CachedBlock(namespace, block_hash, parent, size_bytes)
        block.digests = digests
        self._set_tier(block, tier, present=True)
        self._publish(block)
        return block

    # --- tiers ---

    def enter_host(self, block: CachedBlock, offsets: Offsets, digests: Digests | None = None) -> bool:
        """Say that the host tier has a block that came from another tier.

        Returns:
            False where the block went meanwhile, or is there already: the bytes are the caller's to free.
        """
        if block.state is not BlockState.READY or block.offsets is not None:
            return False
        block.offsets = offsets
        block.digests = block.digests if digests is None else digests
        self._journal.stored(Tier.HOST, block.namespace, block.hash, block.parent)
        self._enter(block)
        return True

    def drop_host(self, block: CachedBlock) -> Freed:
        """Take an evictable block out of the host tier; it is gone if no other tier has it.

        Returns:
            the bytes, which are the caller's to free.
        """
        assert block.evictable, f"dropping {block}"
        self._leave(block)
        freed = self._give_up(block)
        self._journal.evicted(Tier.HOST, block.namespace, block.hash)
        self._forget_if_nowhere(block)
        return freed

    def set_on_disk(self, block: CachedBlock, *, present: bool) -> bool:
        """Say that the disk tier has a block, or has it no more; without any tier it is gone.

        Returns:
            False where the block went before: what the disk has of it is the caller's to delete.
        """
        return self._set_tier(block, Tier.DISK, present=present)

    def set_in_remote(self, block: CachedBlock, *, present: bool) -> bool:
        """Say the same of the remote tier."""
        return self._set_tier(block, Tier.REMOTE, present=present)

    def remove(self, block: CachedBlock) -> list[Freed]:
        """Make a block invisible in all tiers; one that is being written, or went, is left alone.

        Its ``on_disk`` and ``in_remote`` still say what the caller has to delete there.

        Returns:
            the bytes to free now: none where the host tier has none, or they are pinned. Then ``unpin`` gives them.
        """
        if block.state is not BlockState.READY:
            return []
        for tier in _tiers(block):
            self._journal.evicted(tier, block.namespace, block.hash)
        if block.offsets is not None:
            self._leave(block)
        self._forget(block)
        if block.offsets is None:
            return []
        if block.pins:
            block.state = BlockState.DOOMED
            return []
        return [self._give_up(block)]

    # --- use ---

    def touch(self, blocks: Sequence[CachedBlock]) -> None:
        """Note the use of blocks, a prefix in order: the first ones count as used last."""
        for block in reversed(blocks):
            if block.offsets is not None and block.state is BlockState.READY:
                self.accounts.account(block.namespace.tenant).policy.hit(block)

    def pin(self, blocks: Iterable[CachedBlock], holder: int) -> None:
        """Keep blocks where they are, once more for ``holder``. A block in no tier is gone in spite of its pins."""
        held = self._held.setdefault(holder, set())
        for block in blocks:
            pins = block.pins
            if not pins and block.evictable:
                self.accounts.account(block.namespace.tenant).evictable_bytes -= block.size_bytes
            pins[holder] = pins.get(holder, 0) + 1
            held.add(block)
        if not held:
            del self._held[holder]

    def unpin(self, blocks: Iterable[CachedBlock], holder: int) -> list[Freed]:
        """Undo one ``pin`` of each block; return bytes that are nobody's any more, for the caller to free.

        Raises:
            KeyError: ``holder`` does not pin one of them.
        """
        freed: list[Freed] = []
        for block in blocks:
            block.pins[holder] -= 1
            if not block.pins[holder]:
                self._unhold(block, holder, freed)
        return freed

    def unpin_holder(self, holder: int) -> list[Freed]:
        """Undo every ``pin`` of a holder, which may have none; return bytes that are nobody's any more."""
        freed: list[Freed] = []
        for block in list(self._held.get(holder, ())):
            self._unhold(block, holder, freed)
        return freed

    def pinned_by(self) -> dict[int, int]:
        """Return the bytes in the host tier that each holder pins; what two pin counts for both."""
        pinned = {
            holder: sum(block.size_bytes for block in held if block.offsets is not None)
            for holder, held in self._held.items()
        }
        return {holder: size_bytes for holder, size_bytes in pinned.items() if size_bytes}

    def host_victims(self, tenant: int | None = None) -> Iterator[CachedBlock]:
        """Yield evictable blocks of the host tier as they should go, each at most once.

        The caller drops one (``drop_host``, ``remove``), or skips it, before it asks for the next. Without a tenant,
        each one is of the tenant that has most of its quota in use at that moment and has a victim left.
        """
        return self.accounts.victims(tenant)

    # --- inside ---

    def check_integrity(self) -> None:
        """Check that all counts, sets and flags agree: for tests and for a debugging operator.

        Raises:
            AssertionError: what is wrong.
        """
        ready = [block for blocks in self._ready.values() for block in blocks.values()]
        held = {block for blocks in self._held.values() for block in blocks}
        assert all(self._ready.values()), "an empty namespace"
        assert all(self._held.values()), "a holder of nothing"
        assert len(self) == len(ready), "blocks that are visible"
        assert all(block.state is BlockState.READY and any(_tiers(block)) for block in ready), "a visible block"
        assert all(block.state is BlockState.WRITING for block in self._writing.values()), "a block being written"
        for holder, blocks in self._held.items():
            assert all(block.pins[holder] > 0 for block in blocks), f"pins of {holder}"
        for tenant in self.accounts.tenants():
            mine = [block for block in {*ready, *held} if block.namespace.tenant == tenant and block.in_host]
            writing = [block for block in self._writing.values() if block.namespace.tenant == tenant]
            account = self.accounts.account(tenant)
            assert account.cached_bytes == sum(block.size_bytes for block in mine), "cached bytes"
            assert account.writing_bytes == sum(block.size_bytes for block in writing), "bytes being written"
            assert account.evictable_bytes == sum(b.size_bytes for b in mine if b.evictable), "evictable bytes"
            assert len(account.policy) == sum(b.state is BlockState.READY for b in mine), "blocks in the policy"

    def _write(
        self, account: TenantAccount, namespace: Namespace, block_hash: bytes, parent: bytes | None, size_bytes: int
    ) -> CachedBlock:
        block = self._writing[namespace, block_hash] = CachedBlock(namespace, block_hash, parent, size_bytes)
        account.writing_bytes += size_bytes
        return block

    def _publish(self, block: CachedBlock) -> None:
        """Make a block visible that is being written or new."""
        self._writing.pop((block.namespace, block.hash), None)
        self._ready.setdefault(block.namespace, {})[block.hash] = block
        block.state = BlockState.READY
        self._listing.add(block)
        for tier in _tiers(block):
            self._journal.stored(tier, block.namespace, block.hash, block.parent)

    def _enter(self, block: CachedBlock) -> None:
        """Count a visible block's bytes, which are in the host tier now."""
        account = self.accounts.account(block.namespace.tenant)
        account.cached_bytes += block.size_bytes
        account.evictable_bytes += 0 if block.pins else block.size_bytes
        account.policy.add(block)

    def _leave(self, block: CachedBlock) -> None:
        """Let a visible block be no victim any more; its bytes are there still."""
        account = self.accounts.account(block.namespace.tenant)
        account.evictable_bytes -= block.size_bytes if block.evictable else 0
        account.policy.remove(block)

    def _give_up(self, block: CachedBlock) -> Freed:
        """Count a block's bytes in the host tier no more, and return them."""
        assert block.offsets is not None, f"no bytes of {block} in the host tier"
        self.accounts.account(block.namespace.tenant).cached_bytes -= block.size_bytes
        freed = Freed(block.offsets, block.page_bytes)
        block.offsets = None
        return freed

    def _set_tier(self, block: CachedBlock, tier: Tier, *, present: bool) -> bool:
        if block.state not in {BlockState.READY, BlockState.WRITING}:
            return False
        flag = "on_disk" if tier is Tier.DISK else "in_remote"
        changed = getattr(block, flag) is not present
        setattr(block, flag, present)
        if block.state is BlockState.READY and changed:
            if present:
                self._journal.stored(tier, block.namespace, block.hash, block.parent)
            else:
                self._journal.evicted(tier, block.namespace, block.hash)
                self._forget_if_nowhere(block)
        return True

    def _forget_if_nowhere(self, block: CachedBlock) -> None:
        if not any(_tiers(block)):
            self._forget(block)

    def _forget(self, block: CachedBlock) -> None:
        blocks = self._ready[block.namespace]
        del blocks[block.hash]
        if not blocks:
            del self._ready[block.namespace]
        block.state = BlockState.GONE
        self._listing.discard()

    def _unhold(self, block: CachedBlock, holder: int, freed: list[Freed]) -> None:
        """Take a holder's last pin from a block."""
        del block.pins[holder]
        held = self._held[holder]
        held.discard(block)
        if not held:
            del self._held[holder]
        if block.evictable:
            self.accounts.account(block.namespace.tenant).evictable_bytes += block.size_bytes
        elif block.state is BlockState.DOOMED and not block.pins:
            block.state = BlockState.GONE
            freed.append(self._give_up(block))


def _tiers(block: CachedBlock) -> list[Tier]:
    there = ((Tier.HOST, block.offsets is not None), (Tier.DISK, block.on_disk), (Tier.REMOTE, block.in_remote))
    return [tier for tier, present in there if present]
