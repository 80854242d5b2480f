"""What is said of a tier's failing writes, and how often."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from structlog.testing import capture_logs

from kvferry.daemon.tiers.write_failures import LOG_INTERVAL_S, WriteFailures


class Clock:
    """A clock that a test sets."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def said(logs: list[MutableMapping[str, Any]]) -> list[tuple[str, int]]:
    return [(line["log_level"], line["failed"]) for line in logs]


def test_the_first_failure_is_logged_and_further_ones_are_counted() -> None:
    clock = Clock()
    failures = WriteFailures("disk", clock)
    with capture_logs() as logs:
        for _ in range(100):
            failures.failed("failing: EIO", "look")
        clock.now_s += LOG_INTERVAL_S
        failures.failed("failing: EIO", "look")
        assert failures.state == "failing: EIO"
        failures.succeeded()
    assert failures.state == ""
    assert said(logs) == [("warning", 1), ("warning", 101), ("info", 101)]


def test_writes_that_fail_and_succeed_in_turn_are_not_logged_each() -> None:
    failures = WriteFailures("disk", Clock())
    with capture_logs() as logs:
        for _ in range(100):
            failures.failed("failing: EIO", "look")
            failures.succeeded()
    assert said(logs) == [("warning", 1), ("info", 1)]


def test_what_passes_by_itself_is_logged_once_it_lasts() -> None:
    clock = Clock()
    failures = WriteFailures("remote", clock)
    with capture_logs() as logs:
        failures.failed("full", "look", patience_s=10)
        failures.succeeded()
        assert logs == []
        failures.failed("full", "look", patience_s=10)
        clock.now_s += 10
        failures.failed("full", "look", patience_s=10)
    assert said(logs) == [("warning", 2)]
