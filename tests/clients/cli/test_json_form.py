"""Messages as people write them, and what ``kvferry probe`` reads."""

from __future__ import annotations

import json
import string
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients.cli.json_form import BodyWithIds, body_to_fields, object_from_json, request_from_fields
from kvferry.clients.cli.probe_messages import Answers, ProbeMessage, Reader, resolved
from kvferry.protocol.base import pack_ids, unpack_ids
from kvferry.protocol.envelope import REQUEST_TYPES
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.limits import INT64_BYTES
from kvferry.protocol.pool_messages import Allocated
from kvferry.protocol.transfer_messages import Send
from tests.kit.devices import DEVICE
from tests.protocol.bodies import ids_for, structs_of
from tests.protocol.samples import REQUESTS

REQUEST_ID = "0123456789abcdef0123456789abcdef"


def request_from_json(kind: str, text: bytes | str) -> BodyWithIds:
    return request_from_fields(kind, object_from_json(text))


@pytest.mark.parametrize("kind", REQUESTS, ids=lambda kind: str(kind.__struct_config__.tag))
@DEVICE.examples(20)
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
        ("PING", "[" * 100_000, ""),
        ("PING", '{"colour": 1}', "colour"),
        ("SEND", json.dumps({"lists": [dict.fromkeys(reversed(string.ascii_lowercase), 1)]}), "lists[0].a"),
        ("PING", '{"type": "STATUS"}', "type"),
        ("ALLOCATE", '{"pool": "a", "count": 0}', "count"),
        ("ALLOCATE", '{"pool": "a", "count": 1e400}', ""),
        ("FREE", '{"pool": "a"}', "pages"),
        ("FREE", '{"pool": "a", "pages": [1.5]}', "pages"),
        ("FREE", '{"pool": "a", "pages": [18446744073709551616]}', "pages"),
        ("SEND", f'{{{SEND}, "lists": [3]}}', "lists[0]"),
        ("SEND", f'{{{SEND}, "lists": [{{"pages": [1]}}, {{"pages": 2}}]}}', "lists[1].pages"),
        ("SEND", f'{{{SEND}, "lists": [{{"pages": [1], "tokens": 0}}]}}', "lists[0].tokens"),
        ("SEND", f'{{{SEND}, "lists": [{{"pages": [1]}}], "payload": "%"}}', "payload"),
        ("UPDATE_TABLES", '{"tables": "a", "batch": 2, "ids": [1]}', "ids"),
        ("CREATE_POOL", '{"pool": "a", "spec": {"kind": "mha", "colour": 1}}', "spec"),
    ],
)
def test_what_is_wrong_is_named(kind: str, text: str, field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        request_from_json(kind, text)
    assert refused.value.field == field


@given(st.sampled_from(sorted(REQUEST_TYPES)), st.recursive(st.integers() | st.text(), st.lists, max_leaves=4))
def test_any_json_is_a_message_or_a_typed_error(kind: str, value: object) -> None:
    fields = dict.fromkeys(REQUEST_TYPES[kind].__struct_fields__, value)
    try:
        body, ids = request_from_json(kind, msgspec.json.encode(fields))
    except KvferryError:
        return
    assert tuple(len(one) // INT64_BYTES for one in ids) == body.page_counts()


ALLOCATE = '{"pool": "p", "count": 2}'


def test_words_and_lines_are_types_and_their_fields() -> None:
    words = ["ping", "ALLOCATE", ALLOCATE, '{"type": "status", "as": "all"}', "wait", "PING"]
    assert list(Reader().words(words)) == [
        ProbeMessage("1", "PING", {}),
        ProbeMessage("2", "ALLOCATE", {"pool": "p", "count": 2}),
        ProbeMessage("all", "STATUS", {}),
        ProbeMessage("4", "WAIT", {}),
        ProbeMessage("5", "PING", {}),
    ]
    lines = ["# first", "", "  PING  ", f"allocate   {ALLOCATE}", '{"type": "ALLOCATE", "pool": "p", "count": 2}']
    assert list(Reader().lines(lines)) == [
        ProbeMessage("1", "PING", {}),
        *(ProbeMessage(name, "ALLOCATE", {"pool": "p", "count": 2}) for name in "23"),
    ]


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("NONSENSE", "type"),
        ('{"type": 3}', "type"),
        ("ALLOCATE {", ""),
        ('ALLOCATE {"pool": "p", "count": 0}', "count"),
        ('ALLOCATE {"pool": "$1.pool", "colour": 0}', "colour"),
        ('ALLOCATE {"as": "1st", "pool": "p", "count": 1}', "as"),
        ('ALLOCATE {"as": "mine", "pool": "p", "count": 1}', "as"),
        ('FREE {"pool": "p", "pages": "$3.pages"}', "$3"),
        ('FREE {"pool": "p", "pages": "$theirs.pages"}', "$theirs"),
        ('FREE {"pool": "p", "pages": "mine.pages"}', "pages"),
        ('WAIT {"for": 3}', "for"),
    ],
)
def test_a_wrong_line_is_refused_before_it_is_sent(line: str, field: str) -> None:
    reader = Reader()
    first, second = reader.lines(["PING", 'ALLOCATE {"as": "mine", "pool": "p", "count": 1}'])
    assert (first.name, second.name) == ("1", "mine")
    with pytest.raises(KvferryError) as refused:
        reader.line(line)
    assert refused.value.code in {"INVALID_FIELD", "UNKNOWN_TYPE"}
    assert refused.value.field == field
    assert reader.number == "3", "the message at fault"


@pytest.fixture
def answers() -> Answers:
    found = Answers()
    found.put("1", "", {"type": "ALLOCATED", "pages": [4, 5, 6], "deep": ({"x": 7}, "text")})
    found.put("away", "TIER_DONE", {"snapshot": "abc", "lists": [{"pages": [9]}]})
    return found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("$1.pages", [4, 5, 6]),
        ("$1.pages.-1", 6),
        ("$1.pages.1:", [5, 6]),
        ("$1.pages.:1", [4]),
        ("$1.deep.0.x", 7),
        ("$away.TIER_DONE.snapshot", "abc"),
        (["$away.TIER_DONE.lists.0.pages.0", 1, None], [9, 1, None]),
        ({"a": {"b": "$1.pages.2"}}, {"a": {"b": 6}}),
        ("$$1.pages", "$1.pages"),
    ],
)
def test_references_stand_for_what_came(answers: Answers, given: Any, expected: object) -> None:  # noqa: ANN401  any JSON
    assert resolved(given, answers) == expected


@pytest.mark.parametrize(
    "given",
    ["$1.nothing", "$1.pages.3", "$1.pages.x", "$1.type.0", "$2.pages", "$1.FINISHED.pages", "$away.snapshot", "$"],
)
def test_references_to_nothing(answers: Answers, given: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        resolved([given], answers)
    assert refused.value.field == given
