"""``kvferry probe``: send any messages of the protocol by hand, in one session."""

from __future__ import annotations

import argparse
import math
import os
import select
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from kvferry.clients.cli.arguments import add_runtime_dir, seconds
from kvferry.clients.cli.connection import Connection
from kvferry.clients.cli.exit_codes import BAD_INPUT, WORKED
from kvferry.clients.cli.probe_messages import WAIT, ProbeMessage, Reader
from kvferry.clients.cli.probe_run import ProbeRun
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.requests import request_type

DEFAULT_TIMEOUT_S = 30.0
OPENING_TIMEOUT_S = 5.0
STANDARD_INPUT = "-"
READ_BYTES = 1 << 16

GUIDE = """\
Messages are sent in order, in one session, each after the reply to the one
before. Every reply and event is printed as it arrives, one JSON object per
line; its "message" says to which message it belongs. The command ends when
everything accepted has settled; the session's pages are then freed, its pools
stay.

A message is TYPE and its fields as JSON; page ids are lists. In a file or on
standard input it is one line: TYPE JSON, or an object with a "type". It is
named by its number, from 1, or by its field "as". In later messages

  "$1.pages"              is a field of the reply to message 1
  "$mine.pages.0:2"       the first two of a list; .0 is the first, .-1 the last
  "$3.TIER_DONE.lists.0"  is a field of its event (MATCHED, FINISHED, SETTLED
                          or TIER_DONE), for which the message waits
  WAIT                    as TYPE: continue when everything before has settled

  kvferry probe ALLOCATE '{"as": "mine", "pool": "p", "count": 2}' \\
                FREE '{"pool": "p", "pages": "$mine.pages"}'

After a failure nothing more is sent, except with --keep-going or when
messages are typed at a terminal. Exit status: 0 success, 1 something failed
or was refused, 2 a message is invalid and was not sent.
"""


def add_probe(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    command.epilog = GUIDE
    command.set_defaults(complain=command.error)
    add_runtime_dir(command)
    command.add_argument(
        "--timeout",
        type=seconds,
        metavar="SECONDS",
        help=f"for each message, and for the end ({DEFAULT_TIMEOUT_S:g}); with --events, how long to follow",
    )
    command.add_argument("--file", metavar="FILE", help="more messages, one per line; - for standard input")
    command.add_argument("--instance", default="", metavar="NAME", help="open the session for this engine instance")
    command.add_argument("--events", action="store_true", help="stay at the end, and print events until interrupted")
    command.add_argument("--keep-going", action="store_true", help="continue after a failure")
    command.add_argument(
        "words", nargs="*", metavar="TYPE [JSON]", help="messages: STATUS, or ALLOCATE '{\"pool\": …}', one or more"
    )


def probe(options: argparse.Namespace) -> int:
    """Send the messages and print what arrives."""
    if not options.words and options.file is None:
        options.complain("no message: give TYPE [JSON], or --file")
    reader = Reader()
    streamed = options.file == STANDARD_INPUT
    try:
        messages = list(reader.words(options.words))
        if options.file is not None and not streamed:
            messages += reader.lines(_text_of(options.file).splitlines())
    except KvferryError as error:
        return _refuse(reader.number, error)
    session = (
        streamed or options.events or any(one.kind == WAIT or request_type(one.kind).needs_session for one in messages)
    )
    opening_s = min(options.timeout or DEFAULT_TIMEOUT_S, OPENING_TIMEOUT_S)
    with Connection.open(
        options.runtime_dir, "probe", timeout_s=opening_s, session=session, instance=options.instance
    ) as connection:
        most_s = connection.welcome.limits.max_deadline_ms / 1000
        run = ProbeRun(connection, options.timeout or min(DEFAULT_TIMEOUT_S, most_s), _print)
        keep_going = options.keep_going or (streamed and sys.stdin.isatty())
        bad = _send(run, messages, keep_going=keep_going)
        if streamed and (keep_going or not (bad or run.status)):
            bad = _send_lines(run, reader, keep_going=keep_going) or bad
        if options.events:
            _follow(run, options.timeout or math.inf)
        else:
            run.settle()
    return run.status or bad


def _send(run: ProbeRun, messages: Sequence[ProbeMessage], *, keep_going: bool) -> int:
    """Send messages until one fails; return BAD_INPUT if one was invalid."""
    status = WORKED
    for message in messages:
        if not keep_going and (status or run.status):
            break
        try:
            run.send(message)
        except InvalidFieldError as error:
            status = _refuse(message.name, error)
    return status


def _send_lines(run: ProbeRun, reader: Reader, *, keep_going: bool) -> int:
    """Send the messages on standard input, until it ends."""
    status = WORKED
    for line in _lines_of(sys.stdin.fileno(), run):
        try:
            messages = list(reader.lines([line]))
        except KvferryError as error:
            status = _refuse(reader.number, error)
        else:
            status = _send(run, messages, keep_going=keep_going) or status
        if not keep_going and (status or run.status):
            break
    return status


def _lines_of(descriptor: int, run: ProbeRun) -> Iterator[str]:
    """Yield lines as they arrive; meanwhile print what the daemon sends."""
    pending = b""
    while True:
        run.take(also=descriptor)
        if not select.select([descriptor], [], [], 0)[0]:
            continue
        data = os.read(descriptor, READ_BYTES)
        *lines, pending = (pending + data).split(b"\n")
        for line in lines if data else [pending]:
            yield line.decode(errors="replace")
        if not data:
            return


def _follow(run: ProbeRun, timeout_s: float) -> None:
    try:
        run.follow(timeout_s)
    except KeyboardInterrupt:
        return


def _text_of(name: str) -> str:
    try:
        with open(name, encoding="utf-8") as file:  # noqa: PTH123  see ``protocol.settings``
            return file.read()
    except (OSError, UnicodeDecodeError) as cause:
        what = cause.strerror if isinstance(cause, OSError) else "is not UTF-8 text"
        raise InvalidFieldError(f"{name}: {what}", field="FILE") from cause


def _refuse(name: str, error: KvferryError) -> int:
    _print({"message": name, "type": "ERROR", "error": msgspec.to_builtins(error.info())})
    return BAD_INPUT


def _print(fields: dict[str, Any]) -> None:
    print(msgspec.json.encode(fields).decode(), flush=True)
