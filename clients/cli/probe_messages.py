"""The input of ``kvferry probe``: messages as words or lines, and references to earlier replies and events.

A string ``$NAME.FIELD`` stands for a field of the reply to message NAME, which is its number, counted from 1, or the
name given by ``as``. ``$NAME.FINISHED.FIELD`` stands for a field of its event, for which the message waits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec

from kvferry.clients.cli.json_form import check_known_fields, object_from_json, request_from_fields
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.requests import request_type

WAIT: Final = "WAIT"
"""Not a message: what follows is sent once everything accepted before has settled."""

EVENTS: Final = frozenset({"MATCHED", "FINISHED", "SETTLED", "TIER_DONE"})
SIGN: Final = "$"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_SPAN: Final = re.compile(r"(\d*):(\d*)\Z")


class ProbeMessage(msgspec.Struct, frozen=True):
    """A message to send, as written: ``fields`` may contain references."""

    name: str
    kind: str
    fields: dict[str, Any]


class Reference(msgspec.Struct, frozen=True):
    """A parsed ``$NAME.EVENT.PATH``; an empty event refers to the reply."""

    name: str
    event: str
    path: tuple[str, ...]


class Answers:
    """The replies and events so far, as JSON values, by message name and event type."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], dict[str, Any]] = {}

    def put(self, name: str, event: str, fields: dict[str, Any]) -> None:
        """Store a message's reply (``event`` is empty) or event."""
        self._known[name, event] = fields

    def has(self, reference: Reference) -> bool:
        """Return whether the reply or event of a reference has arrived."""
        return (reference.name, reference.event) in self._known

    def value(self, reference: Reference) -> object:
        """Return the value of a reference.

        Raises:
            InvalidFieldError: there is no such reply, event or field.
        """
        given = f"{SIGN}{'.'.join(filter(None, (reference.name, reference.event, *reference.path)))}"
        found: object = self._known.get((reference.name, reference.event))
        if found is None:
            raise InvalidFieldError(f"there is no {reference.event or 'reply'} for that message", field=given)
        for step in reference.path:
            try:
                found = _step(found, step)
            except (LookupError, TypeError, ValueError) as cause:
                raise InvalidFieldError(f"what it refers to has no {step!r}", field=given) from cause
        return found


class Reader:
    """Parses words or lines into messages, numbers them, and checks what can be checked before sending."""

    def __init__(self) -> None:
        self._numbered = 0
        self._names: dict[str, None] = {}

    @property
    def number(self) -> str:
        """Return the number of the message that was parsed last, or that is invalid."""
        return str(self._numbered)

    def words(self, words: Sequence[str]) -> Iterator[ProbeMessage]:
        """Yield the messages on a command line: ``TYPE [JSON]`` each, or JSON objects with a ``type``."""
        waiting: str | None = None
        for word in words:
            if not word.lstrip().startswith("{"):
                if waiting is not None:
                    yield self._message(waiting, {})
                waiting = word
            elif waiting is None:
                yield self.line(word)
            else:
                yield self._read(waiting, word)
                waiting = None
        if waiting is not None:
            yield self._message(waiting, {})

    def lines(self, lines: Iterable[str]) -> Iterator[ProbeMessage]:
        """Yield the messages in a file, one per line; empty lines and those that begin with # are skipped."""
        for line in lines:
            if line.strip() and not line.lstrip().startswith("#"):
                yield self.line(line)

    def line(self, line: str) -> ProbeMessage:
        """Return the message on a line: a JSON object with a ``type``, or ``TYPE`` and optionally an object.

        Raises:
            UnknownTypeError, InvalidFieldError: the line is not a valid message.
        """
        line = line.strip()
        if line.startswith("{"):
            return self._read("", line)
        kind, _, text = line.partition(" ")
        return self._read(kind, text.strip() or "{}")

    def _read(self, kind: str, text: str) -> ProbeMessage:
        try:
            fields = object_from_json(text)
        except InvalidFieldError:
            self._numbered += 1
            raise
        return self._message(kind, fields)

    def _message(self, kind: str, fields: dict[str, Any]) -> ProbeMessage:
        self._numbered += 1
        name = self._name(fields.pop("as", self.number))
        if not kind:
            kind = str(fields.pop("type", ""))
        kind = kind.upper()
        if kind == WAIT:
            if fields:
                raise InvalidFieldError(f"{WAIT} has no fields", field=next(iter(fields)))
        else:
            self._check(kind, fields)
        self._names[name] = None
        return ProbeMessage(name, kind, fields)

    def _name(self, name: object) -> str:
        if name == self.number:
            return self.number
        if not isinstance(name, str) or not _NAME.match(name):
            raise InvalidFieldError("a name is a letter, then letters, digits, '-' or '_'", field="as")
        if name in self._names:
            raise InvalidFieldError(f"an earlier message has the name {name!r}", field="as")
        return name

    def _check(self, kind: str, fields: dict[str, Any]) -> None:
        """Check what can be checked before anything is sent: everything if there are no references."""
        request_type(kind)
        check_known_fields(kind, fields)
        found = list(references(fields))
        for one in found:
            if one.name not in self._names:
                known = ", ".join(self._names) or "none"
                what = f"no earlier message is named {one.name!r}; there are: {known}"
                raise InvalidFieldError(what, field=f"{SIGN}{one.name}")
        if not found:
            request_from_fields(kind, resolved(fields, Answers()))


def references(value: object) -> Iterator[Reference]:
    """Yield the references in a JSON value."""
    if isinstance(value, str):
        found = _reference(value)
        if found is not None:
            yield found
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from references(one)
    elif isinstance(value, list):
        for one in value:
            yield from references(one)


def resolved(value: Any, answers: Answers) -> Any:  # noqa: ANN401  any JSON
    """Return a JSON value with its references replaced; ``$$`` at the start of a string is one ``$``.

    Raises:
        InvalidFieldError: a reference has no value.
    """
    if isinstance(value, str):
        found = _reference(value)
        if found is not None:
            return answers.value(found)
        return value[1:] if value.startswith(2 * SIGN) else value
    if isinstance(value, dict):
        return {key: resolved(one, answers) for key, one in value.items()}
    if isinstance(value, list):
        return [resolved(one, answers) for one in value]
    return value


def _reference(text: str) -> Reference | None:
    if not text.startswith(SIGN) or text.startswith(2 * SIGN):
        return None
    name, *path = text[len(SIGN) :].split(".")
    event = path.pop(0) if path and path[0] in EVENTS else ""
    return Reference(name, event, tuple(path))


def _step(value: object, step: str) -> object:
    if isinstance(value, dict):
        return value[step]
    if not isinstance(value, list | tuple):
        raise TypeError
    span = _SPAN.match(step)
    if span:
        start, end = span.groups()
        return value[int(start or 0) : int(end) if end else None]
    return value[int(step)]
