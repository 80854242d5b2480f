"""The pages of a window, and the full-to-window page map: what it hands out is what was bound, whatever came before."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvferry.attention.state_windows import window_of
from kvferry.attention.window_table import SwaMap
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    DuplicatePageError,
    InvalidFieldError,
    KvferryError,
    LengthMismatchError,
    PageOutOfRangeError,
    WindowMismatchError,
)
from tests.kit.devices import DEVICE

FULL_PAGES, WINDOW_PAGES = 12, 6


@given(st.integers(0, 200), st.integers(1, 80), st.integers(1, 40), st.sampled_from([1, 2, 3, 4, 7, 8, 16]))
def test_a_window_is_the_pages_of_its_tokens(prefix: int, beyond: int, window: int, page_size: int) -> None:
    seq_len = prefix + beyond
    found = window_of(prefix, seq_len, window, page_size)
    pages = {position // page_size for position in range(max(prefix, seq_len - window), seq_len)}
    assert (list(range(*found)), found.pages) == (sorted(pages), len(pages))


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
    assert window_of(256, 256, 256, 128) == (2, 2), "an empty one does"
    with pytest.raises(InvalidFieldError) as caught:
        window_of(*given_)
    assert caught.value.field == field


def ids(*pages: int) -> PageIds:
    return np.array(pages, np.int64)


@pytest.mark.parametrize(
    ("full_ids", "window_ids", "error", "field"),
    [
        ((2,), (2, 3), LengthMismatchError, "window_ids"),
        ((2, FULL_PAGES), (2, 3), PageOutOfRangeError, "full_ids"),
        ((2, 3), (2, WINDOW_PAGES), PageOutOfRangeError, "window_ids"),
        ((2, 2), (2, 3), DuplicatePageError, "full_ids"),
        ((2, 3), (2, 2), DuplicatePageError, "window_ids"),
        ((2, 1), (2, 3), DuplicatePageError, "full_ids"),
        ((2, 3), (2, 1), DuplicatePageError, "window_ids"),
        ((1, 2), None, WindowMismatchError, "full_ids"),
        ((1, 1), None, DuplicatePageError, "full_ids"),
        ((1, 0), None, PageOutOfRangeError, "full_ids"),
    ],
)
def test_what_cannot_be_bound_or_released_changes_nothing(
    full_ids: tuple[int, ...], window_ids: tuple[int, ...] | None, error: type[KvferryError], field: str
) -> None:
    swa = SwaMap(FULL_PAGES, WINDOW_PAGES)
    swa.bind(ids(1), ids(1))
    with pytest.raises(error) as caught:
        swa.release(ids(*full_ids)) if window_ids is None else swa.bind(ids(*full_ids), ids(*window_ids))
    assert caught.value.field == field
    assert swa.pages.tolist() == [0, 1] + [0] * (FULL_PAGES - 2)
    swa.check()
    with pytest.raises(ValueError, match="read-only"):
        swa.pages[1] = 2


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
TestBindings.settings = DEVICE.examples(60, stateful_step_count=15)
