"""The page lists of a SEND or RECEIVE, with their ids, checked against the pool they are of."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.pools.page_checks import check_range
from kvferry.pools.pool import Pool
from kvferry.pools.runs import PageIds
from kvferry.protocol.base import PageList
from kvferry.protocol.errors import InvalidFieldError, LengthMismatchError, PageGapError, UnknownComponentError
from kvferry.protocol.manifests import Entry


class PageRange(msgspec.Struct, frozen=True):
    """Logical pages ``first_page`` to ``end_page`` of one component, and the pages that hold them.

    ``end_token`` is the position after the last token, where the client gave it; ``field`` names the list in errors.
    """

    component: str
    first_page: int
    ids: PageIds
    end_token: int | None
    field: str

    @property
    def end_page(self) -> int:
        """Return the logical page after the last one."""
        return self.first_page + len(self.ids)


def page_ranges(
    lists: Sequence[PageList], ids: Sequence[PageIds], pool: Pool, *, may_end_inside: bool
) -> tuple[PageRange, ...]:
    """Return the lists with their ids.

    Args:
        lists: as the message names them.
        ids: the id frames, in the same order.
        pool: the sender's own pool.
        may_end_inside: whether the last page may be filled in part: not so in a chunk that others follow.

    Raises:
        UnknownComponentError: a component that the pool lacks, has twice here, or needs and has not here.
        EmptyPagesError, PageOutOfRangeError, LengthMismatchError, PageGapError: a list at fault.
    """
    ranges = tuple(
        _page_range(one, its_ids, pool, f"lists[{index}]", may_end_inside=may_end_inside)
        for index, (one, its_ids) in enumerate(zip(lists, ids, strict=True))
    )
    named = [one.component for one in ranges]
    if len(set(named)) < len(named):
        raise UnknownComponentError("a component has two lists", field="lists")
    missing = {entry.component for entry in pool.manifest.entries} - set(named)
    required = sorted(missing.difference(pool.manifest.optional_components))
    if required:
        raise UnknownComponentError(f"no list for component {required[0]!r}", field="lists")
    return ranges


def entries_of(pool: Pool, component: str) -> tuple[Entry, ...]:
    """Return the pool's entries of one component, in manifest order."""
    return tuple(entry for entry in pool.manifest.entries if entry.component == component)


def _page_range(one: PageList, ids: PageIds, pool: Pool, field: str, *, may_end_inside: bool) -> PageRange:
    entries = entries_of(pool, one.component)
    if not entries:
        raise UnknownComponentError(
            f"pool {pool.name!r} has no component {one.component!r}", field=f"{field}.component"
        )
    check_range(ids, pool.manifest.pages, f"{field}.pages")
    end_token = None
    if one.tokens is not None:
        page_tokens = entries[0].page_tokens
        if page_tokens is None:
            raise InvalidFieldError(f"{one.component!r} is not paged by tokens", field=f"{field}.tokens")
        _check_tokens(one.tokens, len(ids), page_tokens, field, may_end_inside=may_end_inside)
        end_token = one.first_page * page_tokens + one.tokens
    return PageRange(one.component, one.first_page, ids, end_token, field)


def _check_tokens(tokens: int, pages: int, page_tokens: int, field: str, *, may_end_inside: bool) -> None:
    needed = -(-tokens // page_tokens)
    if needed != pages:
        raise LengthMismatchError(f"{tokens} tokens fill {needed} pages, not {pages}", field=f"{field}.tokens")
    if tokens % page_tokens and not may_end_inside:
        raise PageGapError(
            f"{tokens} tokens end inside a page of {page_tokens}, and more chunks follow", field=f"{field}.tokens"
        )
