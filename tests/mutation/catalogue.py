"""Mutants: single faults in the product's source, written down so that later versions are tried with the same ones.

A mutant names its place by file, function and source line, not by number, so that it outlives changes around it. Does
not know tests.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

CATALOGUE: Final = Path(__file__).with_name("mutants.json")

Kind = Literal["comparison", "arithmetic", "logic", "bound", "order", "release", "check"]


class Mutant(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of one function, changed.

    Attributes:
        name: by which results of two runs are compared.
        file: relative to the repository.
        function: its qualified name, ``Class.method``.
        kind: what was changed.
        before: the line, without its indentation.
        after: what stands there instead.
        occurrence: which of the function's lines that read so, from 0.
        harmless: why no test can notice it; empty where one must.
    """

    name: str
    file: str
    function: str
    kind: Kind
    before: str
    after: str
    occurrence: int = 0
    harmless: str = ""


class Place(msgspec.Struct, frozen=True):
    """Where a mutant's line is: its index among the file's lines, and the lines of the statement that it is part of."""

    index: int
    statement: range


class GoneError(LookupError):
    """The source has changed so that the mutant has no place any more."""


def read_catalogue(file: Path = CATALOGUE) -> list[Mutant]:
    """Return the mutants that are written down."""
    return msgspec.json.decode(file.read_bytes(), type=list[Mutant])


def write_catalogue(mutants: Sequence[Mutant], file: Path = CATALOGUE) -> None:
    """Write mutants down, one after another, for people to read too."""
    file.write_bytes(msgspec.json.format(msgspec.json.encode(mutants), indent=1) + b"\n")


def find(mutant: Mutant, source: str) -> Place:
    """Return where a mutant's line is.

    Raises:
        GoneError: the function, or the line in it, is not there.
    """
    function = dict(functions_of(ast.parse(source))).get(mutant.function)
    if function is None:
        raise GoneError(f"{mutant.file} has no {mutant.function}")
    lines = source.splitlines()
    assert function.end_lineno is not None
    alike = [at for at in range(function.lineno - 1, function.end_lineno) if lines[at].strip() == mutant.before]
    if len(alike) <= mutant.occurrence:
        raise GoneError(f"{mutant.function} in {mutant.file} has no line {mutant.before!r}")
    index = alike[mutant.occurrence]
    return Place(index, _statement_at(function, index + 1))


def apply(mutant: Mutant, source: str) -> str:
    """Return the source with the mutant in it.

    Raises:
        GoneError: as ``find``.
    """
    lines = source.splitlines(keepends=True)
    line = lines[find(mutant, source).index]
    indentation = line[: len(line) - len(line.lstrip())]
    lines[find(mutant, source).index] = f"{indentation}{mutant.after}\n"
    return "".join(lines)


def functions_of(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield each function of a module with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions_of(node, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}", node
            yield from functions_of(node, f"{prefix}{node.name}.")


def _statement_at(function: ast.FunctionDef | ast.AsyncFunctionDef, line: int) -> range:
    """Return the lines of the innermost statement around a line; of a compound one, its head."""
    found = range(line, line + 1)
    for node in ast.walk(function):
        if not isinstance(node, ast.stmt) or node.end_lineno is None or not node.lineno <= line <= node.end_lineno:
            continue
        body = getattr(node, "body", None)
        end = body[0].lineno - 1 if isinstance(body, list) and body else node.end_lineno
        if line <= max(end, node.lineno) and node.lineno >= found.start - len(found) * 50:
            found = range(node.lineno, max(end, node.lineno) + 1)
    return found
