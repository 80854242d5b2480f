"""Blocks against plain slices: where each byte of a page lies in its block, and how work on them is cut into steps."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools import copy_kernel
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.tiers.block_copies import MIN_CELL_BYTES, BlockCells, offload_step, restore_step, restore_step_hashed
from kvferry.pools.tiers.blocks import (
    CUT_BYTES,
    BlockLayout,
    BlockPages,
    BlockStep,
    BlockSteps,
    step_runs,
    zero_padding,
)
from kvferry.protocol.errors import InternalError
from kvferry.protocol.manifests import Entry, Manifest
from tests.kit.blocks import BlockHarness, Bytes, harnesses

MOST = 1 << 30
STEP_BYTES = st.integers(1, 300) | st.integers(300, 40_000)


def manifest_of_sizes(*sizes: int, pages: int = 4) -> Manifest:
    return lay_out(
        [
            Entry(component="main", role="k", layer=layer, base=0, pages=pages, page_bytes=size)
            for layer, size in enumerate(sizes)
        ]
    )


def steps_of(pages: BlockPages, step_bytes: int) -> list[BlockStep]:
    steps = BlockSteps(pages.layout, 0, len(pages.ids))
    found = []
    while (step := steps.take(step_bytes, MOST)) is not None:
        found.append(step)
    assert steps.exhausted
    return found


def uneven_harness() -> BlockHarness:
    """Return three large entries at uneven distances, of which steps take a middle."""
    packed = manifest_of_sizes(9000, 9000, 9000)
    entries = [msgspec.structs.replace(one, base=one.base + 77 * one.layer**2) for one in packed.entries]
    manifest = msgspec.structs.replace(packed, entries=tuple(entries), region_bytes=packed.region_bytes + 4 * 77)
    layout = BlockLayout(manifest, "main")
    return BlockHarness(manifest, BlockPages(layout, np.array([3, 1]), np.array([64, 30_000])), 60_000)


def test_a_block_is_the_same_in_whatever_order_a_manifest_lists_its_entries() -> None:
    manifest = manifest_of_sizes(3, 5, 8)
    turned = msgspec.structs.replace(manifest, entries=manifest.entries[::-1])
    ours, theirs = BlockLayout(manifest, "main"), BlockLayout(turned, "main")
    assert [one.name for one in ours.entries] == [one.name for one in theirs.entries]
    assert ours.offsets.tolist() == theirs.offsets.tolist()


# -- every byte


@given(harnesses(), STEP_BYTES)
@example(uneven_harness(), 4500)
@example(uneven_harness(), 1 << 20)
def test_an_offload_puts_each_byte_into_its_block_and_nowhere_else(harness: BlockHarness, step_bytes: int) -> None:
    memory, arena = harness.memory(), harness.arena()
    expected, before = harness.offloaded(memory), memory.copy()
    for step in steps_of(harness.pages, step_bytes):
        offload_step(memory, harness.pages, step, arena)
        zero_padding(harness.pages, step, arena)
    assert (arena == expected).all()
    assert (memory == before).all()


@given(harnesses(), STEP_BYTES)
def test_a_restore_puts_each_byte_into_its_page_and_nowhere_else(harness: BlockHarness, step_bytes: int) -> None:
    memory = harness.memory()
    arena = np.random.default_rng(1).integers(0, 256, harness.arena_bytes, np.uint8)
    expected, before = harness.restored(memory, arena), arena.copy()
    for step in reversed(steps_of(harness.pages, step_bytes)):
        restore_step(memory, harness.pages, step, arena)
    assert (memory == expected).all()
    assert (arena == before).all()


@given(harnesses(), STEP_BYTES)
@example(uneven_harness(), 4500)
def test_a_restore_that_hashes_does_the_same_and_padding_that_is_damaged_goes_nowhere(
    harness: BlockHarness, step_bytes: int
) -> None:
    memory, state, found = harness.memory(), copy_kernel.new_hash(), []
    arena = np.random.default_rng(1).integers(0, 256, harness.arena_bytes, np.uint8)
    expected, before = harness.restored(memory, arena), arena.copy()
    for step in steps_of(harness.pages, step_bytes):
        found += restore_step_hashed(memory, harness.pages, step, arena, state).tolist()
    assert (memory == expected).all()
    assert (arena == before).all()
    size = harness.pages.layout.block_bytes
    assert found == [xxhash.xxh3_64_intdigest(arena[at : at + size].tobytes()) for at in harness.pages.offsets.tolist()]
    again = harness.arena()
    for step in steps_of(harness.pages, step_bytes):
        offload_step(memory, harness.pages, step, again)
    assert (again == harness.offloaded(memory)).all(), "the padding of a block that is written later is zero"


# -- steps


@given(harnesses(), STEP_BYTES)
def test_steps_are_in_order_without_gaps_and_of_about_the_size(harness: BlockHarness, step_bytes: int) -> None:
    content = harness.pages.layout.content_bytes
    at = 0
    for step in steps_of(harness.pages, step_bytes):
        assert step.first * content + step.first_byte == at, step
        at += step.size_bytes
        assert 0 < step.size_bytes <= max(step_bytes, CUT_BYTES)
        if step.stop - step.first > 1:
            assert (step.first_byte, step.stop_byte) == (0, content)
    assert at == len(harness.pages.ids) * content


def test_small_blocks_go_together_and_large_ones_are_cut_between_entries() -> None:
    layout = BlockLayout(manifest_of_sizes(6000, 6000, 9000), "main")
    pages = BlockPages(layout, np.arange(1, 4), np.arange(3) * layout.block_bytes)
    assert steps_of(pages, 50_000) == [(0, 2, 0, 21_000), (2, 3, 0, 21_000)]
    assert steps_of(pages, 21_000)[0] == (0, 1, 0, 21_000)
    assert steps_of(pages, 13_000)[:3] == [(0, 1, 0, 12_000), (0, 1, 12_000, 21_000), (1, 2, 0, 12_000)]
    inside = [0, 4096, 6000, 10_096, 12_000, 16_096, 21_000]
    assert [step[2:] for step in steps_of(pages, 5000)][:6] == list(pairwise(inside))


def test_the_size_may_change_from_step_to_step() -> None:
    layout = BlockLayout(manifest_of_sizes(100, 100), "main")
    steps = BlockSteps(layout, 2, 9)
    assert steps.left_bytes == 1400
    assert [steps.take(size, MOST) for size in (200, 250, 600, 150, 1000, 1000)] == [
        (2, 3, 0, 200),
        (3, 4, 0, 200),
        (4, 7, 0, 200),
        (7, 8, 0, 100),
        (7, 8, 100, 200),
        (8, 9, 0, 200),
    ]
    assert steps.take(1000, MOST) is None
    assert steps.left_bytes == 0


def test_a_step_has_no_more_blocks_than_may_be() -> None:
    layout = BlockLayout(manifest_of_sizes(100, 100), "main")
    steps = BlockSteps(layout, 0, 5)
    assert [steps.take(size, 2) for size in (1000, 100, 1000)] == [(0, 2, 0, 200), (2, 3, 0, 100), (2, 3, 100, 200)]


def test_what_is_left_counts_the_rest_of_a_block_that_was_cut() -> None:
    layout = BlockLayout(manifest_of_sizes(100, 100), "main")
    steps = BlockSteps(layout, 0, 2)
    steps.take(100, MOST)
    assert steps.left_bytes == 300


@given(harnesses(), STEP_BYTES)
def test_runs_are_a_steps_bytes_in_the_arena_as_few_as_can_be(harness: BlockHarness, step_bytes: int) -> None:
    layout, seen = harness.pages.layout, np.zeros(harness.arena_bytes, int)
    for step in steps_of(harness.pages, step_bytes):
        runs, at = list(step_runs(harness.pages, step)), 0
        for run, after in zip(runs, [*runs[1:], None], strict=True):
            assert run.at == at
            at += run.size_bytes
            seen[run.offset : run.offset + run.size_bytes] += 1
            assert after is None or after.offset != run.offset + run.size_bytes
        assert at == step.staged_bytes(layout)
    assert seen.max() == 1
    assert seen.sum() == harness.pages.total_bytes


# -- layouts


def test_evenly_spaced_entries_are_one_stack() -> None:
    layout = BlockLayout(manifest_of_sizes(64, 64, 64, 32, 32), "main")
    assert [(one.entries, one.spacing_bytes, one.offset) for one in layout.stacks] == [(3, 256, 0), (2, 128, 192)]
    assert [tuple(one[2:]) for one in layout.stacks_of(10, 150)] == [(1, 64, 54, 10), (1, 64, 64, 64), (1, 64, 22, 128)]
    assert [one.entries for one in layout.stacks_of(64, 192)] == [2]


def test_a_block_ends_at_a_multiple_of_64() -> None:
    layout = BlockLayout(manifest_of_sizes(100, 50), "main")
    assert (layout.content_bytes, layout.block_bytes) == (150, 192)


@pytest.mark.parametrize(
    ("ids", "offsets", "problem"),
    [
        ([1, 2], [0], "2 pages have 1 blocks"),
        ([0], [0], r"not in 1\.\.3"),
        ([4], [0], r"not in 1\.\.3"),
        ([1], [-64], "not within"),
        ([1], [64], "not within"),
    ],
)
def test_lists_that_cannot_be_are_refused(ids: list[int], offsets: list[int], problem: str) -> None:
    layout = BlockLayout(manifest_of_sizes(64), "main")
    with pytest.raises(InternalError, match=problem):
        BlockPages(layout, np.array(ids, np.int64), np.array(offsets, np.int64)).check(127)
    BlockPages(layout, np.array([3]), np.array([63])).check(127)
    BlockPages(layout, np.array([], np.int64), np.array([], np.int64)).check(127)


# -- cells, for devices


def gathered_by_cells(harness: BlockHarness, cells: BlockCells, step: BlockStep, memory: Bytes) -> Bytes:
    """Return a step's bytes in a row, taken by number; what no cell brings is zero, as padding is."""
    flat = np.zeros(step.staged_bytes(harness.pages.layout), np.uint8)
    written = np.zeros(len(flat), int)
    for one in cells.of(step, harness.pages.ids[step.first : step.stop]):
        rows = int(one.numbers.max()) + 1
        end = one.offset_bytes + rows * one.cell_bytes
        assert end <= len(memory), "no byte beyond the last cell is named"
        here = slice(one.flat_bytes, one.flat_bytes + one.size_bytes)
        flat[here] = memory[one.offset_bytes : end].reshape(rows, one.cell_bytes)[one.numbers].reshape(-1)
        written[here] += 1
    assert written.max() == 1
    assert written.sum() == step.size_bytes
    return flat


@given(harnesses(), STEP_BYTES, st.data())
@example(uneven_harness(), 4500, None)
def test_cells_by_number_are_the_blocks_bytes(
    harness: BlockHarness, step_bytes: int, data: st.DataObject | None
) -> None:
    layout, memory, arena = harness.pages.layout, harness.memory(), harness.arena()
    bases = st.sets(st.sampled_from([one.base for one in layout.entries]))
    starts = sorted({0} | (data.draw(bases) if data else set()))
    cells = BlockCells(layout, starts)
    for step in steps_of(harness.pages, step_bytes):
        flat = gathered_by_cells(harness, cells, step, memory)
        for run in step_runs(harness.pages, step):
            arena[run.offset : run.offset + run.size_bytes] = flat[run.at : run.at + run.size_bytes]
    assert (arena == harness.offloaded(memory)).all()


def test_wide_entries_of_one_part_are_one_list_of_cells_for_all_pages() -> None:
    layout = BlockLayout(manifest_of_sizes(4096, 4096, 1024, 1024), "main")
    step, ids = BlockStep(0, 3, 0, layout.content_bytes), np.array([3, 1, 2])
    [one] = BlockCells(layout, [0]).of(step, ids)
    assert (one.cell_bytes, len(one.numbers)) == (1024, 3 * 10)
    apart = list(BlockCells(layout, [0, int(layout.bases[2])]).of(step, ids))
    assert [(cells.cell_bytes, len(cells.numbers)) for cells in apart] == [(4096, 2), (1024, 2)] * 3


def test_entries_that_have_no_wide_cell_in_common_go_one_by_one() -> None:
    narrow = MIN_CELL_BYTES // 2
    layout = BlockLayout(manifest_of_sizes(narrow * 3, narrow * 4), "main")
    found = list(BlockCells(layout, [0]).of(BlockStep(0, 1, 0, layout.content_bytes), np.array([2])))
    assert [(one.cell_bytes, one.numbers.tolist()) for one in found] == [(narrow * 3, [2]), (narrow * 4, [2])]
