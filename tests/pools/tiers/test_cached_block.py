"""What may stand for what, the list of all blocks, and the journal of what happens to them."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.pools.tiers.cached_block import BlockListing, BlockState, CachedBlock, Namespace, Tier, identity_of
from kvferry.pools.tiers.journal import MAX_HASHES, CacheJournal, Change, ChangeKind, Changes
from kvferry.protocol.ids import ModelIdentity

MODEL = ModelIdentity(name="some/model", revision="1", adapter="sql", salt="pepper")
FORM = "0f" * 16


@pytest.mark.parametrize("field", ModelIdentity.__struct_fields__)
def test_each_field_makes_another(field: str) -> None:
    other = msgspec.structs.replace(MODEL, **{field: "other"})
    assert identity_of(other) != identity_of(MODEL)
    assert identity_of(msgspec.structs.replace(MODEL)) == identity_of(MODEL)
    said = [ModelIdentity(name="m", revision="x"), ModelIdentity(name="m", adapter="x"), ModelIdentity(name="mx")]
    assert len({identity_of(one) for one in said}) == len(said)


def test_an_identity_is_what_it_was_and_the_salt_is_never_shown() -> None:
    """Files on disk and names in the store have it: another digest would lose every cache."""
    assert identity_of(MODEL) == "e9fed3a40d2abc32fcdcbbe841e28cfb"
    assert "pepper" not in f"{MODEL} {MODEL!r} {MODEL.label} {MODEL.public!r}"
    assert MODEL.public == msgspec.structs.replace(MODEL, salt="")
    assert MODEL.label == "some/model@1+sql"
    assert ModelIdentity(name="m").label == "m"


@pytest.mark.parametrize("limit", [1, 5000])
def test_a_reader_of_all_parts_meets_each_block_that_stays_once(limit: int) -> None:
    """Blocks go before, between and after the parts, by thousands in a row, and others come."""
    listing, drawn = BlockListing(), random.Random(limit)  # noqa: S311  no secret

    def visible() -> CachedBlock:
        block = CachedBlock(Namespace(7, FORM, FORM, "main", 1), bytes(16), None, 4096)
        block.state = BlockState.READY
        listing.add(block)
        return block

    blocks = [visible() for _ in range(300 if limit == 1 else 20_000)]
    gone: set[CachedBlock] = set()

    def remove(those: Iterable[CachedBlock]) -> None:
        for block in those:
            if block not in gone:
                gone.add(block)
                block.state = BlockState.GONE
                listing.discard(block)

    remove(blocks[len(blocks) // 2 : len(blocks) * 3 // 4])
    met: list[CachedBlock] = []
    later: list[CachedBlock] = []
    position: int | None = 0
    while position is not None:
        found, position = listing.page(position, limit)
        met += found
        remove(drawn.sample(blocks, 20))
        later += [visible()] if len(later) < 40 else []
        assert len(listing) == len(blocks) - len(gone) + len(later)
    assert len(met) == len(set(met))
    assert set(blocks) - gone <= set(met)


def test_a_block_gives_back_what_it_was_given() -> None:
    block = CachedBlock(Namespace(7, FORM, FORM, "main", 2), bytes(16), None, 8192)
    assert (block.offsets, block.digests, block.in_host) == (None, (), False)
    block.offsets, block.digests = np.array([1 << 40, 4096]), (1, (1 << 64) - 1)
    assert block.offsets.tolist() == [1 << 40, 4096]
    assert block.digests == (1, (1 << 64) - 1)
    assert block.in_host
    assert not gc.is_tracked(block), "millions of them are no work for a garbage collection"


SPACE = Namespace(1, "d", "i" * 32, "main", 1)
OTHER = Namespace(2, "d", "i" * 32, "main", 1)
NAMES = st.sampled_from([b"a", b"b", b"c"])
NOTES = st.tuples(st.booleans(), st.sampled_from(list(Tier)), st.sampled_from([SPACE, OTHER]), NAMES, st.none() | NAMES)


def stored(*hashes: bytes, parent: bytes | None = None, tier: Tier = Tier.HOST) -> Change:
    return Change(ChangeKind.STORED, tier, SPACE, hashes, parent)


def test_evicted_blocks_of_one_namespace_and_tier_go_together_and_so_does_a_chain() -> None:
    journal = CacheJournal(8)
    for name in (b"x", b"y"):
        journal.evicted(Tier.HOST, SPACE, name)
    journal.evicted(Tier.HOST, OTHER, b"x")
    evicted = [(change.namespace, change.hashes) for change in journal.since(1, 9).changes]
    assert evicted == [(SPACE, (b"x", b"y")), (OTHER, (b"x",))]
    for name, parent in ((b"b", b"a"), (b"c", b"b"), (b"e", b"d")):
        journal.stored(Tier.HOST, SPACE, [name], [parent])
    journal.stored(Tier.DISK, SPACE, [b"f"], [b"e"])
    expected = (
        stored(b"b", b"c", parent=b"a"), stored(b"e", parent=b"d"), stored(b"f", parent=b"e", tier=Tier.DISK)
    )  # fmt: skip
    assert journal.since(3, 9) == Changes(expected, 6, lost=False)


def test_a_change_has_a_bound() -> None:
    journal = CacheJournal(8)
    for number in range(MAX_HASHES + 1):
        journal.evicted(Tier.HOST, SPACE, number.to_bytes(16, "little"))
    chain = [number.to_bytes(16, "big") for number in range(MAX_HASHES + 1)]
    journal.stored(Tier.HOST, SPACE, chain, [None, *chain[:-1]])
    assert [len(change.hashes) for change in journal.since(1, 9).changes] == [MAX_HASHES, 1, MAX_HASHES, 1]
    assert [change.parent for change in journal.since(3, 9).changes] == [None, chain[-2]]


def test_a_reader_pages_and_one_that_is_too_late_hears_of_it() -> None:
    journal = CacheJournal(3)
    for name in (b"1", b"2", b"3", b"4", b"5"):
        journal.stored(Tier.HOST, SPACE, [name], [None])
    assert journal.since(2, 9) == Changes((), 6, lost=True)
    assert journal.since(3, 2) == Changes((stored(b"3"), stored(b"4")), 5, lost=False)
    assert journal.since(5, 2) == Changes((stored(b"5"),), 6, lost=False)
    assert journal.since(6, 2) == Changes((), 6, lost=False)
    assert journal.since(7, 2) == Changes((), 6, lost=True)
    assert journal.since(0, 2) == Changes((), 6, lost=True)


def test_a_cursor_of_another_boot_has_lost_changes() -> None:
    before, journal = CacheJournal(8, 1000), CacheJournal(8, 5000)
    for name in (b"1", b"2", b"3"):
        journal.evicted(Tier.HOST, SPACE, name)
        assert journal.position()
    assert journal.since(before.position(), 9) == Changes((), 5003, lost=True)
    assert len(journal.since(1, 9).changes) == 3
    assert len(journal.since(5001, 9).changes) == 2


def test_the_oldest_changes_go_where_there_are_too_many_hashes() -> None:
    journal = CacheJournal(8, max_hashes=5)
    for name in (b"1", b"2", b"3"):
        journal.stored(Tier.HOST, SPACE, [name, name * 2], [None, name])
    assert journal.since(1, 9) == Changes((), 4, lost=True)
    assert [one.hashes for one in journal.since(2, 9).changes] == [(b"2", b"22"), (b"3", b"33")]
    journal.stored(Tier.HOST, SPACE, list(names := [b"%d" % n for n in range(10, 17)]), [None, *names[:-1]])
    assert [len(one.hashes) for one in journal.since(4, 9).changes] == [7], "the latest one stays in any case"


@given(notes=st.lists(NOTES, max_size=60), capacity=st.integers(1, 9), limit=st.integers(1, 4), data=st.data())
def test_a_reader_gets_what_was_noted_in_order_or_hears_that_it_did_not(
    notes: list[tuple[bool, Tier, Namespace, bytes, bytes | None]], capacity: int, limit: int, data: st.DataObject
) -> None:
    journal = CacheJournal(capacity)
    cursor, read, missed = 1, list[tuple[object, ...]](), 0
    for number, (is_stored, tier, namespace, name, parent) in enumerate(notes, 1):
        if is_stored:
            journal.stored(tier, namespace, [name], [parent])
        else:
            journal.evicted(tier, namespace, name)
        while data.draw(st.booleans()):
            found = journal.since(cursor, limit)
            assert len(found.changes) <= limit
            if found.lost:
                missed, read = number, []
            else:
                assert found.next_cursor == cursor + len(found.changes)
            cursor = found.next_cursor
            read += [one for change in found.changes for one in flat(change)]
    while (found := journal.since(cursor, limit)).changes:
        cursor = found.next_cursor
        read += [one for change in found.changes for one in flat(change)]
    if not found.lost:
        assert read == [
            (ChangeKind.STORED, tier, namespace, name, parent)
            if is_stored
            else (ChangeKind.EVICTED, tier, namespace, name, None)
            for is_stored, tier, namespace, name, parent in notes[missed:]
        ]


def flat(change: Change) -> list[tuple[object, ...]]:
    parents = [change.parent, *change.hashes[:-1]] if change.kind is ChangeKind.STORED else [None] * len(change.hashes)
    return [
        (change.kind, change.tier, change.namespace, name, parent)
        for name, parent in zip(change.hashes, parents, strict=True)
    ]
