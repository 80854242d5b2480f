"""Steps between pages and blocks in host memory.

A page's evenly spaced entries are copied by one numpy call, which does one memcpy per entry and releases the GIL. Of
all the ways this comes closest to the speed of a single copy: a memmove per entry takes the GIL each time,
``process_vm_readv`` pins every 4 KiB, and numpy's gather by index needs adjacent blocks. The caller has checked the
lists.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from kvferry.pools.tiers.blocks import BlockPages, BlockStep

Bytes = npt.NDArray[np.uint8]


def offload_step(memory: Bytes, pages: BlockPages, step: BlockStep, arena: Bytes) -> None:
    """Copy a step from pages in ``memory``, ``(region_bytes,)``, to blocks in ``arena``, ``(arena_bytes,)``."""
    for page, block in _pairs(memory, pages, step, arena):
        block[...] = page


def restore_step(memory: Bytes, pages: BlockPages, step: BlockStep, arena: Bytes) -> None:
    """Copy a step from blocks to pages: the reverse of ``offload_step``."""
    for page, block in _pairs(memory, pages, step, arena):
        page[...] = block


def _pairs(memory: Bytes, pages: BlockPages, step: BlockStep, arena: Bytes) -> Iterator[tuple[Bytes, Bytes]]:
    """Yield corresponding views, block by block: ``(entries, bytes)`` uint8 of a page and of its block."""
    stacks = [
        (
            np.ndarray(
                (pages.layout.pages, one.entries, one.size_bytes),
                np.uint8,
                memory,
                one.base,
                (one.page_bytes, one.spacing_bytes, 1),
            ),
            one.offset,
            one.entries * one.size_bytes,
        )
        for one in pages.layout.stacks_of(step.first_byte, step.stop_byte)
    ]
    ids, offsets = pages.ids[step.first : step.stop].tolist(), pages.offsets[step.first : step.stop].tolist()
    for page, at in zip(ids, offsets, strict=True):
        for of_pages, offset, size_bytes in stacks:
            here = of_pages[page]
            yield here, arena[at + offset : at + offset + size_bytes].reshape(here.shape)
