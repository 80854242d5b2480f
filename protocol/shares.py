"""Shares: what another process needs to map device memory. They travel over the session socket only.

A share may allow its holder to map the memory, so it is never logged, and its repr shows nothing of it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Handle = Annotated[bytes, Meta(max_length=512)]
DriverHandle = Annotated[int, Meta(ge=0)]
Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]
MAX_SHARES = 16
"""Per frame."""

MAX_SHARED_EVENTS = 128
"""Events in a session's ring on a device: as many as fit their handles into one frame."""


class _Share(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    def __repr__(self) -> str:
        """Show the kind alone."""
        return f"<{type(self).__name__}>"


class VmmShare(_Share, frozen=True, kw_only=True, tag="vmm"):
    """A physical allocation of CANN's virtual memory management; the exporter names the processes that may import it.

    The driver counts its holders: the memory is freed with the last one, however that process ends.
    """

    handle: DriverHandle
    size_bytes: Offset


class TorchShare(_Share, frozen=True, kw_only=True, tag="torch"):
    """A torch storage, with the fields that torch passes to another process.

    ``offset_bytes`` is the offset of the shared bytes in the storage.
    """

    handle: Handle
    storage_bytes: Offset
    storage_offset_bytes: Offset
    ref_counter: Handle
    ref_counter_offset: Offset
    event: Handle
    event_sync: bool
    offset_bytes: Offset = 0


Share = VmmShare | TorchShare
"""Every kind of share, tagged by ``kind``."""


class SharedEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Interprocess events of one device: the process that created them records them, those that open them wait."""

    handles: Annotated[tuple[Handle, ...], Meta(max_length=MAX_SHARED_EVENTS)]

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<SharedEvents {len(self.handles)}>"
