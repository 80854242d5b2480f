"""``kvferry upgrade``: let the daemon that is installed by now take the running one's place."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Mapping

from kvferry.clients.cli.connection import LOOK_S, Connection
from kvferry.clients.cli.console import WORKED, add_daemon
from kvferry.clients.cli.progress import Progress
from kvferry.protocol.errors import DaemonLostError
from kvferry.protocol.printable import json_line, printable
from kvferry.protocol.session_messages import Upgrade

TIMEOUT_S = 120.0
ANSWER_S = 1.0


def add_upgrade(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command, TIMEOUT_S)
    command.add_argument("--json", action="store_true", help="for programs")


def upgrade(options: argparse.Namespace) -> int:
    """Return once the next daemon answers, and print both; the old one goes on where the next one is not ready."""
    ends_at = time.monotonic() + options.timeout
    with Connection.open(options.runtime_dir, "upgrade", timeout_s=options.timeout) as connection:
        before = {"daemon_version": connection.welcome.daemon_version, "boot_id": connection.boot_id}
        upgrading = connection.call(Upgrade(), timeout_s=connection.left_s)
    progress = Progress("upgrade", "the running daemon ends its copies and hands over")
    while time.monotonic() < ends_at:
        progress.look()
        with (
            contextlib.suppress(DaemonLostError),  # what the old one was asked last it may not have heard
            Connection.open(options.runtime_dir, "upgrade", timeout_s=ANSWER_S) as connection,
        ):
            if connection.boot_id != before["boot_id"]:
                after = {"daemon_version": connection.welcome.daemon_version, "boot_id": connection.boot_id}
                progress.end()
                _say(before, {**after, "pid": upgrading.pid}, as_json=options.json)
                return WORKED
        time.sleep(LOOK_S)
    progress.end()
    raise DaemonLostError(f"no daemon answers {options.timeout:g} s after the upgrade began; see its log")


def _say(before: Mapping[str, object], after: Mapping[str, object], *, as_json: bool) -> None:
    if as_json:
        print(json_line({"before": before, "after": after}))
    else:
        old, new = (f"kvferry {one['daemon_version']} boot {str(one['boot_id'])[:8]}" for one in (before, after))
        print(printable(f"{old} is succeeded by {new}, pid {after['pid']}"))
