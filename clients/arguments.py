"""Checks of callers' arguments before anything is sent: errors name the argument and say what to pass instead.

Bodies are validated as a whole by the protocol's types, so that what the daemon would refuse is refused here, where the
mistake was made. Numbers of numpy and torch are accepted as Python's.
"""

from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.clients.plain import is_plain
from kvferry.protocol.codec import WIRE_IDS, PageIds
from kvferry.protocol.errors import InvalidFieldError, invalid_field
from kvferry.protocol.manifests import PoolSpec

MAX_SECONDS: Final = 1e6
"""Upper bound of deadlines and timeouts: eleven days."""

_NO_NUMBERS: Final = (bool, str, bytes)  # a union would be made at every use
_MAX_INT64: Final = (1 << 63) - 1

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
T = TypeVar("T")
S = TypeVar("S")


def wrong_kind(value: object, wanted: str, field: str) -> InvalidFieldError:
    """Return the error for an argument of the wrong type, with a hint for common mistakes."""
    hint = _hint(value)
    return InvalidFieldError(f"{shown(value)} is no {wanted}{hint and f': {hint}'}", field=field)


def seconds(value: float, field: str) -> float:
    """Return a duration in seconds.

    Raises:
        InvalidFieldError: it is not a number from 0 to ``MAX_SECONDS``.
    """
    if type(value) is not float:
        try:
            if isinstance(value, _NO_NUMBERS):
                raise TypeError  # noqa: TRY301  as float() does for other types
            value = float(value)
        except (TypeError, ValueError):
            raise wrong_kind(value, "number of seconds", field) from None
        except OverflowError:  # an integer of more than 300 digits
            value = math.inf if value > 0 else -math.inf
    if not 0.0 <= value <= MAX_SECONDS:
        raise InvalidFieldError(f"{value:g} seconds; give from 0 to {MAX_SECONDS:g}", field=field)
    return value


def packed_ids(value: npt.ArrayLike, field: str) -> bytes:
    """Return page ids, or other integers, as they travel: what becomes of a caller's array afterwards is its affair.

    Raises:
        InvalidFieldError: the value is not a list of 64-bit integers.
    """
    if type(value) is np.ndarray and value.dtype is WIRE_IDS and value.ndim == 1:
        return value.tobytes()
    return page_ids(value, field).astype(WIRE_IDS, copy=False).tobytes()


def page_ids(value: npt.ArrayLike, field: str) -> PageIds:
    """Return page ids, or other integers, as ``(n,)`` int64; it may be the caller's own array.

    Raises:
        InvalidFieldError: the value is not a list of 64-bit integers.
    """
    if hasattr(value, "head") and hasattr(value, "ids"):
        raise InvalidFieldError("Pages are for send, receive, offload and restore: here give their ids", field=field)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise wrong_kind(value, "list of integers", field) from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        hint = "give [id] for one page" if array.ndim == 0 and array.dtype.kind in "iu" else _hint(value)
        what = f"an array {array.shape} of {array.dtype}" if isinstance(value, np.ndarray) else shown(value)
        raise InvalidFieldError(f"{what} is no list of integers{hint and f': {hint}'}", field=field)
    if array.dtype.kind == "u" and array.size and int(array.max()) > _MAX_INT64:
        raise InvalidFieldError(f"{array.max()} does not fit in a signed 64-bit integer", field=field)
    return array.astype(np.int64, copy=False)


def sequence(value: Sequence[T], wanted: str, field: str) -> tuple[T, ...]:
    """Return the members of a list; strings and mappings do not count as one.

    Raises:
        InvalidFieldError: the value is not a list.
    """
    if type(value) is tuple:
        return value
    if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        return tuple(value)
    if isinstance(value, str | bytes | Mapping) or hasattr(value, "_fields"):
        raise wrong_kind(value, f"list of {wanted}", field)
    try:
        return tuple(value)
    except TypeError:
        raise wrong_kind(value, f"list of {wanted}", field) from None


def checked(body: BodyT, names: Mapping[str, str] | None = None) -> BodyT:
    """Return a body with every field validated and converted to the protocol's types.

    Args:
        body: built from a caller's arguments.
        names: the caller's argument for a field, if the names differ.

    Raises:
        InvalidFieldError: a field is invalid; names the argument.
    """
    if is_plain(body):
        return body
    kind = type(body)
    try:
        converted: BodyT = _decoder(kind).decode(_encoder.encode(body))
    except msgspec.ValidationError as cause:
        error = invalid_field(cause)
        head, dot, rest = error.field.partition(".")
        field = (names or {}).get(head, head) + dot + rest
        raise InvalidFieldError(error.detail + _hint_at(body, head), field=field) from None
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise _unsendable(body, names or {}) from None
    return converted


@functools.cache
def _decoder(kind: type[BodyT]) -> msgspec.msgpack.Decoder[BodyT]:
    return msgspec.msgpack.Decoder(kind)


def whole(value: int, field: str, *, least: float = 0) -> int:
    """Return an integer.

    Raises:
        InvalidFieldError: the value is not an integer, or below ``least``.
    """
    number = value
    if type(value) is not int:
        if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__"):
            raise wrong_kind(value, "whole number", field)
        try:
            number = operator.index(value)
        except TypeError:  # an array
            raise wrong_kind(value, "whole number", field) from None
    if number < least:
        raise InvalidFieldError(f"{number}; give {least} or more", field=field)
    return number


def text(value: str, field: str) -> str:
    """Return a string.

    Raises:
        InvalidFieldError: the value is not a string.
    """
    if not isinstance(value, str):
        raise wrong_kind(value, "text", field)
    return value


def truth(value: bool, field: str) -> bool:  # noqa: FBT001  any argument of a caller's
    """Return a bool.

    Raises:
        InvalidFieldError: the value is not a bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise wrong_kind(value, "True or False", field)
    return bool(value)


def mapping(value: Mapping[T, S], wanted: str, field: str) -> Mapping[T, S]:
    """Return a mapping.

    Raises:
        InvalidFieldError: the value is not a mapping.
    """
    if not isinstance(value, Mapping):
        raise wrong_kind(value, f"mapping of {wanted}", field)
    return value


def device_names(value: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return this process's names of the daemon's devices, by the daemon's names.

    Raises:
        InvalidFieldError: the value is not a mapping of strings to strings.
    """
    names = dict(mapping({} if value is None else value, "the daemon's names of devices to ours", "devices"))
    for pair in names.items():
        if [type(one) for one in pair] != [str, str]:
            raise wrong_kind(pair, "pair of names", "devices")
    return names


def pool_spec(value: PoolSpec) -> PoolSpec:
    """Return a pool spec with every field checked.

    Raises:
        InvalidFieldError: the value is not a spec, or a field is invalid.
    """
    if not isinstance(value, PoolSpec):
        raise wrong_kind(value, "spec: MhaSpec(...), MlaSpec(...), HybridSwaSpec(...) or MambaSpec(...)", "spec")
    return checked(value, {one: f"spec.{one}" for one in value.__struct_fields__})


def _unsendable(body: msgspec.Struct, names: Mapping[str, str]) -> InvalidFieldError:
    """Return the error that names the field of a body that cannot be encoded."""
    for field in body.__struct_fields__:
        value = getattr(body, field)
        try:
            _encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError):
            if isinstance(value, msgspec.Struct):
                return _unsendable(value, {one: f"{names.get(field, field)}.{one}" for one in value.__struct_fields__})
            return wrong_kind(value, "value that can be sent", names.get(field, field))
    return InvalidFieldError(f"{type(body).__name__} cannot be sent")


def _hint_at(body: msgspec.Struct, field: str) -> str:
    value = getattr(body, field.partition("[")[0], None)
    hint = _hint(value) or _FIELD_HINTS.get(field, "")
    return hint and f": {hint}"


def _plain(value: object) -> object:
    """Return a scalar of numpy or torch as a Python one."""
    if isinstance(value, np.generic):
        item: object = value.item()
        if isinstance(item, int | float | str | bytes):  # not a date, which would be sent as a string
            return item
    if not isinstance(value, bool | float | str) and hasattr(value, "__index__"):
        return operator.index(value)
    raise TypeError


_HINTS: Final = {
    "AttachedPool": "refer to a pool by its name, pool.name; create one from a spec",
    "Transfer": "a transfer is for wait_finished, wait_settled and cancel",
    "TierOperation": "an operation of the tiers is for wait_done, wait_accepted and cancel_operation",
    "PendingReply": "a pending reply is for wait and is_ready",
    "Tables": "tables are for update_tables and delete_tables",
    "EventRing": "give an event or steps of it, ring.record_event() or [ring.step(...)]",
    "LayerStep": "give a list of steps, [step]",
    "UUID": "give its hex digits, request_id.hex",
    "dtype": "give its name, {name!r}",
    "device": "give its name: host, npu:N or cuda:N",
}
"""By the name of a type, so that none has to be imported for it."""

_FIELD_HINTS: Final = {"after": "give an event of the session's ring, ring.record_event()"}

_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)


def shown(value: object) -> str:
    """Return a value's repr for an error, or only its type if that is not a short line."""
    try:
        line = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        line = ""
    return line if 0 < len(line) <= 80 and "\n" not in line else f"a {type(value).__name__}"  # noqa: PLR2004  a line


def _hint(value: object) -> str:
    """Return a hint for values that are often passed by mistake; empty for others."""
    if isinstance(value, type):
        return f"give one of it, {value.__name__}(...)"
    for kind in type(value).__mro__:
        if kind.__name__ in _HINTS:
            return _HINTS[kind.__name__].format(value=value, name=str(value).removeprefix("torch."))
    return "await it first" if inspect.isawaitable(value) else ""
