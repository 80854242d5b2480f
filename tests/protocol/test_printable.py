"""What others said, as it may be printed."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.printable import json_line, printable

HOSTILE = "a\x1b[2J\n\r\u202e\u2028\x9b\u200b\U000e0041\x00é字 b"


def test_what_a_terminal_obeys_is_escaped() -> None:
    assert printable(HOSTILE) == r"a\x1b[2J\n\r\u202e\u2028\x9b\u200b\U000e0041\x00é字 b"
    assert printable("plain, é 字") == "plain, é 字"


@given(st.text(st.characters(exclude_categories=())))
def test_nothing_unprintable_is_left(text: str) -> None:
    assert printable(text).isprintable()


@given(st.text())
def test_a_json_line_is_printable_and_says_the_same(text: str) -> None:
    line = json_line({text: [text]})
    assert line.isprintable()
    assert json.loads(line) == {text: [text]}
