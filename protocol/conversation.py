"""A conversation with a daemon that loads only the message types of its requests, for commands that must start fast.

``clients.core`` imports every type and tracks transfers and operations for engines; importing all types takes longer
than a ping. This only numbers requests and decodes replies and events. Sans I/O: uses no clock and no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.protocol.base import Body, Busy, ErrorReply, ReplyBody, RequestBody, list_frames
from kvferry.protocol.errors import KvferryError, MalformedError, OverloadedError, raised
from kvferry.protocol.ids import NO_BOOT

EVENT = 0
"""The message id of events."""


class _Request(msgspec.Struct, frozen=True, array_like=True):
    message_id: int
    boot_id: str
    secret: bytes
    deadline_ms: int
    acknowledged: int
    body: Body


class _Reply(msgspec.Struct, frozen=True, array_like=True, tag="R"):
    message_id: int
    boot_id: str
    body: msgspec.Raw


class _Event(msgspec.Struct, frozen=True, array_like=True, tag="E"):
    cursor: int
    boot_id: str
    body: msgspec.Raw


class Arrived(msgspec.Struct, frozen=True):
    """A reply to ``message_id``, or an event (``EVENT``): its body, and the frames of its page lists."""

    message_id: int
    body: Body
    frames: tuple[bytes, ...] = ()

    @property
    def error(self) -> KvferryError | None:
        """Return why the request was refused; None if it was not."""
        if isinstance(self.body, ErrorReply):
            return raised(self.body.error)
        if isinstance(self.body, Busy):
            return OverloadedError(f"{self.body.detail}; try again after {self.body.retry_after_ms} ms").after(
                self.body.retry_after_ms
            )
        return None


_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[_Reply | _Event] = msgspec.msgpack.Decoder(_Reply | _Event)


class Conversation:
    """Numbers requests and decodes replies and events. It acknowledges no event, so RESULT can repeat all of them."""

    def __init__(self, boot_id: str = NO_BOOT, secret: bytes = b"") -> None:
        self.boot_id = boot_id
        self._secret = secret
        self._last_message = 0
        self._last_cursor = 0
        self._replies: dict[int, type[ReplyBody]] = {}

    def request(
        self, body: RequestBody, frames: Sequence[bytes] = (), *, deadline_ms: int = 0
    ) -> tuple[int, list[bytes]]:
        """Return a new request's message id and its frames.

        Args:
            body: the message.
            frames: the page lists that it announces.
            deadline_ms: time left for the request; 0 for the daemon's default.
        """
        self._last_message += 1
        self._replies[self._last_message] = body.reply
        envelope = _Request(self._last_message, self.boot_id, self._secret, deadline_ms, 0, body)
        if frames and body.lists_joined:
            frames = (b"".join(frames),)
        return self._last_message, [_encoder.encode(envelope), *frames]

    def feed(self, frames: Sequence[bytes]) -> Arrived | None:
        """Decode a message from the daemon; return it, or None for an event or a reply that was received before.

        Raises:
            MalformedError: the bytes are not a message of a daemon, or of a newer one.
        """
        try:
            message = _decoder.decode(frames[0])
            kinds = _event_types() if isinstance(message, _Event) else self._reply_types(message.message_id)
            body: Body | None = msgspec.msgpack.decode(message.body, type=kinds) if kinds else None
        except (msgspec.MsgspecError, ValueError, IndexError, RecursionError) as cause:
            raise MalformedError(f"the daemon's message cannot be decoded: {cause}") from cause
        if body is None:
            return None
        lists = tuple(list_frames(body, frames[1:]))
        if not self.boot_id:
            self.boot_id = message.boot_id
        if isinstance(message, _Reply):
            return Arrived(message.message_id, body, lists)
        if message.cursor <= self._last_cursor or message.boot_id != self.boot_id:
            return None
        self._last_cursor = message.cursor
        return Arrived(EVENT, body, lists)

    def _reply_types(self, message_id: int) -> Any:  # noqa: ANN401  a union of types
        kind = self._replies.pop(message_id, None)
        return kind and kind | ErrorReply | Busy


def _event_types() -> Any:  # noqa: ANN401  a union of types
    from kvferry.protocol.events import EventBody  # noqa: PLC0415  few commands begin what has events

    return EventBody
