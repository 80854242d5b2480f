"""Graph tables as an engine sees them: memory at fixed addresses, the host lengths, and ordering with graph replays.

One decode step::

    update = client.update_tables(tables, lengths, entries=Entries(rows, columns, pages), after=replayed)
    ...                                   # the engine's own work hides the update
    client.wait(update)                   # its copies are queued, or done
    tables.order()                        # the current stream waits for them, not the host
    tables.update_graph(graph)            # the lengths that the graph has baked in
    graph.replay()
    replayed = tables.replayed()          # on the host: ring.record_event()
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from kvferry.attention.host_lengths import HostLengths, HostLengthsReader
from kvferry.attention.table_layout import TableShape, asked_shape, table_layout
from kvferry.clients.arguments import text, whole, wrong_kind
from kvferry.clients.device_tables import DeviceTables
from kvferry.clients.devices import EngineDevices, TablesMemory
from kvferry.clients.elements import import_torch
from kvferry.clients.exclusive_use import OfOneProcess
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import ClientClosedError, InvalidFieldError, MisuseError
from kvferry.protocol.ids import HOST
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.table_messages import CreateTables, TablesCreated, TablesShown

if TYPE_CHECKING:
    import torch


_SHAPES: Final = {"block_tables": 2, "block_tables_swa": 2, "seq_lens": 1}
"""Dimensions of each table."""


class Place(NamedTuple):
    """Where a pool is that this client has made, attached or registered, and what it holds."""

    device: str
    manifest: Manifest


class Tables(OfOneProcess):
    """Tables of one captured model; made by ``create_tables``. Tensors are valid until ``close``.

    On a device they are in this process's memory, and outlive the daemon: tensors and captured graphs stay.

    Attributes:
        name: the tables' name in this session.
        columns: W, the number of pages of a row.
        page_size: tokens of a page.
        device: where the tables are.
        body: what they were asked for by.
        overwritten: set it while the engine writes the tables itself: a daemon that comes takes all rows for empty.
    """

    overwritten = False

    def __init__(self, body: CreateTables, created: TablesCreated, fds: list[int], memory: TablesMemory | None) -> None:
        """Map them by the descriptors, which this takes out of ``fds``; on a device they are in ``memory``."""
        self.name = created.tables
        self.columns = created.columns
        self.page_size = created.page_size
        self.device = created.device
        self.body = body
        self._created = created
        self._max_batch = body.max_batch
        self._memory = memory
        self._host = HostRegion(fds.pop(0), created.host_bytes, writable=False)
        self._lengths = HostLengthsReader(self._host.view(), self._max_batch)
        self._region = HostRegion(fds.pop(0), created.region_bytes) if memory is None else None
        self._on_device: DeviceTables | None = None
        if memory is not None:
            self._on_device = DeviceTables(memory, self._host, self._shape, fds.pop(0))

    def __repr__(self) -> str:
        """Show the shape and where they are."""
        return f"<Tables {self.name!r} {self.device} rows={self._max_batch} columns={self.columns}>"

    @property
    def block_tables(self) -> torch.Tensor:
        """Return ``(max_batch, columns)`` int32: the page for each logical page of each row, 0 for none."""
        return self._int32(self._created.block_tables, self._max_batch * self.columns).view(self._max_batch, -1)

    @property
    def block_tables_swa(self) -> torch.Tensor | None:
        """Return the same for the window layers' pool; None without a window."""
        at = self._created.block_tables_swa
        return None if at is None else self._int32(at, self._max_batch * self.columns).view(self._max_batch, -1)

    @property
    def seq_lens(self) -> torch.Tensor:
        """Return ``(max_batch,)`` int32: tokens of each row, extra ones included; 0 if the row is not in use."""
        return self._int32(self._created.seq_lens, self._max_batch)

    def array(self, name: Literal["block_tables", "block_tables_swa", "seq_lens"]) -> npt.NDArray[np.int32]:
        """Return one of the tables on the host, by its tensor's name, as a numpy array of the same shape and memory.

        Raises:
            InvalidFieldError: there is no such table, or they are on a device.
        """
        if not isinstance(self._region, HostRegion):
            raise InvalidFieldError(
                f"the tables are on {self.device}, and numpy sees host memory only: use the tensors", field="device"
            )
        start: int | None = getattr(self._created, name) if text(name, "name") in _SHAPES else None
        if start is None:
            raise InvalidFieldError(f"these tables have no {name!r}", field="name")
        shape = (self._max_batch, self.columns)[: _SHAPES[name]]
        assert self._region is not None, self
        return self._region.view()[start : start + 4 * math.prod(shape)].view(np.int32).reshape(shape)

    def host_lengths(self) -> HostLengths:
        """Return the lengths of the latest update, as Python lists.

        Raises:
            ClientClosedError: the tables are closed.
            ForkedError: a forked child has no tables.
        """
        self._host.check_process()
        if self._host.fd < 0:
            raise ClientClosedError(f"{self!r} was closed")
        on_device = self._on_device
        return self._lengths.read(None if on_device is None else lambda: on_device.sequence)

    def graph_inputs(self, *, draft_step: int | None = None, operators: int = 1) -> list[dict[str, Any]]:
        """Return the argument of ``NPUGraph.update(cpu_update_input=…)``: the lengths that are baked into the graph.

        Args:
            draft_step: step i of a multi-step draft, which reads i + 1 tokens more; None for decode and verify.
            operators: how many attention operators the graph has; 1 is enough if all take the same lengths.

        Raises:
            InvalidFieldError: one of them is not an integer, or negative.
            MisuseError: the tables have no rows that a replay could read: no update has succeeded yet.
        """
        operators = whole(operators, "operators")
        step = None if draft_step is None else whole(draft_step, "draft_step")
        lengths = self.host_lengths()
        if not lengths.replayed_rows:
            raise MisuseError(f"{self!r} have no rows to replay yet: update_tables comes before the first replay")
        kv = lengths.for_update() if step is None else lengths.for_draft_step(step)
        return [{"actual_seq_lengths_kv": kv} for _ in range(operators)]

    def order(self, stream: torch.Stream | None = None) -> None:
        """Make a stream, by default the device's current one, wait for the update's copies; no-op on the host."""
        if self._on_device is not None:
            self._on_device.order(stream)

    def replayed(self, stream: torch.Stream | None = None) -> int:
        """Return a number for ``update_tables(after=...)``: that of all that the stream was given so far, replays too.

        Replays of all graphs over the tables are on one stream at a time, by default the device's current one.

        Raises:
            InvalidFieldError: the tables are on the host: there an event of a ring says it.
        """
        if self._on_device is None:
            raise InvalidFieldError("tables on the host have no such number: use ring.record_event()", field="after")
        return self._on_device.replayed(stream)

    @property
    def memory(self) -> TablesMemory | None:
        """Return the memory of this process that they are in; None: the daemon's, which goes with it."""
        return self._memory

    def shown(self) -> TablesShown:
        """Return what they show, of a daemon that has ended, for the next one to go on with."""
        lengths = self.host_lengths()
        return TablesShown(
            sequence=lengths.sequence,
            batch=len(lengths.lengths),
            extra_tokens=lengths.extra_tokens,
            overwritten=self.overwritten,
        )

    def renew(self, created: TablesCreated, fds: list[int]) -> None:
        """Go on with the next daemon, by the descriptors, which this takes out of ``fds``."""
        assert self._on_device is not None, self
        before, self._host = self._host, HostRegion(fds.pop(0), created.host_bytes, writable=False)
        self._lengths = HostLengthsReader(self._host.view(), self._max_batch)
        self._on_device.renew(self._host, self._shape, fds.pop(0))
        before.close()

    def update_graph(self, graph: Any, *, draft_step: int | None = None, operators: int = 1) -> None:  # noqa: ANN401
        """Rewrite the lengths baked into a captured graph; does nothing if graphs read them from ``seq_lens``.

        Raises as ``graph_inputs`` does.
        """
        if self._memory is not None:
            inputs = self.graph_inputs(draft_step=draft_step, operators=operators)
            self._memory.accelerator.vendor.update_graph(graph, inputs)

    def close(self) -> None:
        """Unmap the tables: graphs captured over them must not be replayed any more."""
        self._host.close()
        if self._region is not None:
            self._region.close()
        if self._on_device is not None:
            self._on_device.close()

    @property
    def _shape(self) -> TableShape:
        """Return what the layout depends on, as the daemon says it."""
        window = None if self._created.block_tables_swa is None else self.body.window
        return TableShape(max_batch=self._max_batch, columns=self.columns, page_size=self.page_size, window=window)

    def _int32(self, start: int, count: int) -> torch.Tensor:
        backend = import_torch()
        end = start + 4 * count
        if self._memory is not None:
            return self._memory.tensor[start:end].view(backend.int32)
        assert self._region is not None, self
        on_host: torch.Tensor = backend.from_numpy(self._region.view()[start:end]).view(backend.int32)
        return on_host


def tables_name(tables: Tables) -> str:
    """Return the name of tables passed as an argument.

    Raises:
        InvalidFieldError: the argument is not ``Tables``.
    """
    if not isinstance(tables, Tables):
        raise wrong_kind(tables, "Tables, as create_tables returns them", "tables")
    return tables.name


def memory_for(body: CreateTables, place: Place | None, devices: EngineDevices) -> TablesMemory | None:
    """Return memory for tables, which may take seconds the first time; None: they are to be in the daemon's.

    Raises:
        InvalidFieldError: no tables can be of that shape.
        OutOfMemoryError: the device has too little free memory.
    """
    if place is None or place.device == HOST:
        return None
    shape = asked_shape(body, place.manifest)
    if shape is None:
        return None  # the daemon refuses them
    return devices.tables_memory(place.device, table_layout(shape).size_bytes)
