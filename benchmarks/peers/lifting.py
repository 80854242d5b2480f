"""Lifting: single functions out of a source file, without importing the package they belong to.

Importing it would ask for everything the package needs. So the file is parsed, the functions wanted are compiled
alone, and what they use is given by name. Knows nothing of any one package.
"""

from __future__ import annotations
import __future__

import ast
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

Function = Callable[..., Any]


class LiftError(Exception):
    """A peer's source is not as expected: another version, or not all of it."""


def lift(file: Path, paths: Sequence[str], given: Mapping[str, object]) -> dict[str, Function]:
    """Return functions of a Python file, compiled from their source.

    Args:
        file: the source.
        paths: ``"function"`` or ``"Class.method"``; a method comes as a function that takes ``self``. Functions of the
            file that they call must be named too: all share one namespace.
        given: the other names that they use, such as modules.

    Returns:
        Each path with its function. Annotations are not evaluated; decorators are, from ``given``.

    Raises:
        LiftError: the file, or one of the functions in it, is not there, or the file cannot be parsed.
    """
    try:
        tree = ast.parse(file.read_bytes(), file)
    except (OSError, SyntaxError, ValueError) as error:
        raise LiftError(f"{file}: {error}") from error
    namespace: dict[str, Any] = dict(given)
    functions = {}
    for path in paths:
        definition = _find(tree, path) or _missing(file, path)
        # As with ``from __future__ import annotations``: a type that only an annotation names need not be given.
        flags = __future__.annotations.compiler_flag
        module = ast.Module([definition], type_ignores=[])
        exec(compile(module, file, "exec", flags, dont_inherit=True), namespace)  # noqa: S102  what lifting is
        functions[path] = namespace[definition.name]
    return functions


def _find(tree: ast.Module, path: str) -> ast.FunctionDef | None:
    """Return the definition at a dotted path, the last one where a name is defined again, as Python has it."""
    *classes, name = path.split(".")
    body = tree.body
    for one in classes:
        body = next((node.body for node in reversed(body) if isinstance(node, ast.ClassDef) and node.name == one), [])
    return next((node for node in reversed(body) if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _missing(file: Path, path: str) -> NoReturn:
    raise LiftError(f"{file} defines no {path}")
