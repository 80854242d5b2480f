"""The requests of a client as values: what to send, and how to read the reply. Shared by both shells."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.clients.arguments import checked, mapping, page_ids, pool_spec, sequence, shown, whole, wrong_kind
from kvferry.protocol.base import Body, PageList
from kvferry.protocol.client_core import ReplyArrived
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import InvalidFieldError, LengthMismatchError, MalformedError
from kvferry.protocol.event_points import EventPoint
from kvferry.protocol.ids import MAIN
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.pool_messages import (
    Allocate,
    Allocated,
    AttachPool,
    CreatePool,
    DeletePool,
    Free,
    Freed,
    LendPool,
    LentArrays,
    PoolAttached,
    PoolCreated,
    PoolDeleted,
    PoolLent,
)
from kvferry.protocol.requests import RequestBody
from kvferry.protocol.room_messages import (
    Cancel,
    Cancelled,
    Landing,
    LayerStep,
    Receive,
    Result,
    RoomResult,
    Send,
    Side,
)
from kvferry.protocol.session_messages import EventsOpened, Hello, OpenEvents, Ping, Pong, Status, StatusReport, Welcome
from kvferry.protocol.table_messages import (
    CreateTables,
    DeleteTables,
    TablesCreated,
    TablesDeleted,
    TablesUpdated,
    UpdateTables,
)
from kvferry.protocol.versions import PROTOCOL_MAX, PROTOCOL_MIN

NAME: Final = {"pool": "name"}
TABLES: Final = {"tables": "name"}
IDS: Final = {"pages": "ids"}
"""What the clients' calls name otherwise than the messages do."""

T_co = TypeVar("T_co", covariant=True)
BodyT = TypeVar("BodyT", bound=Body)


class Operation(NamedTuple, Generic[T_co]):
    """A request and the reading of its reply."""

    body: RequestBody
    ids: tuple[PageIds, ...]
    read: Callable[[ReplyArrived], T_co]


class Pages(NamedTuple):
    """A page list with its ids, as ``send`` and ``receive`` take it; made by ``pages``."""

    head: PageList
    ids: PageIds


class Cells(NamedTuple):
    """Cells of graph tables that get a page: their rows, columns and pages, three lists of one length."""

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
    array = page_ids(ids, "ids")
    head = PageList(component=component, first_page=first_page, pages=len(array), tokens=tokens)
    return Pages(checked(head), array)


def pages_wanted(
    count: int, *, first_page: int | None = None, tokens: int | None = None, component: str = MAIN
) -> Pages:
    """Describe pages that are not there yet, for ``receive(land="host")``; see ``pages``."""
    head = PageList(component=component, first_page=first_page, pages=count, tokens=tokens)
    return Pages(checked(head, {"pages": "count"}), np.empty(0, np.int64))


def no_pages(component: str) -> Pages:
    """Say that this side wants nothing of a window or state component."""
    return Pages(checked(PageList(component=component, pages=0, none=True)), np.empty(0, np.int64))


def page_lists(lists: Sequence[Pages], *, with_ids: bool = True) -> tuple[Pages, ...]:
    """Return the page lists of a message; ``with_ids``: of pages that are there.

    Raises:
        InvalidFieldError: they are not, or are not made by ``pages``.
    """
    if isinstance(lists, Pages):
        raise InvalidFieldError("one Pages, where a list of them is wanted: give [pages(ids)]", field="lists")
    every = sequence(lists, "Pages", "lists")
    given: Sequence[object] = every
    for number, one in enumerate(given):
        field = f"lists[{number}]"
        if not isinstance(one, Pages):
            raise InvalidFieldError(f"{shown(one)} is no Pages: give [pages(ids)], one a component", field=field)
        if with_ids and len(one.ids) != one.head.pages:
            raise InvalidFieldError(
                f"{one.head.pages} pages without ids: pages_wanted is for receive(land='host'), here give pages(ids)",
                field=field,
            )
    return every


def hello(client: str) -> Operation[Welcome]:
    """Agree on the protocol version."""
    return Operation(
        checked(Hello(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, client=client), {"client": "name"}),
        (),
        reply_body(Welcome),
    )


def ping() -> Operation[Pong]:
    """Ask whether the control loop answers."""
    return Operation(Ping(), (), reply_body(Pong))


def status() -> Operation[StatusReport]:
    """Ask what the daemon holds and does."""
    return Operation(Status(), (), reply_body(StatusReport))


def open_events(device: str) -> Operation[EventsOpened]:
    """Ask for the session's event ring."""
    return Operation(checked(OpenEvents(device=device)), (), reply_body(EventsOpened))


def create_pool(pool: str, spec: PoolSpec, device: str, model: ModelIdentity | None = None) -> Operation[PoolCreated]:
    """Create a pool, or find it as it was created before."""
    body = CreatePool(pool=pool, spec=pool_spec(spec), device=device, model=model)
    return Operation(checked(body, NAME), (), reply_body(PoolCreated))


def attach_pool(pool: str, layout_digest: str, device_pid: int | None) -> Operation[PoolAttached]:
    """Ask for a pool's region."""
    body = AttachPool(pool=pool, layout_digest=layout_digest, device_pid=device_pid)
    return Operation(checked(body, NAME), (), reply_body(PoolAttached))


def lend_pool(
    pool: str, spec: PoolSpec, device: str, arrays: tuple[LentArrays, ...], model: ModelIdentity | None = None
) -> Operation[PoolLent]:
    """Lend a pool that this process owns."""
    body = LendPool(pool=pool, spec=pool_spec(spec), device=device, arrays=arrays, model=model)
    return Operation(checked(body, NAME | {"arrays": "tensors"}), (), reply_body(PoolLent))


def delete_pool(pool: str) -> Operation[PoolDeleted]:
    """Delete a pool."""
    return Operation(checked(DeletePool(pool=pool), NAME), (), reply_body(PoolDeleted))


def allocate(pool: str, count: int, space: str) -> Operation[PageIds]:
    """Take pages."""
    return Operation(checked(Allocate(pool=pool, count=count, space=space)), (), _ids_of_allocated)


def free(pool: str, ids: npt.ArrayLike, space: str, after: EventPoint | None) -> Operation[Freed]:
    """Give pages back."""
    array = page_ids(ids, "ids")
    body = Free(pool=pool, pages=len(array), space=space, after=after)
    return Operation(checked(body, IDS), (array,), reply_body(Freed))


def create_tables(body: CreateTables) -> Operation[TablesCreated]:
    """Ask for graph tables."""
    return Operation(checked(body, TABLES | {"pool": "pool"}), (), reply_body(TablesCreated))


def update_tables(
    tables: str,
    lengths: npt.ArrayLike,
    *,
    extra_tokens: int = 0,
    cells: Cells | None = None,
    rows: Mapping[int, npt.ArrayLike] | None = None,
    released: npt.ArrayLike = (),
    bound: tuple[npt.ArrayLike, npt.ArrayLike] = ((), ()),
    after: EventPoint | None = None,
) -> Operation[TablesUpdated]:
    """Change graph tables; see ``Client.update_tables``."""
    at = cells if cells is not None else Cells((), (), ())
    if not isinstance(at, Cells):
        raise wrong_kind(cells, "Cells(rows, columns, pages)", "cells")
    if len(sequence(bound, "lists", "bound")) != 2:  # noqa: PLR2004  full pages, window pages
        raise wrong_kind(bound, "pair of lists: full pages, and the window pages that they get", "bound")
    whole_rows = {
        whole(row, "rows"): page_ids(ids, f"rows[{row}]")
        for row, ids in mapping({} if rows is None else rows, "row to ids", "rows").items()
    }
    counts = [len(ids) for ids in whole_rows.values()]
    given = [
        page_ids(lengths, "lengths"),
        *(page_ids(one, f"cells.{field}") for one, field in zip(at, Cells._fields, strict=True)),
        page_ids(list(whole_rows), "rows"),
        page_ids(counts, "rows"),
        *whole_rows.values(),
        page_ids(released, "released"),
        *(page_ids(one, f"bound[{number}]") for number, one in enumerate(bound)),
    ]
    if not len(given[1]) == len(given[2]) == len(given[3]):
        raise LengthMismatchError(
            f"{len(given[1])} rows, {len(given[2])} columns, {len(given[3])} pages of cells", field="cells"
        )
    if len(given[-2]) != len(given[-1]):
        raise LengthMismatchError(
            f"{len(given[-2])} full pages are bound to {len(given[-1])} window pages", field="bound"
        )
    body = UpdateTables(
        tables=tables,
        batch=len(given[0]),
        extra_tokens=extra_tokens,
        cells=len(given[1]),
        rows=len(whole_rows),
        pages=sum(counts),
        released=len(given[-3]),
        bound=len(given[-2]),
        after=after,
    )
    return Operation(checked(body, {"batch": "lengths"}), (np.concatenate(given),), reply_body(TablesUpdated))


def delete_tables(tables: str) -> Operation[TablesDeleted]:
    """Give graph tables up."""
    return Operation(checked(DeleteTables(tables=tables), TABLES), (), reply_body(TablesDeleted))


def cancel(pool: str, request_id: str, side: Side) -> Operation[Cancelled]:
    """Give up a side of a hand-off."""
    return Operation(Cancel(request_id=request_id, pool=pool, side=side), (), reply_body(Cancelled))


def result(pool: str, request_id: str, side: Side) -> Operation[RoomResult]:
    """Ask for a side's state."""
    return Operation(checked(Result(request_id=request_id, pool=pool, side=side)), (), reply_body(RoomResult))


def send_body(
    pool: str,
    request_id: str,
    lists: Sequence[Pages],
    *,
    last: bool,
    destinations: int,
    first_token: int | None,
    payload: bytes,
    steps: Sequence[LayerStep],
) -> tuple[Send, list[PageIds]]:
    """Return a SEND's body and its page ids."""
    every = page_lists(lists)
    body = Send(
        request_id=request_id,
        pool=pool,
        lists=tuple(one.head for one in every),
        last=last,
        destinations=destinations,
        first_token=first_token,
        payload=payload,
        steps=sequence(steps, "steps, as ring.step makes them", "steps"),
    )
    return checked(body), [one.ids for one in every]


def receive_body(
    pool: str,
    request_id: str,
    lists: Sequence[Pages],
    sources: int,
    source_daemons: Sequence[str],
    after: EventPoint | None,
    land: Landing,
    *,
    any_model: bool = False,
) -> tuple[Receive, list[PageIds]]:
    """Return a RECEIVE's body and its page ids."""
    in_pages = str(land) != "host"
    every = page_lists(lists, with_ids=in_pages)
    body = Receive(
        request_id=request_id,
        pool=pool,
        lists=tuple(one.head for one in every),
        sources=sources,
        source_daemons=sequence(source_daemons, "addresses", "source_daemons"),
        after=after,
        land=land,
        any_model=any_model,
    )
    return checked(body), [one.ids for one in every] if in_pages else []


def reply_body(kind: type[BodyT]) -> Callable[[ReplyArrived], BodyT]:
    """Return the reading of a reply that must be of this kind."""

    def read(reply: ReplyArrived) -> BodyT:
        if not isinstance(reply.body, kind):
            raise MalformedError(f"the daemon answered with {type(reply.body).__name__}, not {kind.__name__}")
        return reply.body

    return read


def _ids_of_allocated(reply: ReplyArrived) -> PageIds:
    reply_body(Allocated)(reply)
    return reply.ids[0].copy()  # the received bytes are read-only
