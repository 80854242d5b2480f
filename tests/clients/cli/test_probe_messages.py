"""What ``kvferry probe`` reads: words, lines, names, and references to what came before."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.clients.cli.probe_messages import Answers, ProbeMessage, Reader, Reference, references, resolved
from kvferry.protocol.envelope import REQUEST_TYPES
from kvferry.protocol.errors import InvalidFieldError, KvferryError

ALLOCATE = '{"pool": "p", "count": 2}'


def test_words_are_types_and_their_fields() -> None:
    words = ["ping", "ALLOCATE", ALLOCATE, '{"type": "status", "as": "all"}', "wait", "PING"]
    assert list(Reader().words(words)) == [
        ProbeMessage("1", "PING", {}),
        ProbeMessage("2", "ALLOCATE", {"pool": "p", "count": 2}),
        ProbeMessage("all", "STATUS", {}),
        ProbeMessage("4", "WAIT", {}),
        ProbeMessage("5", "PING", {}),
    ]


def test_lines_are_types_and_fields_or_objects() -> None:
    lines = ["# first", "", "  PING  ", f"allocate   {ALLOCATE}", '{"type": "ALLOCATE", "pool": "p", "count": 2}']
    assert list(Reader().lines(lines)) == [
        ProbeMessage("1", "PING", {}),
        *(ProbeMessage(name, "ALLOCATE", {"pool": "p", "count": 2}) for name in "23"),
    ]


def test_no_request_has_a_field_that_means_something_here() -> None:
    assert "WAIT" not in REQUEST_TYPES
    assert not any({"as", "type", "message"} & set(one.__struct_fields__) for one in REQUEST_TYPES.values())


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ("NONSENSE", "type"),
        ("{}", "type"),
        ('{"type": 3}', "type"),
        ("ALLOCATE {", ""),
        ("ALLOCATE [1]", ""),
        ('ALLOCATE {"pool": "p", "count": 0}', "count"),
        ('ALLOCATE {"pool": "$1.pool", "colour": 0}', "colour"),
        ('ALLOCATE {"as": "1st", "pool": "p", "count": 1}', "as"),
        ('ALLOCATE {"as": "", "pool": "p", "count": 1}', "as"),
        ('ALLOCATE {"as": 7, "pool": "p", "count": 1}', "as"),
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


def test_what_is_referred_to_is_checked_when_it_is_known() -> None:
    reader = Reader()
    list(reader.words(["ALLOCATE", '{"as": "mine", "pool": "p", "count": 1}']))
    message = reader.line('SEND {"request_id": "$mine.x", "pool": "p", "lists": [{"pages": "$mine.pages.1:"}]}')
    found = [Reference("mine", "", ("x",)), Reference("mine", "", ("pages", "1:"))]
    assert list(references(message.fields)) == found


@pytest.fixture
def answers() -> Answers:
    """Return a reply and an event."""
    found = Answers()
    found.put("1", "", {"type": "ALLOCATED", "pages": [4, 5, 6], "deep": ({"x": 7}, "text")})
    found.put("away", "TIER_DONE", {"snapshot": "abc", "lists": [{"pages": [9]}]})
    return found


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("$1.pages", [4, 5, 6]),
        ("$1.pages.0", 4),
        ("$1.pages.-1", 6),
        ("$1.pages.1:", [5, 6]),
        ("$1.pages.:1", [4]),
        ("$1.pages.0:2", [4, 5]),
        ("$1.deep.0.x", 7),
        ("$away.TIER_DONE.snapshot", "abc"),
        (["$away.TIER_DONE.lists.0.pages.0", 1, None], [9, 1, None]),
        ({"a": {"b": "$1.pages.2"}}, {"a": {"b": 6}}),
        ("$$1.pages", "$1.pages"),
        ("1.pages$", "1.pages$"),
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
