"""The demo's child processes: whatever becomes of one of them, the demo hears of it and all of them end."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import psutil
import pytest

from examples.demo.messages import DemoError, Tell
from examples.demo.processes import Child, listen, start_daemon

TIMEOUT_S: Final = 30.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as path:
        yield Path(path)


def is_silent(_tell: Tell) -> None:
    """Say nothing, and run until it is told to end."""
    signal.pause()


def fails(_tell: Tell) -> None:
    raise ValueError("no such pool")


def daemon_of(folder: Path, runtime_dir: Path) -> Child:
    folder.mkdir(exist_ok=True)
    return start_daemon("daemon", runtime_dir, folder, "")


def test_a_daemon_serves_when_it_is_returned_and_ends_with_status_0(folder: Path) -> None:
    with daemon_of(folder, folder / "run") as daemon:
        assert (folder / "run" / "control.sock").is_socket()
        assert daemon.end() == 0
    assert not psutil.pid_exists(daemon.pid)


def test_a_daemon_that_cannot_start_is_a_reason_in_a_line_with_its_log(folder: Path) -> None:
    with pytest.raises(DemoError, match=r"the daemon \(pid \d+\) ended with status 2: .*nonsense") as raised:
        start_daemon("daemon", folder / "run", folder, "nonsense = 1\n")
    assert "\n" not in str(raised.value)
    assert "daemon | " in raised.value.details


def test_a_child_that_fails_is_named_with_its_error(capfd: pytest.CaptureFixture[str]) -> None:
    reason = r"^the prefill engine \(pid \d+\) ended with status 1: ValueError: no such pool$"
    with Child("prefill engine", fails) as child, pytest.raises(DemoError, match=reason):
        list(listen([child], [], TIMEOUT_S))
    assert "Traceback" in capfd.readouterr().err


def test_a_killed_child_is_named_by_its_signal_and_the_others_end() -> None:
    with Child("one", is_silent) as one, Child("two", is_silent) as two:
        os.kill(two.pid, signal.SIGKILL)
        with pytest.raises(DemoError, match=rf"^the two \(pid {two.pid}\) was killed by SIGKILL$"):
            list(listen([one, two], [], TIMEOUT_S))
        assert one.status() is None
    assert not psutil.pid_exists(one.pid)


def test_silence_is_bounded() -> None:
    with Child("one", is_silent) as one, pytest.raises(DemoError, match=r"one said nothing for 0\.1 s"):
        list(listen([one], [], 0.1))
