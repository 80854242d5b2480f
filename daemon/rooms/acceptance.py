"""What a SEND or RECEIVE must satisfy, and the pages it holds: steps of the book that leave no trace if they raise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from kvferry.daemon.rooms.matching import DRAFT, Match
from kvferry.daemon.rooms.page_ranges import PageRange, lists_with_pages
from kvferry.daemon.rooms.sides import Chunk, Excused, Offer, Room
from kvferry.protocol.errors import FirstTokenTwiceError, InvalidFieldError, KvferryError, PageGapError
from kvferry.protocol.manifests import Manifest


def check_continues(offer: Offer, chunk: Chunk) -> None:
    """Check that a chunk goes on where the offer's last one ended, and that only one carries the first token.

    Raises:
        FirstTokenTwiceError, PageGapError: what is wrong.
    """
    if offer.carries_token and chunk.carries_token:
        raise FirstTokenTwiceError("a SEND before carried the first token or payload", field="first_token")
    for one in chunk.ranges:
        before = offer.last_range(one.component)
        if before is None:
            continue
        if one.first_page is None or before.first_page is None:
            raise PageGapError(f"{one.component}: one chunk carries a list without first_page", field=one.field)
        if one.kind == "paged" and one.first_page != before.end_page:
            raise PageGapError(
                f"{one.component}: the chunk starts at page {one.first_page}, the one before ended at "
                f"{before.end_page}",
                field=f"{one.field}.first_page",
            )


def check_steps(chunk: Chunk, manifest: Manifest) -> None:
    """Check that each layer of the chunk's components is in exactly one step; steps may name others as well.

    A layer in no step, or in two, could go before its bytes are there. Draft's layers have numbers of their own, and go
    with the last step.

    Raises:
        InvalidFieldError: names the layer.
    """
    if not chunk.steps:
        return
    listed = {one.component for one in chunk.ranges} - {DRAFT}
    layers = np.array(sorted({entry.layer for entry in manifest.entries if entry.component in listed}), np.int64)
    first, counts = np.array([(step.first_layer, step.layers) for step in chunk.steps]).T
    named = (first <= layers[:, None]) & (layers[:, None] < first + counts)
    times = named.sum(axis=1)
    for wrong, what in ((times == 0, "in no step"), (times > 1, "in more than one step")):
        if wrong.any():
            raise InvalidFieldError(
                f"layer {layers[wrong.argmax()]} is {what} ({np.count_nonzero(wrong)} layers)", field="steps"
            )


def check_together(room: Room, offers: Sequence[Offer], excused: Sequence[Excused]) -> None:
    """Check what only all offers of a new room together can violate; each of them fits by itself.

    Raises:
        FirstTokenTwiceError, UncoveredEntryError, IncompleteError: what is wrong.
    """
    if sum(offer.carries_token for offer in offers) > 1:
        raise FirstTokenTwiceError("two SENDs of this request carry a first token or payload", field="request_id")
    if len(offers) == room.sources and all(offer.complete for offer in offers):
        room.check_promised(excused)


def would_complete(room: Room, offer: Offer, chunks: Sequence[Chunk]) -> bool:
    """Return whether with these chunks of the offer every source has sent its last SEND."""
    others = [one for one in room.offers if one is not offer]
    return bool(chunks) and chunks[-1].last and len(others) + 1 == room.sources and all(one.complete for one in others)


def withdraw(fits: Iterable[tuple[Room, list[Match]]]) -> None:
    """Take back the promises of chunks that were refused after all."""
    for room, matches in fits:
        for found in matches:
            for promise in found.promises:
                room.coverage[promise.component].withdraw(promise.cells)


def hold_for_writing(room: Room) -> None:
    """Make the room the one writer of its pages.

    Raises:
        KvferryError: a page is not the session's, is named twice, or is busy; none is held then.
    """
    held: list[PageRange] = []
    try:
        for one in lists_with_pages(room.ranges.values()):
            room.pool.allocator_of(one.component).begin_write(room.session_id, one.ids, f"{one.field}.pages")
            held.append(one)
    except KvferryError:
        for one in held:
            room.pool.allocator_of(one.component).end_write(one.ids)
        raise


def hold_for_reading(offer: Offer, chunk: Chunk) -> None:
    """Make the offer a reader of the chunk's pages.

    Raises:
        KvferryError: a page is not the session's, or is being written; none is held then.
    """
    pool = offer.holder
    if pool is None:
        return
    held: list[PageRange] = []
    try:
        for one in lists_with_pages(chunk.ranges):
            pool.allocator_of(one.component).begin_read(offer.session_id, one.ids, f"{one.field}.pages")
            held.append(one)
    except KvferryError:
        for one in held:
            pool.allocator_of(one.component).end_read(one.ids)
        raise
