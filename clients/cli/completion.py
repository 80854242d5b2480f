"""``kvferry completion``: the script by which a shell completes commands, options and files."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any, Final

from kvferry.clients.cli import main
from kvferry.clients.cli.console import WORKED
from kvferry.protocol import programs
from kvferry.protocol.errors import MisuseError

SHELLS: Final = ("bash", "zsh")


def add_completion(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    command.add_argument("shell", choices=SHELLS, help="whose script to print")


def completion(options: argparse.Namespace) -> int:
    """Print the script of a shell.

    Raises:
        MisuseError: shtab is not installed.
    """
    try:
        shtab: Any = importlib.import_module("shtab")  # an extra
    except ImportError as cause:
        remedy = "pip install 'kvferry[completion]'"
        raise MisuseError("it makes the script with shtab, which is not installed", remedy=remedy) from cause
    print(shtab.complete(whole_parser(shtab.FILE), shell=options.shell))
    return WORKED


def whole_parser(file: object = None) -> argparse.ArgumentParser:
    """Return a parser of all commands with their arguments; those that are paths complete as a ``file``."""
    parser = argparse.ArgumentParser(prog="kvferry", description=main.DESCRIPTION)
    commands = parser.add_subparsers(metavar="COMMAND")
    for name, purpose in main.PURPOSES.items():
        command = commands.add_parser(name, help=purpose, description=purpose)
        declared = importlib.import_module(main.MODULES[name]) if name in main.MODULES else programs
        getattr(declared, f"add_{name}")(command)
        _complete_files(command, file)
    return parser


def _complete_files(command: argparse.ArgumentParser, file: object) -> None:
    for action in command._actions:  # noqa: SLF001  argparse has no other way to list them, and shtab uses this one
        if action.type is Path or action.metavar in {"FILE", "DIR"}:
            action.complete = file  # type: ignore[attr-defined]  # as shtab wants it
        if isinstance(action.choices, dict):
            for one in action.choices.values():
                _complete_files(one, file)
