"""The full-to-window page map: what it hands out is what was bound, whatever came and went before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.attention.state_windows import PageWindow, StateIds, window_of
from kvferry.attention.window_table import SwaMap, window_pages
from kvferry.protocol.errors import (
    DuplicatePageError,
    KvferryError,
    LengthMismatchError,
    PageOutOfRangeError,
    WindowMismatchError,
)

FULL_PAGES, WINDOW_PAGES = 12, 6


def ids(*pages: int) -> StateIds:
    return np.array(pages, np.int64)


def bound(*pairs: tuple[int, int]) -> SwaMap:
    """Return a map with these (full, window) pairs."""
    made = SwaMap(FULL_PAGES, WINDOW_PAGES)
    made.bind(ids(*(full for full, _ in pairs)), ids(*(window for _, window in pairs)))
    return made


def test_a_request_as_it_grows_past_its_window() -> None:
    swa = bound((9, 2), (4, 5), (7, 1))
    assert window_pages(swa.pages, ids(9, 4, 7), 0, PageWindow(0, 3)).tolist() == [2, 5, 1]
    assert swa.release(ids(9)).tolist() == [2]
    swa.bind(ids(3), ids(2))  # the same window page, now of the request's fourth page
    request = ids(9, 4, 7, 3)
    assert window_pages(swa.pages, request, 0, PageWindow(1, 4)).tolist() == [5, 1, 2]
    with pytest.raises(WindowMismatchError, match="full page 9, at position 0 of 4"):
        window_pages(swa.pages, request, 0, PageWindow(0, 4))


@given(st.data(), st.integers(1, 60), st.integers(1, 30), st.sampled_from([1, 2, 4, 8]))
def test_a_window_is_translated_page_by_page(data: st.DataObject, seq_len: int, window: int, page_size: int) -> None:
    """The oracle is a dict from logical page to window page."""
    prefix = data.draw(st.integers(0, seq_len - 1))
    first_page = data.draw(st.integers(0, prefix // page_size))
    wanted = window_of(prefix, seq_len, window, page_size)
    full_ids = np.array(data.draw(st.permutations(range(1, 80))), np.int64)[: wanted.end_page - first_page]
    swa = SwaMap(80, 80)
    held = range(*wanted)
    chosen = data.draw(st.permutations(range(1, 80)))[: len(held)]
    swa.bind(full_ids[wanted.first_page - first_page :], np.array(chosen, np.int64))
    expected = dict(zip(held, chosen, strict=True))
    found = window_pages(swa.pages, full_ids, first_page, wanted)
    assert found.tolist() == [expected[page] for page in held]
    assert not np.shares_memory(found, swa.pages)


@pytest.mark.parametrize("window", [PageWindow(1, 3), PageWindow(4, 6), PageWindow(0, 9)])
def test_a_window_outside_the_list(window: PageWindow) -> None:
    with pytest.raises(WindowMismatchError, match=rf"window is pages {window}, the list has 2\.\.4") as caught:
        window_pages(bound((1, 1), (2, 2), (3, 3)).pages, ids(1, 2, 3), 2, window)
    assert caught.value.field == "full_ids"


@pytest.mark.parametrize("page", [0, -1, FULL_PAGES, 1 << 40])
def test_a_page_that_the_map_does_not_have(page: int) -> None:
    swa = bound((1, 1))
    with pytest.raises(PageOutOfRangeError):
        window_pages(swa.pages, ids(1, page), 0, PageWindow(0, 2))
    assert window_pages(swa.pages, ids(1, page), 0, PageWindow(0, 1)).tolist() == [1], "only the window's matter"


def test_no_window_at_all() -> None:
    found = window_pages(bound().pages, ids(3, 4), 0, PageWindow(2, 2))
    assert (found.tolist(), found.dtype) == ([], np.dtype(np.int64))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_an_engines_own_map(dtype: type[np.int32 | np.int64]) -> None:
    found = window_pages(np.array([0, 3, 0, 4], dtype), ids(3, 1), 5, PageWindow(5, 7))
    assert (found.tolist(), found.dtype) == ([4, 3], np.dtype(np.int64))


@pytest.mark.parametrize("lost", [0, -1])
def test_an_engines_map_without_the_page(lost: int) -> None:
    with pytest.raises(WindowMismatchError):
        window_pages(np.array([0, 3, lost, 4]), ids(3, 2), 0, PageWindow(0, 2))


def test_the_map_is_to_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        bound((1, 1)).pages[1] = 2


@pytest.mark.parametrize(
    ("full_ids", "window_ids", "error", "field"),
    [
        ((2,), (2, 3), LengthMismatchError, "window_ids"),
        ((0,), (2,), PageOutOfRangeError, "full_ids"),
        ((FULL_PAGES,), (2,), PageOutOfRangeError, "full_ids"),
        ((2,), (0,), PageOutOfRangeError, "window_ids"),
        ((2, 3), (2, WINDOW_PAGES), PageOutOfRangeError, "window_ids"),
        ((2, 2), (2, 3), DuplicatePageError, "full_ids"),
        ((2, 3), (2, 2), DuplicatePageError, "window_ids"),
        ((2, 1), (2, 3), DuplicatePageError, "full_ids"),
        ((2, 3), (2, 1), DuplicatePageError, "window_ids"),
    ],
)
def test_what_cannot_be_bound_changes_nothing(
    full_ids: tuple[int, ...], window_ids: tuple[int, ...], error: type[KvferryError], field: str
) -> None:
    swa = bound((1, 1))
    before = swa.pages.copy()
    with pytest.raises(error) as caught:
        swa.bind(ids(*full_ids), ids(*window_ids))
    assert caught.value.field == field
    assert swa.pages.tolist() == before.tolist()
    swa.check()


@pytest.mark.parametrize(
    ("full_ids", "error"),
    [
        ((1, 2), WindowMismatchError),
        ((1, 1), DuplicatePageError),
        ((1, 0), PageOutOfRangeError),
        ((1, FULL_PAGES), PageOutOfRangeError),
    ],
)
def test_what_cannot_be_released_changes_nothing(full_ids: tuple[int, ...], error: type[KvferryError]) -> None:
    swa = bound((1, 4))
    with pytest.raises(error):
        swa.release(ids(*full_ids))
    assert swa.release(ids(1)).tolist() == [4]
    assert repr(swa) == "<SwaMap 0 of 11 full pages bound>"


class Bindings(RuleBasedStateMachine):
    """A map beside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.swa = SwaMap(FULL_PAGES, WINDOW_PAGES)
        self.model: dict[int, int] = {}

    @rule(data=st.data())
    def bind(self, data: st.DataObject) -> None:
        """Free pages may be bound."""
        full = sorted(set(range(1, FULL_PAGES)) - self.model.keys())
        window = sorted(set(range(1, WINDOW_PAGES)) - set(self.model.values()))
        count = data.draw(st.integers(0, min(len(full), len(window))))
        pairs = list(
            zip(data.draw(st.permutations(full))[:count], data.draw(st.permutations(window))[:count], strict=True)
        )
        self.swa.bind(ids(*(one for one, _ in pairs)), ids(*(one for _, one in pairs)))
        self.model.update(pairs)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Bound pages come back in the order asked for."""
        gone = data.draw(st.lists(st.sampled_from(sorted(self.model)), unique=True))
        assert self.swa.release(ids(*gone)).tolist() == [self.model.pop(page) for page in gone]

    @rule(full=st.integers(-1, FULL_PAGES), window=st.integers(-1, WINDOW_PAGES))
    def bind_anything(self, full: int, window: int) -> None:
        """Only a free page of either pool may be bound."""
        fits = 0 < full < FULL_PAGES and 0 < window < WINDOW_PAGES
        free = full not in self.model and window not in self.model.values()
        if fits and free:
            self.swa.bind(ids(full), ids(window))
            self.model[full] = window
        else:
            with pytest.raises((DuplicatePageError, PageOutOfRangeError)):
                self.swa.bind(ids(full), ids(window))

    @invariant()
    def agrees(self) -> None:
        """Check the map against the dict."""
        self.swa.check()
        assert {full: self.swa.pages[full] for full in np.flatnonzero(self.swa.pages)} == self.model


TestBindings = Bindings.TestCase
