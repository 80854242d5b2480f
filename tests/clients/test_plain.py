"""What is sent without asking the protocol's types is what these would have returned; a step's requests are that."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np
import pytest

from kvferry.clients.calls import pages
from kvferry.clients.plain import is_plain
from kvferry.protocol.base import MAX_PAGE_LISTS, DeviceEvent, PageList
from kvferry.protocol.ids import new_request_id
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES
from kvferry.protocol.pool_messages import Allocate, Free
from kvferry.protocol.tier_messages import HASH_BYTES, MAX_HASHES, Load, Lookup, Offload, Restore, Store
from kvferry.protocol.transfer_messages import MAX_POOLS, LayerStep, Receive, Send


class Name(str):
    """A text that is no plain one."""

    __slots__ = ()


class Falsy(list[object]):
    """A list that says that it is an empty tuple."""

    __hash__ = None

    def __eq__(self, other: object) -> bool:
        return other == ()


ID: Final = "0123456789abcdef" * 2
TCP: Final = "tcp://192.0.2.1:7801"
STEP: Final = LayerStep(first_layer=0, layers=1, event=0, value=1)
EVENT: Final = DeviceEvent(event=0, value=1)
ODD: Final[list[Any]] = [
    None, True, False, -1, 0, 1, 2, 1.0, MAX_POOLS, 1025, 1 << 30, 1 << 31, 1 << 40,
    1 << 62, 1 << 63, np.int64(3), bytes(LARGEST_PAYLOAD_BYTES + 1), Name("host"),
    "", "x", "main", Name("main"), Name(ID), "MAIN", "pool", "a/b", "pool\n", "-pool", "x" * 128, "x" * 129,
    ID, ID.upper(), ID + "\n", ID[:-1], ID[:-1] + "\n", ID[:-1] + "g", "\uff10" * 32, TCP, "tcp://a b:1", f"{TCP}\n",
    b"", b"x", bytearray(b"x"), bytes(HASH_BYTES * MAX_HASHES), bytes(HASH_BYTES * MAX_HASHES + 1), memoryview(b"x"),
    (), [], [1], Falsy(), (STEP,), EVENT, "host", "pages", (TCP,), (TCP, 3), [TCP], (Name(TCP),), (TCP,) * 65,
    (PageList(pages=1),), [PageList(pages=1)], (PageList(pages=1),) * (MAX_PAGE_LISTS + 1), (PageList(pages=-1),),
    (PageList(pages=1, component="Main"),), (PageList(pages=True),), (PageList(pages=1, tokens=0),), (Falsy(),),
    ("tcp://\udcff:1",), (PageList(pages=1, first_page=1 << 31),), (PageList(pages=1, none=1),), (None,),  # type: ignore[arg-type]
]  # fmt: skip
SOUND: Final[dict[type[msgspec.Struct], dict[str, Any]]] = {
    Send: {"request_id": ID, "pool": "pool", "lists": (PageList(pages=4, tokens=60, first_page=2),)},
    Receive: {"request_id": ID, "pool": "pool", "lists": (PageList(pages=4),)},
    Offload: {"pool": "pool", "lists": (PageList(pages=4),)},
    Restore: {"snapshot": ID, "pool": "pool", "lists": (PageList(pages=4),)},
    Load: {"lease": 1 << 50, "pool": "pool", "pages": 3, "first_block": 2},
    Store: {"pool": "pool", "hashes": bytes(HASH_BYTES), "pages": 1, "parent": bytes(HASH_BYTES)},
    Lookup: {"pool": "pool", "hashes": bytes(HASH_BYTES)},
    Allocate: {"pool": "pool", "count": 3},
    Free: {"pool": "pool", "pages": 3},
    PageList: {"pages": 3},
}


def types(value: object) -> object:
    """Return a value's type, and those of what is in it."""
    if isinstance(value, msgspec.Struct):
        return type(value), *(types(getattr(value, one)) for one in value.__struct_fields__)
    return (type(value), *(types(one) for one in value)) if isinstance(value, tuple | list) else type(value)


@pytest.mark.parametrize("kind", SOUND, ids=lambda kind: kind.__name__)
def test_no_field_is_overlooked(kind: type[msgspec.Struct]) -> None:
    """Each field, set to each odd value: what the decoder refuses or changes is not plain."""
    assert is_plain(kind(**SOUND[kind]))
    refused = 0
    for field in kind.__struct_fields__:
        for value in ODD:
            body = kind(**{**SOUND[kind], field: value})
            try:
                decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(body), type=kind)
                is_same = (decoded, types(decoded)) == (body, types(body))
            except (msgspec.ValidationError, TypeError, OverflowError, UnicodeEncodeError):
                is_same = False
            refused += not is_same
            assert is_same or not is_plain(body), (field, value)
    assert refused > len(kind.__struct_fields__)


def test_what_steps_of_engines_consist_of_is_plain() -> None:
    head = pages(np.arange(3), first_page=0, tokens=40).head
    for body in (
        Send(request_id=new_request_id(), pool="vllm-0.tp1", lists=(head,), first_token=7, payload=b"x" * 1000),
        Send(request_id=new_request_id(), pool="p", lists=(head,) * 3, last=False, checksums=True),
        Receive(request_id=new_request_id(), pool="p", lists=(head,), sources=4, source_daemons=(TCP, "ipc:///run/x")),
        Lookup(pool="p", hashes=bytes(HASH_BYTES) * 4096, pin=False),
        Offload(pool="p", lists=(head,), release=True),
        Restore(snapshot=new_request_id(), pool="p", allocate=True),
        Load(lease=(1 << 62) - 1, pool="p", pages=4, unpin=True),
        Store(pool="p", hashes=bytes(HASH_BYTES) * 4096, pages=4096),
        Lookup(pool="p", hashes=bytes(HASH_BYTES), block_pages=16),
        Allocate(pool="p", count=1),
        Free(pool="p", pages=0),
    ):
        assert is_plain(body), body
