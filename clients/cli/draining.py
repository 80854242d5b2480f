"""``kvferry drain`` and ``kvferry undrain``: whether new transfers may begin at this daemon."""

from __future__ import annotations

import argparse
import sys
import time

from kvferry.clients.cli.connection import LOOK_S, Connection
from kvferry.clients.cli.console import FAILED, WORKED, add_daemon, seconds
from kvferry.protocol.printable import json_line
from kvferry.protocol.session_messages import Drain


def add_drain(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_undrain(command)
    command.add_argument(
        "--wait", type=seconds, metavar="SECONDS", help="until none is under way; exit status 1 if some are after that"
    )


def add_undrain(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command)
    command.add_argument("--json", action="store_true", help="for programs")


def drain(options: argparse.Namespace) -> int:
    """Drain the daemon; return 1 where transfers are under way after ``--wait``."""
    ends_at = time.monotonic() + (options.wait or 0.0)
    live = _ask(options, drain=True)
    said_at = time.monotonic()
    while live and time.monotonic() < ends_at:
        time.sleep(LOOK_S)  # nothing tells of the last one's end
        live = _ask(options, drain=True)
        if not options.json and time.monotonic() - said_at >= 1:
            said_at = time.monotonic()
            print(f"kvferry drain: sides of transfers under way: {live}", file=sys.stderr, flush=True)
    _say(options, drained=True, live=live)
    return FAILED if live and options.wait is not None else WORKED


def undrain(options: argparse.Namespace) -> int:
    """Let transfers begin again."""
    _say(options, drained=False, live=_ask(options, drain=False))
    return WORKED


def _ask(options: argparse.Namespace, *, drain: bool) -> int:
    with Connection.open(options.runtime_dir, "drain" if drain else "undrain", timeout_s=options.timeout) as connection:
        return connection.call(Drain(drain=drain), timeout_s=connection.left_s).transfers


def _say(options: argparse.Namespace, *, drained: bool, live: int) -> None:
    if options.json:
        print(json_line({"drained": drained, "transfers": live}))
    else:
        now = "accepts no new transfers" if drained else "accepts transfers"
        print(f"the daemon {now}; sides of transfers under way: {live}")
