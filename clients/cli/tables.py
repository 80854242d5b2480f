"""Plain text tables: a title, a header, and columns as wide as their widest cell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(title: str, head: Sequence[str], rows: Sequence[Sequence[object]]) -> Iterable[str]:
    """Yield a table's lines, beginning with an empty one; a table without rows is one line that says so."""
    yield ""
    if not rows:
        yield f"no {title}"
        return
    cells = [list(head), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    yield title
    for row in cells:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
