"""The memory from which captured graphs read their tables: host memory, or a device's, written by copies on a stream.

Device tables are copied from a pinned host copy of the whole region. An update's copies wait on the stream for the
replay that still reads the tables, and record an event for which the next replay waits: neither this process nor the
engine blocks on the host. As a replay may take long, or hang, device tables have a stream of their own, and must be
idle (``is_idle``) before they are changed or closed. All methods run on one thread that may block.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from kvferry.attention.graph_tables import GraphTables, TableChange
from kvferry.attention.table_layout import table_layout, views
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.devices.vendor import on_stream
from kvferry.protocol.session_stream import SharedEvents

FEW_COPIES: Final = 4
"""More extents than this are copied as one, from the first to the last: cheaper than a copy for each."""


class VisibleTables(Protocol):
    """The tables of one captured model."""

    device: str

    def show(self, tables: GraphTables, change: TableChange, after: Any | None) -> None:  # noqa: ANN401  torch.Event
        """Copy what has changed; on a device, after the stream has waited for the engine's event ``after``.

        Raises:
            DeviceLostError: the device failed.
        """

    def close(self) -> None:
        """Free the memory; engines that mapped it keep their mapping."""


class HostTables:
    """Tables in shared host memory."""

    def __init__(self, region: HostRegion, tables: GraphTables) -> None:
        self.device = region.device
        self.region = region
        self._views = views(tables.shape, region.view())

    def show(self, tables: GraphTables, change: TableChange, after: Any | None) -> None:  # noqa: ANN401
        """See ``VisibleTables.show``; the caller has waited for the engine's event."""
        assert after is None, "host tables have no stream"
        tables.write(change, self._views)

    def close(self) -> None:
        """See ``VisibleTables.close``."""
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

    def show(self, tables: GraphTables, change: TableChange, after: Any | None) -> None:  # noqa: ANN401
        """See ``VisibleTables.show``; the tables must be idle."""
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
        """See ``VisibleTables.close``; the tables must be idle."""
        self.region.close()
        self._accelerator.release_stream(self)
