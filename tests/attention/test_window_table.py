"""The full-to-window page map: what it hands out is what was bound, whatever came and went before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.attention.window_table import SwaMap
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    DuplicatePageError,
    KvferryError,
    LengthMismatchError,
    PageOutOfRangeError,
    WindowMismatchError,
)

FULL_PAGES, WINDOW_PAGES = 12, 6


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int64)


def bound(*pairs: tuple[int, int]) -> SwaMap:
    """Return a map with these (full, window) pairs."""
    made = SwaMap(FULL_PAGES, WINDOW_PAGES)
    made.bind(ids(*(full for full, _ in pairs)), ids(*(window for _, window in pairs)))
    return made


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
