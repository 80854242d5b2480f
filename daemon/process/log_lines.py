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
        self._lock = threading.Lock()
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
            fields = {name: _short(value) for name, value in event.items() if name not in _LEFT_OUT}
            with self._lock:
                self._add(event, fields)
        return event

    def since(self, cursor: int, limit: int) -> LatestLines:
        """Return up to ``limit`` lines from ``cursor`` on, the oldest first; 0: from the oldest one that is there."""
        with self._lock:
            first = self._next - len(self._lines)
            lost = cursor != 0 and not first <= cursor <= self._next
            begin = first if cursor == 0 or lost else cursor
            found = [self._lines[number - first] for number in range(begin, min(self._next, begin + limit))]
        lines = tuple(msgspec.msgpack.decode(one, type=LogLine) for one in found)
        return LatestLines(lines, begin + len(lines), lost)

    def _add(self, event: structlog.typing.EventDict, fields: dict[str, object]) -> None:
        self._next += 1
        line = LogLine(
            cursor=self._next, at=event["timestamp"], level=event["level"], event=event["event"], fields=fields
        )
        try:
            encoded = msgspec.msgpack.encode(line, enc_hook=str)
        except (TypeError, ValueError, OverflowError):  # the log itself writes what no message can carry
            as_text = {name: _short(str(value)) for name, value in fields.items()}
            encoded = msgspec.msgpack.encode(msgspec.structs.replace(line, fields=as_text))
        self._lines.append(encoded)
        self._bytes += len(encoded)
        while self._bytes > self._max_bytes:
            self._bytes -= len(self._lines.popleft())


def _short(value: object) -> object:
    return value[:MAX_TEXT] if isinstance(value, str) else value
