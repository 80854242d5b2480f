"""Page lists: their runs, and lists against the pool that they are of."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvferry.attention.state_windows import window_of
from kvferry.pools.planning import page_ids
from kvferry.pools.planning.page_ids import FEW, Runs, coalesce
from kvferry.pools.planning.page_ranges import (
    PageRange,
    Span,
    check_apart,
    lists_with_pages,
    page_ranges,
    split,
    state_span,
)
from kvferry.pools.pool import Pool
from kvferry.protocol import errors
from kvferry.protocol.base import PageList
from kvferry.protocol.manifests import Component
from tests.kit.transfers import TransferHarness, layers

NEARBY = st.integers(1, 12)
PAIRS = st.lists(st.tuples(NEARBY, NEARBY), max_size=40)


def runs_of(pairs: list[tuple[int, int]], few: int) -> Runs:
    lists = np.array(pairs, np.int64).reshape(-1, 2)
    lists.flags.writeable = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_ids, "FEW", few)
        return coalesce(lists[:, 0], lists[:, 1])


def expanded(runs: Runs) -> list[tuple[int, int]]:
    return [
        (source + i, destination + i)
        for source, destination, pages in zip(*(one.tolist() for one in runs), strict=True)
        for i in range(pages)
    ]


@pytest.mark.parametrize("few", [0, FEW])  # as if all lists were long, and as if all were short
@given(pairs=PAIRS)
@example(pairs=[(1, 5), (2, 7), (3, 8)])  # contiguous at the source alone
@example(pairs=[(1, 5), (3, 6), (4, 7)])  # contiguous at the destination alone
@example(pairs=[(3, 3), (2, 2), (1, 1)])  # descending
@example(pairs=[(1, 1), (1, 2), (1, 3)])  # one page again and again
@example(pairs=[(1 << 40, 7), ((1 << 40) + 1, 8)])
def test_runs_give_the_lists_back_and_are_maximal(few: int, pairs: list[tuple[int, int]]) -> None:
    runs = runs_of(pairs, few)
    assert expanded(runs) == pairs
    assert (runs.pages >= 1).all()
    ends = zip(runs.source + runs.pages, runs.destination + runs.pages, strict=True)
    starts = zip(runs.source[1:], runs.destination[1:], strict=True)
    assert not any(end == start for end, start in zip(ends, starts, strict=False))


@pytest.fixture
def pool() -> Pool:
    """Return a pool of 17 pages of 4 tokens: main, an optional draft, and one that is not paged by tokens."""
    state = [entry for entry in layers(1, component="mamba") if entry.role == "k"]
    timeless = [type(one)(component="mamba", role="conv", layer=0, base=0, pages=1, page_bytes=8) for one in state]
    components = [
        Component(name="main", space="main", pages=17),
        Component(name="draft", space="main", pages=17),
        Component(name="mamba", space="mamba", pages=17, kind="state"),
    ]
    entries = [*layers(2), *layers(1, component="draft"), *timeless]
    return TransferHarness().pool("prefill", entries, components=components)


def ranges(pool: Pool, *lists: PageList, ids: list[list[int]], inside: bool = True) -> tuple[PageRange, ...]:
    frames = [np.array(one, np.int64) for one in ids]
    return page_ranges(lists, frames, pool.manifest, may_end_inside=inside)


def of(component: str, pages: int, *, first_page: int = 0, tokens: int | None = None) -> PageList:
    return PageList(component=component, pages=pages, first_page=first_page, tokens=tokens)


def test_lists_with_pages_leaves_out_the_empty_and_those_whose_pages_another_has(pool: Pool) -> None:
    main, mamba, draft = found = ranges(pool, PageList(pages=2), PageList(component="mamba", pages=0), ids=[[9, 4], []])
    assert (draft.component, draft.ids.tolist(), draft.shared) == ("draft", [9, 4], True)
    assert (main.first_page, mamba.first_page) == (0, None), "a state's or window's place is unknown if it does not say"
    assert not len(mamba.ids)
    assert lists_with_pages(found) == [main]
    main, mamba, _ = found = ranges(pool, of("main", 2), of("mamba", 1), ids=[[9, 4], [1]])
    assert lists_with_pages(found) == [main, mamba]


def test_several_lists_of_a_component_are_one_with_gaps(pool: Pool) -> None:
    main, _, draft = ranges(
        pool,
        of("main", 2, first_page=1, tokens=8),
        of("mamba", 1),
        of("main", 1, first_page=3),
        of("main", 2, first_page=7, tokens=5),
        ids=[[9, 4], [1], [2], [3, 6]],
    )
    assert main.ids.tolist() == [9, 4, 2, 3, 6]
    assert main.logical_pages == (range(1, 3), range(3, 4), range(7, 9))
    assert (main.first_page, main.end_page, main.end_token, main.held_tokens(4)) == (1, 9, 33, 17)
    assert [(one, ids.tolist()) for one, ids in split(main, 4)] == [
        (of("main", 2, first_page=1), [9, 4]),
        (of("main", 1, first_page=3), [2]),
        (of("main", 2, first_page=7, tokens=5), [3, 6]),
    ]
    assert (draft.logical_pages, draft.ids.tolist(), draft.implied) == (main.logical_pages, [9, 4, 2, 3, 6], True)


def test_an_empty_list_after_a_prefix_is_in_place_only_where_pages_are_received(pool: Pool) -> None:
    lists, ids = [of("main", 0, first_page=3), of("mamba", 1)], [np.array([], np.int64), np.array([1])]
    main, _, draft = page_ranges(lists, ids, pool.manifest, may_end_inside=True, may_be_in_place=True)
    assert [(one.first_page, one.end_page) for one in (main, draft)] == [(3, 3)] * 2
    for first_page, may_be_in_place in ((3, False), (0, True)):
        lists[0] = of("main", 0, first_page=first_page)
        with pytest.raises(errors.EmptyPagesError) as refused:
            page_ranges(lists, ids, pool.manifest, may_end_inside=True, may_be_in_place=may_be_in_place)
        assert refused.value.field == "lists[0].pages"


@pytest.mark.parametrize(
    ("error", "field", "second", "ids"),
    [
        (errors.UnknownComponentError, "lists[1].component", of("swa", 1), [1]),
        (errors.PageOverlapError, "lists[1].first_page", of("main", 1), [2]),
        (errors.InvalidFieldError, "lists[2]", of("mamba", 1), [1]),
        (errors.EmptyPagesError, "lists[1].pages", of("draft", 0), []),
        (errors.InvalidFieldError, "lists[1].none", PageList(component="draft", pages=0, none=True), []),
        (errors.InvalidFieldError, "lists[1].pages", PageList(component="mamba", pages=1, none=True), [1]),
        (errors.PageOutOfRangeError, "lists[1].pages", of("mamba", 1), [0]),
        (errors.PageOutOfRangeError, "lists[1].pages", of("mamba", 1), [17]),
        (errors.InvalidFieldError, "lists[1].tokens", of("mamba", 1, tokens=1), [1]),
        (errors.LengthMismatchError, "lists[1].tokens", of("draft", 2, tokens=4), [1, 2]),
        (errors.LengthMismatchError, "lists[1].tokens", of("draft", 2, tokens=9), [1, 2]),
        (errors.PageGapError, "lists[1].tokens", of("draft", 2, tokens=7), [1, 2]),
    ],
)
def test_refused(pool: Pool, error: type[errors.KvferryError], field: str, second: PageList, ids: list[int]) -> None:
    with pytest.raises(errors.UnknownComponentError, match="no list for component 'mamba'"):  # draft alone is optional
        ranges(pool, of("main", 1), ids=[[1]])
    with pytest.raises(errors.PageGapError, match="more pages follow"):  # inside a page only the last list ends
        ranges(pool, of("main", 2, tokens=7), of("main", 1, first_page=7), of("mamba", 1), ids=[[9, 4], [2], [1]])
    twice = field == "lists[2]"
    lists = [of("main", 1), second, *([] if second.component == "mamba" and not twice else [of("mamba", 1)])]
    frames = [[1], ids, [1]][: len(lists)]
    with pytest.raises(error) as refused:
        ranges(pool, *lists, ids=frames, inside=False)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("named", "list_number"),
    [
        ([("main", 0, [9, 4]), ("draft", 0, [5, 4])], 1),
        ([("main", 0, [9, 9]), ("draft", 0, [5, 4])], 0),
        ([("main", 0, [9, 4]), ("main", 5, [7, 4]), ("draft", 0, [5])], 0),
        ([("mamba", 0, [9]), ("main", 0, [9, 4]), ("draft", 0, [5, 5])], 2),
    ],
    ids=["two lists", "one list", "two lists of one component", "a later list"],
)
def test_a_page_named_twice_is_refused_with_the_list_that_repeats_it(
    pool: Pool, named: list[tuple[str, int, list[int]]], list_number: int
) -> None:
    everything = [*named, *([] if named[0][0] == "mamba" else [("mamba", 0, [9])])]
    lists = [of(component, len(ids), first_page=first) for component, first, ids in everything]
    found = ranges(pool, *lists, ids=[ids for _, _, ids in everything])
    with pytest.raises(errors.DuplicatePageError) as refused:
        check_apart(lists_with_pages(found), pool.manifest)
    assert refused.value.field == f"lists[{list_number}].pages"


# -- lists of windows


def window_list(pages: range, salt: int, *, plain: bool = False) -> PageRange:
    """Return a list of a window's pages; each has an id of its own, as no page of the other side has."""
    return PageRange("swa", None if plain else pages.start, np.array(pages) + salt, None, "lists[0]", "window")


@given(
    st.integers(5, 200), st.integers(-4, 4), st.integers(0, 60), st.integers(-4, 4), st.integers(1, 40),
    st.sampled_from([1, 2, 3, 4, 7, 8]),
)  # fmt: skip
@example(639, 1, 0, 0, 256, 128)  # both start and length differ
@example(512, 1, 0, 0, 256, 128)  # one page more at the end
@example(8, 4, 0, 0, 4, 4)  # equal lengths, one page shifted
def test_only_the_same_logical_page_is_paired(
    seq_len: int, longer: int, prefix: int, prefix_more: int, window: int, page_size: int
) -> None:
    source_seq = max(seq_len + longer, 1)
    ours = range(*window_of(min(max(prefix + prefix_more, 0), source_seq - 1), source_seq, window, page_size))
    theirs = range(*window_of(min(prefix, seq_len - 1), seq_len, window, page_size))
    source, destination = window_list(ours, 1000), window_list(theirs, 2000)
    if not set(theirs) <= set(ours):
        with pytest.raises(errors.WindowMismatchError):
            state_span(source, destination, "0af1")
        return
    span = state_span(source, destination, "0af1")
    assert source.ids[span.source_start :][: span.pages].tolist() == [page + 1000 for page in theirs]
    assert destination.ids[span.destination_start :][: span.pages].tolist() == destination.ids.tolist()
    assert (span.skipped_source_pages, span.trimmed) == (len(ours) - len(theirs), False)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([(True, False), (False, True), (True, True)]))
def test_plain_lists_are_cut_to_the_shorter_head(ours: int, theirs: int, plain: tuple[bool, bool]) -> None:
    source, destination = (
        window_list(range(count), 1000, plain=one) for count, one in zip((ours, theirs), plain, strict=True)
    )
    assert state_span(source, destination, "0af1") == Span(0, 0, min(ours, theirs), 0, ours != theirs)
