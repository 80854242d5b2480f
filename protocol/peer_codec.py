"""Encoding and decoding of messages between daemons; see ``codec`` for the form of a message."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvferry.protocol.codec import Frames, PageIds, page_lists, with_page_lists
from kvferry.protocol.errors import MalformedError
from kvferry.protocol.peer_messages import PeerEnvelope

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PeerEnvelope)


class IncomingPeerMessage(NamedTuple):
    """A decoded message of another daemon and its page lists, in the order in which the body names them."""

    envelope: PeerEnvelope
    ids: tuple[PageIds, ...]


def encode_peer(envelope: PeerEnvelope, ids: Sequence[PageIds] = ()) -> Frames:
    """Return the message's frames. The id frames are views of the arrays: do not modify these before sending."""
    return with_page_lists(_encoder.encode(envelope), envelope.body, ids)


def decode_peer(frames: Sequence[bytes]) -> IncomingPeerMessage:
    """Return the message.

    Raises:
        MalformedError: the bytes are not a message. Nothing else is raised, whatever the input.
    """
    try:
        envelope = _decoder.decode(frames[0])
        return IncomingPeerMessage(envelope, page_lists(envelope.body, frames[1:]))
    except (msgspec.MsgspecError, ValueError, IndexError, RecursionError, MemoryError) as cause:
        raise MalformedError(f"a daemon's message cannot be decoded: {cause}") from cause
