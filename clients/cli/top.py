"""``kvferry top``: what the daemon does right now, in the terminal: rates, transfers by stage, pools, tiers, errors.

It asks for STATUS once in each interval, draws one screen in place, and goes on over a restart of the daemon.
"""

from __future__ import annotations

import argparse
import time
from typing import Final

from kvferry.clients.cli.console import FAILED, WORKED, add_daemon, seconds
from kvferry.clients.cli.inspect import ask
from kvferry.protocol.errors import KvferryError, MisuseError
from kvferry.protocol.session_messages import Status, StatusReport

INTERVAL_S: Final = 1.0
FIRST_S: Final = 0.5
"""Until the second look, where one frame is all: rates are of two."""


def add_top(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command)
    command.add_argument(
        "--interval", type=seconds, default=INTERVAL_S, metavar="SECONDS", help=f"between two looks ({INTERVAL_S:g})"
    )


def top(options: argparse.Namespace) -> int:
    """Draw until Ctrl-C; where standard output is no terminal, print one frame.

    Raises:
        MisuseError: rich is not installed.
        KvferryError: no daemon answers at first.
    """
    try:
        from kvferry.clients.cli.top_screen import Console, Live, frame  # noqa: PLC0415  needs the extra
    except ImportError as cause:
        raise MisuseError("it draws with rich, which is not installed", remedy="pip install 'kvferry[top]'") from cause
    console = Console(highlight=False, markup=False)
    before, now = None, _look(options)
    if not console.is_terminal:
        time.sleep(FIRST_S)
        console.print(frame(_look(options), now, console.height))
        return WORKED
    lost = ""
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                live.update(frame(now, before, console.height, lost), refresh=True)
                time.sleep(options.interval)
                try:
                    before, now, lost = now, _look(options), ""
                except KvferryError as error:
                    lost = str(error)
    except KeyboardInterrupt:
        return FAILED if lost else WORKED


def _look(options: argparse.Namespace) -> StatusReport:
    return ask(options, "top", Status(recent=True))[0]
