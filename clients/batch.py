"""Requests of a step of an engine: they go to the daemon in one message."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self
from weakref import WeakSet

import numpy.typing as npt

from kvferry.clients import calls
from kvferry.clients.core.client_core import ClientCore, Outgoing, size_bytes
from kvferry.clients.submitting import PendingReply, Submitting
from kvferry.clients.tables import Tables
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.codec import Frames, PageIds
from kvferry.protocol.envelope import MAX_BATCH
from kvferry.protocol.errors import (
    CancelledError,
    KvferryError,
    MisuseError,
)
from kvferry.protocol.ids import MAIN
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import Freed
from kvferry.protocol.requests import check_batched

ENVELOPE_BYTES = 1 << 16
"""More than the envelope and what surrounds the bodies of a BATCH take."""


class Batch(Submitting):
    """What ``client.batched()`` returns: it has the calls of the client that send and return at once, and ``free``.

    Nothing is sent before the ``with`` block ends; if that raises, its requests fail with CANCELLED, and if they cannot
    be sent, with the reason. The beginning and the end of the block check whether this thread and process may use the
    client.
    """

    def __init__(
        self,
        core: ClientCore,
        use: AbstractContextManager[None],
        limits: Limits,
        *,
        deadline: Callable[[float | None], tuple[float, int]],
        send: Callable[[Outgoing, Frames | None], None],
        refuse: Callable[[Sequence[Outgoing], KvferryError], None],
        lost_pools: set[str],
        tables: WeakSet[Tables],
    ) -> None:
        """Use ``client.batched()``."""
        self._core = core
        self._use = use
        self._limits = limits
        self._deadline_of = deadline
        self._default_deadline = deadline(None)
        self._send = send
        self._refuse = refuse
        self._lost_pools = lost_pools
        self._tables = tables
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
        unsent = [*self._requests]
        try:
            with self._use:
                if not self._send_whole():
                    for part in self._parts():
                        self._send(self._core.batch(part), None)
                        del unsent[: len(part)]
        except Exception as failure:
            why = failure if isinstance(failure, KvferryError) else CancelledError(f"never sent: {failure!r}")
            self._refuse(unsent, why)
            raise

    def allocate(
        self, pool: str, counts: Sequence[int], space: str = MAIN, *, deadline_s: float | None = None
    ) -> PendingReply[list[PageIds]]:
        """Take pages for several requests of the engine at once, ``counts`` for each: all of them or none.

        ``client.wait`` takes the reply: for each count its pages, ``(count,)`` int64.
        """
        return self.begin(calls.allocate_each(pool, counts, space), deadline_s=deadline_s)

    def free(
        self,
        pool: str,
        ids: npt.ArrayLike,
        space: str = MAIN,
        *,
        after: DeviceEvent | None = None,
        deadline_s: float | None = None,
    ) -> PendingReply[Freed]:
        """Give pages back, as ``client.free`` does; ``client.wait`` takes the reply.

        One call for all pages of a step costs less than one a request: it frees all of them or none.
        """
        return self.begin(calls.free(pool, ids, space, after), deadline_s=deadline_s)

    def _put(self, outgoing: Outgoing) -> None:
        if self._ended or not outgoing.body.in_batch:
            self._check(outgoing)
        self._requests.append(outgoing)

    def _check(self, outgoing: Outgoing) -> None:
        """Refuse a request that cannot go with this batch.

        Raises:
            MisuseError: the batch was sent.
            InvalidFieldError: the request cannot be in one.
        """
        try:
            if self._ended:
                raise MisuseError("this batch was sent: begin another one by client.batched()")
            check_batched(type(outgoing.body), "call")
        except KvferryError as error:
            self._refuse([outgoing], error)
            raise

    def _deadline(self, deadline_s: float | None) -> tuple[float, int]:
        return self._default_deadline if deadline_s is None else self._deadline_of(deadline_s)

    def _send_whole(self) -> bool:
        """Send all in one message, and return True, if it is within the daemon's bounds: most are, and encoded once."""
        if not 0 < len(self._requests) <= MAX_BATCH:
            return False
        message = self._core.batch(self._requests)
        try:
            frames = self._core.frames(message)
        except Exception:
            self._core.undo(message)
            raise
        sizes = [len(one) for one in frames]
        if sum(sizes) > self._limits.max_message_bytes or max(sizes) > self._limits.max_frame_bytes:
            self._core.undo(message)
            return False
        self._send(message, frames)
        return True

    def _parts(self) -> list[list[Outgoing]]:
        """Return the requests as many to a message as the daemon takes."""
        limits = self._limits
        most_bytes = min(limits.max_message_bytes, limits.max_frame_bytes) - ENVELOPE_BYTES
        parts: list[list[Outgoing]] = []
        bytes_left = 0
        for one in self._requests:
            its_bytes = size_bytes((one,))
            if not parts or len(parts[-1]) >= MAX_BATCH or its_bytes > bytes_left:
                parts.append([])
                bytes_left = most_bytes
            parts[-1].append(one)
            bytes_left -= its_bytes
        return parts
