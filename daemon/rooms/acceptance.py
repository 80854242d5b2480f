"""What a SEND or RECEIVE must satisfy, and the pages it holds: steps of the book that leave no trace if they raise."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvferry.daemon.rooms.matching import Match
from kvferry.daemon.rooms.page_ranges import PageRange
from kvferry.daemon.rooms.sides import Chunk, Offer, Room
from kvferry.protocol.errors import FirstTokenTwiceError, KvferryError, PageGapError


def check_continues(offer: Offer, chunk: Chunk) -> None:
    """Check that a chunk goes on where the offer's last one ended, and that only one carries the first token.

    Raises:
        FirstTokenTwiceError, PageGapError: what is wrong.
    """
    if offer.carries_token and chunk.carries_token:
        raise FirstTokenTwiceError("a SEND before carried the first token or payload", field="first_token")
    for one in chunk.ranges:
        expected = offer.end_page(one.component)
        if expected is not None and one.first_page != expected:
            raise PageGapError(
                f"{one.component}: the chunk starts at page {one.first_page}, the one before ended at {expected}",
                field=f"{one.field}.first_page",
            )


def check_together(room: Room, offers: Sequence[Offer]) -> None:
    """Check what only all offers of a new room together can violate; each of them fits by itself.

    Raises:
        FirstTokenTwiceError, UncoveredEntryError, IncompleteError: what is wrong.
    """
    if sum(offer.carries_token for offer in offers) > 1:
        raise FirstTokenTwiceError("two SENDs of this request carry a first token or payload", field="request_id")
    if len(offers) == room.sources and all(offer.complete for offer in offers):
        room.check_promised()


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
        for one in room.ranges.values():
            room.pool.allocator.begin_write(room.session_id, one.ids, f"{one.field}.pages")
            held.append(one)
    except KvferryError:
        for one in held:
            room.pool.allocator.end_write(one.ids)
        raise


def hold_for_reading(offer: Offer, chunk: Chunk) -> None:
    """Make the offer a reader of the chunk's pages.

    Raises:
        KvferryError: a page is not the session's, or is being written; none is held then.
    """
    held: list[PageRange] = []
    try:
        for one in chunk.ranges:
            offer.pool.allocator.begin_read(offer.session_id, one.ids, f"{one.field}.pages")
            held.append(one)
    except KvferryError:
        for one in held:
            offer.pool.allocator.end_read(one.ids)
        raise
