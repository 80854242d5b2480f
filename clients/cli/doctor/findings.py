"""What a check says. Knows nothing of what is checked."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

State = Literal["ok", "warning", "missing", "unknown"]
"""``missing``: needed, and not there or not usable; ``warning``: works, but worse; ``unknown``: nobody could tell."""


class Finding(msgspec.Struct, frozen=True):
    """One line of the report.

    Attributes:
        name: what was looked at, the same in every release: programs select by it.
        state: how it is.
        found: what was seen, in words.
        fix: what to do about it; empty where nothing is to be done.
    """

    name: str
    state: State
    found: str
    fix: str = ""


def exit_status(findings: Iterable[Finding]) -> int:
    """Return 1 where something is missing, else 0: warnings and unknowns do not keep a daemon from working."""
    return int(any(finding.state == "missing" for finding in findings))


def summary(findings: Iterable[Finding]) -> str:
    """Return one line that names what is missing, and what else is not well."""
    groups = [
        (state, [one.name for one in findings if one.state == state]) for state in ("missing", "warning", "unknown")
    ]
    said = [f"{state}: {', '.join(names)}" for state, names in groups if names]
    return "; ".join(said) or "all is well"
