"""Bounds on what a client may send, announced by HELLO and enforced before anything is believed.

Knows nothing of who enforces them.
"""

from __future__ import annotations

import msgspec

INT64_BYTES = 8
MAX_PAYLOAD_BYTES = 64 << 10
"""What a pool takes that says nothing else."""
LARGEST_PAYLOAD_BYTES = 8 << 20
"""What any pool may ask for; see ``Limits.largest_payload_bytes``."""
EVENT_RING_SLOTS = 1024
"""Events of a session's ring; one is used again with a higher value."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one daemon accepts. Every bound is inclusive."""

    max_frame_bytes: int = 4 << 20
    """One frame; libzmq closes the connection of a peer that sends more."""
    max_frames: int = 1024
    """Frames of one message: the envelope and its page lists, of a BATCH those of all its requests."""
    max_message_bytes: int = 16 << 20
    """All frames of one message."""
    max_requests_per_session: int = 256
    """Requests without a reply yet, and the replies remembered for a retry."""
    max_transfers_per_session: int = 1024
    """Sides of transfers that are live, or whose events are not acknowledged."""
    max_transfers: int = 16_384
    """The same over all sessions."""
    max_kept_session_payload_bytes: int = 256 << 20
    """Payloads in a session's transfers that have not settled, and in events that it has not acknowledged."""
    max_kept_payload_bytes: int = 1 << 30
    """The same over all sessions."""
    max_sessions: int = 1024
    max_deadline_ms: int = 3_600_000
    default_deadline_ms: int = 30_000
    """Taken where a request gives 0."""
    resume_grace_ms: int = 0
    """How long a session is kept that lost its socket and said that it would resume; 0: not at all."""

    @property
    def largest_payload_bytes(self) -> int:
        """Return the largest ``max_payload_bytes`` of a pool: the rest of a frame is for what goes with a payload."""
        return min(LARGEST_PAYLOAD_BYTES, self.max_frame_bytes // 2)
