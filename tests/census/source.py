"""What can be counted without running anything: lines, docs, modules, and who imports whom."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import grimp

LAYERS: Final = ("attention", "clients", "daemon", "pools", "protocol")
NO_CODE: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
SHORT_LINES: Final = 60
GENERATED: Final = "# Made from "
"""How a module begins that a program has written."""


class SourceCount(NamedTuple):
    """Sums over the product's modules, all but the first two without what a program has written.

    Attributes:
        tests_and_benchmarks_lines: of all their modules; the examples count nowhere.
        generated_lines: of modules that a program has written.
        code_lines: without blanks, comments and docstrings.
        documented: public modules, classes and functions with a docstring.
        docstring_words: of all docstrings.
        docs_words: of README.md and docs/.
        short_modules: of fewer lines than 60.
        one_importer: modules that only one other module imports.
        module_circles: groups of modules that import each other, also under TYPE_CHECKING.
        package_circles: pairs of packages that import each other, neither of which is inside the other.
    """

    tests_and_benchmarks_lines: int
    generated_lines: int
    lines: int
    code_lines: int
    modules: int
    short_modules: int
    one_importer: int
    documented: int
    docstring_words: int
    docs_words: int
    module_circles: list[str]
    package_circles: list[str]


def count(root: Path) -> SourceCount:
    """Count a checkout's product: not its tests, benchmarks and examples."""
    files = sorted(file for layer in LAYERS for file in (root / layer).rglob("*.py"))
    every = {file: file.read_text() for file in files}
    sources = {file: source for file, source in every.items() if not source.startswith(GENERATED)}
    docstrings = [one for source in sources.values() for one in _docstrings(ast.parse(source))]
    graph = grimp.build_graph("kvferry", cache_dir=None)
    return SourceCount(
        tests_and_benchmarks_lines=sum(
            len(file.read_text().splitlines())
            for folder in ("tests", "benchmarks")
            for file in (root / folder).rglob("*.py")
        ),
        generated_lines=sum(len(every[file].splitlines()) for file in every.keys() - sources.keys()),
        lines=sum(len(one.splitlines()) for one in sources.values()),
        code_lines=sum(len(code_lines(one)) for one in sources.values()),
        modules=len(sources),
        short_modules=sum(len(one.splitlines()) < SHORT_LINES for one in sources.values()),
        one_importer=sum(len(graph.find_modules_that_directly_import(one)) == 1 for one in graph.modules),
        documented=sum(public for public, _ in docstrings),
        docstring_words=sum(len(text.split()) for _, text in docstrings),
        docs_words=sum(len(file.read_text().split()) for file in (root / "README.md", *(root / "docs").rglob("*.md"))),
        module_circles=[" <-> ".join(sorted(one)) for one in _circles(_imports(graph))],
        package_circles=list(_package_circles(graph)),
    )


def code_lines(source: str) -> set[int]:
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    used: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            used.update(range(token.start[0], token.end[0] + 1))
    return used - docstrings


def _docstrings(tree: ast.Module) -> Iterator[tuple[bool, str]]:
    """Yield each docstring, and whether it is of something public."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield not getattr(node, "name", "").startswith("_"), text


def _imports(graph: grimp.ImportGraph) -> dict[str, set[str]]:
    return {one: graph.find_modules_directly_imported_by(one) for one in graph.modules}


def _package_circles(graph: grimp.ImportGraph) -> Iterator[str]:
    """Yield the pairs of packages whose modules import each other, a package's own modules counting for it alone."""
    imports: dict[str, set[str]] = {}
    for importer, imported in _imports(graph).items():
        home = _package(importer, graph)
        imports.setdefault(home, set()).update(_package(one, graph) for one in imported)
    for one in sorted(imports):
        for other in sorted(imports[one]):
            if one < other and one in imports.get(other, ()):
                yield f"{one} <-> {other}"


def _package(module: str, graph: grimp.ImportGraph) -> str:
    return module if graph.find_children(module) else module.rpartition(".")[0]


def _circles(imports: dict[str, set[str]]) -> list[set[str]]:
    reached = {one: _reachable(one, imports) for one in imports}
    groups: list[set[str]] = []
    for one in sorted(imports):
        group = {other for other in reached[one] if one in reached[other]} | {one}
        if len(group) > 1 and group not in groups:
            groups.append(group)
    return groups


def _reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for one in imports.get(waiting.pop(), ()):
            if one not in found:
                found.add(one)
                waiting.append(one)
    return found
