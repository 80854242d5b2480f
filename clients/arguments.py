"""What callers give, checked before anything is sent: each mistake names the argument and says what to give instead.

Bodies are checked as a whole by the protocol's own types, so that what the daemon would refuse is refused here, where
the mistake was made. Numbers of numpy's and torch's are taken for what they are.
"""

from __future__ import annotations

import inspect
import operator
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.clients.pool import AttachedPool
from kvferry.protocol.client_core import HandOff
from kvferry.protocol.client_works import TierWork
from kvferry.protocol.codec import PageIds, invalid_field
from kvferry.protocol.errors import InvalidFieldError

MAX_SECONDS: Final = 1e6
"""Of any deadline or time-out: eleven days."""

_MAX_INT64: Final = (1 << 63) - 1

BodyT = TypeVar("BodyT", bound=msgspec.Struct)
T = TypeVar("T")


def wrong_kind(value: object, wanted: str, field: str) -> InvalidFieldError:
    """Return the error for an argument of a wrong kind, with a hint where the mistake is a common one."""
    hint = _hint(value)
    return InvalidFieldError(f"{_shown(value)} is no {wanted}{hint and f': {hint}'}", field=field)


def seconds(value: float, field: str) -> float:
    """Return a time span.

    Raises:
        InvalidFieldError: it is no number of seconds from 0 on.
    """
    if type(value) is not float:
        try:
            if isinstance(value, bool | str | bytes):
                raise TypeError  # noqa: TRY301  as float() does for the rest
            value = float(value)
        except (TypeError, ValueError):
            raise wrong_kind(value, "number of seconds", field) from None
    if not 0.0 <= value <= MAX_SECONDS:
        raise InvalidFieldError(f"{value:g} seconds; give from 0 to {MAX_SECONDS:g}", field=field)
    return value


def page_ids(value: npt.ArrayLike, field: str) -> PageIds:
    """Return page ids, or other integers, as they travel: ``(n,)`` int64.

    Raises:
        InvalidFieldError: they are no list of integers of 64 bits.
    """
    if isinstance(value, np.ndarray) and value.dtype == np.int64 and value.ndim == 1:
        return value
    if hasattr(value, "head") and hasattr(value, "ids"):
        raise InvalidFieldError("Pages are for send, receive, offload and restore: here give their ids", field=field)
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise wrong_kind(value, "list of integers", field) from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        hint = "give [id] for one page" if array.ndim == 0 and array.dtype.kind in "iu" else _hint(value)
        what = f"an array {array.shape} of {array.dtype}" if isinstance(value, np.ndarray) else _shown(value)
        raise InvalidFieldError(f"{what} is no list of integers{hint and f': {hint}'}", field=field)
    if array.dtype.kind == "u" and array.size and int(array.max()) > _MAX_INT64:
        raise InvalidFieldError(f"{array.max()} does not fit in 64 bits with a sign", field=field)
    return array.astype(np.int64, copy=False)


def sequence(value: Sequence[T], wanted: str, field: str) -> tuple[T, ...]:
    """Return the members of a list, which a string is not.

    Raises:
        InvalidFieldError: it is none.
    """
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return tuple(value)
    if isinstance(value, str | bytes | Mapping) or hasattr(value, "_fields"):
        raise wrong_kind(value, f"list of {wanted}", field)
    try:
        return tuple(value)
    except TypeError:
        raise wrong_kind(value, f"list of {wanted}", field) from None


def checked(body: BodyT, names: Mapping[str, str] | None = None) -> BodyT:
    """Return a body whose every field is what the protocol says it is.

    Args:
        body: as a caller's arguments have made it.
        names: what the caller calls a field, where that differs.

    Raises:
        InvalidFieldError: a field is not; it names the argument.
    """
    try:
        plain = msgspec.to_builtins(body, builtin_types=(bytes, bytearray, memoryview), enc_hook=_plain)
        return msgspec.convert(plain, type(body), builtin_types=(bytes, bytearray, memoryview))
    except msgspec.ValidationError as cause:
        error = invalid_field(cause)
        head, dot, rest = error.field.partition(".")
        field = (names or {}).get(head, head) + dot + rest
        raise InvalidFieldError(error.detail + _hint_at(body, head), field=field) from None
    except (TypeError, ValueError, OverflowError, RecursionError):
        raise _unsendable(body, names or {}) from None


def _unsendable(body: msgspec.Struct, names: Mapping[str, str]) -> InvalidFieldError:
    """Return which field of a body is nothing that can be sent."""
    for field in body.__struct_fields__:
        value = getattr(body, field)
        try:
            msgspec.to_builtins(value, builtin_types=(bytes, bytearray, memoryview), enc_hook=_plain)
        except (TypeError, ValueError, OverflowError, RecursionError):
            if isinstance(value, msgspec.Struct):
                return _unsendable(value, {one: f"{names.get(field, field)}.{one}" for one in value.__struct_fields__})
            return wrong_kind(value, "value that can be sent", names.get(field, field))
    return InvalidFieldError(f"{type(body).__name__} cannot be sent")


def _hint_at(body: msgspec.Struct, field: str) -> str:
    hint = _hint(getattr(body, field.partition("[")[0], None))
    return hint and f": {hint}"


def _plain(value: object) -> object:
    """Return a number of numpy's or torch's as Python's."""
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, bool | float | str) and hasattr(value, "__index__"):
        return operator.index(value)
    raise NotImplementedError


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"  # noqa: PLR2004  a line


def _hint(value: object) -> str:
    """Return what to do about values that are often given where they do not belong."""
    hints: tuple[tuple[Any, str], ...] = (
        (AttachedPool, "a pool is named by its name, pool.name, and made of a spec"),
        (HandOff, "a hand-off is for wait_finished, wait_settled and cancel"),
        (TierWork, "a work of the tiers is for wait_done, wait_accepted and cancel_work"),
        (uuid.UUID, "give its hex digits, request_id.hex"),
    )
    for kind, hint in hints:
        if isinstance(value, kind):
            return hint
    return "await it first" if inspect.isawaitable(value) else ""
