"""The protocol that all transports implement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.daemon.transfer.registry import StartOp
from kvferry.protocol.errors import KvferryError

OnOpDone = Callable[[int, KvferryError | None], None]
"""Called on the control loop, once per transfer op, with its id and its error."""


class Transport(Protocol):
    """Copies transfer ops in the background. Methods are called on the control loop and return at once.

    ``StartOp`` is what is copied within this daemon; transports from other daemons take the ``TransferOp`` itself.
    """

    def start(self, op: StartOp, on_done: OnOpDone) -> None:
        """Start copying; ``on_done`` is called exactly once, when no byte of the transfer op can move any more."""

    def stop(self, op_id: int) -> None:
        """Stop at the next copy chunk, if the transfer op is still running; ``on_done`` is called in any case."""

    def close(self) -> None:
        """Stop everything and wait until no byte moves; nothing is reported after that."""
