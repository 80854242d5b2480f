"""Which logical pages a sliding window holds, and which pages of two state lists correspond.

Pure functions: a transfer and a component are only names in errors. Both ends of a sliding window move with the length
of the sequence, so where the two sides disagree by a token, lists of equal length can be shifted against each other and
lists of unequal length can differ at either end. Only logical page numbers resolve that; lists without them are cut to
the shorter length, keeping the head, as engines do today, and the caller logs a warning.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import EmptyStateError, InvalidFieldError, WindowMismatchError


class PageWindow(NamedTuple):
    """The logical pages ``[first_page, end_page)``; a token at ``position`` is in page ``position // page_size``."""

    first_page: int
    end_page: int

    @property
    def pages(self) -> int:
        """Return the number of pages."""
        return self.end_page - self.first_page

    def __str__(self) -> str:
        """Show the pages as ``first..last``."""
        return f"{self.first_page}..{self.end_page - 1}" if self.pages else f"none at {self.first_page}"


class StateList(NamedTuple):
    """One side's pages or slots of one component.

    ``first_page`` is the logical page of the first one, None in a plain index list. ``none``: this side states that it
    has or wants nothing of the component; ``ids`` is empty then.
    """

    first_page: int | None
    ids: PageIds
    none: bool = False

    @property
    def window(self) -> PageWindow:
        """Return the logical pages; only for a list with a ``first_page``."""
        assert self.first_page is not None
        return PageWindow(self.first_page, self.first_page + len(self.ids))


class StateMatch(msgspec.Struct, frozen=True):
    """Which ids of two lists correspond: ``count`` ids from each start on, and how many are dropped.

    ``trimmed``: the lists had no logical pages and were cut to the shorter length. Log a warning then, with the
    transfer, the component and both lengths: nothing proves that the kept ids correspond.
    """

    source_start: int
    destination_start: int
    count: int
    dropped_source: int = 0
    dropped_destination: int = 0
    trimmed: bool = False

    def source_ids(self, source: StateList) -> PageIds:
        """Return the ids to read, ``(count,)`` int64, a copy: the request's own list is never changed."""
        return source.ids[self.source_start : self.source_start + self.count].copy()

    def destination_ids(self, destination: StateList) -> PageIds:
        """Return the ids to fill, ``(count,)`` int64, a copy."""
        return destination.ids[self.destination_start : self.destination_start + self.count].copy()


def window_of(prefix_tokens: int, seq_len: int, window: int, page_size: int) -> PageWindow:
    """Return the logical pages of a sliding window of ``window`` tokens at the end of ``seq_len`` tokens.

    ``[floor(max(prefix_tokens, seq_len - window) / page_size), ceil(seq_len / page_size))``: the destination already
    has the tokens before ``prefix_tokens``.

    Raises:
        InvalidFieldError: a negative number, a window or page of 0 tokens, or a prefix longer than the sequence.
    """
    if not 0 <= prefix_tokens <= seq_len:
        raise InvalidFieldError(f"a prefix of {prefix_tokens} tokens of {seq_len}", field="prefix_tokens")
    for field, tokens in (("window", window), ("page_size", page_size)):
        if tokens < 1:
            raise InvalidFieldError(f"{tokens} tokens, but at least 1 is needed", field=field)
    return PageWindow(max(prefix_tokens, seq_len - window) // page_size, -(-seq_len // page_size))


def match_state(source: StateList, destination: StateList, component: str, transfer: str) -> StateMatch:
    """Return which ids of the two lists correspond; the lists are not changed.

    If both have a ``first_page``, they are paired by logical page, and source pages outside the destination's are
    dropped. Otherwise both are cut to the shorter length, keeping the head. A destination with ``none`` drops the whole
    source list.

    Args:
        source: what the sender has.
        destination: what the receiver wants.
        component: its name, for errors.
        transfer: its name, for errors.

    Raises:
        EmptyStateError: one side is empty and the other is not, and the destination did not set ``none``.
        WindowMismatchError: the destination wants logical pages that the source does not have.
        InvalidFieldError: a list with ``none`` has ids.
    """
    for side, one in (("source", source), ("destination", destination)):
        if one.none and len(one.ids):
            raise InvalidFieldError(f"{component}: the {side} says none and names {len(one.ids)} ids", field="none")
    if destination.none:
        return StateMatch(0, 0, 0, dropped_source=len(source.ids))
    _check_emptiness(source, destination, component, transfer)
    if not len(source.ids):
        return StateMatch(0, 0, 0)
    if source.first_page is None or destination.first_page is None:
        return _heads(len(source.ids), len(destination.ids))
    return _by_logical_page(source.window, destination.window, component, transfer)


def _check_emptiness(source: StateList, destination: StateList, component: str, transfer: str) -> None:
    ours, theirs = len(source.ids), len(destination.ids)
    if ours and not theirs:
        raise EmptyStateError(
            f"{component} of transfer {transfer}: the source gives {ours} ids, the destination's list is empty",
            field="lists",
        )
    if theirs and not ours:
        what = "the source says none" if source.none else "the source's list is empty"
        raise EmptyStateError(
            f"{component} of transfer {transfer}: the destination wants {theirs} ids, {what}", field="lists"
        )


def _heads(source_length: int, destination_length: int) -> StateMatch:
    count = min(source_length, destination_length)
    surplus = (source_length - count, destination_length - count)
    return StateMatch(0, 0, count, *surplus, trimmed=source_length != destination_length)


def _by_logical_page(source: PageWindow, destination: PageWindow, component: str, transfer: str) -> StateMatch:
    if destination.first_page < source.first_page or destination.end_page > source.end_page:
        raise WindowMismatchError(
            f"{component} of transfer {transfer}: the destination wants pages {destination}, the source has {source}",
            field="first_page",
        )
    return StateMatch(
        source_start=destination.first_page - source.first_page,
        destination_start=0,
        count=destination.pages,
        dropped_source=source.pages - destination.pages,
    )
