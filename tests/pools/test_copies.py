"""Splitting, cutting and copying blocks."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools.planning.copies import (
    MAX_VECTOR,
    CopyBlocks,
    chunk_bounds,
    copy_one_by_one,
    copy_vectored,
    split_blocks,
    vectored_copy_works,
)
from kvferry.pools.planning.plan import Blocks
from kvferry.protocol.errors import TransferFailedError

SIZES = st.lists(st.integers(1, 50), min_size=1, max_size=20)
UNMAPPED = 8  # no process maps its first page


def blocks_of(sizes: list[int]) -> Blocks:
    ends = np.cumsum(np.array(sizes, np.uint64), dtype=np.uint64)
    starts = ends - np.array(sizes, np.uint64)
    return np.stack((starts + np.uint64(1000), starts + np.uint64(5000), np.array(sizes, np.uint64)), axis=1)


def covered(blocks: Blocks) -> list[tuple[int, int]]:
    """Return the address pairs of every byte, in order."""
    return [(start + i, to + i) for start, to, size in blocks.tolist() for i in range(size)]


@given(SIZES, st.integers(1, 60))
def test_split_blocks_copy_the_same_bytes_in_order(sizes: list[int], max_bytes: int) -> None:
    blocks = blocks_of(sizes)
    split = split_blocks(blocks, max_bytes)
    assert covered(split) == covered(blocks)
    assert split[:, 2].max() <= max_bytes
    assert len(split) == sum(-(-size // max_bytes) for size in sizes)
    assert split.dtype == np.uint64


@given(SIZES, st.integers(1, 200))
@example([7, 7, 7], 7)
@example([1], 1)
def test_chunks_tile_the_blocks(sizes: list[int], chunk_bytes: int) -> None:
    bounds = chunk_bounds(blocks_of(sizes), chunk_bytes).tolist()
    assert bounds[0] == 0
    assert bounds[-1] == len(sizes)
    assert bounds == sorted(set(bounds))


@given(SIZES, st.integers(1, 200))
@example([7, 7, 7], 7)
@example([50, 1], 50)
def test_a_chunk_exceeds_its_size_by_less_than_a_block(sizes: list[int], chunk_bytes: int) -> None:
    bounds = chunk_bounds(blocks_of(sizes), chunk_bytes).tolist()
    for start, stop in itertools.pairwise(bounds):
        assert sum(sizes[start:stop]) < chunk_bytes + sizes[stop - 1]


@given(SIZES, st.integers(1, 200))
@example([7, 7, 7], 7)
def test_small_blocks_share_a_chunk(sizes: list[int], chunk_bytes: int) -> None:
    chunks = len(chunk_bounds(blocks_of(sizes), chunk_bytes)) - 1
    assert chunks <= -(-sum(sizes) // chunk_bytes)


@pytest.fixture(params=["vectored", "one by one"])
def copy(request: pytest.FixtureRequest, require: Callable[[object, str], None]) -> CopyBlocks:
    """Return each of the copies."""
    if request.param == "one by one":
        return copy_one_by_one
    require(vectored_copy_works(), "process_vm_readv on ourselves")
    return copy_vectored


@pytest.mark.parametrize("count", [0, 1, MAX_VECTOR - 1, MAX_VECTOR, MAX_VECTOR + 1, 3 * MAX_VECTOR])
def test_many_blocks(copy: CopyBlocks, count: int) -> None:
    rng = np.random.default_rng(count)
    source = rng.integers(0, 256, 3 * count, np.uint8)
    destination = np.zeros(3 * count, np.uint8)
    places = rng.permutation(count)
    rows = [(source.ctypes.data + 3 * i, destination.ctypes.data + 3 * int(to), 3) for i, to in enumerate(places)]
    copy(np.array(rows, np.uint64).reshape(-1, 3))
    assert (destination.reshape(-1, 3)[places] == source.reshape(-1, 3)).all()


@pytest.mark.parametrize("side", [0, 1])
def test_an_address_that_is_not_mapped_is_an_error(require: Callable[[object, str], None], side: int) -> None:
    require(vectored_copy_works(), "process_vm_readv on ourselves")
    memory = np.zeros(16, np.uint8)
    blocks = np.array([[memory.ctypes.data, memory.ctypes.data + 8, 8]], np.uint64)
    blocks[0, side] = UNMAPPED
    with pytest.raises(TransferFailedError, match="copying 1 blocks"):
        copy_vectored(blocks)


def test_blocks_before_an_unmapped_one_are_copied(require: Callable[[object, str], None]) -> None:
    require(vectored_copy_works(), "process_vm_readv on ourselves")
    source, destination = np.arange(8, dtype=np.uint8), np.zeros(8, np.uint8)
    good = [source.ctypes.data, destination.ctypes.data, 8]
    with pytest.raises(TransferFailedError, match="8 of 16 bytes"):
        copy_vectored(np.array([good, [UNMAPPED, destination.ctypes.data, 8]], np.uint64))
    assert (destination == source).all()
