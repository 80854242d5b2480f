"""``kvferry events``: what has happened at the daemon, or to this user's cached blocks, from a cursor on.

Each line has the cursor that goes on after it: a program that ends reads on where it was. Following goes on over a
restart of the daemon, which begins a new log.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final, NamedTuple

import msgspec

from kvferry.clients.cli.connection import Connection
from kvferry.clients.cli.console import WORKED, add_daemon, show
from kvferry.protocol.errors import DaemonLostError, DeadlineError, StaleBootError
from kvferry.protocol.log_messages import MAX_LINES, Log, LogLine
from kvferry.protocol.printable import json_line, printable

OLDEST: Final = 0
NOW: Final = -1
LOOK_S: Final = 0.25
CHANGES_S: Final = 5.0
"""For how long the daemon may wait for a change of the cache before it answers that there is none."""

NO_WAIT_S: Final = 0.01


def add_events(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    add_daemon(command)
    command.add_argument(
        "--from", dest="cursor", type=_cursor, default=OLDEST, metavar="CURSOR",
        help="those after the line that has this cursor; now: only what comes (all that the daemon remembers)",
    )  # fmt: skip
    command.add_argument("--follow", "-f", action="store_true", help="go on as more happens, until Ctrl-C")
    command.add_argument("--cache", action="store_true", help="changes of this user's cached blocks instead")
    command.add_argument("--json", action="store_true", help="for programs: one JSON object per line")


def events(options: argparse.Namespace) -> int:
    """Print what there is from the cursor on, and with ``--follow`` what comes.

    Raises:
        KvferryError: no daemon answers at first, or it refuses.
    """
    cursor, connected = options.cursor, False
    while True:
        try:
            with Connection.open(
                options.runtime_dir, "events", timeout_s=options.timeout, session=options.cache
            ) as connection:
                connected = True
                for page in _pages(connection, cursor, options):
                    _print(page, connection.boot_id, options)
                    cursor = page.cursor
                return WORKED
        except StaleBootError:  # the next daemon has answered what the one before was asked
            continue
        except (DaemonLostError, DeadlineError) as error:
            if not (options.follow and connected):
                raise
            print(printable(f"kvferry events: {error.detail}; waiting for it"), file=sys.stderr, flush=True)
        while _is_away(options):
            time.sleep(LOOK_S)


def remembered(connection: Connection, timeout_s: float) -> Iterator[dict[str, Any]]:
    """Yield all lines that the daemon remembers, the oldest first."""
    everything = argparse.Namespace(cache=False, follow=False, timeout=timeout_s)
    for page in _pages(connection, OLDEST, everything):
        yield from page.lines


class _Page(NamedTuple):
    """What one reply has: JSON objects, and the cursor after them. ``is_last``: there was no more."""

    lines: list[dict[str, Any]]
    cursor: int
    lost: bool
    is_last: bool


def _pages(connection: Connection, cursor: int, options: argparse.Namespace) -> Iterator[_Page]:
    """Yield what there is, page by page; with ``--follow`` without an end."""
    page_from = _changes if options.cache else _log
    skips = cursor == NOW
    cursor = OLDEST if skips else cursor
    while True:
        page = page_from(connection, cursor, options)
        cursor = page.cursor
        if not skips:
            yield page
        if page.is_last:
            skips = False
            if not options.follow:
                return
            if not options.cache:
                time.sleep(LOOK_S)


def _log(connection: Connection, cursor: int, options: argparse.Namespace) -> _Page:
    reply = connection.call(Log(cursor=cursor), timeout_s=options.timeout)
    lines = [_of_log(one) for one in reply.lines]
    return _Page(lines, reply.cursor, reply.lost, is_last=len(lines) < MAX_LINES)


def _of_log(line: LogLine) -> dict[str, Any]:
    """Return a line as the log has it, with its cursor."""
    return {"cursor": line.cursor, "timestamp": line.at, "level": line.level, "event": line.event, **line.fields}


def _changes(connection: Connection, cursor: int, options: argparse.Namespace) -> _Page:
    from kvferry.protocol.tier_messages import HASH_BYTES, CacheEvents  # noqa: PLC0415  many types that LOG is not of

    wait_s = min(CHANGES_S, options.timeout / 2) if options.follow else NO_WAIT_S
    reply = connection.call(CacheEvents(cursor=max(1, cursor)), timeout_s=options.timeout, deadline_s=wait_s)
    lines = []
    for number, one in enumerate(reply.changes, 1):
        hashes = [one.hashes[at : at + HASH_BYTES].hex() for at in range(0, len(one.hashes), HASH_BYTES)]
        # A reply has one cursor: from a cursor within it some changes are shown again, which does no harm.
        after = reply.cursor if number == len(reply.changes) else max(1, cursor)
        plain = msgspec.to_builtins(one)
        lines.append({"cursor": after, **plain, "hashes": hashes, "parent": one.parent.hex()})
    return _Page(lines, reply.cursor, reply.lost, is_last=not lines)


def _print(page: _Page, boot_id: str, options: argparse.Namespace) -> None:
    if page.lost:
        if options.json:
            print(json_line({"lost_before": page.cursor - len(page.lines), "boot_id": boot_id}), flush=True)
        else:
            print(f"-- what was before is lost; this daemon is boot {boot_id[:8]}", flush=True)
    for line in page.lines:
        if options.json:
            print(json_line(line))
        else:
            show([_change_text(line) if options.cache else _log_text(line)])
    sys.stdout.flush()


def _log_text(line: dict[str, Any]) -> str:
    """Return a line for people: its time here, its level from warnings on, and what it says."""
    given = {**line}
    _, at, level, event = (given.pop(name) for name in ("cursor", "timestamp", "level", "event"))
    at = datetime.fromisoformat(at).astimezone().strftime("%H:%M:%S.%f")[:-3]
    said = " ".join(f"{name}={_value(value)}" for name, value in given.items() if value not in (None, "", [], {}))
    return f"{at} {'' if level == 'info' else f'{level.upper()} '}{event}{f': {said}' if said else ''}"


def _value(value: object) -> str:
    text = value if isinstance(value, str) else json_line(value)
    return repr(text) if " " in text else text


def _change_text(line: dict[str, Any]) -> str:
    first, *more = line["hashes"]
    blocks = f"{first}{f' and {len(more)} more' if more else ''}"
    where = "in" if line["kind"] == "stored" else "from"
    return f"{line['kind']} {where} {line['tier']}: {blocks}, group {line['group']} of {line.get('model') or '?'}"


def _is_away(options: argparse.Namespace) -> bool:
    try:
        Connection.open(options.runtime_dir, "events", timeout_s=options.timeout).close()
    except DaemonLostError:
        return True
    return False


def _cursor(text: str) -> int:
    if text == "now":
        return NOW
    try:
        value = int(text)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 62:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a line's cursor nor now")
    return value
