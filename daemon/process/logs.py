"""Logs: one event per line, JSON for machines, coloured for a terminal. Never token ids, secrets or handles."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import TextIO

import structlog

from kvferry.daemon.config.schema import LoggingConfig

_PRIORITY = {"critical": 2, "error": 3, "warning": 4, "info": 6, "debug": 7}
"""Syslog priorities, by which journald classifies lines that start with ``<n>``."""


_json = structlog.processors.JSONRenderer()


def configure_logs(config: LoggingConfig) -> None:
    """Configure structlog for this process; lines go to standard error while something reads it."""
    console = config.format == "console" or (config.format == "auto" and sys.stderr.isatty())
    processors: list[structlog.typing.Processor] = [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    if console:
        processors.append(structlog.dev.ConsoleRenderer())
    else:
        journal = bool(os.environ.get("JOURNAL_STREAM"))
        processors += [structlog.processors.format_exc_info, _journal_line if journal else _json]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(config.level.upper())),
        logger_factory=lambda *_: LineLogger(sys.stderr),
    )


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
