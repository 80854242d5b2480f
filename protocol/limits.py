"""Bounds on what a client may send, announced by HELLO and enforced before a message is processed."""

from __future__ import annotations

import msgspec

from kvferry.protocol.errors import VersionMismatchError

INT64_BYTES = 8
MAX_PAYLOAD_BYTES = 64 << 10
"""Largest payload that a pool accepts by default, in bytes."""
LARGEST_PAYLOAD_BYTES = 8 << 20
"""Upper bound of a pool's payload limit, in bytes; see ``Limits.largest_payload_bytes``."""
EVENT_RING_SLOTS = 1024
"""Events in a session's ring; each is reused with a higher value."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The limits of one daemon. Every bound is inclusive."""

    max_frame_bytes: int = 4 << 20
    """Size of one frame; libzmq closes the connection of a client that sends more."""
    max_frames: int = 1024
    """Frames per message: the envelope and its page lists; for a BATCH, those of all its requests."""
    max_message_bytes: int = 16 << 20
    """Total size of the frames of one message."""
    max_requests_per_session: int = 256
    """Requests without a reply, and also the replies kept for a retry; in bytes, see below."""
    max_transfers_per_session: int = 1024
    """Endpoints of transfers that are live, or whose events are not acknowledged."""
    max_transfers: int = 16_384
    """The same, over all sessions."""
    max_kept_session_payload_bytes: int = 256 << 20
    """Payloads of a session's unsettled transfers and of events that it has not acknowledged."""
    max_kept_payload_bytes: int = 1 << 30
    """The same, over all sessions."""
    max_sessions: int = 1024
    max_deadline_ms: int = 3_600_000
    default_deadline_ms: int = 30_000
    """Used if a request gives 0."""
    max_kept_session_request_bytes: int = 128 << 20
    """Messages of a session's requests that wait, and lists of its transfers and operations that are not over."""
    max_kept_request_bytes: int = 1 << 30
    """The same, over all sessions, with payloads, graph tables, and what comes ahead of messages."""
    max_kept_session_reply_bytes: int = 16 << 20
    """A session's replies that are kept for a retry; of more, the oldest large ones are dropped."""
    max_kept_reply_bytes: int = 256 << 20
    """The same, over all sessions; also what connections have not read yet."""
    resume_grace_ms: int = 10_000
    """How long a resumable session is kept after it lost its socket; 0: not at all."""

    @property
    def largest_payload_bytes(self) -> int:
        """Return the largest ``max_payload_bytes`` of a pool; the rest of a frame is for what goes with a payload."""
        return min(LARGEST_PAYLOAD_BYTES, self.max_frame_bytes // 2)

    def within(self, kept_bytes: int) -> Limits:
        """Return these limits, made smaller where they would let sessions keep more than their part of so many bytes.

        Half of it is for what connections keep (``daemon.control.kept_bytes``), an eighth for replies, the rest for
        requests and payloads. So a message is small against each part.
        """
        requests, replies = kept_bytes * 3 // 8, kept_bytes // 8
        message = min(self.max_message_bytes, kept_bytes // 8)
        return msgspec.structs.replace(
            self,
            max_frame_bytes=min(self.max_frame_bytes, message),
            max_message_bytes=message,
            max_kept_session_payload_bytes=min(self.max_kept_session_payload_bytes, requests // 2),
            max_kept_payload_bytes=min(self.max_kept_payload_bytes, requests),
            max_kept_session_request_bytes=min(self.max_kept_session_request_bytes, requests // 2),
            max_kept_request_bytes=min(self.max_kept_request_bytes, requests),
            max_kept_session_reply_bytes=min(self.max_kept_session_reply_bytes, replies // 2),
            max_kept_reply_bytes=min(self.max_kept_reply_bytes, replies),
        )


# -- protocol versions and how two sides agree on one.
#
# The version increases when a message's meaning changes, not with a new field or type.


PROTOCOL_MIN = 4
PROTOCOL_MAX = 4


def agree(protocol_min: int, protocol_max: int) -> int:
    """Return the highest version both sides speak.

    Raises:
        VersionMismatchError: the ranges do not overlap.
    """
    highest = min(protocol_max, PROTOCOL_MAX)
    if highest < max(protocol_min, PROTOCOL_MIN):
        raise VersionMismatchError(
            f"the client speaks {protocol_min}..{protocol_max}, this side {PROTOCOL_MIN}..{PROTOCOL_MAX}",
            field="protocol_min",
        )
    return highest
