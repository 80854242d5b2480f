"""The base of all message bodies: a frozen struct, tagged by its ``type``, that may announce page lists.

Page ids never travel inside a body: a body holds the length of each list, and the ids follow as one raw little-endian
int64 frame per list, in the order in which the body names the lists.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from kvferry.protocol.ids import MAIN, ComponentName

MAX_PAGE_LISTS = 64
"""Page lists per message: one for each component, several where its logical pages have gaps."""

PageCount = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""Number of page ids in the frame that follows for this list."""


class Body(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    """The base of every request, reply and event body."""

    one_frame: ClassVar[bool] = False
    """Whether all numbers travel in one frame, whose parts the body counts; in JSON they are ``ids``."""

    def page_counts(self) -> tuple[int, ...]:
        """Return the length of each page list that follows as a frame, in frame order; () if none follows."""
        return ()

    def frame_field(self, number: int) -> str:  # noqa: ARG002  a body of bodies says which of them it is
        """Return the field to name where a frame is wrong."""
        return "pages"


class PageList(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The pages of one component, in logical order; their ids follow in a frame.

    ``first_page`` is the logical number (position // page_size) of the first page. None means page 0 for a paged
    component; for a window or a state it means unknown, and both sides' lists are cut to the shorter length.
    ``tokens``, if given, is the number of tokens in the pages: all pages but the last must be full, and both sides must
    end at the same token. ``none`` states that this side wants nothing of a window or state; an empty list without it
    is an error if the other side's list is not empty.

    A paged component may have several lists in one message if its logical pages have gaps: each with its
    ``first_page``, in ascending order. Only the last one may end inside a page.
    """

    component: ComponentName = MAIN
    first_page: PageCount | None = None
    pages: PageCount
    tokens: Annotated[int, Meta(ge=1, lt=1 << 40)] | None = None
    none: bool = False
