"""``kvferry``: the command line. Exit status 0; 1 where it failed; 2 where the input was refused."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from kvferry.clients.cli import inspect, layouts, planning, probing
from kvferry.clients.cli.cache import add_cache, cache
from kvferry.clients.cli.doctor.command import add_doctor, doctor
from kvferry.protocol.errors import KvferryError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given[:1] == ["daemon"]:
        return _become_daemon(given[1:])
    if given[:1] == ["demo"]:
        from kvferry.clients.demo.main import main as demo  # noqa: PLC0415  needs the demo extra

        return demo(given[1:])
    options = _parser().parse_args(given)
    try:
        status: int = options.run(options)
    except KvferryError as error:
        print(f"kvferry {options.command}: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    return status


def _become_daemon(arguments: Sequence[str]) -> int:
    for number in (ignored := {signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2}):
        signal.signal(number, signal.SIG_IGN)  # threads of what was imported take signals as well
    signal.pthread_sigmask(signal.SIG_BLOCK, ignored)  # until the daemon can log them
    os.execv(sys.executable, [sys.executable, "-P", "-m", "kvferry.daemon", *arguments])  # noqa: S606  ourselves, no shell


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvferry", description="The KV-cache daemon of a node, and the tools to look at it."
    )
    parser.add_argument("--version", action="version", version=f"kvferry {metadata.version('kvferry')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("daemon", help="run the daemon of this node", add_help=False)
    commands.add_parser("demo", help="hand a real model's KV cache from prefill to decode", add_help=False)
    for name, text, run, arguments in (
        ("ping", "ask whether the daemon answers", inspect.ping, _add_runtime_dir),
        ("status", "show what the daemon holds and does", inspect.status, _add_status),
        ("probe", "send any message, written as JSON, and print the reply", probing.probe, _add_probe),
        (
            "layout",
            "print the manifest of a pool spec, or what a model's pool takes",
            layouts.layout,
            layouts.add_layout,
        ),
        ("cache", "list, pin, evict and watch cached blocks and snapshots", cache, add_cache),
        ("plan", "print the copies of a hand-off, without a daemon", planning.plan, _add_plan),
        ("doctor", "say what this host has and lacks, each with the fix", doctor, add_doctor),
    ):
        command = commands.add_parser(name, help=text, description=text)
        arguments(command)
        command.set_defaults(run=run)
    return parser


def _add_runtime_dir(command: argparse.ArgumentParser) -> None:
    command.add_argument("--runtime-dir", type=Path, help="where the daemon's sockets are")
    command.add_argument("--timeout", type=float, default=2.0, metavar="SECONDS", help="how long to wait (2)")


def _add_status(command: argparse.ArgumentParser) -> None:
    _add_runtime_dir(command)
    command.add_argument("--json", action="store_true", help="for programs")


def _add_probe(command: argparse.ArgumentParser) -> None:
    _add_runtime_dir(command)
    command.add_argument("type", metavar="TYPE", help="the message's type, such as STATUS or ALLOCATE")
    command.add_argument("message", nargs="?", default="{}", metavar="JSON", help="its fields; page ids as lists")


def _add_file(command: argparse.ArgumentParser) -> None:
    command.add_argument("file", metavar="FILE", help="a JSON file, or - for standard input")


def _add_plan(command: argparse.ArgumentParser) -> None:
    _add_file(command)
    command.add_argument("--explain", action="store_true", help="show what pairs with what, what is left out, and why")
    command.add_argument("--json", action="store_true", help="the explanation for programs")


if __name__ == "__main__":
    sys.exit(main())
