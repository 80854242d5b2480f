"""Engines that fork: the child has neither session nor pools, and whatever it does, the parent's stay whole."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvferry.clients import Client
from tests.kit.daemons import Daemon

ENGINE = Path(__file__).with_name("forking_engine.py")
SOON_S = 60.0


def scene(which: str, daemon: Daemon, pool: str) -> list[str]:
    """Return the lines that the forking engine prints."""
    command = [sys.executable, "-P", str(ENGINE), which, str(daemon.runtime_dir), pool]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Error" not in ended.stderr, ended.stderr
    return ended.stdout.splitlines()


def test_every_call_in_a_child_is_refused_at_once(daemon: Daemon, name: str) -> None:
    *codes, ended, parent = scene("calls", daemon, name)
    assert codes == ["FORKED"] * 14
    assert ended == "exit 0"
    assert parent == "[3] 1 TablesUpdated(sequence=1, replayed_rows=0)", "the parent's session is as it was"


def test_every_call_of_an_async_client_in_a_child_is_refused_at_once(daemon: Daemon, name: str) -> None:
    assert scene("async_calls", daemon, name) == ["FORKED"] * 3 + ["exit 0", "[2]"]


def test_a_child_that_touches_a_pool_is_killed(daemon: Daemon, name: str) -> None:
    assert scene("touches", daemon, name) == ["SIGSEGV SIGSEGV", "5.0"]


def test_a_child_that_gives_its_parents_pool_up_keeps_its_own_memory(daemon: Daemon, name: str) -> None:
    assert scene("leaves", daemon, name) == ["0", "exit 0"]


def test_a_child_that_wants_a_pool_attaches(daemon: Daemon, name: str) -> None:
    assert scene("attaches", daemon, name) == ["exit 0", "3.0"]


def test_closing_gives_pages_back_though_a_child_holds_the_session_open(daemon: Daemon, name: str) -> None:
    command = [sys.executable, "-P", str(ENGINE), "holds", str(daemon.runtime_dir), name]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine,
        Client.connect(daemon.runtime_dir) as client,
    ):
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"closed\n"
        while any(one.name == "holder" for one in client.status().sessions):
            assert engine.poll() is None, "the child was to be alive"
        assert len(client.allocate(name, 16)) == 16
        assert engine.poll() is None, "the child was to be alive"
        engine.communicate(timeout=SOON_S)
    assert engine.returncode == 0
