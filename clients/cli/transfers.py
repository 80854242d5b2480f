"""``kvferry transfers``: what each transfer waits for, which are slow or stuck, and how the last ones ended.

A request has two halves, often at two daemons: ``--request`` asks each of them that is on this host.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import msgspec

from kvferry.clients.cli.console import WORKED, add_daemon, seconds, show, table
from kvferry.clients.cli.inspect import ask, names_of_sessions
from kvferry.clients.daemon_socket import find_runtime_dir
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.printable import json_line
from kvferry.protocol.session_messages import EndedTransfer, Status, StatusReport, TransferStatus
from kvferry.protocol.settings import CONTROL_SOCKET, PEER_SOCKET

SLOW_S: Final = 1.0
STUCK_S: Final = 10.0
MIB: Final = 1 << 20
SECOND_US: Final = 1_000_000
ID_BYTES: Final = 16


def add_transfers(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command)
    command.add_argument(
        "--slow", type=seconds, nargs="?", const=SLOW_S, metavar="SECONDS",
        help=f"those that take longer ({SLOW_S:g}), the oldest first",
    )  # fmt: skip
    command.add_argument(
        "--stuck", type=seconds, nargs="?", const=STUCK_S, metavar="SECONDS",
        help=f"those to which nothing has happened for so long ({STUCK_S:g})",
    )  # fmt: skip
    command.add_argument(
        "--request", metavar="ID", help="both sides of one request, also at other daemons of this host"
    )
    command.add_argument("--recent", action="store_true", help="the last ones that have ended, with each stage's time")
    command.add_argument("--json", action="store_true", help="for programs")


class Sides(NamedTuple):
    """What one daemon says of transfers, or why it says nothing."""

    address: str
    live: Sequence[TransferStatus] = ()
    ended: Sequence[EndedTransfer] = ()
    sessions: Mapping[int, str] = MappingProxyType({})
    unknown: str = ""

    @property
    def daemons(self) -> Iterator[str]:
        """Yield the other daemons that they are exchanged with."""
        for live in self.live:
            yield from live.daemons
        for ended in self.ended:
            yield from ended.daemons


def transfers(options: argparse.Namespace) -> int:
    """Print the transfers that are asked for.

    Raises:
        InvalidFieldError: what is to be a request id is none.
    """
    if options.request is not None and not _is_start_of_id(options.request):
        raise InvalidFieldError(f"{options.request!r}: give hexadecimal digits, at most 32", field="--request")
    request = Status(recent=options.recent or options.request is not None)
    report, boot_id = ask(options, "transfers", request)
    every = [_chosen(report, options)]
    if options.request is not None:
        every += _at_other_daemons(every[0], options)
    if options.json:
        print(json_line({"boot_id": boot_id, "daemons": [_plain(one) for one in every]}))
        return WORKED
    show(line for one in every for line in ("", *_lines(one, options)))
    return WORKED


def _chosen(report: StatusReport, options: argparse.Namespace) -> Sides:
    """Return what the options ask for of one daemon's transfers."""
    slow_ms, stuck_ms = 1000 * (options.slow or 0), 1000 * (options.stuck or 0)
    wanted = options.request.lower() if options.request is not None else ""
    live = [
        one
        for one in report.transfers
        if one.request_id.startswith(wanted) and one.age_ms >= slow_ms and is_stuck(one, stuck_ms)
    ]
    ended = [
        one
        for one in report.recent
        if one.request_id.startswith(wanted) and one.waited_us + one.moved_us >= 1000 * slow_ms
    ]
    if options.recent and options.request is None:
        live = []
    address = next(iter(report.addresses), "this daemon")
    return Sides(address, sorted(live, key=lambda one: -one.age_ms), ended, names_of_sessions(report))


def is_stuck(one: TransferStatus, for_ms: float) -> bool:
    """Return whether nothing has happened to a transfer for so long; 0: any one is.

    One whose bytes another daemon reads is that daemon's to judge.
    """
    is_read_elsewhere = one.direction == "send" and one.daemons and one.state == "open" and one.waits_for == "copies"
    return not for_ms or one.state == "quarantined" or (one.quiet_ms >= for_ms and not is_read_elsewhere)


def _at_other_daemons(here: Sides, options: argparse.Namespace) -> Iterator[Sides]:
    """Yield what the other daemons of a request say, or where to ask them."""
    directory = find_runtime_dir(options.runtime_dir)
    for address in dict.fromkeys(here.daemons):
        place = _directory_of(address, directory, options)
        if place is None:
            digits = options.request
            yield Sides(address, unknown=f"not on this host; ask there: kvferry transfers --request {digits}")
            continue
        try:
            found, _ = ask(options, "transfers", Status(recent=True), place)
        except KvferryError as error:
            yield Sides(address, unknown=str(error))
        else:
            yield _chosen(found, options)._replace(address=address)


def _directory_of(address: str, beside: str, options: argparse.Namespace) -> str | None:
    """Return the runtime directory of a daemon of this host, by its address; None: it is of another host.

    Those with an address of TCP are looked for beside ``beside``.
    """
    path = address.removeprefix("ipc://")
    if path != address:
        return path.removesuffix(f"/{PEER_SOCKET}")
    with os.scandir(os.path.dirname(beside)) as entries:  # noqa: PTH120  pathlib takes a while to import
        near = [one.path for one in entries if os.path.exists(os.path.join(one.path, CONTROL_SOCKET))]  # noqa: PTH110, PTH118
    for place in near:
        try:
            report, _ = ask(options, "transfers", Status(), place)
        except KvferryError:
            continue
        if address in report.addresses:
            return place
    return None


def _lines(sides: Sides, options: argparse.Namespace) -> Iterable[str]:
    if options.request is not None:
        yield f"daemon {sides.address}{f': {sides.unknown}' if sides.unknown else ''}"
        if sides.unknown:
            return
        if not sides.live and not sides.ended:
            yield "  has no side of it: its engine has not asked for it yet, or it ended long ago"
            return
    if sides.live or not (sides.ended or options.recent):
        yield from table("transfers", LIVE, [_live_row(one, sides.sessions) for one in sides.live])
    if sides.ended or options.recent:
        yield from table("transfers that have ended", ENDED, [_ended_row(one) for one in sides.ended])


LIVE: Final = ("request", "direction", "pool", "session", "state", "age", "quiet", "left", "arrived", "waits for")
ENDED: Final = (
    "request", "direction", "pool", "outcome", "ended", "MiB", "planned", "waited", "moved", "copied", "settled",
    "told", "why",
)  # fmt: skip


def _live_row(one: TransferStatus, sessions: Mapping[int, str]) -> tuple[object, ...]:
    arrived = f"{one.arrived}/{one.pages}" if one.direction == "receive" else f"-/{one.pages}"
    times = tuple(map(_time, (one.age_ms * 1000, one.quiet_ms * 1000, one.deadline_ms * 1000)))
    session = sessions.get(one.session, f"{one.session}, gone")
    return (one.request_id, one.direction, one.pool, session, one.state, *times, arrived, one.waits_for)


def _ended_row(one: EndedTransfer) -> tuple[object, ...]:
    outcome = one.error.code if one.error else "OK"
    stages = (one.planned_us, one.waited_us, one.moved_us, one.copied_us, one.settled_us, one.told_us)
    times = (_time(us) for us in stages)
    ago = f"{_time(one.ago_ms * 1000)} ago"
    mib = f"{one.moved_bytes / MIB:.1f}"
    return (one.request_id, one.direction, one.pool, outcome, ago, mib, *times, one.error.detail if one.error else "")


def _time(us: int | None) -> str:
    """Return a time with its unit."""
    if us is None:
        return "-"
    return f"{us / 1e6:.1f} s" if us >= SECOND_US else f"{us / 1000:.1f} ms"


def _plain(sides: Sides) -> dict[str, Any]:
    said = {"address": sides.address, "transfers": sides.live, "recent": sides.ended}
    plain: dict[str, Any] = msgspec.to_builtins(said)
    return plain | ({"unknown": sides.unknown} if sides.unknown else {})


def _is_start_of_id(text: str) -> bool:
    return 0 < len(text) <= 2 * ID_BYTES and not set(text.lower()) - set("0123456789abcdef")
