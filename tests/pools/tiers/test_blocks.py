"""Blocks against plain slices: where each byte of a page lies in its block, and how work on them is cut into steps."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.pools import copy_kernel
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.tiers.block_copies import offload_step, restore_step_hashed
from kvferry.pools.tiers.blocks import CUT_BYTES, BlockLayout, BlockPages, BlockStep, BlockSteps, step_runs
from kvferry.protocol.errors import InternalError
from kvferry.protocol.manifests import Entry, Manifest
from tests.kit.blocks import BlockHarness, harnesses

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


# -- every byte


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


def test_the_size_may_change_from_step_to_step_and_the_number_of_blocks_is_bounded() -> None:
    layout = BlockLayout(manifest_of_sizes(100, 100), "main")
    steps = BlockSteps(layout, 2, 9)
    sizes = ((250, MOST), (600, 2), (150, MOST), (1000, MOST), (1000, MOST))
    found = [(steps.left_bytes, steps.take(*size)) for size in sizes]
    assert found == [
        (1400, (2, 3, 0, 200)),
        (1200, (3, 5, 0, 200)),
        (800, (5, 6, 0, 100)),
        (700, (5, 6, 100, 200)),
        (600, (6, 9, 0, 200)),
    ]
    assert (steps.take(1000, MOST), steps.left_bytes) == (None, 0)


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
