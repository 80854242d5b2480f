"""docs/sglang.md says what the tests run, and names tests that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.clients.sglang import pools
from tests.kit.tables import missing_tests, with_tables
from tests.sglang.docs_table import AXES, BESIDE, DOCUMENT, SAME, TABLES


def test_the_tables_are_current() -> None:
    text = DOCUMENT.read_text()
    assert with_tables(text, TABLES) == text, "python -m tests.sglang.docs_table"


def test_no_pool_is_left_out() -> None:
    """Of those that kvferry carries."""
    assert {*AXES["KV pool"]} == {f"`{name}`" for name in pools.KINDS}
    assert {*SAME, *BESIDE} == {*pools.KINDS} - {*pools.HOST_KINDS, pools.WINDOWS}


def test_each_test_that_is_named_is_there(request: pytest.FixtureRequest) -> None:
    assert not missing_tests(AXES, Path(__file__).parent, request.session)
