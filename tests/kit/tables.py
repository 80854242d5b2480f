"""Tables of the documents that are made from code: between ``<!-- NAME: COMMAND -->`` and ``<!-- end -->``.

A table of axes says of each value of what may differ which tests have it.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Final

import pytest

TABLE: Final = re.compile(r"(<!-- (\w+): [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)

Tables = Mapping[str, Callable[[], Iterable[str]]]
"""The lines of each by its name."""
Axes = Mapping[str, Mapping[str, list[str] | str]]
"""By axis and value the tests, ``FILE::NAME``, or why there is none."""


def with_tables(text: str, tables: Tables) -> str:
    """Return a document with these tables made anew; each must be in it."""
    assert {*tables} <= {found[2] for found in TABLE.finditer(text)}
    return TABLE.sub(
        lambda found: f"{found[1]}{chr(10).join(tables[found[2]]())}\n{found[3]}" if found[2] in tables else found[0],
        text,
    )


def head(*titles: str) -> Iterator[str]:
    """Yield the first two lines of a table."""
    yield row(*titles)
    yield "|".join(["", *["---"] * len(titles), ""])


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |".replace("|  |", "| |")


def rows_of(axes: Axes, where: str) -> Iterator[str]:
    """Yield the table of axes; ``where``: what its tests are."""
    yield from head("axis", "value", where)
    for axis, values in axes.items():
        for value, tests in values.items():
            yield row(axis, value, tests if isinstance(tests, str) else ", ".join(_shown(tests)))


def _shown(tests: Iterable[str]) -> Iterator[str]:
    """Yield names of tests; of one after another of the same function only what differs."""
    for _, same in groupby(tests, key=lambda test: test.partition("[")[0]):
        first, *others = same
        yield f"`{first}`"
        yield from (f"`[{other.partition('[')[2]}`" for other in others)


def missing_tests(axes: Axes, folder: Path, session: pytest.Session) -> list[str]:
    """Return the names in a table that no test has, with their parameters.

    Those in ``npu/`` without: the environment of the others cannot import them.
    """
    named = [test for values in axes.values() for tests in values.values() if isinstance(tests, list) for test in tests]
    assert named

    @functools.cache
    def names(file: str) -> set[str]:
        if file.startswith("npu/"):
            return names_in(folder / file)
        collected = {one.name for one in pytest.Module.from_parent(session, path=folder / file).collect()}
        return collected | {one.partition("[")[0] for one in collected}

    def is_there(test: str) -> bool:
        file, _, name = test.partition("::")
        return (name.partition("[")[0] if file.startswith("npu/") else name) in names(file)

    return [test for test in named if not is_there(test)]


@functools.cache
def names_in(path: Path) -> set[str]:
    """Return the names of the tests in a file, as it says them."""
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node.name for node in functions if node.name.startswith("test_")}
