"""``kvferry dump``: one file for a bug report, of what the asking user may see; read it before you send it on.

It has no bytes of tensors, tokens, payloads or secrets: nothing that it is made of has any.
"""

from __future__ import annotations

import argparse
import io
import os
import platform
import socket
import sys
import tarfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import msgspec

from kvferry.clients.cli.configuration import found_values, running_values
from kvferry.clients.cli.connection import Connection
from kvferry.clients.cli.console import WORKED, add_daemon, show, table
from kvferry.clients.cli.doctor.command import examine
from kvferry.clients.cli.doctor.host import Host, run_child
from kvferry.clients.cli.events import remembered
from kvferry.clients.cli.inspect import ask
from kvferry.clients.cli.progress import Progress
from kvferry.clients.daemon_socket import find_runtime_dir
from kvferry.pools.host.placement import offer
from kvferry.protocol import VERSION
from kvferry.protocol.config.load import read_config
from kvferry.protocol.errors import InvalidFieldError, KvferryError, MisuseError
from kvferry.protocol.printable import json_line, printable
from kvferry.protocol.session_messages import Status
from kvferry.protocol.settings import METRICS_SOCKET, SYSTEM_DIR

CONFIGURATIONS: Final = Path("/etc/kvferry")
LOG_LINES: Final = 1000
LOG_S: Final = 10.0
OF_ITS_OWNER: Final = 0o600
BY_HAND: Final = "add the log by hand"


def add_dump(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command)
    command.add_argument("--config", type=Path, metavar="FILE", help="the daemon's file, /etc/kvferry/NAME.toml say")
    command.add_argument("--json", action="store_true", help="for programs")
    command.add_argument("file", type=Path, nargs="?", metavar="FILE", help="the file to make, a .tar.gz")


def dump(options: argparse.Namespace) -> int:
    """Write the file, and print what is in it. A part that cannot be had says why, in its own place.

    Raises:
        InvalidFieldError: the file exists, or cannot be made.
    """
    stamp = time.strftime("%Y%m%dT%H%M%S")
    path = options.file or Path(f"kvferry-dump-{stamp}.tar.gz")
    name = _name_of_daemon(options)
    if options.config is None and os.access(of_unit := CONFIGURATIONS / f"{name}.toml", os.R_OK):
        options.config = of_unit
    parts: dict[str, Callable[[], str]] = {
        "versions.json": _versions,
        "status.json": lambda: _status(options),
        "metrics.txt": lambda: _metrics(options),
        "configuration.json": lambda: _configuration(options),
        "doctor.json": lambda: _findings(options),
        "events.txt": lambda: _events(options),
        "log.txt": lambda: _log(name),
    }
    try:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OF_ITS_OWNER), "wb")
    except OSError as cause:
        raise InvalidFieldError(f"{path}: {cause.strerror}", field="FILE") from cause
    rows = []
    with file, tarfile.open(fileobj=file, mode="w:gz") as archive:
        for part, text_of in parts.items():
            with Progress("dump", part):
                text, failure = _tried(text_of)
            data = text.encode(errors="replace")
            member = tarfile.TarInfo(f"kvferry-dump-{stamp}/{part}")
            member.size, member.mtime = len(data), int(time.time())
            archive.addfile(member, io.BytesIO(data))
            rows.append((part, len(data), failure))
    if options.json:
        said = [{"part": part, "size_bytes": size, "missing": why} for part, size, why in rows]
        print(json_line({"file": str(path), "parts": said}))
        return WORKED
    show(table("dump", ("part", "bytes", "missing because"), [(*row, why or "-") for *row, why in rows]))
    print(printable(f"{path}: read it before you send it; it names pools, sessions and addresses"))
    return WORKED


def _tried(text_of: Callable[[], str]) -> tuple[str, str]:
    """Return a part, and why it is none: a report is wanted most where something does not work."""
    try:
        return text_of(), ""
    except Exception as error:  # noqa: BLE001  see above
        failure = str(error) if isinstance(error, KvferryError) else f"{type(error).__name__}: {error}"
        return f"{failure}\n", failure


def _name_of_daemon(options: argparse.Namespace) -> str:
    """Return NAME of kvferry@NAME; empty where it is not known."""
    if options.config is not None:
        return str(options.config.stem)
    try:
        directory = Path(find_runtime_dir(options.runtime_dir))
    except KvferryError:  # which the status says, too
        return ""
    return directory.name if directory.parent == Path(SYSTEM_DIR) else ""


def _versions() -> str:
    packages = {str(one.metadata["Name"]): one.version for one in metadata.distributions()}
    return _json(
        {
            "made": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "kvferry": VERSION,
            "python": sys.version,
            "kernel": f"{platform.release()} {platform.version()}",
            "machine": platform.machine(),
            "packages": dict(sorted(packages.items())),
        }
    )


def _status(options: argparse.Namespace) -> str:
    report, boot_id = ask(options, "dump", Status(holders=True, recent=True))
    return _json({"boot_id": boot_id, **msgspec.to_builtins(report)})


def _metrics(options: argparse.Namespace) -> str:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(options.timeout)
        channel.connect(os.fspath(Path(find_runtime_dir(options.runtime_dir)) / METRICS_SOCKET))
        channel.sendall(b"GET /metrics HTTP/1.1\r\nHost: kvferry\r\n\r\n")
        said = b"".join(iter(lambda: channel.recv(1 << 16), b""))
    return said.decode(errors="replace").partition("\r\n\r\n")[2]


def _configuration(options: argparse.Namespace) -> str:
    """Return what the running daemon has, and what one has that starts with this file and this environment."""
    found = found_values(read_config(options.config, offer(), os.environ))
    try:
        running = running_values(options, "dump")
    except KvferryError as error:
        running = {"missing": str(error)}
    return _json({"file": str(options.config or ""), **found, "running": running})


def _findings(options: argparse.Namespace) -> str:
    found = examine(Host.this_one(), argparse.Namespace(**vars(options), npu=False))
    return _json({name: msgspec.to_builtins(one) for name, one in found.items()})


def _events(options: argparse.Namespace) -> str:
    """Return the lines of its log that the daemon itself remembers: there may be no journald."""
    with Connection.open(options.runtime_dir, "dump", timeout_s=options.timeout) as connection:
        return "".join(f"{json_line(one)}\n" for one in remembered(connection, options.timeout))


def _log(name: str) -> str:
    """Return the last lines that journald has of the unit, as far as it lets this user read them."""
    if not name:
        raise MisuseError("the daemon is no unit kvferry@NAME", remedy=BY_HAND)
    command = ("journalctl", "--unit", f"kvferry@{name}.service", "--lines", str(LOG_LINES), "--no-pager")
    done = run_child(command, os.environ, LOG_S)
    if done.status != 0:
        raise MisuseError(f"journalctl: {done.last_error or 'did not end in time'}", remedy=BY_HAND)
    return done.output


def _json(value: Any) -> str:  # noqa: ANN401  whatever msgspec can encode
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"
