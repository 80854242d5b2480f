"""Messages as people write them."""

from __future__ import annotations

import json
import string
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients.cli.json_form import BodyWithIds, body_to_fields, object_from_json, request_from_fields
from kvferry.protocol.base import pack_ids, unpack_ids
from kvferry.protocol.envelope import REQUEST_TYPES
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.limits import INT64_BYTES
from kvferry.protocol.pool_messages import Allocated
from kvferry.protocol.transfer_messages import Receive, Send
from tests.protocol.bodies import ids_for, structs_of
from tests.protocol.samples import REQUESTS

REQUEST_ID = "0123456789abcdef0123456789abcdef"


def request_from_json(kind: str, text: bytes | str) -> BodyWithIds:
    """Return a request with the fields of a JSON object."""
    return request_from_fields(kind, object_from_json(text))


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: str(kind.__struct_config__.tag))
@given(data=st.data())
def test_round_trip(kind: Any, data: st.DataObject) -> None:  # noqa: ANN401  any request type
    body = data.draw(structs_of(kind))
    ids = data.draw(ids_for(body))
    frames = tuple(pack_ids(one.tolist()) for one in ids)
    fields = json.loads(msgspec.json.encode(body_to_fields(body, frames)))
    name = fields.pop("type")
    assert request_from_json(name, json.dumps(fields)) == (body, frames)


def test_page_lists_stand_where_they_are_announced() -> None:
    lists = '[{"pages": [4, 5]}, {"component": "draft", "pages": []}]'
    body, ids = request_from_json("SEND", f'{{"request_id": "{REQUEST_ID}", "pool": "a", "lists": {lists}}}')
    assert isinstance(body, Send)
    assert [(one.component, one.pages) for one in body.lists] == [("main", 2), ("draft", 0)]
    assert [unpack_ids(one) for one in ids] == [[4, 5], []]
    assert body_to_fields(Allocated(pages=2), (pack_ids([7, 8]),)) == {"type": "ALLOCATED", "pages": [7, 8]}


SEND = f'"request_id": "{REQUEST_ID}", "pool": "a"'


@pytest.mark.parametrize(
    ("kind", "text", "field"),
    [
        ("PING", "", ""),
        ("PING", "[]", ""),
        ("PING", "{", ""),
        ("PING", "[" * 100_000, ""),
        ("PING", '{"colour": 1}', "colour"),
        ("PING", json.dumps(dict.fromkeys(reversed(string.ascii_lowercase), 1)), "a"),
        ("SEND", json.dumps({"lists": [dict.fromkeys(reversed(string.ascii_lowercase), 1)]}), "lists[0].a"),
        ("PING", '{"type": "STATUS"}', "type"),
        ("ALLOCATE", '{"pool": "a"}', "count"),
        ("ALLOCATE", '{"pool": "a", "count": 0}', "count"),
        ("ALLOCATE", '{"pool": "a/b", "count": 1}', "pool"),
        ("ALLOCATE", '{"pool": "a", "count": 1e400}', ""),
        ("FREE", '{"pool": "a"}', "pages"),
        ("FREE", '{"pool": "a", "pages": ["1"]}', "pages"),
        ("FREE", '{"pool": "a", "pages": [1.5]}', "pages"),
        ("FREE", '{"pool": "a", "pages": [18446744073709551616]}', "pages"),
        ("FREE", '{"pool": "a", "pages": 3}', "pages"),
        ("FREE", '{"pool": "a", "pages": null}', "pages"),
        ("SEND", f'{{{SEND}, "lists": 3}}', "lists"),
        ("SEND", f'{{{SEND}, "lists": [3]}}', "lists[0]"),
        ("SEND", f'{{{SEND}, "lists": [{{"pages": [1]}}, {{"pages": 2}}]}}', "lists[1].pages"),
        ("SEND", f'{{{SEND}, "lists": [{{"pages": [1], "token": 2}}]}}', "lists[0].token"),
        ("SEND", f'{{{SEND}, "lists": [{{"pages": [1], "tokens": 0}}]}}', "lists[0].tokens"),
        ("SEND", f'{{{SEND}, "lists": [{{"pages": [1]}}], "payload": "%"}}', "payload"),
        ("UPDATE_TABLES", '{"tables": "a", "batch": 2, "ids": [1]}', "ids"),
        ("UPDATE_TABLES", '{"tables": "a", "batch": 0, "ids": 1}', "ids"),
        ("CREATE_POOL", '{"pool": "a", "spec": {"kind": "mha"}}', "spec"),
        ("CREATE_POOL", '{"pool": "a", "spec": {"kind": "mha", "colour": 1}}', "spec"),
    ],
)
def test_what_is_wrong_is_named(kind: str, text: str, field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        request_from_json(kind, text)
    assert refused.value.field == field


def test_a_receive_that_lands_in_the_host_tier_says_how_many_pages() -> None:
    body, ids = request_from_json("RECEIVE", f'{{{SEND}, "into": "host", "lists": [{{"pages": 3, "tokens": 300}}]}}')
    assert isinstance(body, Receive)
    assert (body.lists[0].pages, body.page_counts(), ids) == (3, (), ())


@given(st.sampled_from(sorted(REQUEST_TYPES)), st.recursive(st.integers() | st.text(), st.lists, max_leaves=4))
def test_any_json_is_a_message_or_a_typed_error(kind: str, value: object) -> None:
    fields = dict.fromkeys(REQUEST_TYPES[kind].__struct_fields__, value)
    try:
        body, ids = request_from_json(kind, msgspec.json.encode(fields))
    except KvferryError:
        return
    assert tuple(len(one) // INT64_BYTES for one in ids) == body.page_counts()
