"""The requests of a client as values: what to send, and how to read the reply. Hashes are joined here, ids checked."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import msgspec
import numpy.typing as npt

from kvferry.clients.arguments import checked, mapping, packed_ids, sequence, shown, whole, wrong_kind
from kvferry.clients.core.client_core import ReplyArrived
from kvferry.clients.plain import is_plain
from kvferry.protocol.base import AnsweredBy, DeviceEvent, PageList, ReplyT, RequestBody
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import InvalidFieldError, LengthMismatchError, MalformedError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.limits import INT64_BYTES, PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.protocol.pool_messages import Allocate, Allocated, Free, Freed, ListOwned
from kvferry.protocol.session_messages import Hello, Welcome
from kvferry.protocol.session_stream import SessionOpen
from kvferry.protocol.tier_messages import HASH_BYTES

NAME: Final = {"pool": "name"}
TABLES: Final = {"tables": "name"}
IDS: Final = {"pages": "ids"}
"""What the clients' calls name otherwise than the messages do."""

T_co = TypeVar("T_co", covariant=True)


class Call(msgspec.Struct, Generic[T_co], frozen=True):
    """A request, with its page lists as they travel, and the reading of its reply."""

    body: RequestBody
    ids: tuple[bytes, ...]
    read: Callable[[ReplyArrived], T_co]


def asked(
    body: AnsweredBy[ReplyT], names: Mapping[str, str] | None = None, ids: tuple[bytes, ...] = ()
) -> Call[ReplyT]:
    """Return a request whose reply is read as it is.

    Args:
        body: built from a caller's arguments.
        names: the caller's argument for a field, if the names differ.
        ids: its page lists, as ``packed_ids`` returns them.

    Raises:
        InvalidFieldError: a field is invalid; names the argument.
    """
    return Call(checked(body, names), ids, _reading(body.reply))


def check_ids(call: Call[T_co]) -> None:
    """Check that a request has the page lists that its body announces: with others in one frame they would be theirs.

    Raises:
        InvalidFieldError: it has not.
    """
    for number, one in enumerate(call.ids):
        if type(one) is not bytes:
            raise wrong_kind(one, "page list as it travels: give packed_ids(ids)", f"ids[{number}]")
    lengths = tuple([len(one) for one in call.ids])
    wanted = tuple([count * INT64_BYTES for count in call.body.page_counts()])
    if lengths != wanted:
        raise InvalidFieldError(
            f"page lists of {lengths} bytes, where those that {type(call.body).__name__} announces have {wanted}",
            field="ids",
        )


@functools.cache
def _reading(kind: type[ReplyT]) -> Callable[[ReplyArrived], ReplyT]:
    """Return what reads replies of a type as they are."""

    def read(reply: ReplyArrived) -> ReplyT:
        if not isinstance(reply.body, kind):
            raise MalformedError(f"the daemon answered with {type(reply.body).__name__}, not {kind.__name__}")
        return reply.body

    return read


class Pages(msgspec.Struct, frozen=True, eq=False):
    """A page list with its ids as they travel, for ``send`` and ``receive``; made by ``pages``.

    Raises:
        InvalidFieldError: a field of the list is invalid.
    """

    head: PageList
    ids: bytes

    def __post_init__(self) -> None:
        if type(self.head) is not PageList:
            raise wrong_kind(self.head, "PageList", "head")
        if not is_plain(self.head):
            msgspec.structs.force_setattr(self, "head", checked(self.head))
        if type(self.ids) is not bytes or len(self.ids) % INT64_BYTES:
            msgspec.structs.force_setattr(self, "ids", packed_ids(self.ids, "ids"))


class BlockTableEntries(NamedTuple):
    """Entries of graph tables that get a page: their rows, columns and pages, three lists of one length."""

    rows: npt.ArrayLike
    columns: npt.ArrayLike
    pages: npt.ArrayLike


def pages(
    ids: npt.ArrayLike, *, first_page: int | None = None, tokens: int | None = None, component: str = MAIN
) -> Pages:
    """Describe pages of one component in logical order.

    Args:
        ids: the page ids, ``(n,)`` integers, in the order of the prompt.
        first_page: the logical number (position // page_size) of the first of them; page 0 unless given. A window's or
            state's is unknown unless given: both sides' lists are then cut to the shorter length, with a warning.
        tokens: how many tokens they hold; given on both sides, the daemon checks that both mean the same length.
        component: what the pages are of.

    Raises:
        InvalidFieldError: the ids are not a list of integers, or another argument is not what it has to be.
    """
    packed = packed_ids(ids, "ids")
    head = PageList(component=component, first_page=first_page, pages=_count(packed), tokens=tokens)
    return Pages(head, packed)


def pages_wanted(
    count: int, *, first_page: int | None = None, tokens: int | None = None, component: str = MAIN
) -> Pages:
    """Describe pages that are not there yet, for ``receive(into="host")``; see ``pages``."""
    head = PageList(component=component, first_page=first_page, pages=count, tokens=tokens)
    return Pages(checked(head, {"pages": "count"}), b"")


def no_pages(component: str) -> Pages:
    """Say that this side wants nothing of a window or state component."""
    return Pages(PageList(component=component, pages=0, none=True), b"")


def _count(packed: bytes) -> int:
    """Return how many ids these are."""
    return len(packed) // INT64_BYTES


def page_lists(lists: Sequence[Pages], *, with_ids: bool = True) -> tuple[tuple[PageList, ...], tuple[bytes, ...]]:
    """Return the page lists of a message and their ids; ``with_ids``: of pages that are there.

    Raises:
        InvalidFieldError: they are not, or are not made by ``pages``.
    """
    if isinstance(lists, Pages):
        raise InvalidFieldError("one Pages, where a list of them is wanted: give [pages(ids)]", field="lists")
    every = lists if type(lists) is list else sequence(lists, "Pages", "lists")
    if len(every) == 1 and type(every[0]) is Pages and with_ids and _count(every[0].ids) == every[0].head.pages:
        return (every[0].head,), (every[0].ids,)
    for number, one in enumerate(every):
        if not isinstance(one, Pages):
            raise InvalidFieldError(
                f"{shown(one)} is no Pages: give [pages(ids)], one a component", field=f"lists[{number}]"
            )
        if with_ids and _count(one.ids) != one.head.pages:
            raise InvalidFieldError(
                f"{one.head.pages} pages without ids: pages_wanted is for receive(into='host'), here give pages(ids)",
                field=f"lists[{number}]",
            )
    return tuple([one.head for one in every]), tuple([one.ids for one in every])


def joined(hashes: Sequence[bytes]) -> bytes:
    """Return block hashes as they travel.

    Raises:
        InvalidFieldError: they are no list of 16 bytes each.
    """
    every = sequence(hashes, "hashes", "hashes")
    for number, one in enumerate(every):
        if not isinstance(one, bytes):
            raise wrong_kind(one, f"hash of {HASH_BYTES} bytes", f"hashes[{number}]")
        if len(one) != HASH_BYTES:
            raise InvalidFieldError(f"{len(one)} bytes are no hash of {HASH_BYTES}", field=f"hashes[{number}]")
    return b"".join(every)


def hello(client: str) -> Call[Welcome]:
    """Agree on the protocol version."""
    body = Hello(
        protocol_min=PROTOCOL_MIN,
        protocol_max=PROTOCOL_MAX,
        client=client,
    )
    return asked(body, {"client": "name"})


def session_open(name: str, instance: str = "", *, keep: bool = False, resume: bytes = b"") -> SessionOpen:
    """Return the frame that opens a session.

    Raises:
        InvalidFieldError: an argument is not what it has to be.
    """
    return checked(
        SessionOpen(
            protocol_min=PROTOCOL_MIN,
            protocol_max=PROTOCOL_MAX,
            name=str(name),
            instance=instance,
            keep=keep,
            resume=resume,
        )
    )


def allocate(pool: str, count: int, space: str) -> Call[PageIds]:
    """Take pages."""
    return Call(checked(Allocate(pool=pool, count=count, space=space)), (), _allocated)


def _allocated(reply: ReplyArrived) -> PageIds:
    _reading(Allocated)(reply)
    return reply.ids[0].copy()  # the received bytes are read-only


def allocate_each(pool: str, counts: Sequence[int], space: str) -> Call[list[PageIds]]:
    """Take pages for several requests of an engine by one ALLOCATE: so many for each, all of them or none."""
    each = [whole(one, f"counts[{number}]") for number, one in enumerate(sequence(counts, "numbers", "counts"))]
    ends = list(itertools.accumulate(each))
    body = checked(Allocate(pool=pool, count=ends[-1] if ends else 0, space=space), {"count": "counts"})

    def read(reply: ReplyArrived) -> list[PageIds]:
        ids = _allocated(reply)
        return [ids[end - count : end] for count, end in zip(each, ends, strict=True)]

    return Call(body, (), read)


def free(pool: str, ids: npt.ArrayLike, space: str, after: DeviceEvent | None) -> Call[Freed]:
    """Give pages back."""
    packed = packed_ids(ids, "ids")
    body = Free(pool=pool, pages=_count(packed), space=space, after=after)
    return asked(body, IDS, (packed,))


def list_owned(pool: str) -> Call[dict[str, PageIds]]:
    """Ask which pages are this instance's."""
    asking = asked(ListOwned(pool=pool))

    def read(reply: ReplyArrived) -> dict[str, PageIds]:
        owned = asking.read(reply)
        return {one.space: ids.copy() for one, ids in zip(owned.spaces, reply.ids, strict=True)}

    return Call(asking.body, (), read)


def table_lists(
    lengths: npt.ArrayLike,
    entries: BlockTableEntries | None,
    rows: Mapping[int, npt.ArrayLike] | None,
    released: npt.ArrayLike,
    bound: tuple[npt.ArrayLike, npt.ArrayLike],
) -> tuple[dict[str, int], bytes]:
    """Return the lists of an UPDATE_TABLES in one, and how many each of its fields counts; see ``update_tables``.

    Raises:
        InvalidFieldError: one of them is no list of integers.
        LengthMismatchError: two that belong together are not of one length.
    """
    at = entries if entries is not None else BlockTableEntries((), (), ())
    if not isinstance(at, BlockTableEntries):
        raise wrong_kind(entries, "BlockTableEntries(rows, columns, pages)", "entries")
    if len(sequence(bound, "lists", "bound")) != 2:  # noqa: PLR2004  full pages, window pages
        raise wrong_kind(bound, "pair of lists: full pages, and the window pages that they get", "bound")
    tokens = packed_ids(lengths, "lengths")
    cells = [packed_ids(one, f"entries.{field}") for one, field in zip(at, BlockTableEntries._fields, strict=True)]
    named = mapping({} if rows is None else rows, "row to ids", "rows").items()
    whole_rows = {whole(row, "rows"): packed_ids(ids, f"rows[{row}]") for row, ids in named}
    heads = [packed_ids(list(whole_rows), "rows"), packed_ids([_count(ids) for ids in whole_rows.values()], "rows")]
    back = packed_ids(released, "released")
    full, window = (packed_ids(one, f"bound[{number}]") for number, one in enumerate(bound))
    if len({len(one) for one in cells}) != 1:
        counted = ", ".join(
            f"{_count(one)} {field}" for one, field in zip(cells, BlockTableEntries._fields, strict=True)
        )
        raise LengthMismatchError(f"{counted} of entries", field="entries")
    if len(full) != len(window):
        raise LengthMismatchError(
            f"{_count(full)} full pages are bound to {_count(window)} window pages", field="bound"
        )
    counts = {
        "batch": _count(tokens),
        "entries": _count(cells[0]),
        "rows": len(whole_rows),
        "pages": sum(_count(ids) for ids in whole_rows.values()),
        "released": _count(back),
        "bound": _count(full),
    }
    return counts, b"".join([tokens, *cells, *heads, *whole_rows.values(), back, full, window])
