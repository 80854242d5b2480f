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


def optimal_hits(requests: Sequence[TracedRequest], capacity_blocks: int, *, counted_from: int = 0) -> int:
    """Return the most blocks that a cache of this capacity can have when they are asked for.

    Only hits of requests from ``counted_from`` on are counted, and aimed at.
    """
    blocks = [block for request in requests for block in request.hash_ids]
    first = sum(len(request.hash_ids) for request in requests[:counted_from])
    next_uses = next_use_times(blocks, first).tolist()
    kept: dict[int, int] = {}  # their next uses
    latest: list[tuple[int, int]] = []  # (-next use, block); those whose time is past never come first
    hits = 0
    for at, (block, next_use) in enumerate(zip(blocks, next_uses, strict=True)):
        expected = kept.pop(block, None)
        hits += expected == at
        if next_use == NEVER:
            continue
        kept[block] = next_use
        if expected != next_use:
            heapq.heappush(latest, (-next_use, block))
        if len(kept) > capacity_blocks:
            del kept[heapq.heappop(latest)[1]]
    return hits


def next_use_times(blocks: Sequence[int], counted_from: int = 0) -> Times:
    """Return for each reference the index of the next one to the same block, ``(n,)``, or ``NEVER``.

    Next ones before ``counted_from`` are passed over.
    """
    times = np.full(len(blocks), NEVER)
    following: dict[int, int] = {}
    for index in range(len(blocks) - 1, -1, -1):
        times[index] = following.get(blocks[index], NEVER)
        if index >= counted_from:
            following[blocks[index]] = index
    return times
