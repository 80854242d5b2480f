"""Snapshots: pages offloaded to the host tier, with their tenant and layout. Sans I/O.

A snapshot is pinned until it is dropped; one that is dropped while restores read it is freed with the last of them.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final, Literal, NamedTuple, Self

import msgspec
import numpy as np
import xxhash

from kvferry.daemon.tiers.copier import Digests
from kvferry.pools.allocator import HeldPages, PageAllocator
from kvferry.pools.planning.manifest import key_of, slot_shape, space_of
from kvferry.pools.planning.page_ranges import PageRange, page_tokens_of
from kvferry.pools.pool import Pool
from kvferry.pools.tiers.arena import Extent, Offsets
from kvferry.pools.tiers.blocks import BlockLayout
from kvferry.pools.tiers.tier_record import FoundSnapshot
from kvferry.protocol.codec import PageIds
from kvferry.protocol.config.tenants import whose
from kvferry.protocol.errors import (
    RETRY_LATER_MS,
    InternalError,
    KvferryError,
    LayoutMismatchError,
    LengthMismatchError,
    OverloadedError,
    SnapshotLostError,
    UnknownComponentError,
    UnknownSnapshotError,
)
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.manifests import Entry, Manifest
from kvferry.protocol.tier_messages import SnapshotList, SnapshotStatus

State = Literal["network", "writing", "ready"]
_BOOT_BYTES: Final = 4
_RANDOM_BYTES: Final = 10
_CHECK_DIGITS: Final = 4
MAX_SNAPSHOTS: Final = 4096
"""Per tenant: what SNAPSHOTS lists in one reply."""


class SnapshotSegment(msgspec.Struct):
    """The blocks of one page list."""

    component: str
    layout: BlockLayout
    tokens: int | None
    """How many tokens the pages hold, where the engine said so."""
    count: int
    offsets: Offsets
    digests: Digests | None = None


class MadeFrom(NamedTuple):
    """The pool that a snapshot was made from, as far as that counts later; ``Pool`` has the same."""

    tenant: int
    name: str
    manifest: Manifest
    model: ModelIdentity | None


class Snapshot:
    """One snapshot.

    Attributes:
        owner_id: the instance that owns it; None once that has ended.
        readers: restores in progress.
        dropped: whether it is freed with its last reader.
        settled: set once it is ready, or has failed.
        error: why it has failed.
    """

    def __init__(self, pool: Pool | MadeFrom, owner_id: int | None, segments: Sequence[SnapshotSegment]) -> None:
        self.name = ""
        self.tenant = pool.tenant
        self.owner_id = owner_id
        self.pool = pool.name
        self.manifest = pool.manifest
        self.model = pool.model
        self.segments = list(segments)
        self.state: State = "writing"
        self.readers = 0
        self.dropped = False
        self.created_at = time.monotonic()
        self.settled = asyncio.Event()
        self.error: KvferryError | None = None
        self._checksum_text = ""

    def __repr__(self) -> str:
        """Show name, state and size."""
        return f"<Snapshot {self.name[:8]} {self.state} pages={self.pages} readers={self.readers}>"

    @property
    def pages(self) -> int:
        """Return the number of pages over all lists."""
        return sum(segment.count for segment in self.segments)

    @property
    def size_bytes(self) -> int:
        """Return its bytes, without the rounding to allocation units."""
        return sum(segment.count * segment.layout.block_bytes for segment in self.segments)

    def settle(self, error: KvferryError | None = None) -> None:
        """Wake all waiters: it is ready, or will never be."""
        self.state = "ready"
        self.error = error
        self.settled.set()

    def status(self) -> SnapshotStatus:
        """Return it as SNAPSHOTS shows it."""
        main = next((segment.tokens for segment in self.segments if segment.tokens is not None), None)
        return SnapshotStatus(
            snapshot=self.name,
            pool=self.pool,
            layout_digest=self.manifest.layout_digest,
            lists=tuple(
                SnapshotList(component=one.component, count=one.count, tokens=one.tokens) for one in self.segments
            ),
            tokens=main,
            chunks=self.pages,
            size_bytes=self.size_bytes,
            checksum=self._checksum(),
            age_ms=round((time.monotonic() - self.created_at) * 1000),
            session=self.owner_id,
            state=self.state,
            restores=self.readers,
            model=self.model.label if self.model else "",
        )

    def _checksum(self) -> str:
        if self.state != "ready" or any(segment.digests is None for segment in self.segments):
            return ""
        if not self._checksum_text:
            together = np.concatenate([segment.digests for segment in self.segments if segment.digests is not None])
            self._checksum_text = xxhash.xxh3_128_hexdigest(together.astype("<u8").tobytes())
        return self._checksum_text


class SnapshotRegistry:
    """All snapshots, by name."""

    def __init__(self) -> None:
        self._boot = secrets.token_hex(_BOOT_BYTES)
        self._snapshots: dict[str, Snapshot] = {}
        self._counts: Counter[int] = Counter()

    def __iter__(self) -> Iterator[Snapshot]:
        """Yield the snapshots, oldest first."""
        return iter(self._snapshots.values())

    def __len__(self) -> int:
        """Return the number of snapshots."""
        return len(self._snapshots)

    def check(self, tenant: int) -> None:
        """Check that a tenant may have another snapshot.

        Raises:
            OverloadedError: it has MAX_SNAPSHOTS.
        """
        if self._counts[tenant] >= MAX_SNAPSHOTS:
            raise OverloadedError(f"{whose(tenant)} has {MAX_SNAPSHOTS} snapshots: drop or restore some").after(
                RETRY_LATER_MS
            )

    def add(self, snapshot: Snapshot) -> None:
        """Register a snapshot, under a new name."""
        stem = self._boot + secrets.token_hex(_RANDOM_BYTES)
        snapshot.name = stem + _check_digits(stem)
        self._register(snapshot)

    def adopt(self, found: FoundSnapshot, owner_id: int | None) -> Snapshot:
        """Register a snapshot that an earlier daemon has left, under its name."""
        head = found.head
        made_from = MadeFrom(head.tenant, head.pool, found.manifest, head.model)
        segments = [
            SnapshotSegment(its.component, layout, its.tokens, its.count, offsets, digests)
            for its, layout, offsets, digests in found.segments
        ]
        snapshot = Snapshot(made_from, owner_id, segments)
        snapshot.name, snapshot.created_at = head.name, head.created_s
        snapshot.settle()
        self._register(snapshot)
        return snapshot

    def _register(self, snapshot: Snapshot) -> None:
        self._snapshots[snapshot.name] = snapshot
        self._counts[snapshot.tenant] += 1

    def get(self, tenant: int, name: str) -> Snapshot:
        """Return a tenant's snapshot.

        Raises:
            UnknownSnapshotError: there is none of that name, or it is another tenant's, or dropped.
            SnapshotLostError: an earlier daemon made it, and it is no more.
        """
        found = self._snapshots.get(name)
        stem, digits = name[:-_CHECK_DIGITS], name[-_CHECK_DIGITS:]
        if found is None and not stem.startswith(self._boot) and digits == _check_digits(stem):
            raise SnapshotLostError(
                f"snapshot {name} of an earlier daemon was lost with it, or dropped", field="snapshot"
            )
        if found is None or found.tenant != tenant or found.dropped:
            raise UnknownSnapshotError(f"no snapshot {name} of {whose(tenant)}", field="snapshot")
        return found

    def extents(self) -> Iterator[Extent]:
        """Yield the memory in the host tier that snapshots hold."""
        for snapshot in self:
            for segment in snapshot.segments:
                its = f"snapshot {snapshot.name}"
                yield Extent(segment.offsets, segment.layout.block_bytes, its, snapshot.tenant)

    def remove(self, snapshot: Snapshot) -> None:
        """Unregister a snapshot. Idempotent."""
        if self._snapshots.pop(snapshot.name, None) is not None:
            self._counts[snapshot.tenant] -= 1


def _check_digits(stem: str) -> str:
    """Return the end of a name, which tells names that a daemon gave from others."""
    return xxhash.xxh3_64_hexdigest(stem.encode())[:_CHECK_DIGITS]


def new_segments(pool: Pool, lists: Sequence[PageRange]) -> list[SnapshotSegment]:
    """Return the segments for these lists, without memory yet."""
    manifest = pool.manifest
    return [
        SnapshotSegment(
            one.component,
            pool.block_layout(space_of(manifest, one.component)),
            _tokens_of(one, manifest),
            len(one.ids),
            np.empty(0, np.int64),
        )
        for one in lists
    ]


def ids_for(snapshot: Snapshot, lists: Sequence[PageRange]) -> list[PageIds]:
    """Return the page ids for each segment of a snapshot.

    Raises:
        UnknownComponentError: a segment has no list, or a list no segment.
        LengthMismatchError: a list has another number of pages or tokens than its segment.
    """
    by_component = {one.component: one for one in lists}
    found: list[PageIds] = []
    for segment in snapshot.segments:
        pages = by_component.pop(segment.component, None)
        if pages is None:
            raise UnknownComponentError(f"the snapshot has pages of {segment.component!r}: list as many", field="lists")
        if len(pages.ids) != segment.count:
            raise LengthMismatchError(
                f"{segment.component}: the snapshot has {segment.count} pages, the list {len(pages.ids)}",
                field=pages.field,
            )
        tokens = _tokens_of(pages, snapshot.manifest)
        if None not in {tokens, segment.tokens} and tokens != segment.tokens:
            raise LengthMismatchError(
                f"{segment.component}: the snapshot has {segment.tokens} tokens, the list {tokens}",
                field=f"{pages.field}.tokens",
            )
        found.append(pages.ids)
    if by_component:
        raise UnknownComponentError(f"the snapshot has no pages of {next(iter(by_component))!r}", field="lists")
    return found


def check_layout(snapshot: Snapshot, manifest: Manifest, pool: str) -> None:
    """Check that a pool has the snapshot's layout.

    Raises:
        LayoutMismatchError: names the first entry that differs, and how.
    """
    if manifest.layout_digest == snapshot.manifest.layout_digest:
        return
    ours = {key_of(entry): entry for entry in snapshot.manifest.entries}
    theirs = {key_of(entry): entry for entry in manifest.entries}
    for key in [*ours, *theirs]:
        difference = _difference(ours.get(key), theirs.get(key))
        if difference:
            raise LayoutMismatchError(
                f"{'/'.join(map(str, key))}: {difference} (the snapshot is of pool {snapshot.pool!r}, layout "
                f"{snapshot.manifest.layout_digest}; pool {pool!r} has {manifest.layout_digest})",
                field="pool",
            )
    raise InternalError(f"layouts {snapshot.manifest.layout_digest} and {manifest.layout_digest} differ in no entry")


def _difference(ours: Entry | None, theirs: Entry | None) -> str:
    if ours is None:
        return "the pool has this entry, the snapshot does not"
    if theirs is None:
        return "the snapshot has this entry, the pool does not"
    for name in ("dtype", "format", "page_bytes", "page_tokens", "head_start", "heads", "total_heads", "scales"):
        one, other = getattr(ours, name), getattr(theirs, name)
        if one != other:
            return f"{name} is {one} in the snapshot, {other} in the pool"
    if slot_shape(ours) != slot_shape(theirs):
        return f"a slot is {slot_shape(ours)} in the snapshot, {slot_shape(theirs)} in the pool"
    return ""


def _tokens_of(one: PageRange, manifest: Manifest) -> int | None:
    return None if one.first_page is None else one.held_tokens(page_tokens_of(manifest, one.component) or 0)


class _Held(NamedTuple):
    allocator: PageAllocator
    ids: PageIds


class PageHold:
    """Pages of a pool that an operation reads or writes: one more reader, or their one writer, until ``release``."""

    def __init__(self, *, write: bool) -> None:
        self._write = write
        self._held: list[_Held] = []

    def __enter__(self) -> Self:
        """Hold them until the block is left."""
        return self

    def __exit__(self, *_: object) -> None:
        """Release them; what ``release`` raises is raised once all are released, if they can be."""
        try:
            self.release()
        except Exception:
            self.release()
            raise

    def add(self, allocator: PageAllocator, owner: int, ids: PageIds, field: str) -> None:
        """Hold pages of ``owner``.

        Raises:
            KvferryError: they do not belong to it, or are busy: see ``PageAllocator``.
        """
        self._held.append(_Held(allocator, ids))
        try:
            if self._write:
                allocator.begin_write(owner, ids, field)
            else:
                allocator.begin_read(owner, ids, field)
        except Exception:
            self._held.pop()
            raise

    def held(self, holder: str) -> Iterator[HeldPages]:
        """Yield the pages that it holds, in the name of ``holder``."""
        return (HeldPages(allocator, ids, self._write, holder) for allocator, ids in self._held)

    def release(self) -> None:
        """Release the pages, each once. Idempotent, also after it raised."""
        while self._held:
            held = self._held.pop()
            try:
                if self._write:
                    held.allocator.end_write(held.ids)
                else:
                    held.allocator.end_read(held.ids)
            except Exception:
                self._held.append(held)
                raise

    def give_back(self, owner: int) -> None:
        """Free those pages that ``owner`` still has, each once."""
        by_allocator: dict[PageAllocator, list[PageIds]] = {}
        for allocator, ids in self._held:
            by_allocator.setdefault(allocator, []).append(ids)
        for allocator, lists in by_allocator.items():
            allocator.free_owned(owner, np.unique(np.concatenate(lists)))


def hold_pages(hold: PageHold, pool: Pool, owner: int, lists: Sequence[PageRange]) -> None:
    """Hold the pages of all lists.

    Raises:
        KvferryError: see ``PageHold.add``; those before it are held.
    """
    for pages in lists:
        hold.add(pool.allocator_of(pages.component), owner, pages.ids, f"{pages.field}.pages")
