"""Device events that a request waits for."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from kvferry.protocol.limits import EVENT_RING_SLOTS


class DeviceEvent(msgspec.Struct, frozen=True, kw_only=True):
    """An event of the session's ring, by index, and the value that it must reach."""

    event: Annotated[int, Meta(ge=0, lt=EVENT_RING_SLOTS)]
    value: Annotated[int, Meta(ge=1, lt=1 << 62)]
