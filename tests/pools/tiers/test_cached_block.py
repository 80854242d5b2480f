"""What may stand for what: every part of an identity is part of a namespace; and the list of all blocks."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterable

import msgspec
import numpy as np
import pytest

from kvferry.pools.tiers.cached_block import BlockListing, BlockState, CachedBlock, Namespace, identity_of
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


def test_an_identity_is_what_it_was() -> None:
    """Files on disk and names in the store have it: another digest would lose every cache."""
    assert identity_of(MODEL) == "e9fed3a40d2abc32fcdcbbe841e28cfb"


def test_the_salt_is_never_shown() -> None:
    assert "pepper" not in f"{MODEL} {MODEL!r} {MODEL.label} {MODEL.public!r}"
    assert MODEL.public == msgspec.structs.replace(MODEL, salt="")
    assert MODEL.label == "some/model@1+sql"
    assert ModelIdentity(name="m").label == "m"


def visible(listing: BlockListing) -> CachedBlock:
    """Return a new block of the list."""
    block = CachedBlock(Namespace(7, FORM, FORM, "main", 1), bytes(16), None, 4096)
    block.state = BlockState.READY
    listing.add(block)
    return block


@pytest.mark.parametrize("limit", [1, 5000])
def test_a_reader_of_all_parts_meets_each_block_that_stays_once(limit: int) -> None:
    """Blocks go before, between and after the parts, by thousands in a row, and others come."""
    listing, drawn = BlockListing(), random.Random(limit)  # noqa: S311  no secret
    blocks = [visible(listing) for _ in range(300 if limit == 1 else 20_000)]
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
        later += [visible(listing)] if len(later) < 40 else []
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
