"""What a host tier leaves to the next daemon: written in part, with flipped bits, with extents that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.process.shares import share
from kvferry.pools.layouts import manifest_of
from kvferry.pools.records import UnreadableFileError
from kvferry.pools.tiers.arena import ALLOCATION_UNIT_BYTES as UNIT
from kvferry.pools.tiers.arena import Offsets
from kvferry.pools.tiers.blocks import BlockLayout
from kvferry.pools.tiers.tier_record import (
    ROW_BYTES,
    Digests,
    FoundTier,
    Memory,
    NamespaceHead,
    SegmentHead,
    SnapshotHead,
    TierRecord,
    record_bytes,
)
from kvferry.protocol.ids import ModelIdentity
from tests.kit.devices import DEVICE
from tests.kit.pool_specs import SWA

UNITS: Final = 64
ARENA_BYTES: Final = UNITS * UNIT
MEMORY: Final = 99
MANIFEST: Final = manifest_of(
    msgspec.structs.replace(SWA, full_layers=(0,), window_layers=(1,), tokens=1024, window_tokens=512, window=8)
)
COMPONENTS: Final = [(one.name, one.space) for one in MANIFEST.components]
BLOCK_BYTES: Final = {space: BlockLayout(MANIFEST, space).block_bytes for _, space in COMPONENTS}
PAIRS: Final = NamespaceHead(
    tenant=7, layout_digest="a" * 32, identity="b" * 32, group="main", block_pages=2, page_bytes=UNIT + 1, model="m"
)
SINGLES: Final = msgspec.structs.replace(PAIRS, tenant=8, block_pages=1, page_bytes=100)


class Stored(NamedTuple):
    """A block, as it was stored or is found."""

    head: NamespaceHead
    hash: bytes
    parent: bytes | None
    offsets: tuple[int, ...]
    digests: tuple[int, ...] | None


def new_record() -> tuple[Memory, TierRecord]:
    memory = np.zeros(record_bytes(ARENA_BYTES), np.uint8)
    record = TierRecord(memory, ARENA_BYTES, share)
    record.begin(MEMORY)
    return memory, record


def read(memory: Memory, *, checksums: bool = True) -> FoundTier:
    """Return what the next daemon finds, in a copy."""
    copy = memory.copy()
    found = TierRecord(copy, ARENA_BYTES, share).read(MEMORY, [(0, len(copy))], checksums=checksums)
    again = TierRecord(copy, ARENA_BYTES, share).read(MEMORY, [(0, len(copy))], checksums=checksums)
    assert again.dropped == 0, "what cannot be believed is gone"
    assert blocks_of(again) == blocks_of(found)
    assert [one.head for one in again.snapshots] == [one.head for one in found.snapshots]
    return found


def blocks_of(found: FoundTier) -> set[Stored]:
    return {
        Stored(
            one.head,
            block_hash,
            parent,
            tuple(offsets.tolist()),
            None if one.digests is None else tuple(one.digests[number].tolist()),
        )
        for one in found.blocks
        for number, (block_hash, parent, offsets) in enumerate(zip(one.hashes, one.parents, one.offsets, strict=True))
    }


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def put(record: TierRecord, head: NamespaceHead, units: list[list[int]], first: int = 1) -> set[Stored]:
    """Record a chain of blocks with pages in these units."""
    numbers = range(first, first + len(units))
    offsets = np.array(units, np.int64) * UNIT
    digests = (offsets * 3 + 1).astype(np.uint64)
    parents = [name(one - 1) if one > first else None for one in numbers]
    assert record.put_blocks(head, [name(one) for one in numbers], parents, list(range(len(units))), offsets, digests)
    return {
        Stored(head, name(one), parent, tuple(its.tolist()), tuple(hashed.tolist()))
        for one, parent, its, hashed in zip(numbers, parents, offsets, digests, strict=True)
    }


def snapshot_head(number: int = 1, counts: tuple[int, ...] = (2, 1)) -> SnapshotHead:
    segments = tuple(
        SegmentHead(component=component, space=space, tokens=None, count=count, block_bytes=BLOCK_BYTES[space])
        for (component, space), count in zip(COMPONENTS, counts, strict=False)
    )
    return SnapshotHead(
        name=name(number).hex(), tenant=7, owner=5, pool="pool", model=ModelIdentity(name="m"), created_s=1.0,
        segments=segments,
    )  # fmt: skip


def pages_of(head: SnapshotHead, first_unit: int) -> list[tuple[Offsets, Digests | None]]:
    """Return extents for a snapshot's pages, one after another."""
    found: list[tuple[Offsets, Digests | None]] = []
    at = first_unit * UNIT
    for segment in head.segments:
        step = -(-segment.block_bytes // UNIT) * UNIT
        offsets = at + step * np.arange(segment.count, dtype=np.int64)
        found.append((offsets, (offsets + 1).astype(np.uint64)))
        at += step * segment.count
    return found


def test_blocks_and_snapshots_are_found_as_they_were_stored_until_they_are_cleared() -> None:
    memory, record = new_record()
    pairs = put(record, PAIRS, [[0, 2], [6, 4]])
    singles = put(record, SINGLES, [[8], [9], [10]], first=50)
    head = snapshot_head()
    pages = pages_of(head, 20)
    assert record.put_snapshot(head, MANIFEST, pages)
    found = read(memory)
    assert found.dropped == 0
    assert blocks_of(found) == pairs | singles
    [snapshot] = found.snapshots
    assert msgspec.structs.replace(snapshot.head, manifest=0) == head
    assert snapshot.manifest == MANIFEST
    for segment, (offsets, digests) in zip(snapshot.segments, pages, strict=True):
        assert digests is not None
        assert segment.offsets.tolist() == offsets.tolist()
        assert segment.digests is not None
        assert segment.digests.tolist() == digests.tolist()
    starts, sizes = found.extents
    assert len(starts) == 4 + 3 + 3
    assert sizes[starts == 0] == 2 * UNIT
    record.clear(np.array([6, 4], np.int64) * UNIT)
    record.drop_snapshot(pages[0][0])
    found = read(memory)
    assert blocks_of(found) == {one for one in pairs if one.parent is None} | singles
    assert not found.snapshots
    for offsets, _ in pages:
        record.clear(offsets)
    record.clear(np.arange(12, dtype=np.int64) * UNIT)
    assert record.is_empty
    assert read(memory) == ([], [], 0)


def test_heads_go_with_their_last_use_and_their_room_is_used_again() -> None:
    memory, record = new_record()
    for number in range(3000):  # more than there is room for
        head = msgspec.structs.replace(SINGLES, tenant=number)
        stored = put(record, head, [[number % UNITS]])
        snapshot = snapshot_head(number)
        pages = pages_of(snapshot, 20)
        if number % 7 == 0:
            record.clear(np.array([number % UNITS]) * UNIT)
            assert record.put_snapshot(snapshot, manifest_of(SWA) if number % 2 else MANIFEST, pages)
            record.drop_snapshot(pages[0][0])
            for offsets, _ in pages:
                record.clear(offsets)
        else:
            assert blocks_of(read(memory)) == stored if number % 500 == 1 else True
            record.clear(np.array([number % UNITS]) * UNIT)
        assert record.is_empty


def test_what_has_no_room_for_its_head_is_not_recorded() -> None:
    memory, record = new_record()
    kept = 0
    for number in range(600):
        snapshot = snapshot_head(number, (1,))
        wide = msgspec.structs.replace(snapshot, segments=snapshot.segments * 40)  # a head of some KiB
        offsets = np.array([number % 3], np.int64) * UNIT
        kept += record.put_snapshot(wide, MANIFEST, [(offsets, None)] * 40)
    assert 0 < kept < 600
    assert not record.put_snapshot(snapshot_head(), manifest_of(SWA), pages_of(snapshot_head(), 20))
    assert not read(memory).snapshots, "all of them claim the same bytes"


def test_one_user_cannot_fill_it_and_another_one_is_recorded_before_and_after_a_restart() -> None:
    memory, record = new_record()
    offsets, digests = np.zeros((1, 1), np.int64), np.zeros((1, 1), np.uint64)

    def fits(record: TierRecord, tenant: int, number: int) -> bool:
        head = msgspec.structs.replace(SINGLES, tenant=tenant, identity=f"{number:032x}")
        return record.put_blocks(head, [name(1)], [None], [0], offsets + number % UNITS * UNIT, digests)

    most = next(number for number in range(600) if not fits(record, 7, number))
    assert fits(record, 8, 0)
    assert not fits(record, 7, most)
    again = TierRecord(memory, ARENA_BYTES, share)
    again.read(MEMORY, [(0, len(memory))], checksums=True)
    left = next(number for number in range(600) if not fits(again, 7, 1000 + number))
    assert left == most - UNITS, "those that still have rows, one in each unit, count"
    assert fits(again, 9, 2)


@DEVICE.examples(300)
@given(st.data())
def test_a_flipped_bit_is_seen(data: st.DataObject) -> None:
    """What is found is what was stored, or less: never something else."""
    memory, record = new_record()
    stored = put(record, PAIRS, [[0, 2], [6, 4]]) | put(record, SINGLES, [[8], [9], [10]], first=50)
    head = snapshot_head()
    record.put_snapshot(head, MANIFEST, pages_of(head, 20))
    written = np.flatnonzero(memory)
    byte = data.draw(st.sampled_from(sorted({*written.tolist(), *range(len(memory) - UNITS * ROW_BYTES, len(memory))})))
    memory[byte] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = read(memory)
    except UnreadableFileError:
        assert byte < UNIT
        return
    assert blocks_of(found) <= stored
    for one in found.snapshots:
        assert msgspec.structs.replace(one.head, manifest=0) == head
        assert one.manifest == MANIFEST
    assert found.dropped or (blocks_of(found) == stored and found.snapshots), "in the padding"
    record = TierRecord(memory, ARENA_BYTES, share)
    record.read(MEMORY, [(0, len(memory))], checksums=True)
    free = np.setdiff1d(np.arange(40, 60), found.extents[0] // UNIT)
    fresh = put(record, PAIRS, [[int(free[0]), int(free[2])]], first=90)  # the record is whole again
    assert blocks_of(read(memory)) == blocks_of(found) | fresh


def cut(before: Memory, after: Memory, chosen: st.DataObject) -> Iterator[Memory]:
    """Yield memories between two states: some of the changed words are written, in any order."""
    words = np.flatnonzero(before.view(np.uint64) != after.view(np.uint64))
    for _ in range(4):
        some = chosen.draw(st.lists(st.booleans(), min_size=len(words), max_size=len(words)))
        between = before.copy()
        at = words[np.array(some, np.bool_)]
        between.view(np.uint64)[at] = after.view(np.uint64)[at]
        yield between


@DEVICE.examples(60)
@given(st.data())
def test_cut_in_the_middle_of_its_writes_it_has_what_was_before_or_after(data: st.DataObject) -> None:
    """Whatever words of a change are written: nothing is found but what is whole on one of both sides."""
    memory, record = new_record()
    live: dict[int, set[Stored]] = {}
    free = list(range(0, 16, 2))
    for step in range(data.draw(st.integers(1, 6))):
        before, was = memory.copy(), set[Stored]().union(*live.values())
        if bool(live) and data.draw(st.booleans()):
            unit = data.draw(st.sampled_from(sorted(live)))
            [its] = live.pop(unit)
            record.clear(np.array(its.offsets))
            free += [offset // UNIT for offset in its.offsets]
        elif len(free) >= 2:
            units = [free.pop(data.draw(st.integers(0, len(free) - 1))) for _ in range(2)]
            live[units[0]] = put(record, PAIRS, [units], first=100 + step)
        now = set[Stored]().union(*live.values())
        for between in cut(before, memory, data):
            found = blocks_of(read(between))
            assert found <= was | now
            assert found >= was & now
        assert blocks_of(read(memory)) == now


@pytest.mark.parametrize("size", ["outside", "shared", "inside another"])
def test_extents_that_cannot_be_are_dropped_and_nothing_else(size: str) -> None:
    memory, record = new_record()
    other = put(record, SINGLES, [[30]], first=70)
    units = {"outside": [0, UNITS - 1], "shared": [0, 2], "inside another": [0, 30]}[size]
    units[1] = {"inside another": 29}.get(size, units[1])
    put(record, PAIRS, [units])
    if size == "shared":
        put(record, PAIRS, [[3, 6]], first=80)  # a page is two units long: unit 3 is of the one before
    found = read(memory)
    assert blocks_of(found) == (set() if size == "inside another" else other)
    assert found.dropped


def test_a_block_that_is_there_twice_or_not_whole_is_dropped() -> None:
    memory, record = new_record()
    put(record, PAIRS, [[0, 2]])
    put(record, PAIRS, [[4, 6]])
    whole = put(record, PAIRS, [[8, 10], [12, 14]], first=20)
    record.clear(np.array([14]) * UNIT)
    assert blocks_of(read(memory)) == {one for one in whole if one.parent is None}


def test_blocks_without_digests_count_where_there_are_no_checksums() -> None:
    memory, record = new_record()
    record.put_blocks(SINGLES, [name(1)], [None], [0], np.array([[0]]), None)
    assert read(memory, checksums=False).blocks
    assert not read(memory).blocks


@pytest.mark.parametrize("what", ["identity", "size", "magic"])
def test_a_record_of_other_memory_is_refused(what: str) -> None:
    memory, record = new_record()
    put(record, SINGLES, [[0]])
    if what == "magic":
        memory[0] ^= 1
    if what == "size":
        memory = np.concatenate((memory, np.zeros(ROW_BYTES, np.uint8)))
    with pytest.raises(UnreadableFileError):
        TierRecord(memory, ARENA_BYTES + (UNIT if what == "size" else 0), share).read(
            MEMORY + (what == "identity"), [(0, len(memory))], checksums=True
        )


def test_a_snapshot_of_a_manifest_that_is_another_one_is_dropped() -> None:
    memory, record = new_record()
    head, other = snapshot_head(), msgspec.structs.replace(MANIFEST, layout_digest="0" * 32)
    assert record.put_snapshot(head, other, pages_of(head, 20))
    lies = msgspec.structs.replace(
        snapshot_head(2),
        segments=tuple(
            msgspec.structs.replace(one, block_bytes=one.block_bytes - 64) for one in snapshot_head(2).segments
        ),
    )
    assert record.put_snapshot(lies, MANIFEST, pages_of(lies, 40))
    found = read(memory)
    assert not found.snapshots
    assert found.dropped == 3 + 3 + 2 + 2, "rows, and the heads of both"
