"""The index of sessions: what a daemon leaves to the one that follows it, so that its engines can go on.

A session's new record is complete before its old one is taken away, so every prefix of the writes reads as the old
state or as the new one (``pools.records``). Pure: works on a writable buffer, and knows neither processes nor
descriptors.
"""

from __future__ import annotations

import struct
from collections.abc import Set as AbstractSet
from typing import Annotated, Final, NamedTuple

import msgspec
import xxhash
from msgspec import Meta

from kvferry.pools.records import (
    FORMAT,
    HEAD_BYTES,
    MAGIC,
    MAX_NUMBER,
    Buffer,
    Number,
    UnreadableFileError,
    UserId,
    check_magic,
    invalidate,
    is_blank,
    read_record,
    write_record,
)
from kvferry.protocol.ids import PLAIN_TEXT, TenantNumber

SESSIONS: Final = 1152
"""Places for sessions' records: more than a daemon serves sessions, as a record is replaced by one in another place."""

SESSION_BYTES: Final = 2048
_BOOT_BYTES: Final = 64
_INDEX_MAGIC: Final = b"kvf-indx"
_LAST: Final = struct.Struct("<QQ")
"""The highest number so far, and the checksum of its bytes."""

_LAST_AT: Final = MAGIC.size
_BOOT_AT: Final = _LAST_AT + 2 * _LAST.size
_SESSIONS_AT: Final = 256


def index_bytes(sessions: int) -> int:
    """Return the size of an index with so many places."""
    return _SESSIONS_AT + sessions * SESSION_BYTES


INDEX_BYTES: Final = index_bytes(SESSIONS)


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
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
    tenant: TenantNumber | None = None
    """None: its user."""

    def __repr__(self) -> str:
        """Show number, name and process; never the secret."""
        return f"<SessionRecord {self.session} {self.name!r} pid={self.pid} uid={self.uid}>"


class FoundSessions(NamedTuple):
    """What an index holds: the valid records, one a session, ascending, and how many slots were not readable."""

    records: tuple[SessionRecord, ...]
    unreadable: int


class _Boot(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Who has used an index last: ``tries`` counts the boots that have begun since one has said that it ``came_up``.

    ``device_tries``: the same of ``devices_came_up``, which comes later.
    """

    boot_id: Annotated[str, Meta(max_length=32)] = ""
    tries: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    device_tries: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0


_encoder: Final = msgspec.msgpack.Encoder()
_session_decoder: Final = msgspec.msgpack.Decoder(SessionRecord)
_boot_decoder: Final = msgspec.msgpack.Decoder(_Boot)


class SessionIndex:
    """The sessions that the next daemon may adopt, and the highest number that any was given."""

    def __init__(self, buffer: Buffer) -> None:
        """Use an index that ``format_index`` or an earlier daemon wrote, with as many places as it has.

        Raises:
            UnreadableFileError: it is none, or of another format, or no index has its size.
        """
        check_magic(buffer, _INDEX_MAGIC, "index")
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

    @property
    def device_tries(self) -> int:
        """Return how many boots have begun, one after the other, and have not adopted the pools on devices."""
        return self._boot().device_tries

    def came_up(self) -> None:
        """Record that this boot has adopted what there was, but for pools on devices."""
        self._write_boot(msgspec.structs.replace(self._boot(), tries=0))

    def devices_came_up(self) -> None:
        """Record that this boot has adopted what there was of pools on devices."""
        self._write_boot(msgspec.structs.replace(self._boot(), device_tries=0))

    def _boot(self) -> _Boot:
        try:
            return _boot_decoder.decode(read_record(self._buffer, _BOOT_AT, _BOOT_BYTES) or b"")
        except (msgspec.MsgspecError, ValueError):
            return _Boot()

    def _write_boot(self, boot: _Boot) -> None:
        write_record(self._buffer, _BOOT_AT, _encoder.encode(boot))

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
            if is_blank(self._buffer, at):
                continue
            record = self._record(at)
            if record is None:
                unreadable += 1
                invalidate(self._buffer, at)
                continue
            known = best.get(record.session)
            if known is not None and known[1].turn >= record.turn:
                invalidate(self._buffer, at)
                continue
            if known is not None:
                invalidate(self._buffer, _place(known[0]))
            best[record.session] = (place, record)
        self._places = {session: place for session, (place, _) in best.items()}
        taken = set(self._places.values())
        self._free = [place for place in range(self._room) if place not in taken]
        before = self._boot()
        self._write_boot(_Boot(boot_id=boot_id, tries=before.tries + 1, device_tries=before.device_tries + 1))
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
        if len(content) > SESSION_BYTES - HEAD_BYTES or not self._free:
            return False
        place = self._free.pop()
        write_record(self._buffer, _place(place), content)
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
            invalidate(self._buffer, _place(place))
            self._free.append(place)

    def _record(self, at: int) -> SessionRecord | None:
        content = read_record(self._buffer, at, SESSION_BYTES)
        try:
            return None if content is None else _session_decoder.decode(content)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return None


def format_index(buffer: Buffer) -> None:
    """Make an index of zeros; see ``index_bytes``."""
    buffer[: MAGIC.size] = MAGIC.pack(_INDEX_MAGIC, FORMAT)


def _place(number: int) -> int:
    return _SESSIONS_AT + number * SESSION_BYTES


def _last(number: int) -> bytes:
    return _LAST.pack(number, xxhash.xxh3_64_intdigest(number.to_bytes(8, "little")))


def _number(copy: bytes) -> int:
    """Return the number of a copy, 0 if it is not valid."""
    number: int = _LAST.unpack(copy)[0]
    return number if number <= MAX_NUMBER and copy == _last(number) else 0
