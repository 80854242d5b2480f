"""Conversion between token slots and pages, for engines that track the slot of each token instead of pages.

The slot of a token is ``page * page_size + offset``, as in SGLang's request-to-token map and vLLM's slot mapping. Token
p of a request is at offset ``p % page_size`` of logical page ``p // page_size`` in every engine whose pages hold one
request's tokens in order; so a request's slots determine its pages, which are always transferred whole. A list that
begins inside a page needs ``position``, or the page's earlier tokens would be taken for another request's. Independent
of pools: the daemon refuses ids that are too high.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvferry.clients.arguments import page_ids, whole
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import DuplicatePageError, InvalidFieldError, LengthMismatchError, PageOutOfRangeError


def pages_from_slots(slots: npt.ArrayLike, page_size: int, *, position: int = 0) -> PageIds:
    """Return the pages that hold consecutive tokens of one request, in logical order, each once.

    The first of them is the request's logical page ``position // page_size``, the ``first_page`` of a page list. The
    tokens may end inside a page.

    Args:
        slots: ``(n,)`` integers, the slot of each token in sequence order.
        page_size: tokens of a page.
        position: position in the request of the first slot's token.

    Returns:
        ``(pages,)`` int64; empty without slots.

    Raises:
        InvalidFieldError: the list starts inside a page but ``position`` does not, or the reverse; or a page's tokens
            are not at consecutive slots; names the first such token.
        PageOutOfRangeError: a slot in the padding page, or a negative one.
        DuplicatePageError: a page appears again after another one.
    """
    page_size, position = whole(page_size, "page_size", least=1), whole(position, "position")
    array = page_ids(slots, "slots")
    if not len(array):
        return array
    offset = position % page_size
    if int(array[0]) % page_size != offset:
        raise InvalidFieldError(
            f"slot {array[0]} is at offset {array[0] % page_size} in its page of {page_size}, token {position} of a "
            f"request at offset {offset}: begin with a page's first token, or give the first token's position",
            field="slots",
        )
    starts = np.concatenate(([0], np.arange(page_size - offset, len(array), page_size)))
    ids = array[starts] // page_size
    wanted = _slots(ids, page_size, offset, len(array))
    if not np.array_equal(array, wanted):
        at = int(np.flatnonzero(array != wanted)[0])
        right = f"slot {wanted[at]}, next to the one before" if (position + at) % page_size else "the first of a page"
        raise InvalidFieldError(f"token {position + at} is at slot {array[at]}, not at {right}", field="slots")
    _check_ids(ids, position + starts, "slots")
    return ids


def slots_from_pages(pages: npt.ArrayLike, page_size: int, tokens: int, *, position: int = 0) -> PageIds:
    """Return the slots of consecutive tokens of a request in these pages: the reverse, for example after a restore.

    Args:
        pages: ``(n,)`` integers in logical order; the first is logical page ``position // page_size``. There may be
            more than the tokens need, as for a request that goes on.
        page_size: tokens of a page.
        tokens: how many.
        position: position in the request of the first token.

    Returns:
        ``(tokens,)`` int64.

    Raises:
        InvalidFieldError: a negative number of tokens, or not a list of pages.
        LengthMismatchError: the pages do not hold that many tokens.
        PageOutOfRangeError: the padding page, or a negative id.
        DuplicatePageError: a page is given twice.
    """
    page_size, position = whole(page_size, "page_size", least=1), whole(position, "position")
    tokens = whole(tokens, "tokens")
    ids = page_ids(pages, "pages")
    offset = position % page_size
    if offset + tokens > len(ids) * page_size:
        raise LengthMismatchError(
            f"tokens {position}..{position + tokens - 1} do not fit in {len(ids)} pages of {page_size}, the first of "
            f"which begins with token {position - offset}",
            field="tokens",
        )
    _check_ids(ids, position - offset + np.arange(len(ids)) * page_size, "pages")
    return _slots(ids, page_size, offset, tokens)


def _slots(ids: PageIds, page_size: int, offset: int, tokens: int) -> PageIds:
    """Return the slots of ``tokens`` tokens, from ``offset`` in the first page on."""
    every = ids[:, None] * page_size + np.arange(page_size)
    return every.ravel()[offset : offset + tokens]


def _check_ids(ids: PageIds, first_tokens: PageIds, field: str) -> None:
    """Check that no page is the padding page or appears twice; ``first_tokens``: the first in each, for errors."""
    if not len(ids):
        return
    if int(ids.min()) < 1:
        at = int(np.flatnonzero(ids < 1)[0])
        raise PageOutOfRangeError(f"token {first_tokens[at]} is in page {ids[at]}; pages begin at 1", field=field)
    order = np.argsort(ids, kind="stable")
    again = order[1:][np.diff(ids[order]) == 0]
    if len(again):
        at = int(again.min())
        raise DuplicatePageError(f"token {first_tokens[at]} is in page {ids[at]} a second time", field=field)
