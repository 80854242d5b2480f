"""What a process of the daemon's own user can do to it by /proc: as a user that is not root, which may do anything."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

# Becomes another user and starts a process of it, which has a user's memory: a daemon would have it, too.
PROGRAM = """
import ctypes, os, sys
from kvferry.daemon.process.inspection import forbid_inspection
os.setgroups([]); os.setgid(12345); os.setuid(12345)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a process is that this user has started: setuid closes it
secret = os.memfd_create("pool"); os.write(secret, b"secret")
ours, theirs = os.pipe(); back, forth = os.pipe()
if not (victim := os.fork()):
    if sys.argv[1] == "closed":
        forbid_inspection()
    os.write(theirs, b"1")
    os.read(back, 1)
    own = os.open(f"/proc/self/fd/{secret}", os.O_RDWR)
    assert os.pread(own, 6, 0) == b"secret", os.pread(own, 6, 0)
    assert str(secret) in os.listdir("/proc/self/fd")
    os._exit(0)
os.close(secret)
os.read(ours, 1)
def attempt(what, call):
    try:
        call()
        print(what, "worked")
    except OSError as error:
        print(what, type(error).__name__)
attempt("open", lambda: os.open(f"/proc/{victim}/fd/{secret}", os.O_RDWR))
attempt("list", lambda: os.listdir(f"/proc/{victim}/fd"))
attempt("memory", lambda: os.open(f"/proc/{victim}/mem", os.O_RDWR))
attempt("start time", lambda: open(f"/proc/{victim}/stat").read())
attempt("pidfd", lambda: os.pidfd_open(victim))
os.write(forth, b"1")
print("own", os.waitpid(victim, 0)[1])
"""
OPEN = ["open worked", "list worked", "memory worked", "start time worked", "pidfd worked", "own 0"]
CLOSED = [
    "open PermissionError",
    "list PermissionError",
    "memory PermissionError",
    "start time worked",
    "pidfd worked",
    "own 0",
]


@pytest.mark.parametrize(("how", "expected"), [("open", OPEN), ("closed", CLOSED)])
def test_nobody_of_the_same_user_gets_at_what_is_open(
    how: str, expected: list[str], require: Callable[[object, str], None]
) -> None:
    require(os.geteuid() == 0, "root, to be another user")
    command = [sys.executable, "-c", PROGRAM, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.stdout.splitlines(), done.stderr) == (expected, "")


# Runs the daemon as another user: what it imports lies where only root can read, perhaps.
DAEMON = """
import ctypes, importlib.util, os, sys
import kvferry.daemon.daemon, kvferry.clients, structlog.dev, encodings.idna, uvloop
program = importlib.util.find_spec("kvferry.daemon.__main__").loader.get_code("kvferry.daemon.__main__")
os.setgroups([]); os.setgid(12345); os.setuid(12345)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # see PROGRAM
if os.fork():
    _, status = os.wait()
    sys.exit(os.waitstatus_to_exitcode(status))
sys.argv[1:] = ["--runtime-dir", sys.argv[1]]
exec(program, {"__name__": "__main__"})
"""
LOOK = """
import os, sys
from kvferry.clients import Client, MhaSpec
os.setgroups([]); os.setgid(12345); os.setuid(12345)
spec = MhaSpec(layers=2, tokens=64, page_size=4, kv_heads=2, head_dim=4, dtype="float32")
with Client.connect(sys.argv[1]) as client:
    array = client.create_pool("pool", spec).array("main", "k")
    array[:] = 7
    pid = client.status().pid
    for number in range(64):
        try: os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        except OSError as error: assert isinstance(error, PermissionError), error
        else: print("opened", number)
    print("looked", int(array.max()))
"""


def test_the_daemon_is_closed_to_its_own_user(require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be another user")
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
        os.chown(folder, 12345, 12345)
        run = Path(folder) / "run"
        daemon = subprocess.Popen(
            [sys.executable, "-c", DAEMON, run], stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        with daemon:
            assert daemon.stderr is not None
            try:
                said = ""
                while '"serving"' not in said and (line := daemon.stderr.readline()):
                    said += line
                assert '"serving"' in said, said
                done = subprocess.run(
                    [sys.executable, "-c", LOOK, run], capture_output=True, text=True, check=False, timeout=60
                )
            finally:
                os.killpg(daemon.pid, 15)
    assert (done.stdout, done.stderr) == ("looked 7\n", "")
