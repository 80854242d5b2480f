"""Pools of every layout, lists of their pages, and what their blocks have to be: the oracle, by plain slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.manifest import spaces_of
from kvferry.pools.tiers.blocks import BlockLayout, BlockPages
from kvferry.protocol.manifests import Entry, Manifest, MhaSpec, MlaSpec, PoolSpec
from tests.kit.pool_specs import pool_specs

Bytes = npt.NDArray[np.uint8]
UNTOUCHED: Final = 0xEE
ARENA_UNIT: Final = 64


class BlockHarness(NamedTuple):
    """A pool's layout and some of its pages, with blocks anywhere in an arena."""

    manifest: Manifest
    pages: BlockPages
    arena_bytes: int

    def memory(self) -> Bytes:
        """Return a region full of noise."""
        return np.random.default_rng(0).integers(0, 256, self.manifest.region_bytes, np.uint8)

    def arena(self) -> Bytes:
        """Return an arena that nobody has touched."""
        return np.full(self.arena_bytes, UNTOUCHED, np.uint8)

    def offloaded(self, memory: Bytes) -> Bytes:
        """Return the arena as it has to be after an offload."""
        arena = self.arena()
        for page, at in zip(self.pages.ids.tolist(), self.pages.offsets.tolist(), strict=True):
            block = _block(self.manifest, self.pages.layout.space, memory, page)
            block += bytes(-len(block) % 64)
            arena[at : at + len(block)] = np.frombuffer(block, np.uint8)
        return arena

    def restored(self, memory: Bytes, arena: Bytes) -> Bytes:
        """Return the region as it has to be after a restore."""
        memory = memory.copy()
        for page, at in zip(self.pages.ids.tolist(), self.pages.offsets.tolist(), strict=True):
            for entry in _entries(self.manifest, self.pages.layout.space):
                start = entry.base + page * entry.page_bytes
                memory[start : start + entry.page_bytes] = arena[at : at + entry.page_bytes]
                at += entry.page_bytes  # noqa: PLW2901  the next entry's
        return memory


def _entries(manifest: Manifest, space: str) -> list[Entry]:
    names = [one.name for one in manifest.components if one.space == space]
    mine = (one for one in manifest.entries if one.component in names)
    return sorted(mine, key=lambda one: (one.component, one.role, one.layer))


def _block(manifest: Manifest, space: str, memory: Bytes, page: int) -> bytes:
    parts = []
    for entry in _entries(manifest, space):
        start = entry.base + page * entry.page_bytes
        parts.append(memory[start : start + entry.page_bytes].tobytes())
    return b"".join(parts)


@st.composite
def wide_specs(draw: st.DrawFn) -> PoolSpec:
    """Draw specs whose pages are as wide as real ones are, in units of 512 bytes."""
    tokens = 16 * draw(st.integers(2, 12))
    if draw(st.booleans()):
        return MhaSpec(
            layers=draw(st.integers(1, 5)),
            kv_heads=1,
            head_dim=draw(st.sampled_from([16, 32, 48])),
            v_head_dim=draw(st.sampled_from([16, 32])),
            dtype="bfloat16",
            page_size=16,
            tokens=tokens,
        )
    return MlaSpec(
        layers=draw(st.integers(1, 4)),
        kv_lora_rank=128,
        qk_rope_head_dim=16,
        index_head_dim=draw(st.sampled_from([None, 32])),
        dtype="bfloat16",
        page_size=16,
        tokens=tokens,
    )


@st.composite
def harnesses(draw: st.DrawFn) -> BlockHarness:
    """Draw a pool, a space of it, some pages in any order, and blocks in any order, some of which adjoin."""
    manifest = manifest_of(draw(pool_specs() | wide_specs()))
    space = draw(st.sampled_from(sorted(spaces_of(manifest))))
    return harness_of(manifest, space, draw)


def harness_of(manifest: Manifest, space: str, draw: Callable[[Any], Any]) -> BlockHarness:
    """Return some pages of a pool and their blocks."""
    layout = BlockLayout(manifest, space)
    ids = draw(st.permutations(range(1, layout.pages)))
    ids = sorted(ids) if draw(st.booleans()) else ids
    taken = ids[: draw(st.integers(1, len(ids)))]
    gaps = draw(st.lists(st.sampled_from([0, 0, 0, 1, 3]), min_size=len(taken), max_size=len(taken)))
    offsets = np.cumsum([gap * ARENA_UNIT + layout.block_bytes for gap in gaps]) - layout.block_bytes
    if draw(st.booleans()):
        offsets = offsets[draw(st.permutations(range(len(taken))))]
    pages = BlockPages(layout, np.array(taken, np.int64), np.array(offsets, np.int64))
    return BlockHarness(manifest, pages, int(offsets.max()) + layout.block_bytes + ARENA_UNIT)
