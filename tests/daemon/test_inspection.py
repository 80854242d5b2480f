"""What a process of the daemon's own user can do to it by /proc: as a user that is not root, which may do anything."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

# Runs the daemon as another user: what it imports lies where only root can read, perhaps.
DAEMON = """
import ctypes, importlib.util, os, sys
import kvferry.daemon.daemon, kvferry.clients, structlog.dev, encodings.idna, uvloop
program = importlib.util.find_spec("kvferry.daemon.__main__").loader.get_code("kvferry.daemon.__main__")
os.setgroups([]); os.setgid(12345); os.setuid(12345)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as a process is that this user has started: setuid closes it
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
    for file in ("mem", *(f"fd/{number}" for number in range(64))):
        try: os.open(f"/proc/{pid}/{file}", os.O_RDWR)
        except OSError as error: assert isinstance(error, PermissionError), error
        else: print("opened", file)
    open(f"/proc/{pid}/stat").close()
    os.close(os.pidfd_open(pid))
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
