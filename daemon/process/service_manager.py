"""Reporting the daemon's state to the service manager by the sd_notify protocol (see sd_notify(3))."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

import structlog

log = structlog.get_logger(__name__)


class ServiceManager:
    """Sends state lines to ``$NOTIFY_SOCKET``; does nothing where that is not set."""

    def __init__(self, environ: Mapping[str, str] = os.environ) -> None:
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address

    def ready(self, status: str) -> None:
        """Report that the daemon serves."""
        self._send(f"READY=1\nSTATUS={status}")

    def stopping(self) -> None:
        """Report that the daemon drains and will end."""
        self._send("STOPPING=1\nSTATUS=draining")

    def _send(self, state: str) -> None:
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as channel:
                channel.sendto(state.encode(), self._address)
        except OSError as cause:  # the daemon serves in any case; the manager will notice
            log.warning("service manager not notified", state=state.partition("\n")[0], cause=str(cause))
