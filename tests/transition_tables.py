"""Tables of transitions: which rows a test has reached, and what docs/architecture.md shows of them.

``python -m tests.transition_tables`` writes the tables into the page anew.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

PAGE = Path(__file__).parents[1] / "docs/architecture.md"

KeyT = TypeVar("KeyT")
RowT = TypeVar("RowT")


class SeenRows(UserDict[KeyT, RowT]):
    """A table, and which of its rows were looked up.

    Attributes:
        rows: those.
    """

    def __init__(self, table: Mapping[KeyT, RowT]) -> None:
        super().__init__(table)
        self.rows: set[KeyT] = set()

    def __getitem__(self, key: KeyT) -> RowT:
        """Return a row, and remember that it was reached."""
        row = super().__getitem__(key)
        self.rows.add(key)
        return row


def transitions_of(name: str) -> str:
    """Return the table of transitions that the page shows under this name."""
    _, _, after = PAGE.read_text().partition(f"<!-- transitions: {name} -->\n")
    return after.partition("<!-- /transitions -->")[0].strip("\n") + "\n"


def show(name: str, table: str) -> None:
    """Write a table of transitions into the page."""
    before, marker, after = PAGE.read_text().partition(f"<!-- transitions: {name} -->\n")
    _, end, rest = after.partition("<!-- /transitions -->")
    PAGE.write_text(f"{before}{marker}\n{table}\n{end}{rest}")


if __name__ == "__main__":
    from kvferry.daemon.tiers import operations as of_operations
    from kvferry.daemon.transfer import transitions as of_transfers

    show("transfer", of_transfers.as_markdown())
    show("operation", of_operations.as_markdown())
