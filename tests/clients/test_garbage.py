"""A client that nobody closed and nobody knows any more: its session ends, and whoever collects it goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.kit.daemons import Daemon

SOON_S = 20.0
HEAD = """
import asyncio, gc, sys
from kvferry.clients import AsyncClient, Client

async def connected():
    return await AsyncClient.connect(sys.argv[1], name="dropped")
"""
CONNECT = {"sync": 'client = Client.connect(sys.argv[1], name="dropped")', "async": "client = asyncio.run(connected())"}
COLLECT = """
client.itself = client  # as an engine whose parts know each other
del client
gc.collect()
with Client.connect(sys.argv[1]) as other:
    while any(one.name == "dropped" for one in other.status().sessions):
        pass
print("gone")
"""


def run(daemon: Daemon, code: str) -> subprocess.CompletedProcess[str]:
    """Run a program with the daemon's folder as its argument, and wait for its end."""
    command = [sys.executable, "-P", "-c", code, str(daemon.runtime_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=False)


@pytest.mark.parametrize("kind", CONNECT)
def test_a_dropped_client_ends_its_session_and_hangs_nobody(daemon: Daemon, kind: str) -> None:
    ended = run(daemon, "\n".join((HEAD, CONNECT[kind], COLLECT)))
    assert (ended.returncode, ended.stdout) == (0, "gone\n"), ended.stderr


DROP_IN_CHILD = """
import os
client = Client.connect(sys.argv[1], name="parent")
client.itself = client
child = os.fork()
if not child:
    del client
    gc.collect()
    os._exit(0)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status), [one.name for one in client.status().sessions])
"""


def test_a_child_that_drops_its_copy_leaves_the_parents_session(daemon: Daemon) -> None:
    ended = run(daemon, HEAD + DROP_IN_CHILD)
    assert (ended.returncode, ended.stdout) == (0, "0 ['parent']\n"), ended.stderr
