"""``kvferry probe``: send any messages of the protocol by hand, in one session."""

from __future__ import annotations

import argparse
import functools
import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from kvferry.clients.cli.connection import Connection
from kvferry.clients.cli.console import BAD_INPUT, FAILED, WORKED, add_runtime_dir, add_wait, seconds
from kvferry.clients.cli.json_form import body_to_fields, request_from_fields
from kvferry.clients.cli.probe_messages import WAIT, Answers, ProbeMessage, Reader, Reference, references, resolved
from kvferry.clients.daemon_socket import REPLY_MARGIN_S
from kvferry.protocol.conversation import EVENT, Arrived
from kvferry.protocol.errors import DeadlineError, InvalidFieldError, KvferryError
from kvferry.protocol.printable import json_line
from kvferry.protocol.requests import request_type

DEFAULT_TIMEOUT_S = 30.0
OPENING_TIMEOUT_S = 5.0
STANDARD_INPUT = "-"
READ_BYTES = 1 << 16
Print = Callable[[dict[str, Any]], None]

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


class ProbeRun:
    """Tracks what was sent and is still open. ``status``: the exit status, FAILED once anything has failed."""

    def __init__(self, connection: Connection, timeout_s: float, print_line: Print) -> None:
        self.status = WORKED
        self._connection = connection
        self._timeout_s = timeout_s
        self._print = print_line
        self._answers = Answers()
        self._sent: dict[int, ProbeMessage] = {}
        self._open: dict[str, list[str]] = {}
        self._cancelled: set[str] = set()

    def send(self, message: ProbeMessage) -> None:
        """Send a message once what it refers to has arrived, and wait for its reply.

        Raises:
            InvalidFieldError: the message is invalid with its references replaced.
            KvferryError: no reply came in time, or the daemon is gone.
        """
        if message.kind == WAIT:
            self.settle()
            return
        for one in references(message.fields):
            if one.event:
                self._wait(functools.partial(self._is_known, one), f"{one.event} of message {one.name}")
        fields = resolved(message.fields, self._answers)
        body, frames = request_from_fields(message.kind, fields)
        for kind, its in _requests(message.kind, fields):
            if kind == "CANCEL":
                self._cancelled.add(_transfer(its))
            if kind == "CANCEL_OPERATION":
                self._cancelled.add(_operation(its))
        number = self._connection.send(body, frames, deadline_s=self._timeout_s)
        self._sent[number] = ProbeMessage(message.name, message.kind, fields)
        self._wait(lambda: number not in self._sent, f"the reply to {message.kind}")

    def settle(self) -> None:
        """Wait until everything that was accepted has settled.

        Raises:
            DeadlineError: it has not settled in time.
            DaemonLostError: the daemon is gone.
        """
        self._wait(lambda: not self._open, "the end of what was accepted")

    def follow(self, timeout_s: float) -> None:
        """Print what arrives, for ``timeout_s``, which may be infinite."""
        ends_at = time.monotonic() + timeout_s
        while (left_s := ends_at - time.monotonic()) > 0:
            self.take(left_s)

    def take(self, timeout_s: float = math.inf, also: int | None = None) -> None:
        """Wait for the next message and print it; return early if ``also`` becomes readable."""
        arrived = self._connection.take(timeout_s, also)
        if arrived is None:
            return
        fields = body_to_fields(arrived.body, arrived.frames)
        if arrived.message_id == EVENT:
            self._event(fields)
        elif arrived.message_id in self._sent:
            self._reply(self._sent.pop(arrived.message_id), arrived, fields)

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        ends_at = time.monotonic() + self._timeout_s + REPLY_MARGIN_S
        while not condition():
            left_s = ends_at - time.monotonic()
            if left_s <= 0:
                waiting = f"; open: {', '.join(self._open)}" if self._open else ""
                raise DeadlineError(f"{what} did not come within {self._timeout_s:g} s{waiting}")
            self.take(left_s)

    def _is_known(self, event: Reference) -> bool:
        """Return whether an event has arrived, or cannot arrive any more."""
        return self._answers.has(event) or not any(event.name in names for names in self._open.values())

    def _reply(self, message: ProbeMessage, arrived: Arrived, fields: dict[str, Any]) -> None:
        self._print({"message": message.name, **fields})
        if arrived.error is not None:
            self.status = FAILED
            return
        self._answers.put(message.name, "", fields)
        results = fields["results"] if message.kind == "BATCH" else [fields]
        for (kind, its), result in zip(_requests(message.kind, message.fields), results, strict=True):
            if result["type"] in {"ERROR", "BUSY"}:
                self.status = FAILED
            elif result["type"] == "ACCEPTED":
                self._open.setdefault(_transfer({**its, "direction": kind.lower()}), []).append(message.name)
            elif result["type"] in {"OFFLOADING", "OPERATION_STARTED"}:
                self._open[_operation(result)] = [message.name]

    def _event(self, fields: dict[str, Any]) -> None:
        if fields["type"] == "EVENTS":
            for one in fields["events"]:
                self._event(one)
            return
        what = _operation(fields) if fields["type"] == "TIER_DONE" else _transfer(fields)
        names = self._open.get(what, [])
        self._print({"message": names[-1], **fields} if names else fields)
        told = {"MATCHED": fields.get("matched"), "SETTLED": fields.get("settled"), fields["type"]: True}
        for kind in [one for one, is_told in told.items() if is_told]:  # a FINISHED may stand for all three
            for name in names:
                self._answers.put(name, kind, fields)
        if "error" in fields and not (what in self._cancelled and fields["error"]["code"] == "CANCELLED"):
            self.status = FAILED
        if fields["type"] not in {"MATCHED", "FINISHED"} or fields.get("settled"):
            self._open.pop(what, None)


def _requests(kind: str, fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return what a message asks for, by type and fields: of a BATCH each of its requests."""
    return [(one["type"], one) for one in fields["requests"]] if kind == "BATCH" else [(kind, fields)]


def _transfer(fields: dict[str, Any]) -> str:
    return f"{fields['direction']} {fields['request_id']} of {fields['pool']}"


def _operation(fields: dict[str, Any]) -> str:
    return f"operation {fields['operation']}"


def add_probe(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    command.epilog = GUIDE
    command.set_defaults(complain=command.error)
    add_runtime_dir(command)
    add_wait(command)
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
        options.runtime_dir,
        "probe",
        timeout_s=opening_s,
        session=session,
        instance=options.instance,
        wait_s=options.wait,
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
    print(json_line(fields), flush=True)
