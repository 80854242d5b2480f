"""The session socket: frames of a little-endian uint32 length and that many bytes of msgpack. Sans I/O.

The first frame opens a session; later ones go with file descriptors, or hold shares: what another process needs to map
device memory. A share may allow its holder to map the memory, so it travels over this socket only, is never logged, and
its repr shows nothing of it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from kvferry.protocol.errors import ErrorInfo, MalformedError
from kvferry.protocol.ids import PLAIN_TEXT, ClientName, Hex128, PeerKey, PoolName, TenantNumber

Handle = Annotated[bytes, Meta(max_length=512)]
MAX_STORAGE_HANDLE_BYTES = 12 << 10
"""Of a storage in a segment that its allocator expands: 8 bytes for each 20 MiB, so 30 GiB."""
StorageHandle = Annotated[bytes, Meta(max_length=MAX_STORAGE_HANDLE_BYTES)]
DriverHandle = Annotated[int, Meta(ge=0)]
Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]
MAX_SHARES = 16
"""Per frame."""
MAX_SHARED_EVENTS = 128
"""Events in a session's ring on a device: as many as fit their handles into one frame."""


class _Share(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind"):
    def __repr__(self) -> str:
        """Show the kind alone."""
        return f"<{type(self).__name__}>"


class VmmShare(_Share, frozen=True, kw_only=True, tag="vmm"):
    """A physical allocation of CANN's virtual memory management; the exporter names the processes that may import it.

    The driver counts its holders: the memory is freed with the last one, however that process ends.
    """

    handle: DriverHandle
    size_bytes: Offset


class TorchShare(_Share, frozen=True, kw_only=True, tag="torch"):
    """A torch storage, with the fields that torch passes to another process.

    ``offset_bytes`` is the offset of the shared bytes in the storage.
    """

    handle: StorageHandle
    storage_bytes: Offset
    storage_offset_bytes: Offset
    ref_counter: Handle
    ref_counter_offset: Offset
    event: Handle
    event_sync: bool
    offset_bytes: Offset = 0


Share = VmmShare | TorchShare
"""Every kind of share, tagged by ``kind``."""


class SharedEvents(msgspec.Struct, frozen=True, kw_only=True):
    """Interprocess events of one device: the process that created them records them, those that open them wait."""

    handles: Annotated[tuple[Handle, ...], Meta(max_length=MAX_SHARED_EVENTS)]

    def __repr__(self) -> str:
        """Show how many there are."""
        return f"<SharedEvents {len(self.handles)}>"


# -- the frames

InstanceName = Annotated[str, Meta(pattern=PLAIN_TEXT, max_length=128)]
Secret = Annotated[bytes, Meta(max_length=32)]


class SessionOpen(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="OPEN"):
    """The client's first frame on the session socket. The kernel identifies its process (SO_PEERCRED).

    Sessions of one user that name the same ``instance`` are one owner of pages, leases, pins and snapshots, which are
    released when the last session ends. Without a name, the session is an instance of its own.
    """

    protocol_min: int
    protocol_max: int
    name: ClientName = ""
    instance: InstanceName = ""
    keep: bool = False
    """Keep the session for ``limits.resume_grace_ms`` if its socket is lost while its process lives."""
    resume: Secret = b""
    """The secret of a session that lost its socket, to resume it; its name and instance do not change."""


class RegionRequest(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="REGION_REQUEST"):
    """Sent by another daemon of this host instead of OPEN: it asks for a pool's memory, for reading."""

    tenant: TenantNumber
    pool: PoolName
    region: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
    """The identity of the pool's memory when its pages were sent."""
    send_request: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] = 0
    key: PeerKey = ""
    """What SEND_REQUEST has told of this send request: no other process of the daemon's user knows it."""


class SessionOpened(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="OPENED"):
    """The session's number, its secret for the control socket (never log it) and the daemon's boot id.

    ``resumed``: the session was resumed; if the boot id has changed, a restarted daemon has adopted it. If ``resume``
    was given and this is false, nothing of the old session is left.
    """

    session: int
    secret: bytes
    boot_id: Hex128
    resumed: bool = False
    last_message: int = 0
    """The highest message number that the session has used; a client that resumes continues above it."""


class SessionEnd(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="END"):
    """Ends a session that was opened with ``keep``: the client will not resume it."""


class SessionRefused(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="REFUSED"):
    """Why no session was opened; the daemon then closes the connection."""

    error: ErrorInfo


class RegionFollows(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="REGION"):
    """Comes with one file descriptor: the region of the pool that message ``message_id`` attaches."""

    message_id: int
    pool: str


class EventsFollow(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="EVENTS"):
    """Comes with two file descriptors: the ring's counters, and the eventfd that signals a change of them."""

    message_id: int


class ShareFollows(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="SHARE"):
    """Shares of a device's memory or events, for the reader to map; they belong to message ``message_id``.

    Several frames for one message add up.

    The daemon sends it before the reply to ATTACH_POOL; an engine sends it before REGISTER_POOL, OPEN_EVENTS and
    CREATE_TABLES.
    """

    message_id: int
    shares: Annotated[tuple[Share, ...], Meta(max_length=MAX_SHARES)] = ()
    events: SharedEvents | None = None


class MemoryFollows(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="MEMORY"):
    """Comes with one file descriptor: the host memory that message ``message_id``, a REGISTER_POOL, registers.

    An engine sends it before the message. The descriptor is a memfd that is sealed against resizing.
    """

    message_id: int


class TablesFollow(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="TABLES"):
    """Comes with two file descriptors for CREATE_TABLES ``message_id``: the host lengths, then the tables.

    On a device, where the tables are the engine's, the second one is a pidfd of the daemon: when that process has
    ended, the engine itself brings its last update to an end.
    """

    message_id: int


SessionFrame = SessionOpened | SessionRefused | RegionFollows | EventsFollow | ShareFollows | TablesFollow
MAX_SESSION_FRAME_BYTES = 16384
MAX_SHARE_HEAD_BYTES = 256
"""Of a frame of shares without them."""
_T = TypeVar("_T")
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_open_decoder: msgspec.msgpack.Decoder[SessionOpen | RegionRequest] = msgspec.msgpack.Decoder(
    SessionOpen | RegionRequest
)
_said_decoder: msgspec.msgpack.Decoder[ShareFollows | MemoryFollows | SessionEnd] = msgspec.msgpack.Decoder(
    ShareFollows | MemoryFollows | SessionEnd
)
_frame_decoder: msgspec.msgpack.Decoder[SessionFrame] = msgspec.msgpack.Decoder(SessionFrame)


def pack(message: SessionOpen | SessionEnd | RegionRequest | MemoryFollows | SessionFrame) -> bytes:
    """Return the message as one frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def share_frames(message_id: int, shares: Iterable[Share]) -> list[ShareFollows]:
    """Return the frames by which shares of a message go, in their order: as few as have room for them."""
    frames: list[list[Share]] = [[]]
    room_bytes = 0
    for share in shares:
        size_bytes = len(_encoder.encode(share))
        if len(frames[-1]) == MAX_SHARES or size_bytes > room_bytes:
            frames.append([])
            room_bytes = MAX_SESSION_FRAME_BYTES - MAX_SHARE_HEAD_BYTES
        frames[-1].append(share)
        room_bytes -= size_bytes
    return [ShareFollows(message_id=message_id, shares=tuple(one)) for one in frames if one]


class FrameSplitter:
    """Splits a byte stream into frames."""

    def __init__(self) -> None:
        self._pending = bytearray()

    @property
    def between_frames(self) -> bool:
        """Return whether no partial frame is buffered."""
        return not self._pending

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes; yield the frames that are now complete.

        Raises:
            MalformedError: a frame announces more than MAX_SESSION_FRAME_BYTES.
        """
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._pending)
            if size > MAX_SESSION_FRAME_BYTES:
                raise MalformedError(f"a session frame of {size} bytes; at most {MAX_SESSION_FRAME_BYTES}")
            if len(self._pending) < _LENGTH.size + size:
                return
            frame = bytes(self._pending[_LENGTH.size : _LENGTH.size + size])
            del self._pending[: _LENGTH.size + size]
            yield frame


def unpack_open(frame: bytes) -> SessionOpen | RegionRequest:
    """Return the first frame from a client or another daemon.

    Raises:
        MalformedError: the bytes are not such a frame.
    """
    return _unpack(_open_decoder, frame, "a session opening")


def unpack_attachment(frame: bytes) -> ShareFollows | MemoryFollows | SessionEnd:
    """Return a later frame from an engine, after its session was opened.

    Raises:
        MalformedError: the bytes are not such a frame.
    """
    return _unpack(_said_decoder, frame, "a share of memory or events", show_cause=False)


def unpack_frame(frame: bytes) -> SessionFrame:
    """Return a frame from the daemon.

    Raises:
        MalformedError: the bytes are not such a frame.
    """
    return _unpack(_frame_decoder, frame, "a session frame")


def _unpack(decoder: msgspec.msgpack.Decoder[_T], frame: bytes, what: str, *, show_cause: bool = True) -> _T:
    """``show_cause``: not where its text might contain a handle."""
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, ValueError, RecursionError) as cause:
        if not show_cause:
            raise MalformedError(f"not {what}") from None
        raise MalformedError(f"not {what}: {cause}") from cause
