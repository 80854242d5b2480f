"""What a daemon leaves to the one that follows it: its sessions in an index, each pool's record with its pages' owners.

Both lie in memory that outlives the process, and are read again after it was killed at any moment. So a record is valid
only with its checksum, which is written last; a session's new record is complete before its old one is taken away; and
the owner of a page is one aligned word. Every prefix of the writes therefore reads as the old state or as the new one,
and of a record that is damaged as absence. Pure: works on writable buffers,
and knows neither processes nor descriptors.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from collections.abc import Set as AbstractSet
from typing import Annotated, Final, NamedTuple, Protocol, overload

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash
from msgspec import Meta

from kvferry.pools.allocator import NOBODY, OWNER_DTYPE, PADDING_PAGE, Owners
from kvferry.pools.planning.manifest import spaces_of
from kvferry.protocol.ids import PLAIN_TEXT, ModelIdentity, PoolName
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES
from kvferry.protocol.manifests import Manifest, PoolSpec

FORMAT: Final = 1
"""Another one is not read: all that it describes is dropped."""

MAX_NUMBER: Final = (1 << 31) - 1
"""The highest number of a session, and so of an owner: a page has room for an int32."""

SESSIONS: Final = 1152
"""Places for sessions' records: more than a daemon serves sessions, as a record is replaced by one in another place."""

SESSION_BYTES: Final = 2048
_BOOT_BYTES: Final = 64
_MAGIC: Final = struct.Struct("<8sI4x")
_INDEX_MAGIC: Final = b"kvf-indx"
_POOL_MAGIC: Final = b"kvf-pool"
_DIGEST: Final = struct.Struct("<Q")
_LENGTH: Final = struct.Struct("<I4x")
_HEAD_BYTES: Final = _DIGEST.size + _LENGTH.size
_NO_DIGEST: Final = bytes(_DIGEST.size)
_LAST: Final = struct.Struct("<QQ")
"""The highest number so far, and the checksum of its bytes."""

_ALIGNMENT: Final = 64


class Buffer(Protocol):
    """Writable memory, such as an ``mmap``."""

    def __len__(self) -> int: ...
    @overload
    def __getitem__(self, key: int, /) -> int: ...
    @overload
    def __getitem__(self, key: slice, /) -> bytes: ...
    def __setitem__(self, key: slice, value: bytes, /) -> None: ...


Number = Annotated[int, Meta(ge=1, le=MAX_NUMBER)]
UserId = Annotated[int, Meta(ge=0, lt=1 << 32)]


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A session. ``started`` is its process's start time in the kernel's ticks, 0 if unknown, as its ``pid`` may be.

    ``turn`` counts how often it was resumed: of two records of one session, the later one holds.
    """

    session: Number
    owner: Number
    uid: UserId
    gid: UserId
    pid: Annotated[int, Meta(ge=0, lt=1 << 31)]
    started: Annotated[int, Meta(ge=0)]
    name: Annotated[str, Meta(max_length=128)]
    instance: Annotated[str, Meta(pattern=PLAIN_TEXT, max_length=128)]
    secret: Annotated[bytes, Meta(min_length=16, max_length=32)]
    turn: Annotated[int, Meta(ge=0)]

    def __repr__(self) -> str:
        """Show number, name and process; never the secret."""
        return f"<SessionRecord {self.session} {self.name!r} pid={self.pid} uid={self.uid}>"


class PoolRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host pool of the daemon. ``memory`` is the identity of its region.

    ``manifest`` is the digest of the manifest that follows from ``spec``: where another version of kvferry lays the
    same spec out otherwise, the bytes in the region are not what it takes them for.
    """

    name: PoolName
    tenant: UserId
    spec: PoolSpec
    model: ModelIdentity | None = None
    max_payload_bytes: Annotated[int, Meta(ge=0)] = MAX_PAYLOAD_BYTES
    ends_with: Number | None = None
    memory: Annotated[int, Meta(ge=0)]
    manifest: str


_encoder: Final = msgspec.msgpack.Encoder()
_session_decoder: Final = msgspec.msgpack.Decoder(SessionRecord)
_pool_decoder: Final = msgspec.msgpack.Decoder(PoolRecord)


class UnreadableFileError(Exception):
    """What the memory holds cannot be used; the text says why."""


# -- one record: checksum, length, content


def _digest(length: bytes, content: bytes) -> bytes:
    found = xxhash.xxh3_64_intdigest(length + content)
    return _DIGEST.pack(found or 1)  # 0 is what an invalid record has


def _write(buffer: Buffer, at: int, content: bytes) -> None:
    """Write a record, its checksum last."""
    length = _LENGTH.pack(len(content))
    buffer[at + _HEAD_BYTES : at + _HEAD_BYTES + len(content)] = content
    buffer[at + _DIGEST.size : at + _HEAD_BYTES] = length
    buffer[at : at + _DIGEST.size] = _digest(length, content)


def _invalidate(buffer: Buffer, at: int) -> None:
    buffer[at : at + _DIGEST.size] = _NO_DIGEST


def _read(buffer: Buffer, at: int, room: int) -> bytes | None:
    """Return a record's content; None where there is no valid one in these ``room`` bytes."""
    digest = buffer[at : at + _DIGEST.size]
    length = buffer[at + _DIGEST.size : at + _HEAD_BYTES]
    if digest == _NO_DIGEST or len(length) < _LENGTH.size:
        return None
    size = _LENGTH.unpack(length)[0]
    if size > room - _HEAD_BYTES:
        return None
    content = buffer[at + _HEAD_BYTES : at + _HEAD_BYTES + size]
    return content if digest == _digest(length, content) else None


def _is_blank(buffer: Buffer, at: int) -> bool:
    return buffer[at : at + _DIGEST.size] == _NO_DIGEST


def _check_magic(buffer: Buffer, magic: bytes, what: str) -> None:
    if len(buffer) < _MAGIC.size:
        raise UnreadableFileError(f"{what} has {len(buffer)} bytes")
    found, version = _MAGIC.unpack(buffer[: _MAGIC.size])
    if found != magic:
        raise UnreadableFileError(f"it is no {what}")
    if version != FORMAT:
        raise UnreadableFileError(f"the {what} has format {version}, this daemon reads {FORMAT}")


# -- the index: the boot, the highest number, and the sessions

_LAST_AT: Final = _MAGIC.size
_BOOT_AT: Final = _LAST_AT + 2 * _LAST.size
_SESSIONS_AT: Final = 256


def index_bytes(sessions: int) -> int:
    """Return the size of an index with so many places."""
    return _SESSIONS_AT + sessions * SESSION_BYTES


INDEX_BYTES: Final = index_bytes(SESSIONS)


class FoundSessions(NamedTuple):
    """What an index holds: the valid records, one a session, ascending, and how many slots were not readable."""

    records: tuple[SessionRecord, ...]
    unreadable: int


class _Boot(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Who has used an index last: ``tries`` counts the boots that have begun since one has said that it ``came_up``."""

    boot_id: Annotated[str, Meta(max_length=32)] = ""
    tries: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0


_boot_decoder: Final = msgspec.msgpack.Decoder(_Boot)


class SessionIndex:
    """The sessions that the next daemon may adopt, and the highest number that any was given."""

    def __init__(self, buffer: Buffer) -> None:
        """Use an index that ``format_index`` or an earlier daemon wrote, with as many places as it has.

        Raises:
            UnreadableFileError: it is none, or of another format, or no index has its size.
        """
        _check_magic(buffer, _INDEX_MAGIC, "index")
        self._room, rest = divmod(len(buffer) - _SESSIONS_AT, SESSION_BYTES)
        if self._room < 1 or rest:
            raise UnreadableFileError(f"an index does not have {len(buffer)} bytes")
        self._buffer = buffer
        self._places: dict[int, int] = {}
        self._free = list(range(self._room))

    def __repr__(self) -> str:
        """Show how many sessions have a record."""
        return f"<SessionIndex sessions={len(self._places)}>"

    @property
    def boot_id(self) -> str:
        """Return the boot id of the daemon that wrote last; empty if that is not known."""
        return self._boot().boot_id

    @property
    def tries(self) -> int:
        """Return how many boots have begun with this index, one after the other, and have not come up."""
        return self._boot().tries

    def came_up(self) -> None:
        """Record that this boot has adopted what there was."""
        self._write_boot(msgspec.structs.replace(self._boot(), tries=0))

    def _boot(self) -> _Boot:
        try:
            return _boot_decoder.decode(_read(self._buffer, _BOOT_AT, _BOOT_BYTES) or b"")
        except (msgspec.MsgspecError, ValueError):
            return _Boot()

    def _write_boot(self, boot: _Boot) -> None:
        _write(self._buffer, _BOOT_AT, _encoder.encode(boot))

    @property
    def last(self) -> int:
        """Return the highest number that was given; 0 where that is not known."""
        return max(self._lasts())

    def _lasts(self) -> tuple[int, int]:
        first, second = (self._buffer[at : at + _LAST.size] for at in (_LAST_AT, _LAST_AT + _LAST.size))
        return _number(first), _number(second)

    def begin(self, boot_id: str) -> FoundSessions:
        """Begin a boot: return the sessions of the one before, and forget what cannot be read."""
        best: dict[int, tuple[int, SessionRecord]] = {}
        unreadable = 0
        for place in range(self._room):
            at = _place(place)
            if _is_blank(self._buffer, at):
                continue
            record = self._record(at)
            if record is None:
                unreadable += 1
                _invalidate(self._buffer, at)
                continue
            known = best.get(record.session)
            if known is not None and known[1].turn >= record.turn:
                _invalidate(self._buffer, at)
                continue
            if known is not None:
                _invalidate(self._buffer, _place(known[0]))
            best[record.session] = (place, record)
        self._places = {session: place for session, (place, _) in best.items()}
        taken = set(self._places.values())
        self._free = [place for place in range(self._room) if place not in taken]
        self._write_boot(_Boot(boot_id=boot_id, tries=self.tries + 1))
        return FoundSessions(tuple(best[session][1] for session in sorted(best)), unreadable)

    def give(self, number: int) -> None:
        """Record the highest number so far, before the session hears it; the copy of the one before stays."""
        first, second = self._lasts()
        if number <= max(first, second):
            return
        at = _LAST_AT + (_LAST.size if second < first else 0)
        self._buffer[at : at + _LAST.size] = _last(number)

    def put(self, record: SessionRecord) -> bool:
        """Write a session's record, in place of its earlier one; return False if there is no room for it.

        The earlier one goes only when the new one is complete.
        """
        content = _encoder.encode(record)
        if len(content) > SESSION_BYTES - _HEAD_BYTES or not self._free:
            return False
        place = self._free.pop()
        _write(self._buffer, _place(place), content)
        self.remove(record.session)
        self._places[record.session] = place
        return True

    @property
    def sessions(self) -> AbstractSet[int]:
        """Return the sessions that have a record."""
        return self._places.keys()

    def get(self, session: int) -> SessionRecord | None:
        """Return a session's record, read again; None where it has none that is valid."""
        place = self._places.get(session)
        return None if place is None else self._record(_place(place))

    def remove(self, session: int) -> None:
        """Remove a session's record, if it has one."""
        place = self._places.pop(session, None)
        if place is not None:
            _invalidate(self._buffer, _place(place))
            self._free.append(place)

    def _record(self, at: int) -> SessionRecord | None:
        content = _read(self._buffer, at, SESSION_BYTES)
        try:
            return None if content is None else _session_decoder.decode(content)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None


def format_index(buffer: Buffer) -> None:
    """Make an index of zeros; see ``index_bytes``."""
    buffer[: _MAGIC.size] = _MAGIC.pack(_INDEX_MAGIC, FORMAT)


def _place(number: int) -> int:
    return _SESSIONS_AT + number * SESSION_BYTES


def _last(number: int) -> bytes:
    return _LAST.pack(number, xxhash.xxh3_64_intdigest(number.to_bytes(8, "little")))


def _number(copy: bytes) -> int:
    """Return the number of a copy, 0 if it is not valid."""
    number: int = _LAST.unpack(copy)[0]
    return number if number <= MAX_NUMBER and copy == _last(number) else 0


# -- a pool's file: its record, and the owner of each page


def manifest_digest(manifest: Manifest) -> str:
    """Return a digest of all of a manifest, also of where its entries lie."""
    return xxhash.xxh3_128_hexdigest(_encoder.encode(manifest))


def pool_file_bytes(record: PoolRecord, manifest: Manifest) -> int:
    """Return the size of a pool's file."""
    at, _ = _owners_at(len(_encoder.encode(record)), spaces_of(manifest))
    return at


def write_pool_file(buffer: Buffer, record: PoolRecord) -> None:
    """Write the file of a new pool into zeros: no page has an owner."""
    _write(buffer, _MAGIC.size, _encoder.encode(record))
    buffer[: _MAGIC.size] = _MAGIC.pack(_POOL_MAGIC, FORMAT)


def read_pool_record(buffer: Buffer) -> PoolRecord:
    """Return the record of a pool's file.

    Raises:
        UnreadableFileError: it has none that is valid.
    """
    _check_magic(buffer, _POOL_MAGIC, "pool's record")
    content = _read(buffer, _MAGIC.size, len(buffer) - _MAGIC.size)
    if content is None:
        gone = "the pool was deleted" if _is_blank(buffer, _MAGIC.size) else "its record's checksum is wrong"
        raise UnreadableFileError(gone)
    try:
        return _pool_decoder.decode(content)
    except (msgspec.MsgspecError, ValueError, RecursionError) as cause:
        raise UnreadableFileError(f"its record cannot be read: {cause}") from None


def end_pool_file(buffer: Buffer) -> None:
    """Take a pool's record away: the pool is deleted."""
    _invalidate(buffer, _MAGIC.size)


def owners_in(memory: npt.NDArray[np.uint8], manifest: Manifest) -> dict[str, Owners]:
    """Return the owners of a pool's pages, by page space, as views of its file's memory; its record is valid.

    Raises:
        UnreadableFileError: the file has another size.
    """
    spaces = spaces_of(manifest)
    length = memory[_MAGIC.size + _DIGEST.size : _MAGIC.size + _HEAD_BYTES]
    size, starts = _owners_at(_LENGTH.unpack(length.tobytes())[0], spaces)
    if size != len(memory):
        raise UnreadableFileError(f"its record's memory has {len(memory)} bytes, not {size}")
    width = OWNER_DTYPE.itemsize
    return {
        space: memory[start : start + pages * width].view(OWNER_DTYPE)
        for start, (space, pages) in zip(starts, spaces.items(), strict=True)
    }


def drop_owners(owners: Owners, known: Collection[int]) -> int:
    """Free the pages of everybody but the ``known`` owners; return how many that were."""
    stray = (owners != NOBODY) & ~np.isin(owners, np.fromiter(known, OWNER_DTYPE))
    stray[PADDING_PAGE] = owners[PADDING_PAGE] != NOBODY
    owners[stray] = NOBODY
    return int(np.count_nonzero(stray))


def _owners_at(record_bytes: int, spaces: dict[str, int]) -> tuple[int, list[int]]:
    """Return the size of a pool's file, and where the owners of each space begin."""
    at, starts = _MAGIC.size + _HEAD_BYTES + record_bytes, []
    for pages in spaces.values():
        at = -(-at // _ALIGNMENT) * _ALIGNMENT
        starts.append(at)
        at += pages * OWNER_DTYPE.itemsize
    return at, starts
