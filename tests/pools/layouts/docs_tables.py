"""The tables of ``docs/layouts.md``, made from the code; ``python -m tests.pools.layouts.docs_tables`` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import msgspec

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.models import MODELS, model_spec
from kvferry.pools.planning.manifest import space_sizes
from kvferry.protocol.manifests import PoolSpec

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "layouts.md"
SPECS: Final = re.compile(r"```json\n(.*?)```", re.DOTALL)
TABLES: Final = re.compile(r"(<!-- (kinds|models): [^\n]*-->\n).*?(<!-- end -->)", re.DOTALL)
TOKENS: Final = 65536


def specs(text: str) -> list[PoolSpec]:
    return [msgspec.json.decode(found, type=PoolSpec) for found in SPECS.findall(text)]


def with_tables(text: str) -> str:
    shown = text.split("<!-- kinds:", maxsplit=1)[0]
    tables = {"kinds": "\n".join(_kinds(specs(shown))), "models": "\n".join(_models())}
    return TABLES.sub(lambda found: f"{found[1]}{tables[found[2]]}\n{found[3]}", text)


def _kinds(shown: Iterable[PoolSpec]) -> Iterator[str]:
    yield from _head("kind", "component", "role", "array of a layer", "dtype", "layers", "bytes a page")
    for spec in shown:
        manifest = manifest_of(spec)
        for component, role in dict.fromkeys((one.component, one.role) for one in manifest.entries):
            entries = [one for one in manifest.entries if (one.component, one.role) == (component, role)]
            kind = spec.__struct_config__.tag
            yield _row(kind, component, role, entries[0].shape, entries[0].dtype, len(entries), entries[0].page_bytes)


def _models() -> Iterator[str]:
    yield from _head("model", "kind", "layers", "bytes a token", "window", "state bytes", "source")
    for name, facts in MODELS.items():
        spec = model_spec(name, tokens=TOKENS)
        sizes = {one.kind: one for one in space_sizes(manifest_of(spec))}
        window, state = sizes.get("window"), sizes.get("state")
        yield _row(
            name,
            spec.__struct_config__.tag,
            facts.layers,
            sizes["paged"].token_bytes,
            f"{window.token_bytes} x {facts.window}" if window else "",
            state.page_bytes if state else "",
            facts.source,
        )


def _head(*titles: str) -> Sequence[str]:
    return _row(*titles), "|".join(["", *["---"] * len(titles), ""])


def _row(*cells: object) -> str:
    return f"| {' | '.join(str(cell) for cell in cells)} |"


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
