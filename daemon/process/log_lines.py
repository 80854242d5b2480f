"""The last lines of this process's log, in memory: an operator reads them by a cursor, wherever the log itself goes."""

from __future__ import annotations

import threading
from collections import deque
from typing import Final, NamedTuple, get_args

import msgspec
import structlog

from kvferry.protocol.ids import new_number
from kvferry.protocol.log_messages import Level, LogLine

KEPT_BYTES: Final = 4 << 20
"""Of encoded lines: some 10,000."""

MAX_TEXT: Final = 2000
"""Characters of one field; the log itself has all of them."""

_REMEMBERED: Final = get_args(Level)
_LEFT_OUT: Final = {"timestamp", "level", "event", "exc_info", "stack_info"}


class LatestLines(NamedTuple):
    """The answer to a reader; see ``LOGGED``."""

    lines: tuple[LogLine, ...]
    cursor: int
    lost: bool


class LogLines:
    """A ring of lines, bounded by their bytes. A processor of structlog; any thread may log.

    Tracebacks are left to the log itself.
    """

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._max_bytes = kept_bytes
        self._lock = threading.RLock()  # what the garbage collector frees meanwhile may log, too
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._next = new_number()  # the number of the next line: no cursor of another daemon is one of this one's

    def __repr__(self) -> str:
        """Show how many lines there are."""
        return f"<LogLines {len(self._lines)} next={self._next}>"

    def __call__(
        self, _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        """Remember a line, and pass it on."""
        if event["level"] in _REMEMBERED:
            encoded = _encoded(event)
            with self._lock:
                self._next += 1
                self._lines.append(encoded)
                self._bytes += len(encoded)
                while self._bytes > self._max_bytes:
                    self._bytes -= len(self._lines.popleft())
        return event

    def since(self, cursor: int, limit: int) -> LatestLines:
        """Return up to ``limit`` lines from ``cursor`` on, the oldest first; 0: from the oldest one that is there."""
        with self._lock:
            kept, end = list(self._lines), self._next
        first = end - len(kept)
        lost = cursor != 0 and not first <= cursor <= end
        begin = first if cursor == 0 or lost else cursor
        lines = tuple(
            msgspec.structs.replace(msgspec.msgpack.decode(one, type=LogLine), cursor=number)
            for number, one in enumerate(kept[begin - first : begin - first + limit], begin + 1)
        )
        return LatestLines(lines, begin + len(lines), lost)


def _encoded(event: structlog.typing.EventDict) -> bytes:
    """Return a line whose cursor is not known yet."""
    fields = {name: _short(value) for name, value in event.items() if name not in _LEFT_OUT}
    line = LogLine(cursor=0, at=event["timestamp"], level=event["level"], event=event["event"], fields=fields)
    try:
        return msgspec.msgpack.encode(line, enc_hook=str)
    except (TypeError, ValueError, OverflowError):  # the log itself writes what no message can carry
        as_text = {name: _short(str(value)) for name, value in fields.items()}
        return msgspec.msgpack.encode(msgspec.structs.replace(line, fields=as_text))


def _short(value: object) -> object:
    return value[:MAX_TEXT] if isinstance(value, str) else value
