"""What all tests keep to: they use nothing private, however it is spelled, and their property tests have one budget."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PUBLIC = {"_asdict", "_fields", "_make", "_replace", "_exit", "_set_allocator_settings"}
"""Of named tuples, of ``os``, and torch's function that sets what a process's allocator does."""
BY_NAME = {"getattr", "hasattr", "setattr", "delattr"}


def modules() -> list[Path]:
    return sorted(TESTS.rglob("*.py"))


def private_uses(source: str) -> Iterator[str]:
    """Yield each private name of something else than ``self`` or ``cls`` that a module uses, with its line."""
    for node in ast.walk(ast.parse(source)):
        for name in _names(node):
            if name.startswith("_") and not name.endswith("__") and name not in PUBLIC:
                yield f"{getattr(node, 'lineno', 0)}: {name}"


def _names(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute):
        if not (isinstance(node.value, ast.Name) and node.value.id in {"self", "cls"}):
            yield node.attr
    elif isinstance(node, ast.ImportFrom):
        yield from (one.name for one in node.names)
    elif isinstance(node, ast.Call):
        called = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        if called in BY_NAME:
            strings = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
            yield from (one.rpartition(".")[2] for one in strings)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("a._b", ["1: _b"]),
        ("from a import _b", ["1: _b"]),
        ("getattr(a, '_b')", ["1: _b"]),
        ("monkeypatch.setattr('a.b._c', 1)", ["1: _c"]),
        ("self._b, cls._b, a.__init__, a._replace(b=1), getattr(a, 'b')", []),
    ],
)
def test_private_uses_are_found(source: str, found: list[str]) -> None:
    assert list(private_uses(source)) == found


def test_no_test_uses_what_is_private() -> None:
    uses = [f"{path.relative_to(TESTS)}:{one}" for path in modules() for one in private_uses(path.read_text())]
    assert uses == []


def test_budgets_are_asked_of_the_device() -> None:
    others = [path for path in modules() if path.name not in {"devices.py", Path(__file__).name}]
    assert [path for path in others if "max_examples" in path.read_text()] == []


def test_tests_with_engines_leave_out_only_what_they_require() -> None:
    """CI takes a skipped test for one that lacks something; a test is not given the parameters that it is not for."""
    skipping = [
        path
        for folder in ("sglang", "vllm")
        for path in (TESTS / folder).rglob("*.py")
        if "pytest.skip" in path.read_text() or "mark.skip" in path.read_text()
    ]
    assert skipping == []
