"""``kvferry config``: what a daemon has that starts with this file and this environment, and what it would refuse."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from kvferry.clients.cli.console import BAD_INPUT, WORKED, add_daemon, show, shown, table
from kvferry.clients.cli.inspect import ask
from kvferry.pools.host.members import members_of
from kvferry.pools.host.placement import offer
from kvferry.protocol.config import values
from kvferry.protocol.config.load import ReadConfig, read_config
from kvferry.protocol.errors import AccessDeniedError, ConfigError, MisuseError
from kvferry.protocol.printable import json_line, printable
from kvferry.protocol.session_messages import Status


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
        if name == "show":
            action.add_argument("--running", action="store_true", help="those of the daemon that runs, as it has them")
            add_daemon(action)


def config(options: argparse.Namespace) -> int:
    """Show or check the configuration; return 2 where it has mistakes.

    Raises:
        ConfigError: the file cannot be read or parsed.
        KvferryError: of the running daemon, which does not answer.
    """
    if options.action == "show" and options.running:
        return _show_running(options)
    read = read_config(options.config, offer(), os.environ)
    try:
        members_of(read.config.tenants)
    except ConfigError as unknown:
        read.mistakes.append(unknown)
    if options.action == "show":
        _show(found_values(read), as_json=options.json)
        if not options.json:
            print("\nas a daemon has them that starts with this file and environment; --running: the running one's")
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
    found = values.sourced(read.config, read.sources, os.environ)
    return {
        "values": {key: one._asdict() for key, one in found.items()},
        "mistakes": [shown(one) for one in read.mistakes],
    }


def running_values(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Return the ``values`` of the running daemon, and its ``boot_id``.

    Raises:
        KvferryError: none answers, or this user may not see them.
    """
    report, boot_id = ask(options, name, Status(configuration=True))
    if not report.configuration:
        raise AccessDeniedError("the daemon shows its configuration to root and its own user alone")
    return {"boot_id": boot_id, "values": msgspec.to_builtins(report.configuration)}


def _show_running(options: argparse.Namespace) -> int:
    if options.config is not None:
        raise MisuseError("--running: the daemon has read its file itself", remedy="leave out --config")
    _show(running_values(options, "config"), as_json=options.json)
    return WORKED


def _show(found: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(json_line(found))
        return
    rows = [(key, values.shown(key, one["value"]), one["source"]) for key, one in found["values"].items()]
    show(table("configuration", ("key", "value", "from"), rows))
