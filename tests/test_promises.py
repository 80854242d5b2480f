"""docs/promises.md: each promise has a test, and each test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from tests.kit.documents import section
from tests.kit.tables import names_in

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "promises.md"
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


class Promise(NamedTuple):
    """A line of the page."""

    promise: str
    tests: str
    limits: str


def promises(page: str) -> list[Promise]:
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in row] for row in rows]
    return [Promise(*row) for row in cells if row != ["promise", "test", "limits"]]


def missing(promise: Promise) -> list[str]:
    """Return the tests that a promise names and that are not there; what is no name of a test, too."""
    named = TEST.findall(promise.tests)
    lost = [f"{file}::{name}" for file, name in named if name not in names_in(TESTS / file)]
    return lost + [one for one in TEST.sub("", promise.tests).split(",") if one.strip()]


def test_each_promise_has_a_test_that_is_there() -> None:
    page = promises(PAGE.read_text())
    assert len(page) > 30
    assert [one.promise for one in page if not TEST.search(one.tests)] == []
    assert [lost for one in page for lost in missing(one)] == []
    assert len({one.promise for one in page}) == len(page)


def test_each_row_of_the_threat_model_has_tests_that_are_there() -> None:
    page = section(PAGE.with_name("security.md").read_text(), "What is held")
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 15
    for row in rows:
        named = TEST.findall(row.strip("|").split("|")[-1])
        assert named, row
        assert [name for file, name in named if name not in names_in(TESTS / file)] == [], row
