"""Tables of transitions: which rows a test has reached, and what docs/architecture.md shows of them.

``python -m tests.transition_tables`` writes the tables into the page anew.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from kvferry.daemon.transfer import transitions
from kvferry.protocol.errors import KvferryError
from tests.daemon.tiers import operation_states

PAGE = Path(__file__).parents[1] / "docs/architecture.md"

KeyT = TypeVar("KeyT")
RowT = TypeVar("RowT")


class SeenRows(UserDict[KeyT, RowT]):
    """A table, and which of its rows were looked up."""

    def __init__(self, table: Mapping[KeyT, RowT]) -> None:
        super().__init__(table)
        self.rows: set[KeyT] = set()

    def __getitem__(self, key: KeyT) -> RowT:
        row = super().__getitem__(key)
        self.rows.add(key)
        return row


def transitions_of(name: str) -> str:
    """Return the table of transitions that the page shows under this name."""
    _, _, after = PAGE.read_text().partition(f"<!-- transitions: {name} -->\n")
    return after.partition("<!-- /transitions -->")[0].strip("\n") + "\n"


def show(name: str, table: str) -> None:
    before, marker, after = PAGE.read_text().partition(f"<!-- transitions: {name} -->\n")
    _, end, rest = after.partition("<!-- /transitions -->")
    PAGE.write_text(f"{before}{marker}\n{table}\n{end}{rest}")


def markdown_of_transfers() -> str:
    head = "endpoint|state|event|next state|finishes with|matched endpoints with|tombstone|message to other daemons"
    rows = []
    for (kind, state, event), row in transitions.TRANSITIONS.items():
        ends = _next_state(state, row), _words(row.own), _words(row.matched), "yes" if row.tombstone else ""
        rows.append((kind.value, state.name, event.value, *ends, row.notice.value))
    return _markdown(tuple(head.split("|")), rows)


def markdown_of_operations() -> str:
    rows = (
        (state.name, event.value, "ignored" if row.state is state else row.state.name, _words(row.ends))
        for (state, event), row in operation_states.TRANSITIONS.items()
    )
    return _markdown(("state", "event", "next state", "ends with"), rows)


def _next_state(state: transitions.State, row: transitions.Transition) -> str:
    if row.state is not state:
        return row.state.name
    return "ignored" if row == transitions.Transition(state) else "stays"


def _markdown(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ("---",) * len(head), *rows))


def _words(ends: type[KvferryError] | Enum) -> str:
    return str(ends.value) if isinstance(ends, Enum) else ends.code


if __name__ == "__main__":
    show("transfer", markdown_of_transfers())
    show("operation", markdown_of_operations())
