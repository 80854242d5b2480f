"""Windows and trimming against an oracle that knows tokens only: what is paired is always the same logical page."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st

from kvferry.attention.state_windows import PageWindow, StateList, StateMatch, match_state, window_of
from kvferry.protocol.errors import EmptyStateError, InvalidFieldError, KvferryError, WindowMismatchError

TRANSFER = "0af1"
PS = st.sampled_from([1, 2, 3, 4, 7, 8, 16])
WINDOW = st.integers(1, 40)
SPREAD = st.integers(-4, 4)


class Side(NamedTuple):
    """A request as one side sees it."""

    prefix: int
    seq_len: int
    window: int
    page_size: int


def pages_of_tokens(side: Side) -> list[int]:
    """Return the logical pages of the window, token by token."""
    first = max(side.prefix, side.seq_len - side.window)
    return sorted({position // side.page_size for position in range(first, side.seq_len)})


def ids_of(pages: list[int], salt: int) -> dict[int, int]:
    """Return a physical page for each logical one; no two sides and no two pages have the same."""
    return {page: salt + 17 * page % 10007 for page in pages}


def listed(held: dict[int, int], *, plain: bool = False, none: bool = False) -> StateList:
    first = None if plain else min(held, default=0)
    return StateList(first, np.array([held[page] for page in sorted(held)], np.int64), none)


def matched(source: StateList, destination: StateList) -> StateMatch:
    """Match, and see that neither list was written to and that spans and counts agree."""
    before = source.ids.copy(), destination.ids.copy()
    for one in (source, destination):
        one.ids.flags.writeable = False
    match = match_state(source, destination, "swa", TRANSFER)
    assert [one.tolist() for one in before] == [source.ids.tolist(), destination.ids.tolist()]
    assert match.count + match.dropped_source == len(source.ids)
    assert match.count + match.dropped_destination == len(destination.ids)
    for taken, given_ in (
        (match.source_ids(source), source.ids),
        (match.destination_ids(destination), destination.ids),
    ):
        assert len(taken) == match.count
        assert not np.shares_memory(taken, given_)
        assert taken.flags.writeable
    return match


@given(st.integers(0, 200), st.integers(1, 80), WINDOW, PS)
def test_a_window_is_the_pages_of_its_tokens(prefix: int, beyond: int, window: int, page_size: int) -> None:
    side = Side(prefix, prefix + beyond, window, page_size)
    found = window_of(*side)
    assert list(range(*found)) == pages_of_tokens(side)
    assert found.pages == len(pages_of_tokens(side))


@pytest.mark.parametrize(
    ("given_", "pages"),
    [
        ((0, 0, 128, 128), (0, 0)),
        ((0, 1, 128, 128), (0, 1)),
        ((0, 512, 256, 128), (2, 4)),
        ((0, 513, 256, 128), (2, 5)),
        ((0, 639, 256, 128), (2, 5)),
        ((0, 640, 256, 128), (3, 5)),
        ((384, 513, 256, 128), (3, 5)),
        ((256, 256, 256, 128), (2, 2)),
        ((0, 100, 1 << 40, 128), (0, 1)),
    ],
)
def test_both_ends_move_with_the_length(given_: tuple[int, int, int, int], pages: tuple[int, int]) -> None:
    assert window_of(*given_) == pages


@pytest.mark.parametrize(
    ("given_", "field"),
    [
        ((-1, 5, 4, 2), "prefix_tokens"),
        ((6, 5, 4, 2), "prefix_tokens"),
        ((0, -1, 4, 2), "prefix_tokens"),
        ((0, 5, 0, 2), "window"),
        ((0, 5, 4, 0), "page_size"),
    ],
)
def test_a_window_that_makes_no_sense(given_: tuple[int, int, int, int], field: str) -> None:
    with pytest.raises(InvalidFieldError) as caught:
        window_of(*given_)
    assert caught.value.field == field


@given(st.integers(5, 200), SPREAD, st.integers(0, 60), SPREAD, WINDOW, PS)
@example(639, 1, 0, 0, 256, 128)  # both start and length differ
@example(512, 1, 0, 0, 256, 128)  # one page more at the end
@example(8, 4, 0, 0, 4, 4)  # equal lengths, one page shifted
def test_only_the_same_logical_page_is_paired(
    seq_len: int, longer: int, prefix: int, prefix_more: int, window: int, page_size: int
) -> None:
    source_seq = max(seq_len + longer, 1)
    ours = Side(min(max(prefix + prefix_more, 0), source_seq - 1), source_seq, window, page_size)
    theirs = Side(min(prefix, seq_len - 1), seq_len, window, page_size)
    source_pages, wanted = ids_of(pages_of_tokens(ours), 1), ids_of(pages_of_tokens(theirs), 20011)
    source, destination = listed(source_pages), listed(wanted)
    assert source.first_page == window_of(*ours).first_page
    assert destination.first_page == window_of(*theirs).first_page
    if not wanted.keys() <= source_pages.keys():
        event("refused")
        with pytest.raises(WindowMismatchError) as caught:
            matched(source, destination)
        assert {str(source.window), str(destination.window)} <= set(caught.value.detail.replace(",", "").split())
        return
    match = matched(source, destination)
    event(f"dropped {match.dropped_source}")
    logical = {id_: page for pages in (source_pages, wanted) for page, id_ in pages.items()}
    sent = [logical[id_] for id_ in match.source_ids(source).tolist()]
    filled = [logical[id_] for id_ in match.destination_ids(destination).tolist()]
    assert sent == filled == sorted(wanted)
    assert match.dropped_source == len(source_pages.keys() - wanted.keys())
    assert (match.dropped_destination, match.trimmed) == (0, False)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from(["source", "destination", "both"]))
def test_plain_lists_are_cut_to_the_shorter_head(ours: int, theirs: int, plain: str) -> None:
    source = listed(ids_of(list(range(ours)), 1), plain=plain != "destination")
    destination = listed(ids_of(list(range(theirs)), 20011), plain=plain != "source")
    match = matched(source, destination)
    kept = min(ours, theirs)
    assert match.source_ids(source).tolist() == source.ids[:kept].tolist()
    assert match.destination_ids(destination).tolist() == destination.ids[:kept].tolist()
    assert (match.dropped_source, match.dropped_destination) == (ours - kept, theirs - kept)
    assert match.trimmed == (ours != theirs)


def test_what_keeping_the_head_does_where_the_starts_differ() -> None:
    """The reason for logical pages: one token apart, and the plain lists pair every page with its neighbour."""
    ours, theirs = Side(0, 639, 256, 128), Side(0, 640, 256, 128)
    source_pages, wanted = ids_of(pages_of_tokens(ours), 1), ids_of(pages_of_tokens(theirs), 20011)
    assert (list(source_pages), list(wanted)) == ([2, 3, 4], [3, 4])
    cut = matched(listed(source_pages, plain=True), listed(wanted, plain=True))
    assert cut == StateMatch(0, 0, 2, dropped_source=1, dropped_destination=0, trimmed=True)
    assert cut.source_ids(listed(source_pages)).tolist() == [source_pages[2], source_pages[3]]  # for pages 3 and 4
    known = matched(listed(source_pages), listed(wanted))
    assert known == StateMatch(1, 0, 2, dropped_source=1, dropped_destination=0, trimmed=False)


def test_the_source_has_too_few_pages() -> None:
    with pytest.raises(WindowMismatchError) as caught:
        matched(StateList(3, np.arange(1, 3)), StateList(2, np.arange(1, 4)))
    assert caught.value.code == "WINDOW_MISMATCH"
    assert caught.value.detail == "swa of transfer 0af1: the destination wants pages 2..4, the source has 3..4"
    assert caught.value.field == "first_page"


NOTHING = np.empty(0, np.int64)
FULL = (StateList(4, np.array([7, 8])), StateList(None, np.array([7, 8])))
EMPTY = (StateList(4, NOTHING), StateList(None, NOTHING))
NONE = (StateList(4, NOTHING, none=True), StateList(None, NOTHING, none=True))


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("nothing", [*EMPTY, *NONE])
def test_a_destination_is_never_filled_from_nothing(full: StateList, nothing: StateList) -> None:
    with pytest.raises(EmptyStateError) as caught:
        matched(nothing, full)
    assert caught.value.code == "EMPTY_STATE"
    assert "swa of transfer 0af1" in caught.value.detail
    assert ("says none" in caught.value.detail) == nothing.none
    assert "2 ids" in caught.value.detail


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("empty", EMPTY)
def test_an_empty_destination_is_no_success(full: StateList, empty: StateList) -> None:
    with pytest.raises(EmptyStateError, match="gives 2 ids"):
        matched(full, empty)


@pytest.mark.parametrize("full", FULL)
@pytest.mark.parametrize("none", NONE)
def test_what_the_destination_does_not_want_is_counted(full: StateList, none: StateList) -> None:
    assert matched(full, none) == StateMatch(0, 0, 0, dropped_source=2)


@pytest.mark.parametrize("source", [*EMPTY, *NONE])
@pytest.mark.parametrize("destination", [*EMPTY, *NONE])
def test_nothing_to_move_is_fine(source: StateList, destination: StateList) -> None:
    assert matched(source, destination) == StateMatch(0, 0, 0)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_none_with_ids_is_refused(side: str) -> None:
    wrong, right = StateList(None, np.array([3]), none=True), StateList(None, np.array([4]))
    with pytest.raises(InvalidFieldError, match=f"the {side} says none and names 1 ids"):
        match_state(*((wrong, right) if side == "source" else (right, wrong)), "swa", TRANSFER)


LISTS = st.builds(
    StateList,
    st.none() | st.integers(0, 6),
    st.lists(st.integers(1, 99), max_size=6).map(lambda ids: np.array(ids, np.int64)),
    st.booleans(),
)


@given(LISTS, LISTS)
def test_any_lists_end_in_a_match_or_a_typed_error(source: StateList, destination: StateList) -> None:
    try:
        match = matched(source, destination)
    except KvferryError as error:
        assert error.code in {"EMPTY_STATE", "WINDOW_MISMATCH", "INVALID_FIELD"}  # noqa: PT017  one of three
        return
    assert match.count or destination.none or not len(destination.ids)
    assert match.dropped_destination == 0 or match.trimmed


def test_a_window_as_text() -> None:
    assert [str(PageWindow(2, 5)), str(PageWindow(2, 2))] == ["2..4", "none at 2"]
