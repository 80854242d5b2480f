"""The entries of a table that a step can change: at the ends of rows' ranges, and new contents in them.

Two ways to the same entries: one row after the other where few rows move, as in nearly every decode step, and all rows
at once where that would take longer. Knows ranges and positions, no page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.attention.row_ranges import RowMove, Shown
from kvferry.attention.spans import Positions, distinct, expanded

Mask: TypeAlias = npt.NDArray[np.bool_]


class TouchedEntries(NamedTuple):
    """Entries of a table.

    Attributes:
        positions: flat, ascending, distinct, ``(n,)`` int64.
        visible: whether each is visible after the step, ``(n,)`` bool.
    """

    positions: Positions
    visible: Mask


def touched_by_few(moves: Sequence[RowMove], now: Shown, entries: Sequence[int], columns: int) -> TouchedEntries:
    """Return the entries that these moves touch, and those of ``entries`` that stay visible.

    Args:
        moves: of rows, each once.
        now: what the rows show before.
        entries: flat positions with new contents.
        columns: of the table.
    """
    visible: dict[int, bool] = {}
    moved = {}
    for one in moves:
        moved[one.row] = (one.new_first, one.new_end)
        base = one.row * columns
        for column in _between(one):
            visible[base + column] = one.new_first <= column < one.new_end
    for position in entries:
        row, column = divmod(position, columns)
        if now.first[row] <= column < now.end[row]:
            first, end = moved.get(row, (0, columns))
            if first <= column < end:
                visible[position] = True
    positions = sorted(visible)
    return TouchedEntries(np.array(positions, np.int64), np.array([visible[one] for one in positions], np.bool_))


def touched_by_many(now: Shown, after: Shown, rows: Positions, entries: Positions, columns: int) -> TouchedEntries:
    """Return the entries between what rows show now and after, and those of ``rows`` and ``entries`` that are visible.

    Args:
        now: what the rows show.
        after: what they will show.
        rows: rows with new contents, ``(n,)``.
        entries: flat positions with new contents, ``(n,)``.
        columns: of the table.
    """
    parts = []
    for old, new in zip(now, after, strict=True):
        moved = np.flatnonzero(old != new)
        base, before, then = moved * columns, old[moved], new[moved]
        parts.append(expanded(base + np.minimum(before, then), base + np.maximum(before, then)))
    whole = np.sort(rows)
    base = whole * columns
    first, end = np.minimum(now.first[whole], after.first[whole]), np.maximum(now.end[whole], after.end[whole])
    parts.append(expanded(base + first, base + end))
    parts.append(np.sort(entries[_visible(entries, now, columns) & _visible(entries, after, columns)]))
    positions = distinct([part for part in parts if len(part)])
    return TouchedEntries(positions, _visible(positions, after, columns))


def _between(move: RowMove) -> Sequence[int]:
    first, then_first = sorted((move.first, move.new_first))
    end, then_end = sorted((move.end, move.new_end))
    return [*range(first, then_first), *range(end, then_end)]


def _visible(positions: Positions, shown: Shown, columns: int) -> Mask:
    rows, column = np.divmod(positions, columns)
    return (shown.first[rows] <= column) & (column < shown.end[rows])
