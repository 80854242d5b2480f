"""Engines that fork: the child has neither session nor pools, and whatever it does, the parent's stay whole.

And a client that was dropped without being closed: its session ends when it is collected, and the collector goes on.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients import Client
from tests.kit.daemons import Daemon
from tests.kit.started import started

ENGINE: Final = os.fspath(Path(__file__).with_name("forking_engine.py"))
SOON_S: Final = 60.0
SCENES: Final[dict[str, list[str]]] = {
    "calls": [*["FORKED"] * 14, "exit 0", "[3] 1 TablesUpdated(sequence=1, replayed_rows=0)"],
    "async_calls": [*["FORKED"] * 3, "exit 0", "[2]"],
    "touches": ["SIGSEGV SIGSEGV", "5.0"],
    "leaves": ["0", "exit 0"],
    "attaches": ["exit 0", "3.0"],
    "drops sync": ["gone"],
    "drops async": ["gone"],
    "drops_in_child": ["exit 0 ['drops_in_child']"],
}
"""What the engine prints: in a child calls are refused at once, and who touches a pool is killed."""


@pytest.mark.parametrize("scene", SCENES)
def test_a_scene(daemon: Daemon, name: str, scene: str) -> None:
    which, _, kind = scene.partition(" ")
    argument = kind or (which if which == "drops_in_child" else name)
    with tempfile.TemporaryFile("w+") as errors:
        engine = started([ENGINE, which, str(daemon.runtime_dir), argument], stderr=errors.fileno())
        with engine:
            assert engine.stdout is not None
            printed = engine.stdout.read().splitlines()
        errors.seek(0)
        said = errors.read()
    assert (engine.returncode, printed) == (0, SCENES[scene]), said
    assert "Error" not in said, said


def test_closing_gives_pages_back_though_a_child_holds_the_session_open(daemon: Daemon, name: str) -> None:
    with (
        started([ENGINE, "holds", str(daemon.runtime_dir), name]) as engine,
        Client.connect(daemon.runtime_dir) as client,
    ):
        assert engine.stdin is not None
        assert engine.stdout is not None
        assert engine.stdout.readline() == "closed\n"
        while any(one.name == "holder" for one in client.status().sessions):
            assert engine.poll() is None, "the child was to be alive"
        assert len(client.allocate(name, 16)) == 16
        assert engine.poll() is None, "the child was to be alive"
        engine.stdin.close()
        assert engine.wait(SOON_S) == 0
