"""The result of a check."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

State = Literal["ok", "warning", "missing", "unknown"]
"""``missing``: needed, but absent or unusable; ``warning``: works, but not well; ``unknown``: could not be checked."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        name: what was checked, the same in every release: programs select by it.
        state: the verdict.
        found: what was found, as text.
        fix: what to do about it; empty if nothing.
    """

    name: str
    state: State
    found: str
    fix: str = ""


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 if something is missing, else 0: a daemon works despite warnings and unknowns."""
    return int(any(finding.state == "missing" for finding in findings))


def summary(findings: Iterable[Finding]) -> str:
    """Return one line that names what is missing, what has warnings, and what is unknown."""
    groups = [
        (state, [one.name for one in findings if one.state == state]) for state in ("missing", "warning", "unknown")
    ]
    said = [f"{state}: {', '.join(names)}" for state, names in groups if names]
    return "; ".join(said) or "all is well"
