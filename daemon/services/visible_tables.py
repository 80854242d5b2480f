"""Graph tables where captured graphs read them: host memory, written at once, or a device's, by copies on a stream.

A device's tables follow a pinned copy of the whole region. An update's copies wait on the stream for the replay that
still reads the tables, and an event after them lets the next replay wait: neither this process nor the engine waits on
the host. As a replay may take long, or hang, a device's tables have a stream of their own, and whoever wants to change
or close them asks first whether they are idle. All their methods belong on one thread that may wait.
"""

from __future__ import annotations

from typing import Any, Final, Protocol

from kvferry.attention.graph_tables import GraphTables, TableChange
from kvferry.attention.table_layout import table_layout, views
from kvferry.pools.devices.accelerator import Accelerator
from kvferry.pools.devices.accelerator_region import AcceleratorRegion
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.devices.vendor import on_stream
from kvferry.protocol.shares import SharedEvents

FEW_COPIES: Final = 4
"""More extents than this go as one copy from the first to the last: what lies between costs less than a copy each."""


class VisibleTables(Protocol):
    """The tables of one captured model."""

    device: str

    def show(self, tables: GraphTables, change: TableChange, after: Any | None) -> None:  # noqa: ANN401  torch.Event
        """Copy what has changed; ``after``: an event of the engine to wait for on the stream.

        Raises:
            DeviceLostError: the device failed.
        """

    def close(self) -> None:
        """Give the memory back; engines that mapped it keep it until they let it go."""


class HostTables:
    """Tables in shared host memory."""

    def __init__(self, region: HostRegion, tables: GraphTables) -> None:
        self.device = region.device
        self.region = region
        self._views = views(tables.shape, region.view())

    def show(self, tables: GraphTables, change: TableChange, after: Any | None) -> None:  # noqa: ANN401
        """See ``VisibleTables.show``; the engine's events have been waited for."""
        assert after is None, "no stream here waits"
        tables.write(change, self._views)

    def close(self) -> None:
        """See ``VisibleTables.close``."""
        self.region.close()


class DeviceTables:
    """Tables on a device."""

    def __init__(self, accelerator: Accelerator, region: AcceleratorRegion, tables: GraphTables) -> None:
        """Own ``region``, which is zeroed."""
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
        """Return whether the copies of the last update are done: till then its memory and its event are in use.

        Raises:
            DeviceLostError: the device failed.
        """
        with self._accelerator.calling():
            return bool(self._event.query())

    def show(self, tables: GraphTables, change: TableChange, after: Any | None) -> None:  # noqa: ANN401
        """See ``VisibleTables.show``; while they are idle."""
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
            accelerator.vendor.record(self._event, stream)  # before the engine is told

    def close(self) -> None:
        """See ``VisibleTables.close``; while they are idle."""
        self.region.close()
        self._accelerator.release_stream(self)
