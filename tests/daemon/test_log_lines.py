"""The lines of the log that the daemon remembers: which, how many, and from where on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import structlog

from kvferry.daemon.process import host
from kvferry.daemon.process.log_lines import MAX_TEXT, LogLines
from kvferry.protocol.config.schema import LoggingConfig

ALL: Final = 1000
log = structlog.get_logger(__name__)


@pytest.fixture
def _logs_restored() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


@pytest.fixture
def lines(_logs_restored: None) -> LogLines:
    """Return what remembers this process's log, of which standard error gets errors alone."""
    lines = LogLines(kept_bytes=4096)
    host.configure_logs(LoggingConfig(level="error", format="json"), lines)
    return lines


def test_lines_from_info_on_are_remembered_and_shown_as_configured(
    lines: LogLines, capfd: pytest.CaptureFixture[str]
) -> None:
    log.debug("a")
    log.info("b", pool="p", pages=3, where=Path("/x"), nothing=None)
    log.warning("c", text="x" * 2 * MAX_TEXT)
    try:
        int("x")
    except ValueError:
        log.exception("d", cause="why")
    found = lines.since(0, ALL).lines
    assert [(one.level, one.event) for one in found] == [("info", "b"), ("warning", "c"), ("error", "d")]
    assert found[0].fields == {"pool": "p", "pages": 3, "where": "/x", "nothing": None}
    assert len(found[1].fields["text"]) == MAX_TEXT
    assert found[2].fields == {"cause": "why"}, "the traceback is the log's alone"
    [written] = capfd.readouterr().err.splitlines()
    assert "Traceback" in written


def test_what_no_message_can_carry_is_remembered_as_text(lines: LogLines, capfd: pytest.CaptureFixture[str]) -> None:
    log.error("large", number=1 << 70)
    assert [one.fields for one in lines.since(0, ALL).lines] == [{"number": str(1 << 70)}]
    assert str(1 << 70) in capfd.readouterr().err


def test_the_oldest_go_first_and_a_cursor_before_them_is_lost(lines: LogLines) -> None:
    log.info("0")
    begin = lines.since(0, ALL).cursor
    for number in range(1, 200):
        log.info(str(number))
    found = lines.since(0, ALL)
    events = [int(one.event) for one in found.lines]
    assert events == list(range(events[0], 200))
    assert 10 < len(events) < 100
    assert all(after.cursor == before.cursor + 1 for before, after in pairwise(found.lines))
    assert not found.lost
    assert found.cursor == found.lines[-1].cursor
    assert lines.since(begin, ALL) == found._replace(lost=True)
    assert lines.since(found.cursor + 1, 1) == (found.lines[:1], found.lines[0].cursor, True)
    [after, last] = found.lines[-2:]
    assert lines.since(after.cursor, ALL) == ((last,), last.cursor, False)
    assert lines.since(last.cursor, ALL) == ((), last.cursor, False)
    assert lines.since(after.cursor - 1, 1) == ((after,), after.cursor, False)


def test_any_thread_may_log(lines: LogLines) -> None:
    threads = [threading.Thread(target=lambda: [log.info("x") for _ in range(200)]) for _ in range(4)]
    began = lines.since(0, ALL).cursor
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert lines.since(0, ALL).cursor - began == 800
