"""Request traces: files of JSON objects, one a line, as the Mooncake project's are; times are not kept.

Each request has an ``input_length`` in tokens and, where blocks count, ``hash_ids``: a number for each block of its
prompt, in order. A number stands for a block and everything before it, so it always has the same predecessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec


class TracedRequest(msgspec.Struct, frozen=True):
    """A line of a trace; its other fields are not used."""

    input_length: int
    hash_ids: tuple[int, ...] = ()


class NoTraceError(ValueError):
    """A file is not a trace."""


def read_trace(trace: Path, count: int | None = None) -> list[TracedRequest]:
    """Return the first requests, or all.

    Raises:
        NoTraceError: a line is not one, which it names; or there is none.
    """
    decoder = msgspec.json.Decoder(TracedRequest)
    requests = []
    with trace.open("rb") as lines:
        for number, line in enumerate(islice(lines, count), 1):
            try:
                requests.append(decoder.decode(line))
            except (msgspec.MsgspecError, ValueError) as cause:
                raise NoTraceError(f"{trace}, line {number}: {cause}; a trace has a JSON object a line") from cause
    if not requests:
        raise NoTraceError(f"{trace} is empty")
    return requests


def count_blocks(requests: Sequence[TracedRequest]) -> int:
    """Return how many blocks all prompts have together."""
    return sum(len(request.hash_ids) for request in requests)


def count_unique(requests: Sequence[TracedRequest]) -> int:
    """Return how many different blocks there are."""
    return len(set().union(*(request.hash_ids for request in requests)))


def bound(requests: Sequence[TracedRequest]) -> float:
    """Return the hit rate of a cache that never evicts: the share of blocks that an earlier request has had.

    A block's predecessors are in every request that has it, so each of these hits is one of the longest prefix.
    """
    return 1 - count_unique(requests) / count_blocks(requests)
