"""The tables of ``docs/layouts.md``, made from the code; ``python -m tests.pools.layouts.docs_tables`` writes them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.models import MODELS, model_spec
from kvferry.pools.planning.manifest import space_sizes
from kvferry.protocol.manifests import PoolSpec
from tests.kit.tables import Tables, head, row, with_tables

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "layouts.md"
SPECS: Final = re.compile(r"```json\n(.*?)```", re.DOTALL)
TOKENS: Final = 65536


def specs(text: str) -> list[PoolSpec]:
    return [msgspec.json.decode(found, type=PoolSpec) for found in SPECS.findall(text)]


def _kinds() -> Iterator[str]:
    yield from head("kind", "component", "role", "array of a layer", "dtype", "layers", "bytes a page")
    for spec in specs(DOCUMENT.read_text().split("<!-- kinds:", maxsplit=1)[0]):
        manifest = manifest_of(spec)
        for component, role in dict.fromkeys((one.component, one.role) for one in manifest.entries):
            entries = [one for one in manifest.entries if (one.component, one.role) == (component, role)]
            kind = spec.__struct_config__.tag
            yield row(kind, component, role, entries[0].shape, entries[0].dtype, len(entries), entries[0].page_bytes)


def _models() -> Iterator[str]:
    yield from head("model", "kind", "layers", "bytes a token", "window", "state bytes", "source")
    for name, facts in MODELS.items():
        spec = model_spec(name, tokens=TOKENS)
        sizes = {one.kind: one for one in space_sizes(manifest_of(spec))}
        window, state = sizes.get("window"), sizes.get("state")
        yield row(
            name,
            spec.__struct_config__.tag,
            facts.layers,
            sizes["paged"].token_bytes,
            f"{window.token_bytes} x {facts.window}" if window else "",
            state.page_bytes if state else "",
            facts.source,
        )


TABLES: Final[Tables] = {"kinds": _kinds, "models": _models}

if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), TABLES))
