"""Messages as JSON, for people: page lists stand where the body announces their length.

On the wire ``{"pages": 3}`` announces a frame of three ids; in JSON it reads ``{"pages": [4, 5, 6]}``. A body that
counts the parts of its one frame keeps the counts, and has the frame as ``ids``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from kvferry.protocol.base import Body, PageList
from kvferry.protocol.codec import PageIds, invalid_field
from kvferry.protocol.errors import InvalidFieldError, UnknownTypeError
from kvferry.protocol.requests import REQUEST_TYPES, RequestBody

PAGES = "pages"
IDS = "ids"


class BodyWithIds(NamedTuple):
    """A request's body and its page lists."""

    body: RequestBody
    ids: tuple[PageIds, ...]


def request_from_json(kind: str, text: bytes | str) -> BodyWithIds:
    """Return the request of type ``kind`` whose fields are given as a JSON object.

    Raises:
        UnknownTypeError: no such type.
        InvalidFieldError: the text is no JSON object, or a field is unknown or wrong; names the field.
    """
    row = REQUEST_TYPES.get(kind)
    if row is None:
        raise UnknownTypeError(f"no request type {kind!r}; there are {', '.join(REQUEST_TYPES)}", field="type")
    try:
        fields = msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as cause:
        raise InvalidFieldError(f"the message is no JSON object: {cause}") from cause
    _check_known(fields, row.request, "")
    ids: tuple[PageIds, ...] = ()
    if row.request.one_frame:
        ids = (_take(fields, IDS, IDS),)
    elif fields.get("land") != "host":  # whose lists hold counts, in JSON too
        ids = tuple(_take_ids(fields))
    try:
        body = msgspec.convert({"type": kind, **fields}, RequestBody)
    except msgspec.ValidationError as cause:
        raise invalid_field(cause) from cause
    given, announced = tuple(len(one) for one in ids), body.page_counts()
    if given != announced:
        raise InvalidFieldError(f"{len(ids[0])} ids; the counts say {announced[0]}", field=IDS)
    return BodyWithIds(body, ids)


def body_to_json(body: Body, ids: Sequence[PageIds]) -> bytes:
    """Return a reply or event as one line of JSON, page ids in place."""
    fields = msgspec.to_builtins(body, enc_hook=str)
    if body.one_frame:
        fields[IDS] = ids[0].tolist()
        return msgspec.json.encode(fields)
    remaining = iter(ids)
    _put_ids(fields, remaining)
    return msgspec.json.encode(fields)


def _check_known(fields: dict[str, Any], kind: type[Body], where: str) -> None:
    unknown = sorted(set(fields) - set(kind.__struct_fields__) - ({IDS} if kind.one_frame else set()))
    if unknown:
        known = ", ".join(kind.__struct_fields__) or "none"
        raise InvalidFieldError(f"unknown field {unknown[0]!r}; known: {known}", field=f"{where}{unknown[0]}")
    for index, one in enumerate(_lists_of(fields)):
        _check_known_list(one, f"lists[{index}].")


def _check_known_list(one: dict[str, Any], where: str) -> None:
    unknown = sorted(set(one) - set(PageList.__struct_fields__))
    if unknown:
        raise InvalidFieldError(f"unknown field {unknown[0]!r}", field=f"{where}{unknown[0]}")


def _lists_of(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    lists = fields.get("lists")
    if isinstance(lists, list | tuple):
        yield from (one for one in lists if isinstance(one, dict))


def _holders(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects that may hold page ids, in frame order, and how to name them."""
    yield "", fields
    for index, one in enumerate(_lists_of(fields)):
        yield f"lists[{index}].", one


def _take_ids(fields: dict[str, Any]) -> Iterator[PageIds]:
    for where, holder in _holders(fields):
        if PAGES not in holder:
            continue
        ids = _take(holder, PAGES, f"{where}{PAGES}")
        holder[PAGES] = len(ids)
        yield ids


def _take(holder: dict[str, Any], key: str, field: str) -> PageIds:
    try:
        return np.array(msgspec.convert(holder.pop(key, []), list[int]), np.int64)
    except (msgspec.ValidationError, OverflowError) as cause:
        raise InvalidFieldError(f"page ids are a list of integers: {cause}", field=field) from cause


def _put_ids(fields: dict[str, Any], remaining: Iterator[PageIds]) -> None:
    for _, holder in _holders(fields):
        ids = next(remaining, None) if PAGES in holder else None
        if ids is not None:
            holder[PAGES] = ids.tolist()
