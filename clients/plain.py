"""Requests of a scheduler's step that a look at their fields shows to be valid, for a fraction of what a decoder costs.

Where an engine's caches are cold, as they are after each step of its model, each part of a library that is used costs
what fetching it from memory does, and a comparison next to nothing. The comparisons are made from the protocol's types
at the first request of a type. What is not plain is left to the type's decoder, which says what is wrong with it, if
anything.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Final, TypeAlias, get_args

import msgspec
from msgspec import inspect

from kvferry.protocol.base import PageList
from kvferry.protocol.ids import Hex128
from kvferry.protocol.pool_messages import Allocate, Free
from kvferry.protocol.table_messages import UpdateTables
from kvferry.protocol.tier_messages import Load, Lookup, Offload, Restore, Store
from kvferry.protocol.transfer_messages import Receive, Send

OF_A_STEP: Final = frozenset(
    {Send, Receive, PageList, Offload, Restore, Load, Store, Lookup, Allocate, Free, UpdateTables}
)
"""Of others there are too few for that."""

MOST_TEXTS: Final = 256
"""Texts of a type, such as names of pools, that are remembered as valid."""
_ID: Final[str] = get_args(Hex128)[1].pattern
"""Each id is a new one."""

_Look: TypeAlias = Callable[[Any], bool]


def is_plain(body: msgspec.Struct, known: str = "") -> bool:
    """Return whether a body's fields are as its decoder would return them; False where it is to be asked.

    ``known``: a list of which it is known that its members are plain.
    """
    return _look(type(body), known)(body)


@functools.cache
def _look(kind: type[msgspec.Struct], known: str) -> _Look:
    if kind not in OF_A_STEP:
        return lambda _body: False
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType), info
    return _look_at(info.fields, known)


def _look_at(fields: tuple[inspect.Field, ...], known: str = "") -> _Look:
    """Return a function that looks at one field after another."""
    names: dict[str, Any] = {}
    lines = ["def look(body):"]
    for field in fields:
        condition = _condition(field.type, names, members=field.name != known)
        lines += [f" v = body.{field.name}", f" if not ({condition}): return False"]
    exec("\n".join([*lines, " return True"]), names)  # noqa: S102  made of the protocol's types alone
    look: _Look = names["look"]
    return look


def _condition(  # noqa: C901, PLR0911  a line for each kind of type
    kind: inspect.Type, names: dict[str, Any], *, members: bool = True
) -> str:
    """Return an expression for whether ``v`` is plain, or its ``members`` may be; ``names`` gets what it calls."""

    def name(called: object) -> str:
        names[f"name{len(names)}"] = called
        return f"name{len(names) - 1}"

    match kind:
        case inspect.NoneType():
            return "v is None"
        case inspect.BoolType():
            return "type(v) is bool"
        case inspect.IntType(ge=int(least), lt=int(end)):
            return f"type(v) is int and {least} <= v < {end}"
        case inspect.IntType(ge=int(least), le=int(most)):
            return f"type(v) is int and {least} <= v <= {most}"
        case inspect.BytesType(max_length=int(most)):
            return f"type(v) is bytes and {kind.min_length or 0} <= len(v) <= {most}"
        case inspect.StrType(pattern=pattern, max_length=int(most)) if pattern == _ID:
            return f"type(v) is str and len(v) <= {most} and {name(re.compile(_ID).search)}(v)"
        case inspect.StrType(max_length=int()):
            return f"type(v) is str and {name(_text(kind))}(v)"
        case inspect.LiteralType():
            return f"type(v) is str and v in {kind.values!r}"
        case inspect.UnionType():
            return " or ".join(f"({_condition(one, names)})" for one in reversed(kind.types))  # None comes last
        case inspect.VarTupleType(max_length=int(most)):
            each = f" and False not in [{_condition(kind.item_type, names)} for v in v]" if members else ""
            return f"type(v) is tuple and {kind.min_length or 0} <= len(v) <= {most}{each}"
        case inspect.StructType():
            return f"type(v) is {name(kind.cls)} and {name(_look_at(kind.fields))}(v)"
    return "False"


def _text(kind: inspect.StrType) -> _Look:
    """Return what says whether a text is valid; no text that cannot be sent is, such as a lone surrogate."""
    least, most, search = kind.min_length or 0, kind.max_length or 0, re.compile(kind.pattern or "").search

    @functools.lru_cache(MOST_TEXTS)
    def is_valid(text: str) -> bool:
        return least <= len(text) <= most and text.isascii() and search(text) is not None

    return is_valid
