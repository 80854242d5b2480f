"""What a host tier leaves to the daemon that follows: which extents of its arena hold which snapshot or cached block.

A page has a row, at a place that follows from where its extent begins: so no two rows can claim one beginning, and a
row needs no room of its own. What pages have in common (a namespace, a snapshot, a manifest) is said once, in a
*head*, whose number each row has. A row or a head is valid only with its checksum. Rows are written when the bytes of
their pages are whole, and taken away before the extents are free: a daemon that is killed at any moment leaves no row
over other bytes. Works on arrays, and knows neither processes nor descriptors.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from kvferry.pools import copy_kernel
from kvferry.pools.planning.manifest import layout_digest
from kvferry.pools.records import FORMAT as RECORDS_FORMAT
from kvferry.pools.records import (
    MAGIC,
    Buffer,
    Number,
    UnreadableFileError,
    check_magic,
    read_record,
    write_record,
)
from kvferry.pools.tiers.arena import ALLOCATION_UNIT_BYTES as UNIT
from kvferry.pools.tiers.arena import Arena, Freed, NotEnoughError, Offsets, whole_units
from kvferry.pools.tiers.blocks import BlockLayout
from kvferry.pools.tiers.cached_block import Namespace
from kvferry.protocol.ids import Hex128, ModelIdentity, PoolName, TenantNumber
from kvferry.protocol.manifests import Manifest

FORMAT: Final = 1
"""Of rows and heads, beside that of ``records``."""

MOST_HEAD_BYTES: Final = 64 << 20
HEADS_PART: Final = 64
LEAST_HEAD_BYTES: Final = 1 << 20
"""Heads may have a 64th of the arena's size, within these bounds. What does not fit in does not outlive the daemon."""

MOST_PAGES: Final = 1024
_MAGIC: Final = b"kvf-tier"
_PREFACE_BYTES: Final = UNIT
_NO_HASH: Final = bytes(16)

Digests: TypeAlias = npt.NDArray[np.uint64]
Memory: TypeAlias = npt.NDArray[np.uint8]
Rows: TypeAlias = npt.NDArray[np.void]
_Indices: TypeAlias = npt.NDArray[np.int64]

_ROW: Final = np.dtype(
    [
        ("check", "<u8"),  # XXH3-64 of the rest; 0: there is no row
        ("hash", "V16"),  # a block's; or a snapshot's name
        ("parent", "V16"),
        ("digest", "<u8"),  # of the page's bytes
        ("head", "<u4"),
        ("unit", "<u4"),  # where its extent begins, in allocation units
        ("number", "<u4"),  # a block's depth; or of the page in its segment
        ("part", "<u2"),  # of the page in its block; or of its segment in the snapshot
        ("has_parent", "u1"),
        ("has_digest", "u1"),
    ]
)
ROW_BYTES: Final = _ROW.itemsize
_CHECK_BYTES: Final = 8
_SLOT: Final = np.dtype([("check", "<u8"), ("size_bytes", "<u8")])
_SLOT_HEAD: Final = struct.Struct("<QQ")

_Size = Annotated[int, Meta(ge=1, lt=1 << 50)]


class Preface(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which memory a record is of: its identity, and its size."""

    format: int
    memory: Annotated[int, Meta(ge=0)]
    arena_bytes: _Size


class NamespaceHead(msgspec.Struct, frozen=True, kw_only=True, tag="blocks", forbid_unknown_fields=True):
    """What the blocks of a namespace have in common; ``model`` is its label, for people."""

    tenant: TenantNumber
    layout_digest: Hex128
    identity: Hex128
    group: Annotated[str, Meta(max_length=128)] = msgspec.field(name="space")
    block_pages: Annotated[int, Meta(ge=1, le=MOST_PAGES)]
    page_bytes: _Size
    model: str = ""

    @property
    def namespace(self) -> Namespace:
        """Return the namespace."""
        return Namespace(self.tenant, self.layout_digest, self.identity, self.group, self.block_pages)


class SegmentHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One page list of a snapshot: ``count`` pages of a component."""

    component: Annotated[str, Meta(max_length=128)]
    space: Annotated[str, Meta(max_length=128)]
    tokens: Annotated[int, Meta(ge=0)] | None
    count: Annotated[int, Meta(ge=1, lt=1 << 32)]
    block_bytes: _Size


class SnapshotHead(msgspec.Struct, frozen=True, kw_only=True, tag="snapshot", forbid_unknown_fields=True):
    """A snapshot. ``manifest`` is the number of the head that has it; ``owner`` is an instance's number."""

    name: Hex128
    tenant: TenantNumber
    owner: Number | None
    pool: PoolName
    model: ModelIdentity | None
    created_s: float
    """By the host's monotonic clock."""
    segments: Annotated[tuple[SegmentHead, ...], Meta(min_length=1, max_length=1 << 16)]
    manifest: int = 0


class _ManifestHead(msgspec.Struct, frozen=True, kw_only=True, tag="manifest", forbid_unknown_fields=True):
    manifest: Manifest


class FoundBlocks(NamedTuple):
    """Blocks of one namespace, by their depth.

    Attributes:
        depths: how many blocks are before each, as far as they were known.
        offsets: ``(blocks, block_pages)`` int64.
        digests: ``(blocks, block_pages)`` uint64, of each page's bytes; None if the blocks have none.
    """

    head: NamespaceHead
    hashes: list[bytes]
    parents: list[bytes | None]
    depths: list[int]
    offsets: Offsets
    digests: Digests | None

    def only(self, numbers: _Indices) -> FoundBlocks:
        """Return some of them."""
        at = numbers.tolist()
        hashes, parents, depths = [self.hashes[one] for one in at], [self.parents[one] for one in at], self.depths
        digests = None if self.digests is None else self.digests[numbers]
        return FoundBlocks(self.head, hashes, parents, [depths[one] for one in at], self.offsets[numbers], digests)

    @property
    def pages(self) -> Freed:
        """Return the memory of all their pages."""
        return Freed(self.offsets.reshape(-1), self.head.page_bytes)


class FoundSegment(NamedTuple):
    """The pages of one list of a snapshot: ``(count,)`` each."""

    head: SegmentHead
    layout: BlockLayout
    offsets: Offsets
    digests: Digests | None


class FoundSnapshot(NamedTuple):
    """A snapshot with all of its pages."""

    head: SnapshotHead
    manifest: Manifest
    segments: list[FoundSegment]


class FoundTier(NamedTuple):
    """What a record holds that can be believed: no two things share a byte, and each is whole.

    Attributes:
        dropped: rows and heads that cannot be, or are of something that is not whole.
    """

    blocks: list[FoundBlocks]
    snapshots: list[FoundSnapshot]
    dropped: int

    @property
    def extents(self) -> tuple[Offsets, Offsets]:
        """Return where each extent begins, and how many bytes of the arena it takes: ``(extents,)`` each."""
        parts = [(one.offsets.reshape(-1), one.head.page_bytes) for one in self.blocks]
        parts += [(its.offsets, its.head.block_bytes) for one in self.snapshots for its in one.segments]
        starts = [np.zeros(0, np.int64), *(offsets for offsets, _ in parts)]
        sizes = [np.zeros(0, np.int64), *(np.full(len(offsets), whole_units(size)) for offsets, size in parts)]
        return np.concatenate(starts), np.concatenate(sizes)


NOTHING: Final = FoundTier([], [], 0)

_Head: TypeAlias = NamespaceHead | SnapshotHead | _ManifestHead
_encoder: Final = msgspec.msgpack.Encoder()
_preface_decoder: Final = msgspec.msgpack.Decoder(Preface)
_head_decoder: Final = msgspec.msgpack.Decoder(_Head)


class _Plan(NamedTuple):
    """How a record is laid out: where its parts begin, and how many heads there may be."""

    heads: int
    contents_at: int
    rows_at: int
    units: int

    @property
    def size_bytes(self) -> int:
        return self.rows_at + self.units * ROW_BYTES


def _plan(arena_bytes: int) -> _Plan:
    units = arena_bytes // UNIT
    heads = max(LEAST_HEAD_BYTES, min(MOST_HEAD_BYTES, arena_bytes // HEADS_PART)) // UNIT
    contents_at = _PREFACE_BYTES + whole_units(heads * _SLOT.itemsize)
    return _Plan(heads, contents_at, contents_at + heads * UNIT, units)


def record_bytes(arena_bytes: int) -> int:
    """Return the size of the record of an arena; of its memory only what is used is ever touched."""
    return _plan(arena_bytes).size_bytes


def read_preface(buffer: Buffer) -> Preface:
    """Return which memory a record is of.

    Raises:
        UnreadableFileError: it is no record, or of another format.
    """
    check_magic(buffer, _MAGIC, "record of a host tier")
    content = read_record(buffer, MAGIC.size, _PREFACE_BYTES - MAGIC.size)
    if content is None:
        raise UnreadableFileError("the checksum of its preface is wrong")
    try:
        preface = _preface_decoder.decode(content)
    except (msgspec.MsgspecError, ValueError) as cause:
        raise UnreadableFileError(f"its preface cannot be read: {cause}") from None
    if preface.format != FORMAT:
        raise UnreadableFileError(f"it has format {preface.format}, this daemon reads {FORMAT}")
    return preface


class TierRecord:
    """The record of one host tier; the daemon whose tier it is writes it, for one thread."""

    def __init__(self, memory: Memory, arena_bytes: int, share: Callable[[int, int, int], int]) -> None:
        """Use ``record_bytes(arena_bytes)`` bytes; ``begin`` or ``read`` comes first.

        Args:
            memory: zeros, or what another one has written.
            arena_bytes: the size of the tier.
            share: returns how much of a size a user may have, where other users have so much of it.
        """
        plan = _plan(arena_bytes)
        assert len(memory) == plan.size_bytes, f"a record of {len(memory)} bytes, not {plan.size_bytes}"
        assert plan.units < 1 << 32, "a row has 32 bits for its unit"
        self._memory = memory
        self._plan = plan
        self._arena_bytes = arena_bytes
        self._slots = memory[_PREFACE_BYTES : _PREFACE_BYTES + plan.heads * _SLOT.itemsize].view(_SLOT)
        self._contents = memory[plan.contents_at : plan.rows_at]
        self._rows = memory[plan.rows_at :].view(_ROW)
        self._room = Arena(plan.heads * UNIT)
        self._uses = np.zeros(plan.heads, np.int64)
        """How many rows, or other heads, have each head: it goes with the last of them."""
        self._namespaces: dict[Namespace, int] = {}
        self._manifests: dict[int, tuple[Manifest, int]] = {}
        """The manifests of snapshots, by their objects' identity, and their heads."""
        self._heads: dict[int, _Head] = {}
        self._share = share
        self._users: dict[int, int] = {}
        """Whose each head is; a manifest is its first snapshot's user's."""
        self._of_users: Counter[int] = Counter()
        """The units of their heads."""

    def __repr__(self) -> str:
        """Show how many heads it has."""
        return f"<TierRecord heads={len(self._heads)} rows={int(self._uses.sum())}>"

    @property
    def is_empty(self) -> bool:
        """Return whether it records nothing."""
        return not self._heads

    def begin(self, identity: int) -> None:
        """Make a new record, in zeros, of the memory of this identity."""
        preface = Preface(format=FORMAT, memory=identity, arena_bytes=self._arena_bytes)
        buffer = _Bytes(self._memory)
        write_record(buffer, MAGIC.size, _encoder.encode(preface))
        buffer[: MAGIC.size] = MAGIC.pack(_MAGIC, RECORDS_FORMAT)

    def range_of(self, start: int, stop: int) -> tuple[int, int]:
        """Return which bytes of the record are about these bytes of the arena, in whole pages of memory."""
        first, last = (self._plan.rows_at + at // UNIT * ROW_BYTES for at in (start, stop))
        return first // UNIT * UNIT, min(whole_units(last), len(self._memory))

    def _units(self, number: int) -> int:
        return whole_units(int(self._slots["size_bytes"][number])) // UNIT

    # -- writing

    def put_blocks(
        self,
        head: NamespaceHead,
        hashes: Sequence[bytes],
        parents: Sequence[bytes | None],
        depths: Sequence[int],
        offsets: Offsets,
        digests: Digests | None,
    ) -> bool:
        """Record blocks of a namespace whose bytes are whole; return False where there is no room for its head.

        Args:
            head: of the namespace.
            hashes: 16 bytes each.
            parents: likewise, or None.
            depths: how many blocks are before each, as far as they are known.
            offsets: ``(blocks, block_pages)`` int64.
            digests: of the same shape; None if checksums are off.
        """
        number = self._namespaces.get(head.namespace)
        if number is None:
            number = self._put_head(head, head.tenant)
            if number is None:
                return False
            self._namespaces[head.namespace] = number
        pages = head.block_pages
        rows = np.zeros(offsets.size, _ROW)
        rows["hash"] = np.frombuffer(b"".join(hashes), "V16").repeat(pages)
        rows["parent"] = np.frombuffer(b"".join([one or _NO_HASH for one in parents]), "V16").repeat(pages)
        rows["has_parent"] = np.array([one is not None for one in parents], np.uint8).repeat(pages)
        rows["number"] = np.array(depths, np.uint32).repeat(pages)
        rows["part"] = np.tile(np.arange(pages, dtype=np.uint16), len(hashes))
        self._write(number, rows, offsets.reshape(-1), None if digests is None else digests.reshape(-1))
        return True

    def put_snapshot(
        self, head: SnapshotHead, manifest: Manifest, pages: Sequence[tuple[Offsets, Digests | None]]
    ) -> bool:
        """Record a snapshot whose bytes are whole; return False where there is no room for it.

        Args:
            head: all but the number of the manifest's head.
            manifest: of the pool that it was made from.
            pages: of each segment, ``(count,)`` offsets, and the digests of the pages if there are any.
        """
        known = self._manifests.get(id(manifest))
        at = known[1] if known is not None else self._put_head(_ManifestHead(manifest=manifest), head.tenant)
        if at is None:
            return False
        self._manifests[id(manifest)] = (manifest, at)
        number = self._put_head(msgspec.structs.replace(head, manifest=at), head.tenant)
        if number is None:
            self._used(np.array([at]), 0)
            return False
        self._uses[at] += 1
        for part, (offsets, digests) in enumerate(pages):
            rows = np.zeros(len(offsets), _ROW)
            rows["hash"] = np.frombuffer(bytes.fromhex(head.name), "V16")
            rows["number"] = np.arange(len(offsets), dtype=np.uint32)
            rows["part"] = part
            self._write(number, rows, offsets, digests)
        return True

    def clear(self, offsets: Offsets) -> None:
        """Take the rows of extents away that are about to be free."""
        units = offsets // UNIT
        checks = self._rows["check"]
        its = units[checks[units] != 0]
        if not len(its):
            return
        heads = self._rows["head"][its].astype(np.int64)
        checks[its] = 0
        if (heads == heads[0]).all():  # mostly: far faster than by ``unique``
            self._used(heads[:1], len(its))
        else:
            self._used(*np.unique(heads, return_counts=True))

    def drop_snapshot(self, offsets: Offsets) -> None:
        """Let a snapshot with these extents not be found any more; its rows go when they are freed."""
        unit = int(offsets[0]) // UNIT
        if self._rows["check"][unit]:
            self._slots["check"][int(self._rows["head"][unit])] = 0

    def _write(self, head: int, rows: Rows, offsets: Offsets, digests: Digests | None) -> None:
        units = offsets // UNIT
        rows["head"], rows["unit"] = head, units
        if digests is not None:
            rows["digest"], rows["has_digest"] = digests, 1
        rows["check"] = _checks(rows)
        self._uses[head] += len(rows)
        self._rows[units] = rows

    def _put_head(self, head: _Head, user: int) -> int | None:
        """Write a head, which nothing uses yet; return its number, None where there is no room for this user's."""
        content = _encoder.encode(head)
        wanted = self._of_users[user] + whole_units(len(content)) // UNIT
        if wanted > self._share(user, self._plan.heads, self._of_users.total() - self._of_users[user]):
            return None
        try:
            at = int(self._room.allocate(1, len(content))[0])
        except NotEnoughError:
            return None
        number = at // UNIT
        self._contents[at : at + len(content)] = np.frombuffer(content, np.uint8)
        self._slots["size_bytes"][number] = len(content)
        self._slots["check"][number] = _head_check(number, content)
        self._heads[number], self._users[number] = head, user
        self._of_users[user] = wanted
        return number

    def _used(self, heads: _Indices, counts: _Indices | int) -> None:
        """Take uses away from heads; those without any go."""
        self._uses[heads] -= counts
        for number in heads[self._uses[heads] == 0].tolist():
            self._end_head(number)

    def _end_head(self, number: int) -> None:
        head = self._heads.pop(number)
        self._slots["check"][number] = 0
        self._room.free(np.array([number * UNIT]), int(self._slots["size_bytes"][number]))
        self._of_users[self._users.pop(number)] -= self._units(number)
        if isinstance(head, NamespaceHead):
            self._namespaces.pop(head.namespace, None)
        elif isinstance(head, _ManifestHead):
            self._manifests.pop(id(head.manifest), None)
        else:
            self._used(np.array([head.manifest]), 1)

    # -- reading what an earlier daemon has written

    def read(self, identity: int, ranges: Iterable[tuple[int, int]], *, checksums: bool) -> FoundTier:
        """Return what can be believed, and take everything else away; then it may be written.

        Args:
            identity: of the memory that the extents are in.
            ranges: the parts of the record, from byte to byte in whole pages, outside of which there are zeros.
            checksums: whether pages without a digest are dropped.

        Raises:
            UnreadableFileError: it is no record of that memory.
        """
        self._check_preface(identity)
        heads, dropped = self._read_heads()
        units = self._candidates(ranges)
        rows = self._rows[units]
        known = np.zeros(self._plan.heads, np.bool_)
        known[list(heads)] = True
        good = (rows["check"] == _checks(rows)) & (rows["unit"] == units) & (rows["head"] < len(known))
        good &= known[np.where(good, rows["head"], 0)]
        if checksums:
            good &= rows["has_digest"] == 1
        whole: list[FoundBlocks | FoundSnapshot] = []
        its = rows[good]
        its = its[np.argsort(its["head"], kind="stable")]
        counts = np.bincount(its["head"], minlength=len(known))
        numbers = np.flatnonzero(counts)
        for number, some in zip(numbers.tolist(), np.split(its, np.cumsum(counts[numbers])[:-1]), strict=False):
            head = heads[number]
            if isinstance(head, NamespaceHead):
                whole += self._blocks_of(head, some)
            elif isinstance(head, SnapshotHead):
                whole += self._snapshot_of(head, heads.get(head.manifest), some)
        kept = self._apart(whole)
        blocks = [one for one in kept if isinstance(one, FoundBlocks)]
        snapshots = [one for one in kept if isinstance(one, FoundSnapshot)]
        found = FoundTier(blocks, snapshots, 0)
        believed = found.extents[0] // UNIT
        dropped += len(units) - len(believed)
        is_believed = np.zeros(self._plan.units, np.bool_)
        is_believed[believed] = True
        self._rows["check"][units[~is_believed[units]]] = 0
        dropped += self._take_over(heads, believed)
        return found._replace(dropped=dropped)

    def _check_preface(self, identity: int) -> None:
        preface = read_preface(_Bytes(self._memory))
        if (preface.memory, preface.arena_bytes) != (identity, self._arena_bytes):
            raise UnreadableFileError(f"it is of other memory: {preface}")

    def _read_heads(self) -> tuple[dict[int, _Head], int]:
        """Return the heads that can be believed, by number, and how many cannot."""
        heads: dict[int, _Head] = {}
        used = np.flatnonzero(self._slots["check"])
        for number in used.tolist():
            at, size_bytes = number * UNIT, int(self._slots["size_bytes"][number])
            if not 0 < size_bytes <= len(self._contents) - at:
                continue
            content = self._contents[at : at + size_bytes].tobytes()
            if int(self._slots["check"][number]) != _head_check(number, content):
                continue
            try:
                heads[number] = _head_decoder.decode(content)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                continue
        wrong = np.setdiff1d(used, np.fromiter(heads, np.int64, len(heads)))
        self._slots["check"][wrong] = 0
        return heads, len(wrong)

    def _candidates(self, ranges: Iterable[tuple[int, int]]) -> _Indices:
        """Return the units that have a row, valid or not."""
        at, found = self._plan.rows_at, [np.zeros(0, np.int64)]
        for start, stop in ranges:
            first, last = max(0, start - at) // ROW_BYTES, max(0, stop - at) // ROW_BYTES
            found.append(np.flatnonzero(self._rows["check"][first:last]) + first)
        return np.concatenate(found)

    def _blocks_of(self, head: NamespaceHead, rows: Rows) -> Iterator[FoundBlocks]:
        """Yield the blocks of a namespace that are whole."""
        pages = head.block_pages
        high, low = _halves(rows["hash"])
        order = np.lexsort((rows["part"], low, high))
        rows, high, low = rows[order], high[order], low[order]
        firsts = np.flatnonzero(np.r_[True, (high[1:] != high[:-1]) | (low[1:] != low[:-1])])
        firsts = firsts[np.diff(np.r_[firsts, len(rows)]) == pages]
        rows = rows[firsts[:, None] + np.arange(pages)]
        good = (rows["part"] == np.arange(pages)).all(axis=1)
        for name in ("number", "has_parent", "has_digest"):
            good &= (rows[name] == rows[name][:, :1]).all(axis=1)
        for half in _halves(rows["parent"]):
            good &= (half == half[:, :1]).all(axis=1)
        for has_digest in (0, 1):
            some = rows[good & (rows["has_digest"][:, 0] == has_digest)]
            some = some[np.argsort(some["number"][:, 0], kind="stable")]
            if not len(some):
                continue
            first = some[:, 0]
            parents = zip(first["parent"].tolist(), first["has_parent"].tolist(), strict=True)
            yield FoundBlocks(
                head,
                first["hash"].tolist(),
                [parent if there else None for parent, there in parents],
                first["number"].tolist(),
                some["unit"].astype(np.int64) * UNIT,
                some["digest"].astype(np.uint64) if has_digest else None,
            )

    def _snapshot_of(self, head: SnapshotHead, manifest: _Head | None, rows: Rows) -> Iterator[FoundSnapshot]:
        """Yield a snapshot, if it is whole, and its manifest is what it is said to be."""
        counts = [one.count for one in head.segments]
        rows = rows[np.lexsort((rows["number"], rows["part"]))]
        if not isinstance(manifest, _ManifestHead) or len(rows) != sum(counts):
            return
        parts = np.arange(len(counts)).repeat(counts)
        numbers = np.concatenate([np.arange(one) for one in counts])
        is_its = rows["hash"] == np.frombuffer(bytes.fromhex(head.name), "V16")
        if not (is_its & (rows["part"] == parts) & (rows["number"] == numbers)).all():
            return
        layouts = _layouts(manifest.manifest, head.segments)
        if layouts is None:
            return
        segments = []
        for segment, layout, its in zip(head.segments, layouts, np.split(rows, np.cumsum(counts)[:-1]), strict=True):
            digests = its["digest"].astype(np.uint64) if its["has_digest"].all() else None
            segments.append(FoundSegment(segment, layout, its["unit"].astype(np.int64) * UNIT, digests))
        yield FoundSnapshot(head, manifest.manifest, segments)

    def _apart(self, whole: Sequence[FoundBlocks | FoundSnapshot]) -> list[FoundBlocks | FoundSnapshot]:
        """Return what is left without the blocks and snapshots that are outside the arena, or share a byte."""
        starts, sizes, items = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        before = [0]
        for one in whole:
            number = before[-1]
            if isinstance(one, FoundBlocks):
                count, pages = one.offsets.shape
                starts.append(one.offsets.reshape(-1))
                sizes.append(np.full(count * pages, whole_units(one.head.page_bytes)))
                items.append(np.arange(number, number + count).repeat(pages))
            else:
                count = 1
                for its in one.segments:
                    starts.append(its.offsets)
                    sizes.append(np.full(len(its.offsets), whole_units(its.head.block_bytes)))
                    items.append(np.full(len(its.offsets), number))
            before.append(number + count)
        bad = _in_conflict(np.concatenate(starts), np.concatenate(sizes), np.concatenate(items), self._arena_bytes)
        is_good = np.ones(before[-1], np.bool_)
        is_good[bad] = False
        kept: list[FoundBlocks | FoundSnapshot] = []
        for one, first, stop in zip(whole, before[:-1], before[1:], strict=True):
            good = is_good[first:stop]
            if good.all():
                kept.append(one)
            elif isinstance(one, FoundBlocks):
                kept.append(one.only(np.flatnonzero(good)))
        return kept

    def _take_over(self, heads: dict[int, _Head], believed: _Indices) -> int:
        """Know what is in the record; return how many heads have nothing, and are taken away."""
        self._heads = heads
        used = np.bincount(self._rows["head"][believed].astype(np.int64), minlength=self._plan.heads)
        self._uses[:] = used
        for number, head in list(heads.items()):
            if isinstance(head, SnapshotHead) and used[number]:
                self._uses[head.manifest] += 1
                self._users[head.manifest] = head.tenant
        gone = [number for number in heads if not self._uses[number]]
        for number in gone:
            self._slots["check"][number] = 0
            del heads[number]
        self._users |= {number: one.tenant for number, one in heads.items() if not isinstance(one, _ManifestHead)}
        for number in heads:
            self._of_users[self._users[number]] += self._units(number)
        at = np.array([number * UNIT for number in heads], np.int64)
        self._room.occupy(at, np.array([whole_units(int(self._slots["size_bytes"][one])) for one in heads], np.int64))
        self._namespaces = {one.namespace: at for at, one in heads.items() if isinstance(one, NamespaceHead)}
        self._manifests = {
            id(one.manifest): (one.manifest, at) for at, one in heads.items() if isinstance(one, _ManifestHead)
        }
        return len(gone)


class _Bytes:
    """An array as a buffer of ``records``."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def __len__(self) -> int:
        return len(self._memory)

    def __getitem__(self, key: Any) -> Any:  # noqa: ANN401  int or bytes, by the key
        return self._memory[key].tobytes() if isinstance(key, slice) else int(self._memory[key])

    def __setitem__(self, key: slice, value: bytes) -> None:
        self._memory[key] = np.frombuffer(value, np.uint8)


def _checks(rows: Rows) -> Digests:
    """Return what each row's checksum has to be."""
    copies = np.zeros((len(rows), 3), np.uint64)
    copies[:, 0] = rows.ctypes.data + _CHECK_BYTES + ROW_BYTES * np.arange(len(rows))
    copies[:, 2] = ROW_BYTES - _CHECK_BYTES
    return np.maximum(copy_kernel.copy_hashed(copies, np.arange(1, len(rows) + 1)), 1)


def _head_check(number: int, content: bytes) -> int:
    return xxhash.xxh3_64_intdigest(_SLOT_HEAD.pack(number, len(content)) + content) or 1


def _halves(hashes: npt.NDArray[np.void]) -> tuple[Digests, Digests]:
    """Return 16 bytes each as two numbers, which numpy can compare and sort."""
    both = np.ascontiguousarray(hashes).view(np.uint64).reshape(*hashes.shape, 2)
    return both[..., 0], both[..., 1]


def _layouts(manifest: Manifest, segments: Sequence[SegmentHead]) -> list[BlockLayout] | None:
    """Return the layout of each segment's blocks; None where the manifest does not have what they say."""
    if layout_digest(manifest.entries) != manifest.layout_digest:
        return None
    spaces = {one.name: one.space for one in manifest.components}
    held = {one.component for one in manifest.entries}
    if any(spaces.get(one.component) != one.space or one.component not in held for one in segments):
        return None
    by_space = {space: BlockLayout(manifest, space) for space in {one.space for one in segments}}
    layouts = [by_space[one.space] for one in segments]
    same = all(one.block_bytes == layout.block_bytes for one, layout in zip(segments, layouts, strict=True))
    return layouts if same else None


def _in_conflict(starts: Offsets, sizes: Offsets, items: _Indices, arena_bytes: int) -> _Indices:
    """Return the items that have an extent which is not within the arena, or which overlaps one of another or its own.

    All arrays are ``(extents,)``.
    """
    order = np.argsort(starts, kind="stable")
    starts, items = starts[order], items[order]
    ends = starts + sizes[order]
    furthest = np.maximum.accumulate(ends)
    of_furthest = np.maximum.accumulate(np.where(ends == furthest, np.arange(len(ends)), 0))
    late = np.flatnonzero(starts[1:] < furthest[:-1])
    return np.concatenate((items[late + 1], items[of_furthest[late]], items[ends > arena_bytes]))
