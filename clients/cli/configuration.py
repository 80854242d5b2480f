"""``kvferry config``: what a daemon has that starts with this file and this environment, and what it would refuse."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any, Final

from kvferry.clients.cli.console import BAD_INPUT, WORKED, show, shown, table
from kvferry.pools.host.placement import offer
from kvferry.protocol.config import values
from kvferry.protocol.config.load import ReadConfig, read_config
from kvferry.protocol.printable import json_line, printable
from kvferry.protocol.settings import runtime_dirs

DEFAULT: Final = "default"
OF_DIRECTORY: Final = ("KVFERRY_RUNTIME_DIR", "XDG_RUNTIME_DIR")


def add_config(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("show", "show each value, and where it comes from: default, file or environment"),
        ("check", "say what a daemon would refuse; exit status 2 if there is anything"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("--config", type=Path, metavar="FILE", help="the daemon's file, /etc/kvferry/NAME.toml say")
        action.add_argument("--json", action="store_true", help="for programs")


def config(options: argparse.Namespace) -> int:
    """Show or check the configuration; return 2 where it has mistakes.

    Raises:
        ConfigError: the file cannot be read or parsed.
    """
    read = read_config(options.config, offer(), os.environ)
    if options.action == "show":
        _show(read, as_json=options.json)
    elif options.json:
        print(json_line({"mistakes": [shown(one) for one in read.mistakes]}))
    elif not read.mistakes:
        print(printable(f"{options.config or 'the environment'}: a daemon accepts it"))
    if not options.json:
        for mistake in read.mistakes:
            print(printable(f"kvferry config: {mistake}"), file=sys.stderr)
    return BAD_INPUT if read.mistakes else WORKED


def found_values(read: ReadConfig) -> dict[str, Any]:
    """Return, as JSON has them, the ``values``, each with its ``source``, and the ``mistakes``."""
    found, sources = values.values_of(read.config), dict(read.sources)
    if found["runtime_dir"] is None:
        found["runtime_dir"] = runtime_dirs(os.environ)[0]
        sources["runtime_dir"] = next((f"${name}" for name in OF_DIRECTORY if os.environ.get(name)), DEFAULT)
    said = {key: {"value": value, "source": sources.get(key, DEFAULT)} for key, value in found.items()}
    return {"values": said, "mistakes": [shown(one) for one in read.mistakes]}


def _show(read: ReadConfig, *, as_json: bool) -> None:
    found = found_values(read)
    if as_json:
        print(json_line(found))
        return
    rows = [(key, values.shown(key, one["value"]), one["source"]) for key, one in found["values"].items()]
    show(table("configuration", ("key", "value", "from"), rows))
