"""Messages as JSON, for people: page lists replace the lengths that the body announces.

On the wire ``{"pages": 3}`` announces a frame of three ids; in JSON it is ``{"pages": [4, 5, 6]}``. A body that counts
the parts of a single frame keeps the counts and has the frame's numbers in ``ids``.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from kvferry.protocol.base import Body, PageList, RequestBody, pack_ids, unpack_ids
from kvferry.protocol.errors import CallerError, InvalidFieldError, invalid_field
from kvferry.protocol.limits import INT64_BYTES
from kvferry.protocol.requests import request_type

BATCH = "BATCH"
REQUESTS = "requests"
RESULTS = "results"
EVENTS = "events"
PAGES = "pages"
IDS = "ids"


class BodyWithIds(NamedTuple):
    """A request's body, and the frames of its page lists."""

    body: RequestBody
    frames: tuple[bytes, ...]


def object_from_json(text: bytes | str) -> dict[str, Any]:
    """Return the JSON object in ``text``.

    Raises:
        InvalidFieldError: the text is not a JSON object.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.MsgspecError, ValueError, RecursionError) as cause:
        raise InvalidFieldError(f"the message is not a JSON object: {cause}") from cause


def request_from_fields(kind: str, given: dict[str, Any]) -> BodyWithIds:
    """Return the request of type ``kind`` with these fields in JSON form; does not modify ``given``.

    Raises:
        UnknownTypeError: no such type.
        InvalidFieldError: a field is unknown or invalid; names the field.
    """
    request = request_type(kind)
    check_known_fields(kind, given)
    if kind == BATCH:
        return _batch_from_fields(given)
    fields = {**given}
    if isinstance(given.get("lists"), list | tuple):
        fields["lists"] = [{**one} if isinstance(one, dict) else one for one in given["lists"]]
    frames: tuple[bytes, ...] = ()
    if request.one_frame:
        frames = (_take(fields, IDS, IDS),)
    elif fields.get("into") != "host":  # lists of a RECEIVE into the host tier are counts in JSON too
        frames = tuple(_take_ids(fields))
    try:
        body = msgspec.convert({"type": kind, **fields}, request)
    except msgspec.ValidationError as cause:
        raise invalid_field(cause) from cause
    lengths, announced = tuple(len(one) // INT64_BYTES for one in frames), body.page_counts()
    if lengths != announced:
        raise InvalidFieldError(f"{lengths[0]} ids given; the counts require {announced[0]}", field=IDS)
    return BodyWithIds(body, frames)


def _batch_from_fields(given: dict[str, Any]) -> BodyWithIds:
    """Return a BATCH; each of its requests has its ``type`` among its fields."""
    from kvferry.protocol.requests import check_batched  # noqa: PLC0415  it loads nearly all messages

    parts: list[BodyWithIds] = []
    for at, one in enumerate(_objects_of(given.get(REQUESTS))):
        fields = {**one}
        try:
            kind = str(fields.pop("type", ""))
            check_batched(request_type(kind), "type")
            parts.append(request_from_fields(kind, fields))
        except CallerError as error:
            error.field = f"{REQUESTS}[{at}].{error.field}"
            raise
    listed = given.get(REQUESTS)
    if isinstance(listed, list | tuple) and len(listed) == len(parts):
        listed = [one.body for one in parts]
    try:
        body = msgspec.convert({"type": BATCH, **given, REQUESTS: listed}, request_type(BATCH))
    except msgspec.ValidationError as cause:
        raise invalid_field(cause) from cause
    return BodyWithIds(body, tuple(frame for one in parts for frame in one.frames))


def body_to_fields(body: Body, frames: Sequence[bytes]) -> dict[str, Any]:
    """Return a message's fields in JSON form, page ids in place."""
    fields: dict[str, Any] = msgspec.to_builtins(body, enc_hook=str)
    of_several = next((one for one in (REQUESTS, RESULTS, EVENTS) if getattr(body, one, ())), None)
    if of_several is not None:
        parts: Sequence[Body] = getattr(body, of_several)
        rest = iter(frames)
        its = [tuple(itertools.islice(rest, len(one.page_counts()))) for one in parts]
        fields[of_several] = [body_to_fields(one, its_frames) for one, its_frames in zip(parts, its, strict=True)]
    elif body.one_frame:
        fields[IDS] = unpack_ids(frames[0])
    else:
        _put_ids(fields, iter(frames))
    return fields


def check_known_fields(kind: str, fields: dict[str, Any]) -> None:
    """Check that a request of that type has fields of these names; values are not checked.

    Raises:
        UnknownTypeError: no such type.
        InvalidFieldError: a field is unknown; names it.
    """
    request = request_type(kind)
    unknown = sorted(set(fields) - set(request.__struct_fields__) - ({IDS} if request.one_frame else set()))
    if unknown:
        known = ", ".join(request.__struct_fields__) or "none"
        raise InvalidFieldError(f"unknown field {unknown[0]!r}; known: {known}", field=unknown[0])
    for index, one in enumerate(_lists_of(fields)):
        _check_known_list(one, f"lists[{index}].")
    for index, one in enumerate(_objects_of(fields.get(REQUESTS))):
        try:
            check_known_fields(str(one.get("type", "")), {key: value for key, value in one.items() if key != "type"})
        except CallerError as error:
            error.field = f"{REQUESTS}[{index}].{error.field}"
            raise


def _check_known_list(one: dict[str, Any], where: str) -> None:
    unknown = sorted(set(one) - set(PageList.__struct_fields__))
    if unknown:
        raise InvalidFieldError(f"unknown field {unknown[0]!r}", field=f"{where}{unknown[0]}")


def _lists_of(fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _objects_of(fields.get("lists"))


def _objects_of(value: object) -> Iterator[dict[str, Any]]:
    if isinstance(value, list | tuple):
        yield from (one for one in value if isinstance(one, dict))


def _holders(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (path prefix, object) of the objects that may hold page ids, in frame order."""
    yield "", fields
    for index, one in enumerate(_lists_of(fields)):
        yield f"lists[{index}].", one


def _take_ids(fields: dict[str, Any]) -> Iterator[bytes]:
    for where, holder in _holders(fields):
        if PAGES not in holder:
            continue
        frame = _take(holder, PAGES, f"{where}{PAGES}")
        holder[PAGES] = len(frame) // INT64_BYTES
        yield frame


def _take(holder: dict[str, Any], key: str, field: str) -> bytes:
    try:
        return pack_ids(msgspec.convert(holder.pop(key, []), list[int]))
    except (msgspec.ValidationError, OverflowError) as cause:
        raise InvalidFieldError(f"page ids must be a list of integers: {cause}", field=field) from cause


def _put_ids(fields: dict[str, Any], remaining: Iterator[bytes]) -> None:
    for _, holder in _holders(fields):
        frame = next(remaining, None) if PAGES in holder else None
        if frame is not None:
            holder[PAGES] = unpack_ids(frame)
