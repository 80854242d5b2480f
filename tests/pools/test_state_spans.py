"""Pairing the lists of windows and states, against an oracle of tokens: only the same logical page is ever paired."""

from __future__ import annotations

from typing import Final

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from kvferry.attention.state_windows import window_of
from kvferry.pools.planning.page_ranges import PageRange, Span, state_span
from kvferry.protocol.errors import EmptyStateError, WindowMismatchError

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


NOTHING: Final = listed(4, [], none=True)
LISTS: Final = st.just(NOTHING) | st.builds(
    listed, st.none() | st.integers(0, 6), st.lists(st.integers(1, 99), max_size=6)
)


@given(LISTS, LISTS)
@example(NOTHING, listed(4, [7, 8]))
@example(listed(None, [7, 8]), NOTHING)
@example(listed(4, []), listed(4, [7, 8]))
@example(listed(4, [7, 8]), listed(None, []))
@example(NOTHING, listed(None, []))
def test_a_destination_is_never_filled_from_nothing_and_an_empty_one_is_no_success(
    source: PageRange, destination: PageRange
) -> None:
    ours, theirs = len(source.ids), len(destination.ids)
    if (theirs and not ours) or (ours and not theirs and not destination.none):
        said = "gives .* ids, the destination's list is empty" if ours else "wants .* ids, the source"
        said += "" if ours else (" says none" if source.none else "'s list is empty")
        with pytest.raises(EmptyStateError, match=said) as caught:
            paired(source, destination)
        assert caught.value.field == "lists"
        return
    try:
        span, _, _ = paired(source, destination)
    except WindowMismatchError:
        assert source.first_page is not None
        assert destination.first_page is not None
        return
    assert span.pages == (min(ours, theirs) if span.trimmed else theirs)
    assert span.pages or span == Span(0, 0, 0, ours)
