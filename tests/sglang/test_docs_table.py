"""docs/sglang.md says what the tests run, and names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvferry.clients.sglang import pools
from tests.sglang.docs_table import AXES, BESIDE, DOCUMENT, SAME, TABLE, with_tables
from tests.test_promises import names_in

HERE = Path(__file__).parent


def test_the_tables_are_current() -> None:
    text = DOCUMENT.read_text()
    assert [found[2] for found in TABLE.finditer(text)] == ["states", "axes", "topologies"]
    assert with_tables(text) == text, "python -m tests.sglang.docs_table"


def test_no_pool_is_left_out() -> None:
    """Of those that kvferry carries."""
    assert {*AXES["KV pool"]} == {f"`{name}`" for name in pools.KINDS}
    assert {*SAME, *BESIDE} == {*pools.KINDS} - {*pools.HOST_KINDS, pools.WINDOWS}


@pytest.mark.parametrize("axis", AXES)
def test_each_test_that_is_named_is_there(axis: str, request: pytest.FixtureRequest) -> None:
    """With its parameters, but for those on an NPU, which this environment cannot import."""
    named = [test for tests in AXES[axis].values() if not isinstance(tests, str) for test in tests]
    assert named
    for file, name in (test.split("::") for test in named):
        if file.startswith("npu/"):
            assert name.partition("[")[0] in names_in(HERE / file)
            continue
        module = pytest.Module.from_parent(request.session, path=HERE / file)
        collected = {one.name for one in module.collect()}
        assert name in collected | {re.sub(r"\[.*", "", one) for one in collected}
