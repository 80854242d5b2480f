"""The table of pools in docs/sglang.md *On Ascend*; ``python -m tests.sglang.npu.docs_table`` writes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from tests.kit.folders import REPOSITORY
from tests.kit.tables import Tables, head, row, with_tables
from tests.sglang.npu.pools import DRAFTS, HYBRIDS, KINDS, NO_KERNELS, NOT_SERVED, NOT_WRITTEN, REFUSED, SERVED

DOCUMENT: Final = REPOSITORY / "docs" / "sglang.md"


def _rows() -> Iterator[str]:
    yield from head("SGLang's class", "test", "a pair of servers", "the class alone")
    for name, kind in KINDS.items():
        alone = "lists, every attribute" + ("" if name in NOT_WRITTEN else ", what SGLang writes")
        yield row(f"`{kind.kind.__name__}`", name, _served(name), alone)
    for name, kind in HYBRIDS.items():
        alone = "lists, every attribute, what arrives of either pool within, and what comes back"
        yield row(f"`{kind.__name__}`", name, _served(name), alone)
    for name, kind in DRAFTS.items():
        yield row(f"`{kind.kind.__name__}`", f"{name}, and a draft", f"no: {NO_KERNELS}", "lists, every attribute")
    for name, refused in REFUSED.items():
        yield row(f"`{refused.kind.__name__}`", name, f"refused: {refused.why}", f"refused: {refused.says}")


def _served(name: str) -> str:
    return "yes" if name in SERVED else f"no: {NOT_SERVED[name]}"


TABLES: Final[Tables] = {"pools": _rows}

if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), TABLES))
