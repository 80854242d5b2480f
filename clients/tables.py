"""Graph tables as an engine sees them: memory at fixed addresses, the host lengths, and ordering with graph replays.

One decode step::

    update = client.update_tables(tables, lengths, entries=Entries(rows, columns, pages), after=ring.record_event())
    ...                                   # the engine's own work hides the update
    client.wait(update)                   # its copies are queued, or done
    tables.order()                        # the current stream waits for them, not the host
    tables.update_graph(graph)            # the lengths that the graph has baked in
    graph.replay()
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np
import numpy.typing as npt

from kvferry.attention.host_lengths import HostLengths, HostLengthsReader
from kvferry.clients.arguments import text, whole, wrong_kind
from kvferry.clients.devices import EngineDevices
from kvferry.clients.elements import import_torch
from kvferry.clients.exclusive_use import OfOneProcess
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import ClientClosedError, InvalidFieldError
from kvferry.protocol.ids import HOST
from kvferry.protocol.session_stream import ShareFollows, TablesFollow
from kvferry.protocol.table_messages import TablesCreated

if TYPE_CHECKING:
    import torch


_SHAPES: Final = {"block_tables": 2, "block_tables_swa": 2, "seq_lens": 1}
"""Dimensions of each table."""


class Tables(OfOneProcess):
    """Tables of one captured model; made by ``create_tables``. Tensors are valid until ``close``.

    Attributes:
        name: the tables' name in this session.
        columns: W, the number of pages of a row.
        page_size: tokens of a page.
        device: where the tables are.
    """

    def __init__(
        self,
        created: TablesCreated,
        max_batch: int,
        region: HostRegion | AcceleratorRegion,
        host: HostRegion,
        ordered: tuple[Accelerator, torch.Event] | None,
    ) -> None:
        """Take ownership of the mapped memory; ``ordered``: the device, if on one, and the event of its updates."""
        self.name = created.tables
        self.columns = created.columns
        self.page_size = created.page_size
        self.device = created.device
        self._created = created
        self._max_batch = max_batch
        self._region = region
        self._host = host
        self._lengths = HostLengthsReader(host.view(), max_batch)
        self._ordered = ordered

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
        return self._lengths.read()

    def graph_inputs(self, *, draft_step: int | None = None, operators: int = 1) -> list[dict[str, Any]]:
        """Return the argument of ``NPUGraph.update(cpu_update_input=…)``: the lengths that are baked into the graph.

        Args:
            draft_step: step i of a multi-step draft, which reads i + 1 tokens more; None for decode and verify.
            operators: how many attention operators the graph has; 1 is enough if all take the same lengths.

        Raises:
            InvalidFieldError: one of them is not an integer, or negative.
        """
        operators = whole(operators, "operators")
        step = None if draft_step is None else whole(draft_step, "draft_step")
        lengths = self.host_lengths()
        kv = lengths.for_update() if step is None else lengths.for_draft_step(step)
        return [{"actual_seq_lengths_kv": kv} for _ in range(operators)]

    def order(self, stream: torch.Stream | None = None) -> None:
        """Make a stream, by default the device's current one, wait for the update's copies; no-op on the host."""
        if self._ordered is not None:
            accelerator, event = self._ordered
            (stream or accelerator.current_stream()).wait_event(event)

    def update_graph(self, graph: Any, *, draft_step: int | None = None, operators: int = 1) -> None:  # noqa: ANN401
        """Rewrite the lengths baked into a captured graph; does nothing if graphs read them from ``seq_lens``."""
        if self._ordered is not None:
            inputs = self.graph_inputs(draft_step=draft_step, operators=operators)
            self._ordered[0].vendor.update_graph(graph, inputs)

    def close(self) -> None:
        """Unmap the tables: graphs captured over them must not be replayed any more."""
        self._host.close()
        self._region.close()

    def _int32(self, start: int, count: int) -> torch.Tensor:
        backend = import_torch()
        end = start + 4 * count
        if isinstance(self._region, AcceleratorRegion):
            return self._region.tensor[start:end].view(backend.int32)
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


def mapped_tables(
    created: TablesCreated, max_batch: int, follows: TablesFollow, fds: list[int], devices: EngineDevices
) -> Tables:
    """Return the tables of a CREATE_TABLES reply, mapped by the descriptors, which it takes out of ``fds``."""
    host = HostRegion(fds.pop(0), created.host_bytes, writable=False)
    if created.device == HOST:
        return Tables(created, max_batch, HostRegion(fds.pop(0), created.region_bytes), host, None)
    said = ShareFollows(
        message_id=follows.message_id, shares=(follows.share,) if follows.share else (), events=follows.events
    )
    region = devices.map(created.device, said, created.region_bytes)
    ordered = (devices.open(created.device), devices.open_event(created.device, said))
    return Tables(created, max_batch, region, host, ordered)
