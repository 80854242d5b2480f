"""CREATE_TABLES, UPDATE_TABLES and DELETE_TABLES: the graph tables of all sessions.

``attention`` decides what an update changes. Here an update waits for the replay before it, one at a time, and is
copied to the memory that graphs read. Tables belong to a session and end with it. Those on a device are in memory of
their engine, and outlive this process: the next daemon goes on with what they show, once it has checked that.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Final, TypeVar

import structlog

from kvferry.attention.graph_tables import GraphTables, TableChange
from kvferry.attention.host_lengths import HostLengthsWriter
from kvferry.attention.table_layout import (
    MAX_WORD,
    RELEASED,
    WORD_BYTES,
    Int64s,
    Region,
    TableShape,
    TableViews,
    asked_shape,
    table_layout,
    views,
)
from kvferry.attention.table_mirror import TableMirror, shared_bytes
from kvferry.attention.table_update import TableUpdate
from kvferry.daemon.control.dispatch import Answer, Call, Dispatcher, expect
from kvferry.daemon.control.kept_bytes import TABLES
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.process.descriptors import PER_REGION, Descriptors
from kvferry.daemon.process.device_keeper import Fence
from kvferry.daemon.process.devices import Devices, RegisteredSegment
from kvferry.daemon.process.threads import on_thread, started_threads
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.daemon.tiers.lower_tiers import Background
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.devices.vendor import on_stream
from kvferry.pools.planning.arrays import Array
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
from kvferry.protocol.session_stream import Share, TablesFollow, TorchShare
from kvferry.protocol.table_messages import (
    CreateTables,
    DeleteTables,
    TablesCreated,
    TablesDeleted,
    TablesShown,
    TablesUpdated,
    UpdateTables,
)

MAX_TABLES_PER_SESSION: Final = 16
MAX_TABLES_BYTES: Final = 256 << 20
"""Bound of one set of tables: 1024 rows of 8 million tokens each."""
HOST_COPIES: Final = 3
"""Host memory holds the tables, or a mirror of them, and their contents twice as numbers."""
DEVICE_COPIES: Final = HOST_COPIES + 1
"""With a pinned copy."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 100e-6, 5e-3
CLOSE_PAUSE_S: Final = 0.05
FEW_COPIES: Final = 4
"""More extents than this are copied as one, from the first to the last: cheaper than a copy for each."""

T = TypeVar("T")
log = structlog.get_logger(__name__)


# -- the memory from which captured graphs read their tables: host memory, or a device's, written by copies on a stream.
#
# A device's is allocated by the engine. An update's bytes go into the mirror, which the engine sees, too, and from a
# pinned copy of it to the device. The copies wait on the stream for the number of the replay that still reads the
# tables, and the stream writes the update's number behind them, for which the next replay waits: neither this process
# nor the engine blocks on the host. As a replay may take long, or hang, device tables have a stream of their own, and
# must be idle (``is_idle``) before they are changed or closed. Their methods run on one thread that may block.


class HostTables:
    """Tables in shared host memory."""

    def __init__(self, region: HostRegion, shape: TableShape) -> None:
        self.device = region.device
        self.region = region
        self._views = views(shape, region.view())

    def is_idle(self) -> bool:
        """Return True: what is shown is copied at once."""
        return True

    def show(self, tables: GraphTables, change: TableChange, sequence: int, replayed: int) -> None:
        """Copy what has changed; the caller has waited for the engine's event, so there is no ``replayed``."""
        del sequence
        assert not replayed, replayed
        tables.write(change, self._views)

    def close(self) -> None:
        """Free the memory; engines that mapped it keep their mapping."""
        self.region.close()


class DeviceTables:
    """Tables on a device, in memory of their engine.

    Attributes:
        device: its name.
        mirror: what the engine finds in host memory if this process ends.
    """

    def __init__(
        self, accelerator: Accelerator, region: AcceleratorRegion, mirror: TableMirror, shape: TableShape
    ) -> None:
        """Take ``region`` over, in which tables are empty."""
        self.device = region.device
        self.mirror = mirror
        self._region = region
        self._accelerator = accelerator
        self._layout = table_layout(shape)
        with accelerator.calling():
            backend = accelerator.torch
            self._pinned = accelerator.pinned(self._layout.size_bytes, backend.uint8)
            self._event = backend.Event(device=backend.device(accelerator.kind, accelerator.index))
            self._stream = accelerator.waiting_stream(self)
            self._shown = int(region.tensor.data_ptr()) + self._layout.words
            self._replayed = self._shown + WORD_BYTES
        self._views = views(shape, self._pinned.numpy())

    def is_idle(self) -> bool:
        """Return whether the copies of the last update are done; until then its memory is in use.

        Raises:
            DeviceLostError: the device failed.
        """
        with self._accelerator.calling():
            return bool(self._event.query())

    def show(self, tables: GraphTables, change: TableChange, sequence: int, replayed: int) -> None:
        """Copy what has changed once the engine's stream has written ``replayed``; the tables must be idle.

        Raises:
            DeviceLostError: the device failed.
        """
        tables.write(change, self.mirror.views)
        self.mirror.end(sequence, replayed)
        tables.write(change, self._views)
        accelerator, vendor, stream = self._accelerator, self._accelerator.vendor, self._stream
        spans = change.byte_spans(self._layout)
        starts, ends = spans.starts, spans.ends
        if len(starts) > FEW_COPIES:
            starts, ends = starts[:1], ends[-1:]
        on_device = self._region.tensor
        with accelerator.calling(), accelerator.may_wait():
            if replayed:
                vendor.wait_value(self._replayed, replayed, stream)
            with on_stream(accelerator.torch, stream):
                for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
                    on_device[start:end].copy_(self._pinned[start:end], non_blocking=True)
            vendor.write_value(self._shown, sequence, stream)  # before the engine gets its reply
            self._event.record(stream)

    def shown(self) -> int:
        """Return the number of the update that the memory shows, as it says itself."""
        words = slice(self._layout.words, self._layout.words + WORD_BYTES)
        return int(self._read(words).view("uint64")[0])

    def read(self, sequence: int) -> TableViews:
        """Return what the memory shows, at least that update, and take it for the mirror's contents, too."""
        with self._accelerator.calling():
            self._accelerator.vendor.wait_value(self._shown, sequence, self._accelerator.streams.device_to_host)
        self.mirror.bytes[:] = self._read(slice(0, self._layout.words))
        return self.mirror.views

    def release(self) -> None:
        """Let copies go on that wait for a replay of an engine that is no more: nothing reads what they write."""
        with self._accelerator.calling():
            self._accelerator.vendor.write_value(self._replayed, RELEASED, self._accelerator.streams.host_to_device)

    def close(self) -> None:
        """Unmap the memory; the tables must be idle."""
        self._region.close()
        self._accelerator.release_stream(self)

    def _read(self, where: slice) -> Region:
        accelerator, stream = self._accelerator, self._accelerator.streams.device_to_host
        with accelerator.calling():
            with on_stream(accelerator.torch, stream):
                self._pinned[where].copy_(self._region.tensor[where], non_blocking=True)
            self._event.record(stream)
            accelerator.wait(self._event)
        found: Region = self._pinned[where].numpy()
        return found


# -- the service.


class _Tables:
    """One set of tables: its contents, the memory that graphs read, and the host memory that goes with it.

    On a device, its methods are for the tables' thread.
    """

    def __init__(
        self, session_id: int, name: str, tables: GraphTables, host: HostRegion, visible: HostTables | DeviceTables
    ) -> None:
        self.session_id = session_id
        self.name = name
        self.tables = tables
        self.visible = visible
        self.host = host
        self.lengths = HostLengthsWriter(host.view(), tables.shape.max_batch)
        self.sequence = 0
        self.updates = 0
        self.busy = False  # an update waits, or is being copied
        self.stale = False  # a copy failed, or what is shown is not known: the next one copies everything
        self.closed = False
        self.is_adopted = False  # copies of the daemon before may come yet

    def adopt(self, shown: TablesShown) -> bool:
        """Go on with what the memory shows, if that can be believed; return whether it can.

        Raises:
            InvalidFieldError: the memory's words are not those of tables.
        """
        visible = self.visible
        assert isinstance(visible, DeviceTables)
        self.sequence = visible.shown()
        if self.sequence > MAX_WORD:
            raise InvalidFieldError(f"the memory's word says that it shows {self.sequence}", field="shown")
        visible.mirror.end(self.sequence, 0)
        batch = self.tables.shape.max_batch
        try:
            lengths = self._believed(visible, shown)
        except InvalidFieldError as error:
            self.stale = True
            self.lengths = HostLengthsWriter(self.host.view(), batch, self.sequence)
            log.warning("tables are empty", session=self.session_id, tables=self.name, cause=error.detail)
            return False
        self.lengths = HostLengthsWriter(self.host.view(), batch, self.sequence - 1)
        self.lengths.write(lengths, self.tables.shape.replayed_rows(shown.batch), shown.extra_tokens)
        return True

    def _believed(self, visible: DeviceTables, shown: TablesShown) -> Int64s:
        """Take over what the memory shows; return the lengths of its rows, without the extra tokens."""
        if shown.overwritten:
            raise InvalidFieldError("their engine has written them itself", field="shown")
        contents = visible.read(shown.sequence)
        self.tables.adopt(contents, shown.batch, shown.extra_tokens)
        lengths = contents.seq_lens[: shown.batch].astype("int64")
        lengths -= shown.extra_tokens * (lengths > 0)
        return lengths

    def show(self, update: TableUpdate, replayed: int) -> TablesUpdated | None:
        """Apply an update and start its copies; return None, with nothing done, while earlier ones are in progress."""
        if self.closed:
            raise UnknownTablesError(f"tables {self.name!r} are deleted", field="tables")
        if not self.visible.is_idle():
            return None
        change = self.tables.apply(update)
        if self.stale:
            change = self.tables.everything()
        self.stale = True
        self.sequence += 1
        self.lengths.write(update.lengths, change.replayed_rows, update.extra_tokens)
        self.visible.show(self.tables, change, self.sequence, replayed)
        self.stale = False
        self.updates += 1
        return TablesUpdated(sequence=self.sequence, replayed_rows=change.replayed_rows)

    def release(self) -> None:
        """Let its copies wait for its engine no longer."""
        if not self.closed and isinstance(self.visible, DeviceTables):
            self.visible.release()

    def close(self) -> bool:
        """Free the memory that no copy writes any more; return whether it was freed."""
        if not self.visible.is_idle():
            return False
        self.closed = True
        self.host.close()
        self.visible.close()
        return True


class TableService:
    """Owns every session's tables. Those on devices are mapped and copied on a thread of their own."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        session_socket: SessionSocket,
        pools: PoolRegistry,
        devices: Devices,
        rings: EventRings,
        descriptors: Descriptors,
        fence: Fence,
    ) -> None:
        self._fence = fence
        self._descriptors = descriptors
        self._dispatcher = dispatcher
        self._session_socket = session_socket
        self._pools = pools
        self._devices = devices
        self._rings = rings
        self._tables: dict[tuple[int, str], _Tables] = {}
        self._coming: set[tuple[int, str]] = set()
        self._ending: set[_Tables] = set()
        self._process = os.pidfd_open(os.getpid())
        self._executor = started_threads(1, "tables")
        self._closing = Background("the end of tables")
        dispatcher.handle("CREATE_TABLES", self._create)
        dispatcher.handle("UPDATE_TABLES", self._update)
        dispatcher.handle("DELETE_TABLES", self._delete)

    def __repr__(self) -> str:
        """Show how many sets of tables there are."""
        return f"<TableService {len(self._tables)}>"

    def session_lost(self, session_id: int) -> None:
        """Close a session's tables, and wait for its engine no longer."""
        for key in [one for one in self._tables if one[0] == session_id]:
            self._close_tables(self._tables.pop(key))
        for one in [one for one in self._ending if one.session_id == session_id]:
            self._closing.spawn(on_thread(self._executor, one.release))

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
        for one in (*self._tables.values(), *self._ending):
            one.host.close()
            one.visible.close()
        os.close(self._process)

    async def _create(self, call: Call) -> Answer:
        body = expect(call, CreateTables)
        shares = self._session_socket.take_share(call.session, call.message_id).shares
        key = (call.session.session_id, body.tables)
        if key in self._tables or key in self._coming:
            raise TablesExistError(f"the session has tables {body.tables!r}", field="tables")
        if sum(one[0] == key[0] for one in (*self._tables, *self._coming)) >= MAX_TABLES_PER_SESSION:
            raise OverloadedError(f"the session has {MAX_TABLES_PER_SESSION} tables").after(RETRY_LATER_MS)
        pool = self._pools.named_by(call.session, body.pool)
        device, tables = pool.region.device, _tables_for(pool, body)
        share = _share_of(pool, body, shares)
        copies = HOST_COPIES if share is None else DEVICE_COPIES
        self._keep(*key, copies * table_layout(tables.shape).size_bytes)
        self._coming.add(key)
        try:
            made = self._on_host(*key, tables) if share is None else await self._on_device(*key, device, share, tables)
            adopted = body.shown is not None and await self._adopted(made, body.shown)
            return self._created(call, made, adopted=adopted)
        except BaseException:
            self._forget(*key)
            raise
        finally:
            self._coming.discard(key)

    def _on_host(self, session_id: int, name: str, tables: GraphTables) -> _Tables:
        region = HostRegion.create(f"tables-{session_id}-{name}", table_layout(tables.shape).size_bytes)
        try:
            host = HostRegion.create(f"lengths-{session_id}-{name}", shared_bytes(tables.shape, mirrored=False))
        except BaseException:
            region.close()
            raise
        return _Tables(session_id, name, tables, host, HostTables(region, tables.shape))

    async def _on_device(
        self, session_id: int, name: str, device: str, share: TorchShare, tables: GraphTables
    ) -> _Tables:
        """Return tables in an engine's memory, after asking the driver about that."""

        def make() -> _Tables:
            size_bytes = table_layout(tables.shape).size_bytes
            array = Array(name="tables", start=0, shape=(size_bytes,), dtype="uint8")
            host = HostRegion.create(f"lengths-{session_id}-{name}", shared_bytes(tables.shape, mirrored=True))
            region = None
            try:
                region = self._devices.register(device, [RegisteredSegment(array, share)], size_bytes)
                mirror = TableMirror(host.view(), tables.shape)
                visible = DeviceTables(self._devices.open(device), region, mirror, tables.shape)
            except BaseException:
                host.close()
                if region is not None:
                    region.close()
                raise
            return _Tables(session_id, name, tables, host, visible)

        return await on_thread(self._executor, make, _Tables.close)

    async def _adopted(self, made: _Tables, shown: TablesShown) -> bool:
        """Return whether these go on with what their memory shows; wait until it does: their engine may see to that."""
        visible, pause_s = made.visible, FIRST_PAUSE_S
        assert isinstance(visible, DeviceTables)
        try:
            while await on_thread(self._executor, visible.shown) < shown.sequence:
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            made.is_adopted = True
            return await on_thread(self._executor, lambda: made.adopt(shown))
        except BaseException:
            self._close_tables(made)
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

    def _created(self, call: Call, made: _Tables, *, adopted: bool) -> Answer:
        visible, shape = made.visible, made.tables.shape
        second, regions = (visible.region.fd, 2) if isinstance(visible, HostTables) else (self._process, 1)
        try:
            self._descriptors.take(made.host, call.session.tenant, "sessions", PER_REGION * regions)
            follows = TablesFollow(message_id=call.message_id)
            self._session_socket.pass_frame(call.session, follows, (made.host.fd, second))
        except Exception:
            self._close_tables(made)
            raise
        self._tables[made.session_id, made.name] = made
        layout = table_layout(shape)
        log.info("tables created", session=made.session_id, tables=made.name, device=visible.device, adopted=adopted)
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
                adopted=adopted,
            )
        )

    async def _update(self, call: Call) -> Answer:
        body = expect(call, UpdateTables)
        one = self._get_idle(call.session.session_id, body.tables)
        _check_after(one, body)
        one.busy = True
        try:
            if one.is_adopted:
                await self._pass_fence(one)
            await self._rings.reached(call, body.after)
            return Answer(await self._shown(one, _update_of(body, call), body.replayed or 0))
        finally:
            one.busy = False

    async def _pass_fence(self, one: _Tables) -> None:
        """Wait until no copy of the daemon before can come over an update.

        Raises:
            UnknownTablesError: nobody knows when that is: the tables are no more.
        """
        if not await self._fence.passed():
            self._drop(one)
            raise UnknownTablesError(
                f"tables {one.name!r}: copies of the daemon before may still come into their memory", field="tables"
            )
        one.is_adopted = False

    async def _shown(self, one: _Tables, update: TableUpdate, replayed: int) -> TablesUpdated:
        """Show an update once the copies of the one before it are done; they may wait for a slow engine's replay."""
        pause_s = FIRST_PAUSE_S
        while (shown := await self._called(one, lambda: one.show(update, replayed))) is None:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        return shown

    async def _called(self, one: _Tables, call: Callable[[], T]) -> T:
        """Return what a call returns that is for the thread of these tables."""
        return call() if isinstance(one.visible, HostTables) else await on_thread(self._executor, call)

    def _delete(self, call: Call) -> Answer:
        body = expect(call, DeleteTables)
        self._drop(self._get_idle(call.session.session_id, body.tables))
        return Answer(TablesDeleted(tables=body.tables))

    def _drop(self, one: _Tables) -> None:
        if self._tables.pop((one.session_id, one.name), None) is not None:
            self._forget(one.session_id, one.name)
            self._close_tables(one)

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
            self._ending.add(one)
            self._closing.spawn(self._close_on_device(one))

    async def _close_on_device(self, one: _Tables) -> None:
        """Close tables after the copies that are queued on the tables' thread."""
        while not await on_thread(self._executor, one.close):  # noqa: ASYNC110  a driver tells nobody that it is done
            await asyncio.sleep(CLOSE_PAUSE_S)
        self._ending.discard(one)


def _share_of(pool: Pool, body: CreateTables, shares: tuple[Share, ...]) -> TorchShare | None:
    """Return the share of the memory in which tables of this pool are to be; None: of the daemon's.

    Raises:
        InvalidFieldError: the engine shares none, or shares some for a pool on the host.
    """
    device = pool.region.device
    if device == HOST:
        if shares or body.shown is not None:
            raise InvalidFieldError(
                f"pool {pool.name!r} is on the host, where tables are in the daemon's memory", field="pool"
            )
        return None
    if len(shares) != 1 or not isinstance(shares[0], TorchShare):
        raise InvalidFieldError(
            f"pool {pool.name!r} is on {device}, where tables are in memory of their engine, of which one share comes "
            "before CREATE_TABLES: make, attach or register the pool by this client first",
            field="pool",
        )
    return shares[0]


def _check_after(one: _Tables, body: UpdateTables) -> None:
    """Check that an update says as these tables need it which replay it is to wait for.

    Raises:
        InvalidFieldError: it does not.
    """
    if one.visible.device != HOST and body.after is not None:
        raise InvalidFieldError(
            f"an event of a ring is for tables on the host; these are on {one.visible.device}: give what "
            "tables.replayed() returns",
            field="after",
        )
    if one.visible.device == HOST and body.replayed is not None:
        raise InvalidFieldError(
            "it is for tables on a device: here an event of a ring says it, after", field="replayed"
        )


def _tables_for(pool: Pool, body: CreateTables) -> GraphTables:
    """Return empty tables for a pool.

    Raises:
        UnknownComponentError: the pool has no such paged component or window.
        InvalidFieldError: the window is missing, or differs from the pool's.
        TooLargeError: the tables exceed ``MAX_TABLES_BYTES``.
    """
    component = component_of(pool.manifest, body.component)
    shape = asked_shape(body, pool.manifest)
    if component is None or shape is None:
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
