"""Token slots and pages: the way there and back, token by token, and what is refused."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients.slots import pages_from_slots, slots_from_pages
from kvferry.protocol.errors import (
    DuplicatePageError,
    InvalidFieldError,
    KvferryError,
    LengthMismatchError,
    PageOutOfRangeError,
)

POOL_PAGES = 24


class Request(NamedTuple):
    """Some consecutive tokens of a request, and where they lie: as many pages as they need."""

    page_size: int
    pages: list[int]
    position: int
    tokens: int

    @property
    def slots(self) -> list[int]:
        """Return each token's slot, computed token by token."""
        first = self.position // self.page_size
        return [
            self.pages[at // self.page_size - first] * self.page_size + at % self.page_size
            for at in range(self.position, self.position + self.tokens)
        ]


SEEDS = st.integers(0, 1 << 30)


def random_pages(seed: int, count: int) -> list[int]:
    """Return different pages of the pool."""
    ids: list[int] = np.random.default_rng(seed).permutation(np.arange(1, POOL_PAGES))[:count].tolist()
    return ids


@st.composite
def requests(draw: st.DrawFn) -> Request:
    page_size = draw(st.integers(1, 8))
    position = draw(st.integers(0, 5 * page_size))
    tokens = draw(st.integers(1, 7 * page_size))
    count = -(-(position % page_size + tokens) // page_size)
    return Request(page_size, random_pages(draw(SEEDS), count), position, tokens)


# -- there and back


@given(requests())
def test_slots_give_their_pages_and_pages_their_slots(one: Request) -> None:
    found = pages_from_slots(one.slots, one.page_size, position=one.position)
    assert found.tolist() == one.pages
    back = slots_from_pages(found, one.page_size, one.tokens, position=one.position)
    assert back.tolist() == one.slots
    assert found.dtype == back.dtype == np.int64
    spare = [*one.pages, POOL_PAGES]  # for the tokens to come: they change nothing
    assert slots_from_pages(spare, one.page_size, one.tokens, position=one.position).tolist() == one.slots


# -- what is refused


@given(requests(), st.data())
def test_any_other_slot_is_refused_or_in_another_page(one: Request, data: st.DataObject) -> None:
    """What is accepted is a request's: every token lies where its page has it."""
    slots = one.slots
    at = data.draw(st.integers(0, len(slots) - 1))
    slots[at] = data.draw(st.integers(-5, POOL_PAGES * one.page_size).filter(lambda slot: slot != slots[at]))
    try:
        found = pages_from_slots(slots, one.page_size, position=one.position).tolist()
    except (InvalidFieldError, PageOutOfRangeError, DuplicatePageError):
        return
    assert one._replace(pages=found).slots == slots
    assert len(set(found)) == len(found)
    assert min(found) >= 1


@given(requests(), st.integers(0, 40))
def test_another_position_is_accepted_only_a_page_away(one: Request, position: int) -> None:
    if position % one.page_size == one.position % one.page_size:
        assert pages_from_slots(one.slots, one.page_size, position=position).tolist() == one.pages
    else:
        with pytest.raises(InvalidFieldError, match=f"token {position} of a request"):
            pages_from_slots(one.slots, one.page_size, position=position)


Refusal = tuple[npt.ArrayLike, dict[str, int], type[KvferryError], str]
REFUSED_SLOTS: dict[str, Refusal] = {
    "starts inside a page": ([5, 6], {}, InvalidFieldError, "slot 5 is at offset 1 in its page of 4.*position"),
    "starts on a page, not the request": (
        [4, 5],
        {"position": 2},
        InvalidFieldError,
        "token 2 of a request at offset 2",
    ),
    "a gap": ([4, 5, 7], {}, InvalidFieldError, "token 2 is at slot 7, not at slot 6"),
    "the next page from within": ([6, 7, 9], {"position": 10}, InvalidFieldError, "token 12 is at slot 9.*first of a"),
    "the padding page": ([4, 5, 6, 7, 0], {}, PageOutOfRangeError, "token 4 is in page 0"),
    "negative": ([-4, -3], {}, PageOutOfRangeError, "token 0 is in page -1"),
    "a page again": ([6, 7, 8, 9, 10, 11, 4], {"position": 2}, DuplicatePageError, "token 8 is in page 1 a second"),
    "floats": ([4.0], {}, InvalidFieldError, "no list of integers"),
    "a negative token": ([4], {"position": -4}, InvalidFieldError, "-4; give 0 or more"),
    "no page size": ([4], {"page_size": 0}, InvalidFieldError, "0; give 1 or more"),
}
REFUSED_PAGES: dict[str, Refusal] = {
    "too few": ([3, 4], {"tokens": 9}, LengthMismatchError, "tokens 0..8 do not fit in 2 pages of 4"),
    "too few from inside a page": (
        [3],
        {"tokens": 3, "position": 6},
        LengthMismatchError,
        "tokens 6..8 do not fit in 1",
    ),
    "the padding page": ([3, 0], {"tokens": 8}, PageOutOfRangeError, "token 4 is in page 0"),
    "twice": ([3, 4, 3], {"tokens": 12}, DuplicatePageError, "token 8 is in page 3 a second time"),
    "a negative count": ([3], {"tokens": -1}, InvalidFieldError, "-1; give 0 or more"),
    "no page size of pages": ([4], {"tokens": 1, "page_size": -1}, InvalidFieldError, "-1; give 1 or more"),
}


@pytest.mark.parametrize(("ids", "more", "kind", "text"), (REFUSED_SLOTS | REFUSED_PAGES).values())
def test_what_is_no_requests_is_refused(
    ids: npt.ArrayLike, more: dict[str, int], kind: type[KvferryError], text: str
) -> None:
    call = slots_from_pages if "tokens" in more else pages_from_slots
    with pytest.raises(kind, match=text) as refused:
        call(ids, **{"page_size": 4, **more})
    assert refused.value.field in {"slots", "pages", "tokens", "position", "page_size"}
