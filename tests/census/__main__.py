"""``make census``: how large the product is, how its parts hang together, how many of them one request goes through.

    python -m tests.census             prints the figures
    python -m tests.census functions   prints also which functions a transfer and an offload enter

What a request goes through is what the second one of its kind enters in a daemon, when all is warm.
"""

from __future__ import annotations

import ast
import asyncio
import io
import os
import sys
import threading
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Final

import grimp
import msgspec

from kvferry.clients import AttachedPool, Client, MhaSpec, ModelIdentity, pages
from kvferry.daemon.daemon import Tuning
from kvferry.protocol.config.schema import TiersConfig
from kvferry.protocol.ids import new_request_id
from tests.kit.in_process import CONFIG, serving

ROOT: Final = Path(__file__).resolve().parents[2]
LAYERS: Final = ("attention", "clients", "daemon", "pools", "protocol")
NO_CODE: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
SHORT_LINES: Final = 60
GENERATED: Final = "# Made from "
"""How a module begins that a program has written."""
SPEC: Final = MhaSpec(layers=2, tokens=256, page_size=16, kv_heads=2, head_dim=8, dtype="float32")
PAGES: Final = 4


def main(arguments: list[str]) -> int:
    rows: list[tuple[str, object]] = [*counted().items()]
    requests = {"SEND": entered(transfer), "OFFLOAD": entered(offload)}
    for name, found in requests.items():
        rows += [(f"{name}: modules", len({file for file, _ in found})), (f"{name}: functions", len(found))]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:{width}} {_shown(value, width)}")
    for name, found in requests.items() if arguments == ["functions"] else ():
        print("\n".join([f"\n{name}", *(f"  {file} {function}" for file, function in sorted(found))]))
    return 0


def _shown(value: object, indent: int) -> str:
    if isinstance(value, list):
        return f"{len(value)}" + "".join(f"\n{'':{indent}} {one}" for one in value)
    return str(value)


def lines_of(paths: Iterator[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def counted() -> Mapping[str, object]:
    """Return sums over the product's modules: not its tests, benchmarks and examples."""
    files = {file: file.read_text() for layer in LAYERS for file in (ROOT / layer).rglob("*.py")}
    sources = [source for source in files.values() if not source.startswith(GENERATED)]
    docstrings = [one for source in sources for one in _docstrings(ast.parse(source))]
    graph = grimp.build_graph("kvferry", cache_dir=None)
    others = (file for folder in ("tests", "benchmarks") for file in (ROOT / folder).rglob("*.py"))
    docs = (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))
    return {
        "tests and benchmarks lines": lines_of(others),
        "generated lines": sum(len(one.splitlines()) for one in files.values() if one.startswith(GENERATED)),
        "lines": sum(len(one.splitlines()) for one in sources),
        "code lines": sum(len(code_lines(one)) for one in sources),
        "modules": len(sources),
        "short modules": sum(len(one.splitlines()) < SHORT_LINES for one in sources),
        "one importer": sum(len(graph.find_modules_that_directly_import(one)) == 1 for one in graph.modules),
        "documented": sum(public for public, _ in docstrings),  # modules, classes and functions
        "docstring words": sum(len(text.split()) for _, text in docstrings),
        "docs words": sum(len(file.read_text().split()) for file in docs),
        "module circles": [" <-> ".join(sorted(one)) for one in _circles(_imports(graph))],  # under TYPE_CHECKING, too
        "package circles": list(_package_circles(graph)),
    }


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
    """Return the strongly connected groups of more than one module."""
    reached = {one: _reachable(one, imports) for one in imports}
    groups = [{other for other in reached[one] if one in reached[other]} | {one} for one in sorted(imports)]
    return [group for number, group in enumerate(groups) if len(group) > 1 and group not in groups[:number]]


def _reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for one in imports.get(waiting.pop(), ()):
            if one not in found:
                found.add(one)
                waiting.append(one)
    return found


class Recorder:
    """A profile function of all threads but the engine's. Sets are all that it touches: it runs at every call."""

    def __init__(self) -> None:
        self.on = False
        self.engine = 0
        self.entered: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        del argument
        if self.on and event == "call" and threading.get_ident() != self.engine:
            self.entered.add(frame.f_code)


def transfer(client: Client, pool: AttachedPool) -> Callable[[], None]:
    """Prepare a RECEIVE; return the SEND, until both sides have settled. One connection is both engines."""
    request_id = new_request_id()
    source, destination = client.allocate(pool.name, PAGES), client.allocate(pool.name, PAGES)
    received = client.receive(pool.name, request_id, [pages(destination)])
    client.ping()  # the RECEIVE has been taken

    def send() -> None:
        sent = client.send(pool.name, request_id, [pages(source)], first_token=1)
        for one in (received, sent):
            client.wait_finished(one)
            client.wait_settled(one)

    return send


def offload(client: Client, pool: AttachedPool) -> Callable[[], None]:
    """Prepare pages; return their OFFLOAD, to its end."""
    ids = client.allocate(pool.name, PAGES)

    def store() -> None:
        client.wait_done(client.offload(pool.name, [pages(ids)]))

    return store


def entered(prepare: Callable[[Client, AttachedPool], Callable[[], None]]) -> set[tuple[str, str]]:
    """Return (module's file, function) of what the second one of such requests enters in a daemon of its own."""
    recorder = Recorder()

    def ask(path: Path) -> None:
        recorder.engine = threading.get_ident()
        with Client.connect(path) as client:
            pool = client.create_pool("census", SPEC, model=ModelIdentity(name="census"))
            prepare(client, pool)()
            request = prepare(client, pool)
            recorder.on = True
            request()
            client.ping()  # so that what came before it has been done
            recorder.on = False
            pool.close()

    async def run() -> None:
        config = msgspec.structs.replace(CONFIG, tiers=TiersConfig(host_bytes=4 << 20))
        async with serving(config, tuning=Tuning()) as one:
            await asyncio.to_thread(ask, one.path)

    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        asyncio.run(run())
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    files = ((os.path.relpath(os.path.realpath(one.co_filename), ROOT), one.co_qualname) for one in recorder.entered)
    made = (".", "<", "tests")  # outside of the checkout or in an environment, by Python itself, by the tests
    return {(file, name) for file, name in files if not file.startswith(made) and not name.endswith(">")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
