"""Whether a chunk fits a room, and what it fills there. Pure: nothing is promised until the caller says so."""

from __future__ import annotations

import functools

import msgspec
import numpy as np

from kvferry.daemon.rooms.page_ranges import PageRange, entries_of
from kvferry.daemon.rooms.sides import Chunk, Promise, Room
from kvferry.pools.coverage import Cells
from kvferry.pools.pairing import Pairing, check_covered, pair_entries
from kvferry.pools.plan import make_plan
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import FirstTokenTwiceError, LengthMismatchError


class Match(msgspec.Struct, frozen=True):
    """What a chunk fills in a room; surplus that the room does not want is counted."""

    promises: tuple[Promise, ...]
    skipped_source_entries: int
    skipped_source_pages: int


def match(chunk: Chunk, source: Pool, room: Room) -> Match:
    """Return what the chunk fills in the room.

    Source pages before the room's first page are dropped: decode has that prefix already. Source pages past its end
    are an error: the sides disagree about the length.

    Raises:
        LengthMismatchError: the chunk goes past the room's end, or the last tokens differ.
        PageOverlapError: a cell has a sender already.
        FirstTokenTwiceError: the room has a first token or payload already.
        UncoveredEntryError, GeometryMismatchError, DuplicateEntryError: the pools do not fit.
    """
    if chunk.carries_token and room.token_chunk is not None:
        raise FirstTokenTwiceError("another SEND of the room carries the first token or payload", field="first_token")
    promises, skipped_entries, skipped_pages = [], 0, 0
    for one in chunk.ranges:
        target = room.ranges.get(one.component)
        if target is None:
            skipped_entries += len(entries_of(source, one.component))
            continue
        _check_end(one, target, last=chunk.last)
        pairing = _pairing(source, room.pool, one.component)
        if room.sources == 1:
            check_covered(pairing, room.pool.manifest.optional_components)
        skipped_entries += pairing.skipped_source_entries
        surplus = min(max(target.first_page - one.first_page, 0), len(one.ids))
        skipped_pages += surplus
        if surplus < len(one.ids):
            promises.append(_promise(one, target, pairing, surplus, room))
    return Match(tuple(promises), skipped_entries, skipped_pages)


@functools.lru_cache(maxsize=64)
def _pairing(source: Pool, destination: Pool, component: str) -> Pairing:
    return pair_entries(entries_of(source, component), entries_of(destination, component))


def _check_end(one: PageRange, target: PageRange, *, last: bool) -> None:
    if one.end_page > target.end_page:
        raise LengthMismatchError(
            f"{one.component}: source pages {one.first_page}..{one.end_page - 1} go past the room's "
            f"{target.first_page}..{target.end_page - 1}",
            field=one.field,
        )
    ends_known = one.end_token is not None and target.end_token is not None
    if last and ends_known and one.end_token != target.end_token:
        raise LengthMismatchError(
            f"{one.component}: the source ends after token {one.end_token}, the room after {target.end_token}",
            field=f"{one.field}.tokens",
        )


def _promise(one: PageRange, target: PageRange, pairing: Pairing, surplus: int, room: Room) -> Promise:
    start = one.first_page + surplus - target.first_page
    stop = one.end_page - target.first_page
    rows = np.array([pair.destination_index for pair in pairing.pairs], np.intp)
    cells = Cells(rows, start, stop)
    room.coverage[one.component].check_free(cells)
    return Promise(one.component, cells, make_plan(pairing, one.ids[surplus:], target.ids[start:stop]))
