"""What docs/architecture.md shows between two markers; the markers are comments of its text."""

from __future__ import annotations

from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs/architecture.md"


def transitions_of(name: str) -> str:
    """Return the table of transitions that the page shows under this name."""
    _, _, after = PAGE.read_text().partition(f"<!-- transitions: {name} -->\n")
    return after.partition("<!-- /transitions -->")[0].strip("\n") + "\n"
