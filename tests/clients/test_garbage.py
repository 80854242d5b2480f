"""A client that nobody closed and nobody knows any more: its session ends, and whoever collects it goes on."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.daemons import DaemonProcess

SOON_S = 20.0
HEAD = """
import asyncio, gc, sys
from kvferry.clients import AsyncClient, Client

async def connected():
    return await AsyncClient.connect(sys.argv[1], name="dropped")
"""
CONNECT = {
    "sync": 'client = Client.connect(sys.argv[1], name="dropped")',
    "async": "client = asyncio.run(connected())",
}
COLLECT = """
client.itself = client  # as an engine whose parts know each other
del client
gc.collect()
with Client.connect(sys.argv[1]) as other:
    while any(one.name == "dropped" for one in other.status().sessions):
        pass
print("gone")
"""


@pytest.mark.parametrize("kind", CONNECT)
def test_a_dropped_client_ends_its_session_and_hangs_nobody(daemon: DaemonProcess, kind: str) -> None:
    code = "\n".join(textwrap.dedent(part) for part in (HEAD, CONNECT[kind], COLLECT))
    ended = subprocess.run(
        [sys.executable, "-P", "-c", code, daemon.runtime_dir],
        capture_output=True,
        text=True,
        timeout=SOON_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, "gone\n"), ended.stderr
