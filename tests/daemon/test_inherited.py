"""What a service manager passes at start, as systemd passes it: to a process of its own, from descriptor 3 on."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

PROGRAM = """
import json, os, sys
from kvferry.daemon.process.inherited import VARIABLES, take_inherited

def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True

passed = [fd for fd in (3, 4, 5) if is_open(fd)]
os.environ["LISTEN_PID"] = os.environ["LISTEN_PID"].replace("OWN", str(os.getpid()))
inherited = take_inherited()
said = {"taken": inherited.take(sys.argv[1]), "left": inherited.names}
said["inheritable"] = [fd for fd in passed if os.get_inheritable(fd)] if said["taken"] else []
inherited.close_rest()
said["open"] = [fd for fd in passed if is_open(fd)]
said["variables"] = [name for name in VARIABLES if name in os.environ]
print(json.dumps(said))
"""
# Becomes the program with the descriptors 3, 4 and 5 open, and inheritable.
START = "import os, sys\nfor fd in (3, 4, 5): os.dup2(1, fd)\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


def said_by_daemon(variables: dict[str, str], take: str = "control") -> tuple[dict[str, object], str]:
    """Return what a process finds that is started so, and its log."""
    command = [sys.executable, "-c", START, "-P", "-c", PROGRAM, take]
    done = subprocess.run(
        command, env={**os.environ, **variables}, capture_output=True, text=True, check=True, timeout=60
    )
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]), "\n".join(lines[:-1])


def test_each_is_taken_by_its_name_and_the_others_are_closed() -> None:
    passed = {"LISTEN_PID": "OWN", "LISTEN_FDS": "3", "LISTEN_FDNAMES": "control:session:control"}
    said, log = said_by_daemon(passed)
    assert said == {"taken": [3, 5], "left": ["session"], "inheritable": [], "open": [3, 5], "variables": []}
    assert "session" in log


def test_what_has_no_name_is_closed_too() -> None:
    said, _ = said_by_daemon({"LISTEN_PID": "OWN", "LISTEN_FDS": "3", "LISTEN_FDNAMES": "control"})
    assert (said["taken"], said["left"], said["open"]) == ([3], ["unknown"], [3])


@pytest.mark.parametrize("count", ["", "-1", "three", "9" * 5000])
def test_a_count_that_cannot_be_is_none(count: str) -> None:
    said, _ = said_by_daemon({"LISTEN_PID": "OWN", "LISTEN_FDS": count, "LISTEN_FDNAMES": "control"})
    assert (said["taken"], said["left"], said["open"], said["variables"]) == ([], [], [3, 4, 5], [])


def test_more_than_are_open_are_not_invented() -> None:
    said, _ = said_by_daemon({"LISTEN_PID": "OWN", "LISTEN_FDS": "60", "LISTEN_FDNAMES": ":".join(["control"] * 60)})
    assert said["taken"] == [3, 4, 5]


def test_what_another_process_was_meant_to_have_is_left_alone() -> None:
    said, _ = said_by_daemon({"LISTEN_PID": "1", "LISTEN_FDS": "3", "LISTEN_FDNAMES": "control:control:control"})
    assert (said["taken"], said["open"], said["variables"]) == ([], [3, 4, 5], [])
