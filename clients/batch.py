"""Requests that are collected and sent in one message: one step of an engine's loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import numpy.typing as npt

from kvferry.clients import calls
from kvferry.clients.submitting import PendingReply, Submitting
from kvferry.protocol.batch_messages import MAX_BATCH, check_batched
from kvferry.protocol.client_core import ClientCore, Outgoing
from kvferry.protocol.device_event import DeviceEvent
from kvferry.protocol.errors import CancelledError, KvferryError, MisuseError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import Freed

ENVELOPE_BYTES = 1 << 16
"""More than the envelope and what surrounds the bodies of a BATCH take."""


class Batch(Submitting):
    """What ``client.batched()`` returns: it has the calls of the client that send and return at once, and ``free``.

    Nothing is sent before the ``with`` block ends; where that raises, what was begun in it is refused as CANCELLED.
    """

    def __init__(
        self,
        core: ClientCore,
        use: AbstractContextManager[None],
        limits: Limits,
        *,
        deadline: Callable[[float | None], tuple[float, int]],
        expect: Callable[[int], None],
        send: Callable[[Outgoing], None],
        refuse: Callable[[Sequence[Outgoing], KvferryError], None],
    ) -> None:
        """Use ``client.batched()``."""
        self._core = core
        self._use = use
        self._limits = limits
        self._deadline_of = deadline
        self._expect_reply = expect
        self._send = send
        self._refuse = refuse
        self._requests: list[Outgoing] = []
        self._ended = False

    def __repr__(self) -> str:
        """Show how many requests it has."""
        return f"<Batch of {len(self._requests)} requests{', ended' if self._ended else ''}>"

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Send the requests, or give them up."""
        self._ended = True
        if error is not None:
            self._refuse(self._requests, CancelledError(f"never sent: its batch ended with {error!r}"))
            return
        with self._use:
            for part in self._parts():
                self._send(self._core.batch(part))

    def free(
        self,
        pool: str,
        ids: npt.ArrayLike,
        space: str = MAIN,
        *,
        after: DeviceEvent | None = None,
        deadline_s: float | None = None,
    ) -> PendingReply[Freed]:
        """Give pages back, as ``client.free`` does; ``client.wait`` takes the reply."""
        return self.begin(calls.free(pool, ids, space, after), deadline_s=deadline_s)

    def _put(self, outgoing: Outgoing) -> None:
        try:
            if self._ended:
                raise MisuseError("this batch was sent: begin another one by client.batched()")
            check_batched(type(outgoing.request.body), "call")
        except KvferryError as error:
            self._refuse([outgoing], error)
            raise
        self._requests.append(outgoing)

    def _expect(self, message_id: int) -> None:
        self._expect_reply(message_id)

    def _deadline(self, deadline_s: float | None) -> tuple[float, int]:
        return self._deadline_of(deadline_s)

    def _parts(self) -> list[list[Outgoing]]:
        """Return the requests as many to a message as the daemon takes."""
        parts: list[list[Outgoing]] = []
        frames_left = bytes_left = 0
        for one in self._requests:
            frames, size_bytes = len(one.ids), one.size_bytes
            if not parts or len(parts[-1]) >= MAX_BATCH or frames > frames_left or size_bytes > bytes_left:
                parts.append([])
                frames_left = self._limits.max_frames - 1
                bytes_left = min(self._limits.max_message_bytes, self._limits.max_frame_bytes) - ENVELOPE_BYTES
            parts[-1].append(one)
            frames_left -= frames
            bytes_left -= size_bytes
        return parts
