"""What engines give and get as values, without a daemon: requests and replies, block hashes, token slots and pages."""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients import calls
from kvferry.clients.calls import Pages
from kvferry.clients.core.client_core import ReplyArrived
from kvferry.clients.hashing import block_hashes
from kvferry.clients.plain import is_plain
from kvferry.clients.slots import pages_from_slots, slots_from_pages
from kvferry.protocol import errors
from kvferry.protocol.base import MAX_PAGE_LISTS, DeviceEvent, PageList
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES
from kvferry.protocol.pool_messages import Allocate, DeletePool, Free, PoolDeleted
from kvferry.protocol.session_messages import Ping
from kvferry.protocol.tier_messages import HASH_BYTES, MAX_HASHES, Load, Lookup, Offload, Restore, Store
from kvferry.protocol.transfer_messages import MAX_POOLS, LayerStep, Receive, Send


def test_a_reply_of_another_kind_is_not_taken_for_it() -> None:
    reply = ReplyArrived(1, PoolDeleted(pool="decode"), (), None)
    with pytest.raises(errors.MalformedError, match="answered with PoolDeleted, not Pong"):
        calls.asked(Ping()).read(reply)
    assert calls.asked(DeletePool(pool="decode")).read(reply) == PoolDeleted(pool="decode")


def test_pages_made_by_hand_are_checked() -> None:
    for head, field in ((PageList(pages=1, component="Main"), "component"), (PageList(pages=1, tokens=0), "tokens")):
        with pytest.raises(errors.InvalidFieldError) as refused:
            Pages(head, bytes(8))
        assert refused.value.field == field
    with pytest.raises(errors.InvalidFieldError, match="no PageList"):
        Pages(None, bytes(8))  # type: ignore[arg-type]
    ids: Any = [4, 5]
    assert Pages(PageList(pages=2), ids).ids == calls.pages(ids).ids
    for ids in (np.arange(2).reshape(2, 1), ["x"], None, b"odd"):
        with pytest.raises(errors.InvalidFieldError) as refused:
            Pages(PageList(pages=2), ids)
        assert refused.value.field == "ids"


def test_lists_of_a_call_are_those_that_its_body_announces() -> None:
    body = Free(pool="decode", pages=3)
    calls.check_ids(calls.asked(body, ids=(bytes(24),)))
    wrong: Any = ((bytes(16),), (bytes(24), bytes(8)), (np.arange(3),), (bytes(25),))
    for ids in wrong:
        with pytest.raises(errors.InvalidFieldError) as refused:
            calls.check_ids(calls.asked(body, ids=ids))
        assert refused.value.field.startswith("ids")


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


TOKENS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40)
BLOCK = st.integers(1, 9)
SALT = st.binary(max_size=20)


def chain(tokens: list[int], block_tokens: int, salt: bytes) -> list[bytes]:
    before, hashes = hashlib.sha256(b"kvferry blocks 1:" + salt).digest()[:16], []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        block = b"".join(one.to_bytes(8, "little", signed=True) for one in tokens[start : start + block_tokens])
        before = hashlib.sha256(before + block).digest()[:16]
        hashes.append(before)
    return hashes


@given(TOKENS, BLOCK, SALT)
def test_it_is_the_chain_that_is_documented(tokens: list[int], block_tokens: int, salt: bytes) -> None:
    hashes = block_hashes(tokens, block_tokens, salt=salt)
    assert hashes == chain(tokens, block_tokens, salt)
    assert len(hashes) == len(tokens) // block_tokens
    assert {len(one) for one in hashes} <= {HASH_BYTES}


def test_the_bytes_never_change() -> None:
    """Blocks outlive releases: what was stored under a name is found under it."""
    hashes = [one.hex() for one in block_hashes(range(8), 4, salt=b"model")]
    assert hashes == ["48f59cc0f2d832bd67cb28fb170a9c57", "cd0da20f88dff2f5372407705f3d66e4"]


@given(TOKENS, BLOCK, SALT, st.data())
def test_a_grown_sequence_needs_its_new_blocks_only(
    tokens: list[int], block_tokens: int, salt: bytes, data: st.DataObject
) -> None:
    hashes: list[bytes] = []
    ends = data.draw(st.lists(st.integers(0, len(tokens)), max_size=5).map(sorted))
    for end in [*ends, len(tokens)]:
        grown = tokens[len(hashes) * block_tokens : end]
        parent = hashes[-1] if hashes else None
        hashes += block_hashes(grown, block_tokens, parent=parent, salt=salt)
    assert hashes == block_hashes(tokens, block_tokens, salt=salt)


@pytest.mark.parametrize(
    "tokens",
    [
        np.arange(10, dtype=np.int32),
        np.arange(10, dtype=np.uint16),
        np.arange(10, dtype=">i8"),
        np.arange(20)[::2] // 2,
        tuple(range(10)),
        torch.arange(10, dtype=torch.int32),
    ],
    ids=["int32", "uint16", "big-endian", "strided", "tuple", "tensor"],
)
def test_how_the_tokens_are_held_makes_no_difference(tokens: npt.ArrayLike) -> None:
    assert block_hashes(tokens, 4) == block_hashes(list(range(10)), 4)


POOL_PAGES = 24


class Request(NamedTuple):
    """Some consecutive tokens of a request, and where they lie: as many pages as they need."""

    page_size: int
    pages: list[int]
    position: int
    tokens: int

    @property
    def slots(self) -> list[int]:
        """Return each token's slot, computed token by token."""
        first = self.position // self.page_size
        return [
            self.pages[at // self.page_size - first] * self.page_size + at % self.page_size
            for at in range(self.position, self.position + self.tokens)
        ]


SEEDS = st.integers(0, 1 << 30)


def random_pages(seed: int, count: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).permutation(np.arange(1, POOL_PAGES))[:count].tolist()
    return ids


@st.composite
def requests(draw: st.DrawFn) -> Request:
    page_size = draw(st.integers(1, 8))
    position = draw(st.integers(0, 5 * page_size))
    tokens = draw(st.integers(1, 7 * page_size))
    count = -(-(position % page_size + tokens) // page_size)
    return Request(page_size, random_pages(draw(SEEDS), count), position, tokens)


@given(requests())
def test_slots_give_their_pages_and_pages_their_slots(one: Request) -> None:
    found = pages_from_slots(one.slots, one.page_size, position=one.position)
    assert found.tolist() == one.pages
    back = slots_from_pages(found, one.page_size, one.tokens, position=one.position)
    assert back.tolist() == one.slots
    assert found.dtype == back.dtype == np.int64
    spare = [*one.pages, POOL_PAGES]  # for the tokens to come: they change nothing
    assert slots_from_pages(spare, one.page_size, one.tokens, position=one.position).tolist() == one.slots


@given(requests(), st.data())
def test_any_other_slot_is_refused_or_in_another_page(one: Request, data: st.DataObject) -> None:
    """What is accepted is a request's: every token lies where its page has it."""
    slots = one.slots
    at = data.draw(st.integers(0, len(slots) - 1))
    slots[at] = data.draw(st.integers(-5, POOL_PAGES * one.page_size).filter(lambda slot: slot != slots[at]))
    try:
        found = pages_from_slots(slots, one.page_size, position=one.position).tolist()
    except (errors.InvalidFieldError, errors.PageOutOfRangeError, errors.DuplicatePageError):
        return
    assert one._replace(pages=found).slots == slots
    assert len(set(found)) == len(found)
    assert min(found) >= 1


Refusal = tuple[npt.ArrayLike, dict[str, int], str, str]
REFUSED: Final[dict[str, Refusal]] = {
    "starts inside a page": ([5, 6], {}, "INVALID_FIELD", "slot 5 is at offset 1 in its page of 4.*position"),
    "starts on a page, not the request": (
        [4, 5],
        {"position": 2},
        "INVALID_FIELD",
        "token 2 of a request at offset 2",
    ),
    "a gap": ([4, 5, 7], {}, "INVALID_FIELD", "token 2 is at slot 7, not at slot 6"),
    "the next page from within": ([6, 7, 9], {"position": 10}, "INVALID_FIELD", "token 12 is at slot 9.*first of a"),
    "the padding page": ([4, 5, 6, 7, 0], {}, "PAGE_OUT_OF_RANGE", "token 4 is in page 0"),
    "negative": ([-4, -3], {}, "PAGE_OUT_OF_RANGE", "token 0 is in page -1"),
    "a page again": ([6, 7, 8, 9, 10, 11, 4], {"position": 2}, "DUPLICATE_PAGE", "token 8 is in page 1 a second"),
    "floats": ([4.0], {}, "INVALID_FIELD", "no list of integers"),
    "a negative token": ([4], {"position": -4}, "INVALID_FIELD", "-4; give 0 or more"),
    "no page size": ([4], {"page_size": 0}, "INVALID_FIELD", "0; give 1 or more"),
    "too few": ([3, 4], {"tokens": 9}, "LENGTH_MISMATCH", "tokens 0..8 do not fit in 2 pages of 4"),
    "too few from inside a page": (
        [3],
        {"tokens": 3, "position": 6},
        "LENGTH_MISMATCH",
        "tokens 6..8 do not fit in 1",
    ),
    "the padding page of pages": ([3, 0], {"tokens": 8}, "PAGE_OUT_OF_RANGE", "token 4 is in page 0"),
    "twice": ([3, 4, 3], {"tokens": 12}, "DUPLICATE_PAGE", "token 8 is in page 3 a second time"),
    "a negative count": ([3], {"tokens": -1}, "INVALID_FIELD", "-1; give 0 or more"),
    "no page size of pages": ([4], {"tokens": 1, "page_size": -1}, "INVALID_FIELD", "-1; give 1 or more"),
}  # fmt: skip


@pytest.mark.parametrize(("ids", "more", "code", "text"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_requests_is_refused(ids: npt.ArrayLike, more: dict[str, int], code: str, text: str) -> None:
    call = slots_from_pages if "tokens" in more else pages_from_slots
    with pytest.raises(errors.KvferryError, match=text) as refused:
        call(ids, **{"page_size": 4, **more})
    assert refused.value.code == code
    assert refused.value.field in {"slots", "pages", "tokens", "position", "page_size"}
