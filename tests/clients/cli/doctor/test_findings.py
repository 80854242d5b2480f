"""The exit status and the last line."""

from __future__ import annotations

import pytest

from kvferry.clients.cli.doctor.host import Finding, State, exit_status, summary


@pytest.mark.parametrize(
    ("states", "status"),
    [
        ((), 0),
        (("ok", "ok"), 0),
        (("ok", "warning", "unknown"), 0),
        (("ok", "missing"), 1),
        (("missing", "missing", "warning"), 1),
    ],
)
def test_only_what_is_missing_counts(states: tuple[State, ...], status: int) -> None:
    assert exit_status([Finding("x", state, "") for state in states]) == status


def test_the_worst_comes_first() -> None:
    findings = [
        Finding("a", "warning", ""),
        Finding("b", "missing", ""),
        Finding("c", "ok", ""),
        Finding("d", "missing", ""),
    ]
    assert summary(findings) == "missing: b, d; warning: a"


def test_all_is_well() -> None:
    assert summary([Finding("a", "ok", "")]) == "all is well"
