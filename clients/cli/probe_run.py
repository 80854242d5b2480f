"""One run of ``kvferry probe``: sends messages in order, and prints replies and events until everything has settled."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable
from typing import Any

from kvferry.clients.cli.connection import Connection
from kvferry.clients.cli.exit_codes import FAILED, WORKED
from kvferry.clients.cli.probe_messages import WAIT, Answers, ProbeMessage, Reference, references, resolved
from kvferry.clients.daemon_socket import REPLY_MARGIN_S
from kvferry.protocol.conversation import EVENT, Arrived
from kvferry.protocol.errors import DeadlineError
from kvferry.protocol.json_form import body_to_fields, request_from_fields

Print = Callable[[dict[str, Any]], None]


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
        what = _operation(fields) if fields["type"] == "TIER_DONE" else _transfer(fields)
        names = self._open.get(what, [])
        self._print({"message": names[-1], **fields} if names else fields)
        for name in names:
            self._answers.put(name, fields["type"], fields)
        if "error" in fields and not (what in self._cancelled and fields["error"]["code"] == "CANCELLED"):
            self.status = FAILED
        if fields["type"] not in {"MATCHED", "FINISHED"}:
            self._open.pop(what, None)


def _requests(kind: str, fields: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Return what a message asks for, by type and fields: of a BATCH each of its requests."""
    return [(one["type"], one) for one in fields["requests"]] if kind == "BATCH" else [(kind, fields)]


def _transfer(fields: dict[str, Any]) -> str:
    return f"{fields['direction']} {fields['request_id']} of {fields['pool']}"


def _operation(fields: dict[str, Any]) -> str:
    return f"operation {fields['operation']}"
