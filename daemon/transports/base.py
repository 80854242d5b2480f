"""The contract of every transport."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvferry.daemon.transfer.effects import StartOp
from kvferry.protocol.errors import KvferryError

OnOpDone = Callable[[int, KvferryError | None], None]
"""Called with a transfer op's id and what went wrong, once for each transfer op, on the control loop."""


class Transport(Protocol):
    """Moves transfer ops in the background. Methods are called on the control loop and return at once."""

    def start(self, op: StartOp, on_done: OnOpDone) -> None:
        """Begin to copy; ``on_done`` follows exactly once, when no byte of the transfer op can move any more."""

    def stop(self, op_id: int) -> None:
        """Stop at the next boundary, if the transfer op is still under way; ``on_done`` follows all the same."""

    def close(self) -> None:
        """Stop everything and wait until no byte moves; nothing is reported after it."""
