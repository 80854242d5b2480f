"""Hypothesis strategies for every message body, made from the structs themselves: a new field or type is covered."""

from __future__ import annotations

import functools
import re
from typing import Any, Final

import msgspec
import numpy as np
from hypothesis import strategies as st
from msgspec import inspect

from kvferry.protocol.base import Body
from kvferry.protocol.codec import PageIds
from kvferry.protocol.envelope import Event, Reply, Request
from kvferry.protocol.peer_messages import PeerEnvelope
from tests.protocol.samples import EVENTS, PEERS, REPLIES, REQUESTS, Message, to_frames

INT64: Final = (-(1 << 63), (1 << 63) - 1)
MAX_LIST: Final = 4
COUNTS: Final = {"pages", "batch", "entries", "rows", "released", "bound"}
"""Fields that say how many numbers follow in a frame."""

ALL_BODIES: Final = (*REQUESTS, *REPLIES, *EVENTS, *PEERS)


def values_of(info: inspect.Type, field: str = "") -> st.SearchStrategy[Any]:  # noqa: C901, PLR0911, PLR0912  a case a type
    """Return values that the type accepts. Counts stay small: what they count must be drawn too."""
    if isinstance(info, inspect.IntType):
        return _integers(info) if field not in COUNTS else st.integers(info.ge or 0, MAX_LIST)
    if isinstance(info, inspect.FloatType):
        return st.floats(min_value=info.gt, exclude_min=info.gt is not None, allow_nan=False, allow_infinity=False)
    if isinstance(info, inspect.StrType):
        return _strings(info)
    if isinstance(info, inspect.BytesType):
        return st.binary(min_size=info.min_length or 0, max_size=min(info.max_length or 64, 64))
    if isinstance(info, inspect.StructType):
        return structs_of(info.cls)
    if isinstance(info, inspect.UnionType):
        return st.one_of([values_of(one, field) for one in info.types])
    if isinstance(info, inspect.VarTupleType):
        size = info.min_length or 0
        return st.lists(values_of(info.item_type), min_size=size, max_size=size + 2).map(tuple)
    if isinstance(info, inspect.TupleType):
        return st.tuples(*[values_of(one) for one in info.item_types])
    if isinstance(info, inspect.DictType):
        return st.dictionaries(values_of(info.key_type), values_of(info.value_type), max_size=3)
    if isinstance(info, inspect.LiteralType):
        return st.sampled_from(info.values)
    if isinstance(info, inspect.NoneType):
        return st.none()
    if isinstance(info, inspect.BoolType):
        return st.booleans()
    if isinstance(info, inspect.AnyType):
        return st.none() | st.booleans() | st.text(max_size=64)
    raise NotImplementedError(info)


@functools.cache
def structs_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    info = inspect.type_info(kind)
    assert isinstance(info, inspect.StructType)
    return st.builds(kind, **{field.name: values_of(field.type, field.name) for field in info.fields})


@st.composite
def ids_for(draw: st.DrawFn, body: Body) -> tuple[PageIds, ...]:
    ids = st.integers(*INT64)
    return tuple(
        np.array(draw(st.lists(ids, min_size=count, max_size=count)), np.int64) for count in body.page_counts()
    )


@st.composite
def messages(draw: st.DrawFn, kinds: tuple[type[Body], ...] = ALL_BODIES) -> Message:
    """Draw a whole message of one of these types, with its page lists."""
    kind = draw(st.sampled_from(kinds))
    body = draw(structs_of(kind))
    ids = draw(ids_for(body))
    if kind in PEERS:
        return msgspec.structs.replace(draw(structs_of(PeerEnvelope)), body=body), ids
    boot_id = draw(st.text("0123456789abcdef", min_size=32, max_size=32) | st.just(""))
    numbers = st.integers(0, INT64[1])
    if kind in EVENTS:
        return Event(draw(st.integers(1, INT64[1])), boot_id, body, draw(st.integers(0, 9))), ids
    if kind in REPLIES:
        return Reply(draw(numbers), boot_id, body), ids
    secret = draw(st.binary(max_size=32))
    return Request(draw(st.integers(1, INT64[1])), boot_id, secret, draw(numbers), draw(numbers), body), ids


@st.composite
def damaged(draw: st.DrawFn, kinds: tuple[type[Body], ...]) -> list[bytes]:
    """Draw a valid message and damage it: bytes changed, cut, repeated; frames lost, doubled, swapped."""
    frames = to_frames(*draw(messages(kinds)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(frames) - 1))
        start = draw(st.integers(0, len(frames[at])))
        stop = draw(st.integers(start, min(len(frames[at]), start + 8)))
        frames[at] = frames[at][:start] + draw(st.binary(max_size=8)) + frames[at][stop:]
    return draw(st.sampled_from([frames, frames[:-1], [*frames, frames[-1]], frames[::-1]]))


def _integers(info: inspect.IntType) -> st.SearchStrategy[int]:
    low = INT64[0] if info.ge is None else info.ge
    high = INT64[1]
    if info.le is not None:
        high = min(high, info.le)
    if info.lt is not None:
        high = min(high, info.lt - 1)
    return st.integers(low, high)


def _strings(info: inspect.StrType) -> st.SearchStrategy[str]:
    longest = min(info.max_length or 40, 40)
    if info.pattern is None:
        return st.text(min_size=info.min_length or 0, max_size=longest)
    pattern = re.compile(info.pattern, re.ASCII)
    return st.from_regex(pattern).filter(lambda text: (info.min_length or 0) <= len(text) <= longest)
