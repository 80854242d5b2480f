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

from examples.demo.errors import DemoError
from examples.demo.messages import Prompt
from examples.demo.processes import Child, listen, start_daemon

SILENT: Final = "kvferry.daemon"
"""A module that says nothing on its standard output and runs until it is told to end."""
TIMEOUT_S: Final = 30.0


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder whose path is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as path:
        yield Path(path)


def silent_child(folder: Path, name: str) -> Child:
    return Child(name, SILENT, ["--runtime-dir", os.fspath(folder / name)], {}, folder)


def test_a_daemon_is_ready_when_it_is_returned_and_ends_with_status_0(folder: Path) -> None:
    with start_daemon(folder / "run", folder) as daemon:
        assert (folder / "run" / "control.sock").is_socket()
        assert daemon.end() == 0
    assert not psutil.pid_exists(daemon.pid)


def test_a_second_daemon_on_a_directory_is_a_reason_in_a_line(folder: Path) -> None:
    other = folder / "other"
    other.mkdir()
    with start_daemon(folder / "run", folder), pytest.raises(DemoError, match="another daemon") as raised:
        start_daemon(folder / "run", other)
    assert "\n" not in str(raised.value)
    assert "daemon | " in raised.value.details


def test_a_child_that_fails_is_named_with_the_end_of_its_log(folder: Path) -> None:
    with (
        Child("prefill engine", "examples.demo.prefill_engine", ["--nonsense"], {}, folder) as child,
        pytest.raises(DemoError, match=r"the prefill engine \(pid \d+\) ended with status 2: .*--model") as raised,
    ):
        list(listen([child], [], TIMEOUT_S))
    assert "prefill engine | usage:" in raised.value.details


def test_a_killed_child_is_named_by_its_signal_and_the_others_end(folder: Path) -> None:
    with silent_child(folder, "one") as one, silent_child(folder, "two") as two:
        os.kill(two.pid, signal.SIGKILL)
        with pytest.raises(DemoError, match=rf"^the two \(pid {two.pid}\) was killed by SIGKILL$"):
            list(listen([one, two], [], TIMEOUT_S))
        assert one.status(0) is None
    assert not psutil.pid_exists(one.pid)


def test_failures_that_belong_together_are_told_together(folder: Path) -> None:
    with silent_child(folder, "one") as one, silent_child(folder, "two") as two:
        for child in (one, two):
            os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(DemoError, match=r"the (one|two) .* SIGKILL; the (one|two) .* SIGKILL$"):
            list(listen([one, two], [], TIMEOUT_S))


def test_the_daemons_end_is_noticed_while_the_children_run(folder: Path) -> None:
    with silent_child(folder, "one") as one, silent_child(folder, "daemon") as daemon:
        os.kill(daemon.pid, signal.SIGKILL)
        with pytest.raises(DemoError, match=r"the daemon .* was killed by SIGKILL"):
            list(listen([one], [daemon], TIMEOUT_S))


def test_silence_is_bounded(folder: Path) -> None:
    with silent_child(folder, "one") as one, pytest.raises(DemoError, match=r"one said nothing for 0\.1 s"):
        list(listen([one], [], 0.1))


def test_what_is_no_line_of_ours_is_a_reason(folder: Path) -> None:
    with Child("one", "platform", [], {}, folder) as one, pytest.raises(DemoError, match="the one said b'Linux"):
        list(listen([one], [], TIMEOUT_S))


def test_orders_to_a_child_that_has_ended_fail(folder: Path) -> None:
    prompt = Prompt(request_id="0" * 32, tokens=tuple(range(100_000)), max_new_tokens=1)
    with (
        Child("one", "kvferry.daemon", ["--nonsense"], {}, folder) as one,
        pytest.raises(DemoError, match=r"the one .* ended with status 2"),
    ):
        one.notify([prompt])
