"""Pairing the lists of windows and states, against an oracle of tokens: only the same logical page is ever paired."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from kvferry.attention.state_windows import window_of
from kvferry.pools.planning.page_ranges import PageRange, Span, state_span
from kvferry.protocol.errors import EmptyStateError, KvferryError, WindowMismatchError

SPREAD: Final = st.integers(-4, 4)
SOURCE_SALT: Final = 1
DESTINATION_SALT: Final = 20011
"""No two sides and no two pages have the same id."""


def listed(first_page: int | None, ids: list[int], *, none: bool = False) -> PageRange:
    array = np.array(ids, np.int64)
    array.flags.writeable = False
    return PageRange("swa", first_page, array, None, "lists[0]", "window", none)


def of_pages(pages: range, salt: int, *, plain: bool = False) -> PageRange:
    return listed(None if plain else pages.start, [salt + 17 * page % 10007 for page in pages])


def paired(source: PageRange, destination: PageRange) -> tuple[Span, list[int], list[int]]:
    """Return the span, and the ids to read and to fill; see that what is skipped is counted where pages are known."""
    span = state_span(source, destination, "0af1")
    sent, filled = (
        one.ids[start : start + span.pages].tolist()
        for one, start in ((source, span.source_start), (destination, span.destination_start))
    )
    assert len(sent) == len(filled) == span.pages
    assert span.skipped_source_pages == (0 if span.trimmed else len(source.ids) - span.pages)
    return span, sent, filled


@given(st.integers(5, 200), SPREAD, st.integers(0, 60), SPREAD, st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 7, 8]))
@example(639, 1, 0, 0, 256, 128)  # both start and length differ
@example(512, 1, 0, 0, 256, 128)  # one page more at the end
@example(8, 4, 0, 0, 4, 4)  # equal lengths, one page shifted
def test_only_the_same_logical_page_is_paired(
    seq_len: int, longer: int, prefix: int, prefix_more: int, window: int, page_size: int
) -> None:
    source_seq = max(seq_len + longer, 1)
    ours = range(*window_of(min(max(prefix + prefix_more, 0), source_seq - 1), source_seq, window, page_size))
    theirs = range(*window_of(min(prefix, seq_len - 1), seq_len, window, page_size))
    source, destination = of_pages(ours, SOURCE_SALT), of_pages(theirs, DESTINATION_SALT)
    if not set(theirs) <= set(ours):
        event("refused")
        with pytest.raises(WindowMismatchError) as caught:
            paired(source, destination)
        said = f"the destination wants pages {theirs[0]}..{theirs[-1]}, the source has {ours[0]}..{ours[-1]}"
        assert (caught.value.field, caught.value.detail) == ("first_page", f"swa of transfer 0af1: {said}")
        return
    span, sent, filled = paired(source, destination)
    event(f"skipped {span.skipped_source_pages}")
    assert sent == of_pages(theirs, SOURCE_SALT).ids.tolist()
    assert filled == destination.ids.tolist()
    assert not span.trimmed


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["source", "destination", "both"]))
def test_plain_lists_are_cut_to_the_shorter_head(ours: int, theirs: int, plain: str) -> None:
    source = of_pages(range(ours), SOURCE_SALT, plain=plain != "destination")
    destination = of_pages(range(theirs), DESTINATION_SALT, plain=plain != "source")
    span, sent, filled = paired(source, destination)
    kept = min(ours, theirs)
    assert (sent, filled) == (source.ids[:kept].tolist(), destination.ids[:kept].tolist())
    assert span.trimmed == (ours != theirs)


def test_what_keeping_the_head_does_where_the_starts_differ() -> None:
    """The reason for logical pages: one token apart, and the plain lists pair every page with its neighbour."""
    ours, theirs = (range(*window_of(0, seq_len, 256, 128)) for seq_len in (639, 640))
    assert (list(ours), list(theirs)) == ([2, 3, 4], [3, 4])
    for plain, span in ((True, Span(0, 0, 2, 0, trimmed=True)), (False, Span(1, 0, 2, 1, trimmed=False))):
        lists = of_pages(ours, SOURCE_SALT, plain=plain), of_pages(theirs, DESTINATION_SALT, plain=plain)
        assert paired(*lists)[0] == span


FULL: Final = (listed(4, [7, 8]), listed(None, [7, 8]))
EMPTY: Final = (listed(4, []), listed(None, []))
NONE: Final = (listed(4, [], none=True), listed(None, [], none=True))


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("nothing", [*EMPTY, *NONE])
def test_what_has_pages_and_what_has_none(full: PageRange, nothing: PageRange) -> None:
    """A destination is never filled from nothing, an empty one is no success; what is not wanted is counted."""
    said = f"wants 2 ids, the source{' says none' if nothing.none else chr(39) + 's list is empty'}"
    with pytest.raises(EmptyStateError, match=f"swa of transfer 0af1: the destination {said}") as caught:
        paired(nothing, full)
    assert (caught.value.code, caught.value.field) == ("EMPTY_STATE", "lists")
    if nothing.none:
        assert paired(full, nothing)[0] == Span(0, 0, 0, 2)
    else:
        with pytest.raises(EmptyStateError, match="gives 2 ids, the destination's list is empty"):
            paired(full, nothing)


@pytest.mark.parametrize("source", [*EMPTY, *NONE])
@pytest.mark.parametrize("destination", [*EMPTY, *NONE])
def test_nothing_to_move_is_fine(source: PageRange, destination: PageRange) -> None:
    assert paired(source, destination)[0] == Span(0, 0, 0, 0)


LISTS: Final = st.builds(listed, st.none() | st.integers(0, 6), st.lists(st.integers(1, 99), max_size=6)) | st.just(
    NONE[0]
)


@given(LISTS, LISTS)
def test_any_lists_end_in_a_span_or_a_typed_error(source: PageRange, destination: PageRange) -> None:
    try:
        span, _, _ = paired(source, destination)
    except KvferryError as error:
        assert error.code in {"EMPTY_STATE", "WINDOW_MISMATCH"}  # noqa: PT017  one of two
        return
    assert span.pages or destination.none or not len(destination.ids)
    assert len(destination.ids) == span.pages or span.trimmed
