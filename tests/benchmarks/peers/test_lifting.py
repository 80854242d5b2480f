"""Functions come out of a source file alone, without what the file imports."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Final

import pytest

from benchmarks.peers.lifting import LiftError, lift

SOURCE: Final = """
import a_package_that_is_not_there
from a_package_that_is_not_there import Shape

raise RuntimeError("the module was run")


def area(shape: Shape) -> Shape.Number:
    return doubled(shape.width) * shape.height // units.two


def doubled(number):
    return number * 2


class Sender(a_package_that_is_not_there.Base):
    def doubled(self, number):
        return self.factor * number

    @doubled.marked
    def marked(self):
        return 1

    def doubled(self, number):
        def inner(value: Shape) -> Shape:
            return value + self.factor

        return inner(number)


doubled_again = doubled
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.py"
    path.write_text(SOURCE)
    return path


def test_functions_share_what_is_given_and_each_other(file: Path) -> None:
    lifted = lift(file, ["doubled", "area"], {"units": SimpleNamespace(two=2)})
    assert sorted(lifted) == ["area", "doubled"]
    assert lifted["doubled"](21) == 42
    assert lifted["area"](SimpleNamespace(width=3, height=5)) == 15


def test_a_function_that_is_not_lifted_is_not_there(file: Path) -> None:
    area = lift(file, ["area"], {})["area"]
    with pytest.raises(NameError, match="doubled"):
        area(SimpleNamespace(width=3, height=5))


def test_a_method_takes_any_self_and_the_last_definition_counts(file: Path) -> None:
    method = lift(file, ["Sender.doubled"], {})["Sender.doubled"]
    assert method(SimpleNamespace(factor=100), 7) == 107


def test_a_traceback_leads_to_the_source(file: Path) -> None:
    code = lift(file, ["doubled"], {})["doubled"].__code__
    assert code.co_filename == str(file)
    assert SOURCE.splitlines()[code.co_firstlineno - 1] == "def doubled(number):"


@pytest.mark.parametrize("path", ["missing", "Sender.area", "area.doubled", "Nobody.doubled", "doubled_again"])
def test_what_is_not_defined_is_named(file: Path, path: str) -> None:
    with pytest.raises(LiftError, match=rf"theirs\.py defines no {path}$"):
        lift(file, [path], {})


@pytest.mark.parametrize("text", [None, "def broken(:", "def a(): pass\0"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "theirs.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(LiftError, match=r"theirs\.py: "):
        lift(file, ["a"], {})
