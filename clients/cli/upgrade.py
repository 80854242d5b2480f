"""``kvferry upgrade``: let the daemon that is installed by now take the running one's place."""

from __future__ import annotations

import argparse
import contextlib
import time

from kvferry.clients.cli.connection import LOOK_S, Connection
from kvferry.clients.cli.console import add_daemon
from kvferry.protocol.errors import DaemonLostError
from kvferry.protocol.printable import printable
from kvferry.protocol.session_messages import Upgrade

TIMEOUT_S = 120.0
ANSWER_S = 1.0


def add_upgrade(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command, TIMEOUT_S)


def upgrade(options: argparse.Namespace) -> int:
    """Return once the next daemon answers, and print both; the old one goes on where the next one is not ready."""
    ends_at = time.monotonic() + options.timeout
    with Connection.open(options.runtime_dir, "upgrade", timeout_s=options.timeout) as connection:
        before = f"kvferry {connection.welcome.daemon_version} boot {connection.boot_id[:8]}"
        boot_id = connection.boot_id
        upgrading = connection.call(Upgrade(), timeout_s=connection.left_s)
    while time.monotonic() < ends_at:
        with (
            contextlib.suppress(DaemonLostError),  # what the old one was asked last it may not have heard
            Connection.open(options.runtime_dir, "upgrade", timeout_s=ANSWER_S) as connection,
        ):
            if connection.boot_id != boot_id:
                after = f"kvferry {connection.welcome.daemon_version} boot {connection.boot_id[:8]}"
                print(printable(f"{before} is succeeded by {after}, pid {upgrading.pid}"))
                return 0
        time.sleep(LOOK_S)
    raise DaemonLostError(f"no daemon answers {options.timeout:g} s after the upgrade began; see its log")
