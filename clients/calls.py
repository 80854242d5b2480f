"""The requests of a client as values: what to send, and how to read the reply. Hashes are joined here, ids checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.clients.arguments import checked, mapping, page_ids, pool_spec, sequence, shown, whole, wrong_kind
from kvferry.protocol.base import Body, DeviceEvent, PageList, RequestBody
from kvferry.protocol.client_core import ReplyArrived
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import InvalidFieldError, LengthMismatchError, MalformedError
from kvferry.protocol.ids import MAIN, ModelIdentity, PoolLifetime
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES, PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.pool_messages import (
    Allocate,
    Allocated,
    AttachPool,
    CreatePool,
    DeletePool,
    Free,
    Freed,
    PoolAttached,
    PoolCreated,
    PoolDeleted,
    PoolRegistered,
    RegisteredArrays,
    RegisterPool,
)
from kvferry.protocol.session_messages import EventsOpened, Hello, OpenEvents, Ping, Pong, Status, StatusReport, Welcome
from kvferry.protocol.session_stream import SessionOpen
from kvferry.protocol.table_messages import (
    CreateTables,
    DeleteTables,
    TablesCreated,
    TablesDeleted,
    TablesUpdated,
    UpdateTables,
)
from kvferry.protocol.tier_messages import (
    HASH_BYTES,
    CacheChanges,
    CacheEvents,
    CacheEvict,
    CacheEvicted,
    CacheList,
    CacheListed,
    CachePin,
    CachePinned,
    CancelOperation,
    DropSnapshot,
    Found,
    Lookup,
    OperationCancelled,
    SnapshotDropped,
    SnapshotReport,
    Snapshots,
    Unpin,
    Unpinned,
)
from kvferry.protocol.transfer_messages import (
    Abandon,
    Abandoned,
    Cancel,
    Cancelled,
    Direction,
    Result,
    TransferResult,
)

NAME: Final = {"pool": "name"}
TABLES: Final = {"tables": "name"}
IDS: Final = {"pages": "ids"}
"""What the clients' calls name otherwise than the messages do."""

T_co = TypeVar("T_co", covariant=True)
BodyT = TypeVar("BodyT", bound=Body)


class Call(NamedTuple, Generic[T_co]):
    """A request and the reading of its reply."""

    body: RequestBody
    ids: tuple[PageIds, ...]
    read: Callable[[ReplyArrived], T_co]


class Pages(NamedTuple):
    """A page list with its ids, as ``send`` and ``receive`` take it; made by ``pages``."""

    head: PageList
    ids: PageIds


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
    array = page_ids(ids, "ids")
    head = PageList(component=component, first_page=first_page, pages=len(array), tokens=tokens)
    return Pages(checked(head), array)


def pages_wanted(
    count: int, *, first_page: int | None = None, tokens: int | None = None, component: str = MAIN
) -> Pages:
    """Describe pages that are not there yet, for ``receive(into="host")``; see ``pages``."""
    head = PageList(component=component, first_page=first_page, pages=count, tokens=tokens)
    return Pages(checked(head, {"pages": "count"}), np.empty(0, np.int64))


def no_pages(component: str) -> Pages:
    """Say that this side wants nothing of a window or state component."""
    return Pages(checked(PageList(component=component, pages=0, none=True)), np.empty(0, np.int64))


def page_lists(lists: Sequence[Pages], *, with_ids: bool = True) -> tuple[tuple[PageList, ...], list[PageIds]]:
    """Return the page lists of a message and their ids; ``with_ids``: of pages that are there.

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
                f"{one.head.pages} pages without ids: pages_wanted is for receive(into='host'), here give pages(ids)",
                field=field,
            )
    return tuple(one.head for one in every), [one.ids for one in every]


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
    return Call(
        checked(Hello(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, client=client), {"client": "name"}),
        (),
        reply_body(Welcome),
    )


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


def ping() -> Call[Pong]:
    """Ask whether the control loop answers."""
    return Call(Ping(), (), reply_body(Pong))


def status() -> Call[StatusReport]:
    """Ask what the daemon holds and does."""
    return Call(Status(), (), reply_body(StatusReport))


def open_events(device: str) -> Call[EventsOpened]:
    """Ask for the session's event ring."""
    return Call(checked(OpenEvents(device=device)), (), reply_body(EventsOpened))


def create_pool(
    pool: str,
    spec: PoolSpec,
    device: str,
    model: ModelIdentity | None = None,
    lifetime: PoolLifetime = "daemon",
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> Call[PoolCreated]:
    """Create a pool, or find it as it was created before."""
    body = CreatePool(
        pool=pool,
        spec=pool_spec(spec),
        device=device,
        model=model,
        lifetime=lifetime,
        max_payload_bytes=max_payload_bytes,
    )
    return Call(checked(body, NAME), (), reply_body(PoolCreated))


def attach_pool(pool: str, layout_digest: str, device_pid: int | None) -> Call[PoolAttached]:
    """Ask for a pool's region."""
    body = AttachPool(pool=pool, layout_digest=layout_digest, device_pid=device_pid)
    return Call(checked(body, NAME), (), reply_body(PoolAttached))


def register_pool(
    pool: str,
    spec: PoolSpec,
    device: str,
    arrays: tuple[RegisteredArrays, ...],
    model: ModelIdentity | None = None,
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
) -> Call[PoolRegistered]:
    """Register a pool that this process owns."""
    body = RegisterPool(
        pool=pool,
        spec=pool_spec(spec),
        device=device,
        arrays=arrays,
        model=model,
        max_payload_bytes=max_payload_bytes,
    )
    return Call(checked(body, NAME | {"arrays": "tensors"}), (), reply_body(PoolRegistered))


def delete_pool(pool: str) -> Call[PoolDeleted]:
    """Delete a pool."""
    return Call(checked(DeletePool(pool=pool), NAME), (), reply_body(PoolDeleted))


def allocate(pool: str, count: int, space: str) -> Call[PageIds]:
    """Take pages."""
    return Call(checked(Allocate(pool=pool, count=count, space=space)), (), _ids_of_allocated)


def free(pool: str, ids: npt.ArrayLike, space: str, after: DeviceEvent | None) -> Call[Freed]:
    """Give pages back."""
    array = page_ids(ids, "ids")
    body = Free(pool=pool, pages=len(array), space=space, after=after)
    return Call(checked(body, IDS), (array,), reply_body(Freed))


def create_tables(body: CreateTables) -> Call[TablesCreated]:
    """Ask for graph tables."""
    return Call(checked(body, TABLES | {"pool": "pool"}), (), reply_body(TablesCreated))


def update_tables(
    tables: str,
    lengths: npt.ArrayLike,
    *,
    extra_tokens: int = 0,
    entries: BlockTableEntries | None = None,
    rows: Mapping[int, npt.ArrayLike] | None = None,
    released: npt.ArrayLike = (),
    bound: tuple[npt.ArrayLike, npt.ArrayLike] = ((), ()),
    after: DeviceEvent | None = None,
) -> Call[TablesUpdated]:
    """Change graph tables; see ``Client.update_tables``."""
    at = entries if entries is not None else BlockTableEntries((), (), ())
    if not isinstance(at, BlockTableEntries):
        raise wrong_kind(entries, "BlockTableEntries(rows, columns, pages)", "entries")
    if len(sequence(bound, "lists", "bound")) != 2:  # noqa: PLR2004  full pages, window pages
        raise wrong_kind(bound, "pair of lists: full pages, and the window pages that they get", "bound")
    whole_rows = {
        whole(row, "rows"): page_ids(ids, f"rows[{row}]")
        for row, ids in mapping({} if rows is None else rows, "row to ids", "rows").items()
    }
    counts = [len(ids) for ids in whole_rows.values()]
    given = [
        page_ids(lengths, "lengths"),
        *(page_ids(one, f"entries.{field}") for one, field in zip(at, BlockTableEntries._fields, strict=True)),
        page_ids(list(whole_rows), "rows"),
        page_ids(counts, "rows"),
        *whole_rows.values(),
        page_ids(released, "released"),
        *(page_ids(one, f"bound[{number}]") for number, one in enumerate(bound)),
    ]
    if not len(given[1]) == len(given[2]) == len(given[3]):
        raise LengthMismatchError(
            f"{len(given[1])} rows, {len(given[2])} columns, {len(given[3])} pages of entries", field="entries"
        )
    if len(given[-2]) != len(given[-1]):
        raise LengthMismatchError(
            f"{len(given[-2])} full pages are bound to {len(given[-1])} window pages", field="bound"
        )
    body = UpdateTables(
        tables=tables,
        batch=len(given[0]),
        extra_tokens=extra_tokens,
        entries=len(given[1]),
        rows=len(whole_rows),
        pages=sum(counts),
        released=len(given[-3]),
        bound=len(given[-2]),
        after=after,
    )
    return Call(checked(body, {"batch": "lengths"}), (np.concatenate(given),), reply_body(TablesUpdated))


def delete_tables(tables: str) -> Call[TablesDeleted]:
    """Give graph tables up."""
    return Call(checked(DeleteTables(tables=tables), TABLES), (), reply_body(TablesDeleted))


def cancel(pool: str, request_id: str, direction: Direction, *, wait: bool = True) -> Call[Cancelled]:
    """Give up a side of a transfer."""
    body = Cancel(request_id=request_id, pool=pool, direction=direction, wait=wait)
    return Call(checked(body), (), reply_body(Cancelled))


def abandon(request_id: str, direction: Direction, daemons: Sequence[str], reason: str) -> Call[Abandoned]:
    """Say that a half of a request does not come."""
    body = Abandon(
        request_id=request_id, direction=direction, daemons=sequence(daemons, "addresses", "daemons"), reason=reason
    )
    return Call(checked(body), (), reply_body(Abandoned))


def result(pool: str, request_id: str, direction: Direction) -> Call[TransferResult]:
    """Ask for a side's state."""
    return Call(checked(Result(request_id=request_id, pool=pool, direction=direction)), (), reply_body(TransferResult))


def lookup(
    pool: str, hashes: Sequence[bytes], space: str, block_pages: int, lease: int | None, *, pin: bool
) -> Call[Found]:
    """Ask for the longest cached prefix."""
    body = Lookup(pool=pool, hashes=joined(hashes), space=space, block_pages=block_pages, lease=lease, pin=pin)
    return Call(checked(body), (), reply_body(Found))


def unpin(lease: int) -> Call[Unpinned]:
    """End a lease."""
    return Call(checked(Unpin(lease=lease)), (), reply_body(Unpinned))


def drop_snapshot(snapshot: str) -> Call[SnapshotDropped]:
    """Give a snapshot up."""
    return Call(checked(DropSnapshot(snapshot=snapshot)), (), reply_body(SnapshotDropped))


def snapshots() -> Call[SnapshotReport]:
    """Ask for the user's snapshots."""
    return Call(Snapshots(), (), reply_body(SnapshotReport))


def cancel_operation(number: int) -> Call[OperationCancelled]:
    """Give up an operation."""
    return Call(CancelOperation(operation=number), (), reply_body(OperationCancelled))


def cache_list(position: int, limit: int) -> Call[CacheListed]:
    """Ask for a page of the list of cached blocks."""
    return Call(checked(CacheList(position=position, limit=limit)), (), reply_body(CacheListed))


def cache_pin(hashes: Sequence[bytes], *, pinned: bool) -> Call[CachePinned]:
    """Pin blocks by hand, or unpin them."""
    return Call(checked(CachePin(hashes=joined(hashes), pinned=pinned)), (), reply_body(CachePinned))


def cache_evict(hashes: Sequence[bytes] | None) -> Call[CacheEvicted]:
    """Drop blocks from every tier; None for all."""
    body = CacheEvict(hashes=joined(() if hashes is None else hashes), everything=hashes is None)
    return Call(checked(body), (), reply_body(CacheEvicted))


def cache_events(cursor: int, limit: int) -> Call[CacheChanges]:
    """Ask for the changes after a cursor."""
    return Call(checked(CacheEvents(cursor=cursor, limit=limit)), (), reply_body(CacheChanges))


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
