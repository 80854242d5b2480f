"""docs/vllm.md says what the tests run, and names tests that are there."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from kvferry.clients.vllm.configuration import Memory
from kvferry.clients.vllm.memory import FLOAT8, TO_A_BYTE
from tests.kit.tables import missing_tests, with_tables
from tests.vllm.docs_table import AXES, DOCUMENT, TABLES


def test_the_table_is_current() -> None:
    text = DOCUMENT.read_text()
    assert with_tables(text, TABLES) == text, "python -m tests.vllm.docs_table"


@pytest.mark.parametrize(
    ("axis", "values"),
    [
        ("KV cache dtype", {*FLOAT8, *TO_A_BYTE}),
        ("memory", {*get_args(Memory)} - {"auto"}),
    ],
)
def test_no_value_is_left_out(axis: str, values: set[str]) -> None:
    """Of those that the connector carries."""
    said = " ".join(AXES[axis])
    assert [one for one in values if one not in said] == []


def test_each_test_that_is_named_is_there(request: pytest.FixtureRequest) -> None:
    assert missing_tests(AXES, Path(__file__).parent, request.session) == []
