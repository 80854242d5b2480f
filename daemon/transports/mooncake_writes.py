"""One write of the Mooncake engine, from waiting to its end, and the writes to one peer.

Knows nothing of Mooncake.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.protocol.errors import InvalidFieldError, KvferryError, TransferFailedError

LARGEST_PORT = 65535

OnWriteDone = Callable[[KvferryError | None], None]
"""Called once, on the loop: the source is not read any more. None: the bytes have landed. Else a WriteFailedError."""

OnWriteLate = Callable[[int], None]
"""Called with the write's id, at most once, on the loop: its deadline has passed, but it is still under way."""


class WriteFailedError(TransferFailedError):
    """A write that did not land, or not as far as anybody can tell.

    Attributes:
        may_still_land: bytes of it may land yet; only the receiver's fence ends that.
    """

    def __init__(self, detail: str, *, may_still_land: bool) -> None:
        super().__init__(detail)
        self.may_still_land = may_still_land


@dataclass(eq=False, slots=True, kw_only=True)
class Write:
    """One write: waiting, then handed to the worker thread, then begun: set there, just before Mooncake sees it."""

    write_id: int
    session_name: str
    local_address: int
    remote_address: int
    size_bytes: int
    timeout_s: float
    on_done: OnWriteDone
    on_late: OnWriteLate | None
    timer: asyncio.TimerHandle | None = None
    batch_id: int = 0
    handed: bool = False
    begun: bool = False
    withdrawn: bool = False

    def __str__(self) -> str:
        return f"a write of {self.size_bytes} bytes to {self.session_name} at {self.remote_address:#x}"


@dataclass(eq=False, slots=True)
class Peer:
    """What waits for one session name, and how much of it is under way."""

    waiting: deque[Write] = field(default_factory=deque)
    bytes_in_flight: int = 0
    contact: asyncio.Task[None] | None = None

    @property
    def idle(self) -> bool:
        """Return whether there is nothing to remember."""
        return not self.waiting and not self.bytes_in_flight and self.contact is None


def host_and_port(session_name: str) -> tuple[str, int]:
    """Return what a session name, ``ADDRESS:PORT``, says.

    Raises:
        InvalidFieldError: it is none.
    """
    host, _, port = session_name.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port[:6]) > LARGEST_PORT:
        raise InvalidFieldError(f"{session_name!r} is not ADDRESS:PORT", field="session_name")
    return host.strip("[]"), int(port)
