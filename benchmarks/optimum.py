"""The best any eviction can do: Belady's MIN, which evicts what is asked for again last, or never keeps it.

Exact for blocks of one size, and for prefixes too: whoever asks for a block asks for its predecessors just before, so
what MIN evicts first is always the end of a prefix, and every block that it keeps has its predecessors there.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from benchmarks.traces import TracedRequest

Times = npt.NDArray[np.int64]
NEVER = np.iinfo(np.int64).max


def optimal_hits(requests: Sequence[TracedRequest], capacity_blocks: int) -> int:
    """Return the most blocks that a cache of this capacity can have when they are asked for."""
    blocks = [block for request in requests for block in request.hash_ids]
    next_uses = next_use_times(blocks).tolist()
    kept: set[int] = set()
    latest: list[tuple[int, int]] = []  # (-next use, block); those whose time is past never come first
    hits = 0
    for block, next_use in zip(blocks, next_uses, strict=True):
        hits += block in kept
        kept.discard(block)
        if next_use == NEVER:
            continue
        kept.add(block)
        heapq.heappush(latest, (-next_use, block))
        if len(kept) > capacity_blocks:
            kept.remove(heapq.heappop(latest)[1])
    return hits


def next_use_times(blocks: Sequence[int]) -> Times:
    """Return for each reference the index of the next one to the same block, ``(n,)``, or ``NEVER``."""
    times = np.full(len(blocks), NEVER)
    last: dict[int, int] = {}
    for index, block in enumerate(blocks):
        if block in last:
            times[last[block]] = index
        last[block] = index
    return times
