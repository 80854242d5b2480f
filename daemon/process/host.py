"""What the daemon's process has of its host: its log, the service manager, the allocator.

Logs have one event per line, JSON for machines, coloured for a terminal. Never token ids, secrets or handles. The
service manager hears of the daemon's state by the sd_notify protocol (see sd_notify(3)).
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import logging
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TextIO

import structlog

from kvferry.daemon.process.log_lines import LogLines
from kvferry.protocol.config.schema import LoggingConfig
from kvferry.protocol.printable import printable

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_KEPT_BYTES = 32 << 20  # glibc's maximum
_KEEP_BYTES = 256 << 20
STEP_S: Final = 60.0
"""How long one step of the start may take: to open a device, or to take over a pool."""

SEND_S: Final = 2.0
"""How long a service manager that reads nothing holds up the daemon, which has nothing else to do at these times."""

log = structlog.get_logger(__name__)

_PRIORITY = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
"""Syslog priorities, by which journald classifies lines that start with ``<n>``."""


_json = structlog.processors.JSONRenderer()


def configure_logs(config: LoggingConfig, lines: LogLines | None = None) -> None:
    """Configure structlog for this process; lines go to standard error while something reads it.

    ``lines`` remembers those from level ``info`` on, also where standard error gets fewer.
    """
    level = logging.getLevelNamesMapping()[config.level.upper()]
    least = level if lines is None else min(level, logging.INFO)
    console = config.format == "console" or (config.format == "auto" and sys.stderr.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    if lines is not None:
        processors += [lines, _from(level)]
    if console:
        processors += [_printable, structlog.dev.ConsoleRenderer(exception_formatter=_traceback)]
    else:
        journal = bool(os.environ.get("JOURNAL_STREAM"))
        processors += [structlog.processors.format_exc_info, _journal_line if journal else _json]
    structlog.configure(
        processors=processors,
        wrapper_class=_unfailing(structlog.make_filtering_bound_logger(least)),
        logger_factory=lambda *_: LineLogger(sys.stderr),
    )


def _unfailing(kind: type[structlog.typing.FilteringBoundLogger]) -> type[structlog.typing.FilteringBoundLogger]:
    """Return a kind of logger that loses a line rather than raise: whoever logs has something else to bring to its end.

    A line with a traceback takes memory and, at first use, modules and descriptors.
    """

    class Unfailing(kind):  # type: ignore[valid-type,misc]
        def _proxy_to_logger(self, method_name: str, event: str | None = None, **fields: object) -> object:
            try:
                return super()._proxy_to_logger(method_name, event, **fields)
            except Exception:  # noqa: BLE001
                return None

    return Unfailing


def _from(level: int) -> structlog.typing.Processor:
    """Return what drops lines below a level."""
    levels = logging.getLevelNamesMapping()

    def pass_on(
        _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        if levels[event["level"].upper()] < level:
            raise structlog.DropEvent
        return event

    return pass_on


def _printable(
    logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Escape what an engine or a peer said, which a terminal would obey; JSON lines are escaped as they are."""
    del logger, method
    return {name: printable(value) if isinstance(value, str) else value for name, value in event.items()}


def _traceback(out: TextIO, exc_info: structlog.typing.ExcInfo) -> None:
    text = io.StringIO()
    structlog.dev.plain_traceback(text, exc_info)
    out.write("\n".join(map(printable, text.getvalue().split("\n"))))


class LineLogger:
    """Writes one line per call. Its reader, a terminal or a pipe, may go away: that must not stop the daemon."""

    def __init__(self, file: TextIO) -> None:
        self._fd = file.fileno()

    def msg(self, message: str) -> None:
        """Write one line, unbuffered, so that nothing of a line that failed is kept for the next one."""
        remaining = f"{message}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            while remaining:
                remaining = remaining[os.write(self._fd, remaining) :]

    debug = info = warning = warn = error = critical = fatal = exception = log = msg


def _journal_line(
    logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict
) -> str | bytes:
    return f"<{_PRIORITY.get(method, 6)}>{_json(logger, method, event)!s}"


class ServiceManager:
    """Sends state lines to ``$NOTIFY_SOCKET``; does nothing where that is not set.

    Attributes:
        watchdog_s: it ends and restarts a daemon that has not said ``alive`` for so long; None: it does not.
    """

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self.watchdog_s = _watchdog_s(environ) if address else None

    def starting(self, status: str) -> None:
        """Report what the daemon does before it serves, and that this may take ``STEP_S`` from now on."""
        self._send(f"EXTEND_TIMEOUT_USEC={round(STEP_S * 1e6)}\nSTATUS={status}", SEND_S)

    def ready(self, status: str) -> None:
        """Report that the daemon serves."""
        self._send(f"READY=1\nSTATUS={status}", SEND_S)

    def alive(self) -> None:
        """Report that the daemon still answers. A manager that reads nothing has enough of these in its queue."""
        self._send("WATCHDOG=1", 0.0)

    def stopping(self) -> None:
        """Report that the daemon drains and will end."""
        self._send("STOPPING=1\nSTATUS=draining", SEND_S)

    def succeeded_by(self, pid: int) -> None:
        """Report that another process is the daemon from now on."""
        self._send(f"MAINPID={pid}\nSTATUS=handed over", SEND_S)

    def _send(self, state: str, timeout_s: float) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.settimeout(timeout_s)
                channel.sendto(state.encode(), self._address)
        except OSError as cause:  # the daemon serves in any case; the manager will notice
            log.warning("service manager not notified", state=state.partition("\n")[0], cause=str(cause))


def _watchdog_s(environ: Mapping[str, str]) -> float | None:
    """Return the watchdog's time, if it is meant for this very process; see sd_watchdog_enabled(3)."""
    time_us, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    if not time_us.isdecimal() or not int(time_us) or pid not in {"", str(os.getpid())}:
        return None
    return int(time_us) / 1e6


def keep_freed_memory() -> bool:
    """Make glibc keep freed arrays for the next plan instead of returning each to the kernel.

    Planning makes and drops arrays of megabytes; faulting in their pages anew each time costs several times the
    planning itself. Return False where the C library has no mallopt; then plans are merely slower.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES))


def started_at(pid: int) -> int:
    """Return a process's start time, in ticks since the host's boot; 0 where that cannot be known.

    With it, a pid names one process: see ``starttime`` in proc_pid_stat(5).
    """
    try:
        _, _, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")
        return int(after.split()[19])
    except (OSError, IndexError, ValueError):
        return 0
