"""Token slots and pages: the way there and back, what is refused, and retraction against a copy token by token."""

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


@given(requests())
def test_pages_for_the_tokens_to_come_change_nothing(one: Request) -> None:
    spare = [*one.pages, POOL_PAGES]
    assert slots_from_pages(spare, one.page_size, one.tokens, position=one.position).tolist() == one.slots


def test_no_tokens_are_in_no_pages() -> None:
    assert pages_from_slots([], 4).tolist() == []
    assert pages_from_slots([], 4, position=3).tolist() == []
    assert slots_from_pages([], 4, 0).tolist() == []


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


REFUSED_SLOTS = {
    "starts inside a page": ([5, 6, 7, 8], {}, InvalidFieldError, "slot 5 is at offset 1 in its page of 4.*position"),
    "starts on a page, not the request": (
        [4, 5],
        {"position": 2},
        InvalidFieldError,
        "token 2 of a request at offset 2",
    ),
    "a gap": ([4, 5, 7], {}, InvalidFieldError, "token 2 is at slot 7, not at slot 6"),
    "backwards": ([4, 6, 5], {}, InvalidFieldError, "token 1 is at slot 6, not at slot 5"),
    "another page's slot": ([4, 5, 10, 11], {}, InvalidFieldError, "token 2 is at slot 10, not at slot 6"),
    "the next page from within": ([6, 7, 9], {"position": 10}, InvalidFieldError, "token 12 is at slot 9.*first of a"),
    "the padding page": ([4, 5, 6, 7, 0], {}, PageOutOfRangeError, "token 4 is in page 0"),
    "negative": ([-4, -3], {}, PageOutOfRangeError, "token 0 is in page -1"),
    "a page again": ([6, 7, 8, 9, 10, 11, 4], {"position": 2}, DuplicatePageError, "token 8 is in page 1 a second"),
    "floats": ([4.0], {}, InvalidFieldError, "no list of integers"),
    "two dimensions": ([[4]], {}, InvalidFieldError, "list of integers"),
    "a negative token": ([4], {"position": -4}, InvalidFieldError, "-4; give 0 or more"),
}


@pytest.mark.parametrize(("slots", "more", "kind", "text"), REFUSED_SLOTS.values(), ids=REFUSED_SLOTS)
def test_slots_that_are_not_a_requests_are_refused(
    slots: npt.ArrayLike, more: dict[str, int], kind: type[KvferryError], text: str
) -> None:
    with pytest.raises(kind, match=text) as refused:
        pages_from_slots(slots, 4, **more)
    assert refused.value.field in {"slots", "position"}


REFUSED_PAGES = {
    "too few": ([3, 4], 9, {}, LengthMismatchError, "tokens 0..8 do not fit in 2 pages of 4"),
    "too few from inside a page": ([3], 3, {"position": 6}, LengthMismatchError, "tokens 6..8 do not fit in 1 pages"),
    "none": ([], 1, {}, LengthMismatchError, "0 pages"),
    "the padding page": ([3, 0], 8, {}, PageOutOfRangeError, "token 4 is in page 0"),
    "negative": ([-3], 2, {"position": 5}, PageOutOfRangeError, "token 4 is in page -3"),
    "twice": ([3, 4, 3], 12, {}, DuplicatePageError, "token 8 is in page 3 a second time"),
    "a negative count": ([3], -1, {}, InvalidFieldError, "-1; give 0 or more"),
    "no list": (3, 1, {}, InvalidFieldError, "no list of integers"),
}


@pytest.mark.parametrize(("pages", "tokens", "more", "kind", "text"), REFUSED_PAGES.values(), ids=REFUSED_PAGES)
def test_pages_that_are_not_a_requests_are_refused(
    pages: npt.ArrayLike, tokens: int, more: dict[str, int], kind: type[KvferryError], text: str
) -> None:
    with pytest.raises(kind, match=text) as refused:
        slots_from_pages(pages, 4, tokens, **more)
    assert refused.value.field in {"pages", "tokens"}


@pytest.mark.parametrize("page_size", [0, -1])
def test_a_page_has_tokens(page_size: int) -> None:
    with pytest.raises(InvalidFieldError, match=f"{page_size}; give 1 or more"):
        pages_from_slots([4], page_size)
    with pytest.raises(InvalidFieldError, match=f"{page_size}; give 1 or more"):
        slots_from_pages([4], page_size, 1)


# -- retraction


@given(requests(), SEEDS, st.integers(1, 5))
def test_whole_pages_carry_every_token_of_a_retraction(one: Request, seed: int, width: int) -> None:
    """Tokens that start and end inside pages: what page copies restore is what a copy token by token does."""
    random = np.random.default_rng(seed)
    pool = random.integers(0, 256, (POOL_PAGES, one.page_size, width), np.uint8)
    token_copy = [pool.reshape(-1, width)[slot].tobytes() for slot in one.slots]

    offloaded = pool[pages_from_slots(one.slots, one.page_size, position=one.position)].copy()
    pool[1:] = random.integers(0, 256, pool[1:].shape, np.uint8)  # others have used them since
    others = pool.copy()
    ids = np.array(random_pages(seed, len(one.pages)))
    pool[ids] = offloaded

    slots = slots_from_pages(ids, one.page_size, one.tokens, position=one.position)
    assert [pool.reshape(-1, width)[slot].tobytes() for slot in slots] == token_copy
    untouched = np.setdiff1d(np.arange(POOL_PAGES), ids)
    assert np.array_equal(pool[untouched], others[untouched])
    assert pages_from_slots(slots, one.page_size, position=one.position).tolist() == ids.tolist()
