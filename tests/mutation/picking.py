"""Picks mutants at random, by a seed: so many from each folder, spread over its files. Does not run anything."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from tests.mutation.catalogue import Kind, Mutant, functions_of

FOLDERS: Final = (
    "attention",
    "clients",
    "clients/cli",
    "daemon",
    "daemon/transfer",
    "daemon/tiers",
    "daemon/transports",
    "pools",
    "pools/devices",
    "pools/layouts",
    "pools/tiers",
    "protocol",
)

NEED_HARDWARE: Final = frozenset({"cuda.py"})
"""Nothing here can run these."""

COMPARISONS: Final = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: Final = {ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"), ast.FloorDiv: ("//", "*")}
RELEASES: Final = frozenset(
    {"cancel", "clear", "close", "discard", "drop", "end", "free", "give_back", "pop", "release", "remove", "settle"}
)
ORDERS: Final = {"sorted": "list", "min": "max", "max": "min", "reversed": "list"}
RARE: Final[dict[Kind, int]] = {"order": 6, "bound": 6, "release": 2, "check": 2}
"""Kinds that few functions have are taken where they are."""

WORDY: Final = ("log.", "print(", "raise ", "return f", "__repr__")


class _Change(NamedTuple):
    kind: Kind
    line: int
    before: str
    after: str


def pick(root: Path, *, seed: int, each: int) -> list[Mutant]:
    """Return ``each`` mutants of every folder, no two in one function, as few as can be in one file.

    Args:
        root: the checkout.
        seed: the same seed and source give the same mutants.
        each: how many from each folder.
    """
    chance = random.Random(seed)  # noqa: S311  (not for secrets)
    picked: list[Mutant] = []
    for folder in FOLDERS:
        files = sorted(file for file in (root / folder).glob("*.py") if file.name not in NEED_HARDWARE)
        candidates = {file: list(_one_a_function(_mutants_of(file, root), chance)) for file in files}
        for file_mutants in candidates.values():
            chance.shuffle(file_mutants)
        order = [file for file in files if candidates[file]]
        chance.shuffle(order)
        rounds = (candidates[file][turn] for turn in range(each) for file in order if turn < len(candidates[file]))
        picked += [one for one, _ in zip(rounds, range(each), strict=False)]
    return [msgspec.structs.replace(one, name=f"M{number:03}") for number, one in enumerate(picked, 1)]


def _one_a_function(mutants: Iterable[Mutant], chance: random.Random) -> Iterator[Mutant]:
    """Yield one mutant of each function, so that rare kinds are as likely as frequent ones."""
    by_function: dict[str, dict[Kind, list[Mutant]]] = {}
    for mutant in mutants:
        by_function.setdefault(mutant.function, {}).setdefault(mutant.kind, []).append(mutant)
    for by_kind in by_function.values():
        kind = chance.choices(sorted(by_kind), [RARE.get(one, 1) for one in sorted(by_kind)])[0]
        yield chance.choice(by_kind[kind])


def _mutants_of(file: Path, root: Path) -> Iterator[Mutant]:
    source = file.read_text()
    lines = source.splitlines()
    for name, function in functions_of(ast.parse(source)):
        assert function.end_lineno is not None
        for change in _changes_in(function, lines):
            text = lines[change.line - 1]
            before = text.strip()
            if any(word in before for word in WORDY):
                continue
            alike = [at for at in range(function.lineno, function.end_lineno + 1) if lines[at - 1].strip() == before]
            yield Mutant(
                name="",
                file=str(file.relative_to(root)),
                function=name,
                kind=change.kind,
                before=before,
                after=change.after.strip(),
                occurrence=alike.index(change.line),
            )


def _changes_in(function: ast.FunctionDef | ast.AsyncFunctionDef, lines: Sequence[str]) -> Iterator[_Change]:
    for node in ast.walk(function):
        if node is not function and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue  # met under its own name
        if isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from _between("comparison", node.left, node.comparators[0], COMPARISONS.get(type(node.ops[0])), lines)
            yield from _bounds(node, lines)
        elif isinstance(node, ast.BinOp):
            yield from _between("arithmetic", node.left, node.right, ARITHMETIC.get(type(node.op)), lines)
        elif isinstance(node, ast.BoolOp):
            words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            yield from _between("logic", node.values[0], node.values[1], words, lines)
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise):
            yield from _replaced("check", node.test, "False", lines)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Attribute) and called.attr in RELEASES:
                yield from _replaced("release", node, "pass", lines)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ORDERS:
            yield from _replaced("order", node.func, ORDERS[node.func.id], lines)


def _between(
    kind: Kind, left: ast.expr, right: ast.expr, words: tuple[str, str] | None, lines: Sequence[str]
) -> Iterator[_Change]:
    """Yield the change of an operator between two operands on one line."""
    if words is None or left.end_lineno != right.lineno or left.end_col_offset is None:
        return
    line = lines[right.lineno - 1]
    start, end = left.end_col_offset, right.col_offset
    old, new = words
    if line[start:end].count(old) == 1 and line.isascii():
        yield _Change(kind, right.lineno, line, line[:start] + line[start:end].replace(old, new) + line[end:])


def _bounds(node: ast.Compare, lines: Sequence[str]) -> Iterator[_Change]:
    """Yield the change of a number that something is compared with."""
    for side in (node.left, node.comparators[0]):
        if isinstance(side, ast.Constant) and type(side.value) is int:
            yield from _replaced("bound", side, str(side.value + 1), lines)


def _replaced(kind: Kind, node: ast.AST, text: str, lines: Sequence[str]) -> Iterator[_Change]:
    start, end = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    if start != end:
        return
    line = lines[start - 1]
    if line.isascii():
        after = line[: getattr(node, "col_offset", 0)] + text + line[getattr(node, "end_col_offset", 0) :]
        yield _Change(kind, start, line, after)
