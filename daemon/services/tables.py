"""CREATE_TABLES, UPDATE_TABLES and DELETE_TABLES: the graph tables of all sessions.

``attention`` decides what an update changes. Here an update waits for the replay before it, one at a time, and is
copied to the memory that graphs read. Tables belong to a session and end with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any, Final, TypeVar

import structlog

from kvferry.attention.graph_tables import GraphTables, TableChange
from kvferry.attention.host_lengths import HostLengthsWriter, host_lengths_bytes
from kvferry.attention.table_layout import TableShape, table_layout, table_shape, views
from kvferry.attention.table_update import TableUpdate
from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.kept_bytes import TABLES
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.process.descriptors import PER_REGION, Descriptors
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.process.threads import on_thread, started_threads
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.lower_tiers import Background
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.devices.vendor import on_stream
from kvferry.pools.planning.manifest import component_of
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import (
    RETRY_LATER_MS,
    InvalidFieldError,
    OutOfMemoryError,
    OverloadedError,
    TablesBusyError,
    TablesExistError,
    TooLargeError,
    UnknownComponentError,
    UnknownTablesError,
)
from kvferry.protocol.ids import HOST
from kvferry.protocol.session_messages import TablesStatus
from kvferry.protocol.session_stream import Share, SharedEvents, TablesFollow
from kvferry.protocol.table_messages import (
    CreateTables,
    DeleteTables,
    TablesCreated,
    TablesDeleted,
    TablesUpdated,
    UpdateTables,
)

MAX_TABLES_PER_SESSION: Final = 16
MAX_TABLES_BYTES: Final = 256 << 20
"""Bound of one set of tables: 1024 rows of 8 million tokens each."""
HOST_COPIES: Final = 3
"""Host memory holds the tables, or a pinned copy of them, and their contents twice as numbers."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 100e-6, 5e-3
CLOSE_PAUSE_S: Final = 0.05
FEW_COPIES: Final = 4
"""More extents than this are copied as one, from the first to the last: cheaper than a copy for each."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


# -- the memory from which captured graphs read their tables: host memory, or a device's, written by copies on a stream.
#
# Device tables are copied from a pinned host copy of the whole region. An update's copies wait on the stream for the
# replay that still reads the tables, and record an event for which the next replay waits: neither this process nor the
# engine blocks on the host. As a replay may take long, or hang, device tables have a stream of their own, and must be
# idle (``is_idle``) before they are changed or closed. Their methods run on one thread that may block.


class HostTables:
    """Tables in shared host memory."""

    def __init__(self, region: HostRegion, tables: GraphTables) -> None:
        self.device = region.device
        self.region = region
        self._views = views(tables.shape, region.view())

    def is_idle(self) -> bool:
        """Return True: what is shown is copied at once."""
        return True

    def show(self, tables: GraphTables, change: TableChange, after: object) -> None:
        """Copy what has changed; the caller has waited for the engine's event, so there is no ``after``."""
        assert after is None, after
        tables.write(change, self._views)

    def close(self) -> None:
        """Free the memory; engines that mapped it keep their mapping."""
        self.region.close()


class DeviceTables:
    """Tables on a device."""

    def __init__(self, accelerator: Accelerator, region: AcceleratorRegion, tables: GraphTables) -> None:
        """Take over ``region``, which must be zeroed."""
        self.device = region.device
        self.region = region
        self._accelerator = accelerator
        self._layout = table_layout(tables.shape)
        with accelerator.calling():
            backend = accelerator.torch
            self._pinned = accelerator.pinned(self._layout.size_bytes, backend.uint8)
            self._event, self._handle = accelerator.vendor.shared_event()
            self._stream = accelerator.waiting_stream(self)
        self._after: Any | None = None
        self._views = views(tables.shape, self._pinned.numpy())

    @property
    def events(self) -> SharedEvents:
        """Return the event that is recorded after each update. Never log it."""
        return SharedEvents(handles=(self._handle,))

    def is_idle(self) -> bool:
        """Return whether the copies of the last update are done; until then its memory and event are in use.

        Raises:
            DeviceLostError: the device failed.
        """
        with self._accelerator.calling():
            return bool(self._event.query())

    def show(self, tables: GraphTables, change: TableChange, after: Any | None) -> None:  # noqa: ANN401  torch.Event
        """Copy what has changed once the stream has waited for the engine's event ``after``; the tables must be idle.

        Raises:
            DeviceLostError: the device failed.
        """
        accelerator, stream = self._accelerator, self._stream
        self._after = after  # kept until the stream has waited for it
        spans = change.byte_spans(self._layout)
        starts, ends = spans.starts, spans.ends
        if len(starts) > FEW_COPIES:
            starts, ends = starts[:1], ends[-1:]
        on_device = self.region.tensor
        with accelerator.calling():
            tables.write(change, self._views)
            with on_stream(accelerator.torch, stream):
                if after is not None:
                    stream.wait_event(after)
                for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                    on_device[start:end].copy_(self._pinned[start:end], non_blocking=True)
            accelerator.vendor.record(self._event, stream)  # before the engine gets its reply

    def close(self) -> None:
        """Free the memory, as ``HostTables.close``; the tables must be idle."""
        self.region.close()
        self._accelerator.release_stream(self)


# -- the service.


class _Tables:
    """One set of tables: its contents, the memory that graphs read, and the host lengths.

    On a device, ``show`` and ``close`` are for the tables' thread.
    """

    def __init__(self, session_id: int, name: str, tables: GraphTables, visible: HostTables | DeviceTables) -> None:
        self.session_id = session_id
        self.name = name
        self.tables = tables
        self.visible = visible
        batch = tables.shape.max_batch
        self.host = HostRegion.create(f"lengths-{session_id}-{name}", host_lengths_bytes(batch))
        self.lengths = HostLengthsWriter(self.host.view(), batch)
        self.updates = 0
        self.busy = False  # an update waits, or is being copied
        self.stale = False  # a copy failed: the next one copies everything

    def show(self, update: TableUpdate, after: Any | None) -> TablesUpdated | None:  # noqa: ANN401  torch.Event
        """Apply an update and start its copies; return None, with nothing done, while earlier ones are in progress."""
        if not self.visible.is_idle():
            return None
        change = self.tables.apply(update)
        if self.stale:
            change = self.tables.everything()
        self.stale = True
        self.visible.show(self.tables, change, after)
        self.stale = False
        self.updates += 1
        sequence = self.lengths.write(update.lengths, change.replayed_rows, update.extra_tokens)
        return TablesUpdated(sequence=sequence, replayed_rows=change.replayed_rows)

    def close(self) -> bool:
        """Free the memory that no copy writes any more; return whether it was freed."""
        if not self.visible.is_idle():
            return False
        self.host.close()
        self.visible.close()
        return True


class TableService:
    """Owns every session's tables. Those on devices are allocated and copied on a thread of their own."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        session_socket: SessionSocket,
        pools: PoolRegistry,
        devices: Devices,
        rings: EventRings,
        descriptors: Descriptors,
    ) -> None:
        self._descriptors = descriptors
        self._dispatcher = dispatcher
        self._session_socket = session_socket
        self._pools = pools
        self._devices = devices
        self._rings = rings
        self._loop = asyncio.get_running_loop()
        self._tables: dict[tuple[int, str], _Tables] = {}
        self._coming: set[tuple[int, str]] = set()
        self._executor = started_threads(1, "tables")
        self._closing = Background("the end of tables")
        dispatcher.handle("CREATE_TABLES", self._create)
        dispatcher.handle("UPDATE_TABLES", self._update)
        dispatcher.handle("DELETE_TABLES", self._delete)

    def __repr__(self) -> str:
        """Show how many sets of tables there are."""
        return f"<TableService {len(self._tables)}>"

    def session_lost(self, session_id: int) -> None:
        """Close a session's tables."""
        for key in [one for one in self._tables if one[0] == session_id]:
            self._close_tables(self._tables.pop(key))

    def status(self) -> Iterator[TablesStatus]:
        """Yield the tables as STATUS shows them."""
        for one in self._tables.values():
            yield TablesStatus(
                session=one.session_id,
                tables=one.name,
                device=one.visible.device,
                max_batch=one.tables.shape.max_batch,
                columns=one.tables.shape.columns,
                updates=one.updates,
                waiting=int(one.busy),
            )

    async def close(self) -> None:
        """Free all memory, without waiting for a lost device."""
        await self._closing.close()
        self._executor.shutdown(wait=not self._devices.lost, cancel_futures=True)
        for one in self._tables.values():
            one.host.close()
            one.visible.close()

    async def _create(self, call: Call) -> Answer:
        body = expect(call, CreateTables)
        key = (call.session.session_id, body.tables)
        if key in self._tables or key in self._coming:
            raise TablesExistError(f"the session has tables {body.tables!r}", field="tables")
        if sum(one[0] == key[0] for one in (*self._tables, *self._coming)) >= MAX_TABLES_PER_SESSION:
            raise OverloadedError(f"the session has {MAX_TABLES_PER_SESSION} tables").after(RETRY_LATER_MS)
        pool = self._pools.named_by(call.session, body.pool)
        tables = _tables_for(pool, body)
        self._keep(*key, HOST_COPIES * table_layout(tables.shape).size_bytes)
        self._coming.add(key)
        try:
            return self._created(call, *await self._made(call, pool.region.device, tables))
        except BaseException:
            self._forget(*key)
            raise
        finally:
            self._coming.discard(key)

    async def _made(self, call: Call, device: str, tables: GraphTables) -> tuple[_Tables, Share | None]:
        """Return new tables, and what the engine needs to map those on a device."""
        body = expect(call, CreateTables)
        key, process_id = (call.session.session_id, body.tables), body.device_pid or call.session.peer.pid

        def make() -> tuple[_Tables, Share | None]:
            visible, share = self._visible(key, device, tables, process_id)
            try:
                return _Tables(*key, tables, visible), share
            except BaseException:
                visible.close()
                raise

        return make() if device == HOST else await on_thread(self._executor, make, lambda made: made[0].close())

    def _visible(
        self, key: tuple[int, str], device: str, tables: GraphTables, process_id: int
    ) -> tuple[HostTables | DeviceTables, Share | None]:
        size_bytes = table_layout(tables.shape).size_bytes
        if device == HOST:
            return HostTables(HostRegion.create(f"tables-{key[0]}-{key[1]}", size_bytes), tables), None
        accelerator = self._devices.open(device)
        region = self._devices.allocate(device, size_bytes)
        try:
            return DeviceTables(accelerator, region, tables), region.share(process_id)
        except BaseException:
            region.close()
            raise

    def _keep(self, session_id: int, name: str, size_bytes: int) -> None:
        """Count what tables take of host memory.

        Raises:
            OutOfMemoryError: there is not so much for them.
        """
        kept = self._dispatcher.kept
        try:
            kept.check_whole(session_id, size_bytes)
        except OverloadedError as error:
            raise OutOfMemoryError(
                f"tables take {size_bytes} bytes of host memory: {error.detail}",
                field="max_batch",
                remedy="make them smaller, or delete others",
            ) from None
        kept.keep(session_id, (TABLES, name), size_bytes)

    def _forget(self, session_id: int, name: str) -> None:
        self._dispatcher.kept.drop(session_id, (TABLES, name))

    def _created(self, call: Call, made: _Tables, share: Share | None) -> Answer:
        visible, shape = made.visible, made.tables.shape
        follows = TablesFollow(message_id=call.message_id)
        fds = [made.host.fd]
        if isinstance(visible, DeviceTables):
            follows = TablesFollow(message_id=call.message_id, share=share, events=visible.events)
        else:
            fds.append(visible.region.fd)
        try:
            self._descriptors.take(made.host, call.session.tenant, "sessions", PER_REGION * len(fds))
            self._session_socket.pass_frame(call.session, follows, fds)
        except Exception:
            self._close_tables(made)
            raise
        self._tables[made.session_id, made.name] = made
        layout = table_layout(shape)
        log.info("tables created", session=made.session_id, tables=made.name, device=visible.device)
        return Answer(
            TablesCreated(
                tables=made.name,
                device=visible.device,
                columns=shape.columns,
                page_size=shape.page_size,
                block_tables=layout.block_tables,
                block_tables_swa=layout.block_tables_swa,
                seq_lens=layout.seq_lens,
                region_bytes=layout.size_bytes,
                host_bytes=made.host.size_bytes,
            )
        )

    async def _update(self, call: Call) -> Answer:
        body = expect(call, UpdateTables)
        one = self._get_idle(call.session.session_id, body.tables)
        event = self._event(call, one)
        one.busy = True
        try:
            await self._rings.reached(call, body.after, recorded=event is not None)
            return Answer(await self._shown(one, _update_of(body, call), event))
        finally:
            one.busy = False

    def _event(self, call: Call, one: _Tables) -> Any | None:  # noqa: ANN401  torch.Event
        """Return the event that the tables' stream can wait for; None where the host has to wait, or none is given."""
        device_event = expect(call, UpdateTables).after
        events = self._rings.events(call.session.session_id) if device_event is not None else None
        if (
            device_event is None
            or events is None
            or events.device != one.visible.device
            or device_event.event >= events.slots
        ):
            return None
        return events.event(device_event.event)

    async def _shown(self, one: _Tables, update: TableUpdate, event: Any | None) -> TablesUpdated:  # noqa: ANN401
        """Show an update once the copies of the one before it are done; they may wait for a slow engine's replay."""
        pause_s = FIRST_PAUSE_S
        while (shown := await self._called(one, lambda: one.show(update, event))) is None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return shown

    async def _called(self, one: _Tables, call: Callable[[], T]) -> T:
        """Return what a call returns that is for the thread of these tables."""
        return call() if isinstance(one.visible, HostTables) else await on_thread(self._executor, call)

    def _delete(self, call: Call) -> Answer:
        body = expect(call, DeleteTables)
        one = self._get_idle(call.session.session_id, body.tables)
        del self._tables[one.session_id, one.name]
        self._forget(one.session_id, one.name)
        self._close_tables(one)
        return Answer(TablesDeleted(tables=body.tables))

    def _get(self, session_id: int, name: str) -> _Tables:
        one = self._tables.get((session_id, name))
        if one is None:
            raise UnknownTablesError(f"the session has no tables {name!r}", field="tables")
        return one

    def _get_idle(self, session_id: int, name: str) -> _Tables:
        one = self._get(session_id, name)
        if one.busy:
            raise TablesBusyError(f"an update of tables {name!r} is in progress: wait for its reply", field="tables")
        return one

    def _close_tables(self, one: _Tables) -> None:
        if isinstance(one.visible, HostTables):
            one.close()
        else:
            self._closing.spawn(self._close_on_device(one))

    async def _close_on_device(self, one: _Tables) -> None:
        """Close tables after the copies that are queued on the tables' thread."""
        while not await on_thread(self._executor, one.close):  # noqa: ASYNC110  a driver tells nobody that it is done
            await asyncio.sleep(CLOSE_PAUSE_S)


def _tables_for(pool: Pool, body: CreateTables) -> GraphTables:
    """Return empty tables for a pool.

    Raises:
        UnknownComponentError: the pool has no such paged component or window.
        InvalidFieldError: the window is missing, or differs from the pool's.
        TooLargeError: the tables exceed ``MAX_TABLES_BYTES``.
    """
    component = component_of(pool.manifest, body.component)
    tokens = next((one.page_tokens for one in pool.manifest.entries if one.component == body.component), None)
    if component is None or tokens is None:
        raise UnknownComponentError(f"pool {pool.name!r} has no paged {body.component!r}", field="component")
    window = component_of(pool.manifest, body.window_component) if body.window is not None else None
    if body.window is not None and (window is None or window.kind != "window"):
        raise UnknownComponentError(
            f"pool {pool.name!r} has no window {body.window_component!r}", field="window_component"
        )
    if window is None and any(one.kind == "window" for one in pool.manifest.components):
        raise InvalidFieldError(f"pool {pool.name!r} has window layers: give their window in tokens", field="window")
    if window is not None and window.window not in {None, body.window}:
        raise InvalidFieldError(
            f"pool {pool.name!r} has a window of {window.window} tokens, not of {body.window}", field="window"
        )
    shape: TableShape = table_shape(
        max_batch=body.max_batch,
        max_context_tokens=body.max_context_tokens,
        page_size=tokens,
        draft_tokens=body.draft_tokens,
        request_row_tokens=body.request_row_tokens,
        window=body.window,
        captured=body.captured,
    )
    size_bytes = table_layout(shape).size_bytes
    if size_bytes > MAX_TABLES_BYTES:
        raise TooLargeError(
            f"{shape.max_batch} rows of {shape.columns} columns are {size_bytes} bytes; at most {MAX_TABLES_BYTES}",
            field="max_batch",
        )
    return GraphTables(shape, component.pages, None if window is None else window.pages)


def _update_of(body: UpdateTables, call: Call) -> TableUpdate:
    entries, rows, bound = body.entries, body.rows, body.bound
    counts = (body.batch, entries, entries, entries, rows, rows, body.pages, body.released, bound, bound)
    arrays = [call.ids[0][end - count : end] for count, end in zip(counts, accumulate(counts), strict=True)]
    return TableUpdate(
        lengths=arrays[0],
        extra_tokens=body.extra_tokens,
        entry_rows=arrays[1],
        entry_columns=arrays[2],
        entry_pages=arrays[3],
        rows=arrays[4],
        row_pages=arrays[5],
        pages=arrays[6],
        released=arrays[7],
        bound_full=arrays[8],
        bound_window=arrays[9],
    )
