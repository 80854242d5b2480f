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


THREE = "control:session:control"


@pytest.mark.parametrize(
    ("pid", "count", "names", "taken", "left", "stays_open"),
    [
        ("OWN", "3", THREE, [3, 5], ["session"], [3, 5]),
        ("OWN", "3", "control", [3], ["unknown"], [3]),  # what has no name is closed too
        ("OWN", "60", ":".join(["control"] * 60), [3, 4, 5], [], [3, 4, 5]),  # more than are open
        ("OWN", "-1", "control", [], [], [3, 4, 5]),
        ("OWN", "9" * 5000, "control", [], [], [3, 4, 5]),
        ("1", "3", THREE, [], [], [3, 4, 5]),  # another process was meant to have them
    ],
    ids=["three", "no name", "sixty", "less than none", "no number", "another's"],
)
def test_each_is_taken_by_its_name_and_the_others_are_closed(
    pid: str, count: str, names: str, taken: list[int], left: list[str], stays_open: list[int]
) -> None:
    passed = {"LISTEN_PID": pid, "LISTEN_FDS": count, "LISTEN_FDNAMES": names}
    command = [sys.executable, "-c", START, "-P", "-c", PROGRAM, "control"]
    done = subprocess.run(command, env={**os.environ, **passed}, capture_output=True, text=True, check=True, timeout=60)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"taken": taken, "left": left, "inheritable": [], "open": stays_open, "variables": []}
