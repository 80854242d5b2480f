"""Shares: what another process needs to map memory of a device. They travel over the session socket only.

Whoever has a share may be able to map the memory: a share is never logged, and its text form shows nothing of it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Handle = Annotated[bytes, Meta(max_length=512)]
DriverHandle = Annotated[int, Meta(ge=0)]
Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]
MAX_SHARES = 16
"""Of one frame."""

MAX_SHARED_EVENTS = 128
"""Events of a session's ring on a device: their handles fit into one frame."""


class _Share(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    def __repr__(self) -> str:
        """Show the kind alone."""
        return f"<{type(self).__name__}>"


class VmmShare(_Share, frozen=True, kw_only=True, tag="vmm"):
    """A physical allocation of CANN's virtual memory management; the exporter has named who may import it.

    The driver counts who holds it: the memory goes with the last one, however he ends.
    """

    handle: DriverHandle
    size_bytes: Offset


class TorchShare(_Share, frozen=True, kw_only=True, tag="torch"):
    """A torch storage, by the fields that torch itself hands to another process.

    ``offset_bytes`` is where the shared bytes begin in the storage.
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
"""Every kind of share, told apart by ``kind``."""


class SharedEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Interprocess events of one device: whoever made them records them, whoever opens them waits."""

    handles: Annotated[tuple[Handle, ...], Meta(max_length=MAX_SHARED_EVENTS)]

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<SharedEvents {len(self.handles)}>"
