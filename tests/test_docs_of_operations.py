"""What docs/operations.md does by hand, done by exactly its commands: each terminal is a shell of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from typing import Any, Final

import numpy as np
import pytest

from kvferry.clients import Client, MhaSpec
from tests.kit.daemons import Daemon
from tests.kit.documents import blocks, page
from tests.kit.kvferry_command import COMMAND

TEXT: Final = page("operations.md")
SPEC: Final = MhaSpec(layers=2, tokens=64, page_size=4, kv_heads=2, head_dim=8, dtype="float16")
WAIT_S: Final = 60
CONFIG: Final = "[tiers]\nhost_bytes = 16777216\n"


DECODE, PREFILL, OFFLOAD, RESTORE = blocks(TEXT, "By hand", "sh")


class Terminal:
    """A shell that runs one block of the text."""

    def __init__(self, daemon: Daemon, code: str) -> None:
        path = f"{COMMAND.parent}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "KVFERRY_RUNTIME_DIR": str(daemon.runtime_dir)}
        self._shell = subprocess.Popen(
            ["sh", "-c", code], env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.said: list[dict[str, Any]] = []

    def until(self, kind: str) -> dict[str, Any]:
        """Read what is printed up to a line of this type, and return that."""
        assert self._shell.stdout is not None
        for line in self._shell.stdout:
            self.said.append(json.loads(line))
            if self.said[-1]["type"] == kind:
                return self.said[-1]
        pytest.fail(f"no {kind} among {[one['type'] for one in self.said]}")

    def end(self, status: int = 0) -> list[str]:
        """Wait for its end, with this status; return the types of all that it printed."""
        assert self._shell.stdout is not None
        with self._shell.stdout as printed:  # not communicate(), which would miss what has been read ahead of a line
            self.said += [json.loads(line) for line in printed]
        self._shell.wait(WAIT_S)
        assert self._shell.returncode == status, self.said
        return [one["type"] for one in self.said]

    def interrupt(self) -> None:
        """Press Ctrl-C: whatever the command makes of it, its shell ends by it."""
        os.killpg(self._shell.pid, signal.SIGINT)


def but_settled(types: list[str]) -> list[str]:
    """Return what was said, without SETTLED: FINISHED stands for it where both come at once."""
    return [one for one in types if one != "SETTLED"]


def test_a_transfer_and_an_offload_by_hand(daemon: Daemon) -> None:
    with Client.connect(daemon.runtime_dir, name="observer") as client:
        source, destination = (client.create_pool(name, SPEC) for name in "pd")
        filled = source.tensor("main", "k").numpy()
        filled[...] = np.arange(filled.size, dtype=np.float16).reshape(filled.shape)
        arrived = destination.tensor("main", "k").numpy()

        decode = Terminal(daemon, DECODE)
        pages = decode.until("ALLOCATED")["pages"]
        decode.until("ACCEPTED")
        prefill = Terminal(daemon, PREFILL)
        sent = prefill.until("ALLOCATED")["pages"]
        assert but_settled(prefill.end()[2:]) == ["ACCEPTED", "FINISHED", "TRANSFER_RESULT", "FREED"]
        assert prefill.said[-2]["state"] == "settled"
        assert but_settled(decode.end())[-2:] == ["FINISHED", "FREED"]
        assert [one["first_token"] for one in decode.said if one["type"] == "FINISHED"] == [42]
        assert decode.said[-1]["freed"] == 2
        assert (arrived[:, pages] == filled[:, sent]).all()

        offload = Terminal(daemon, OFFLOAD)
        away = offload.until("ALLOCATED")["pages"]
        snapshot = offload.until("TIER_DONE")["snapshot"]
        restore = Terminal(daemon, RESTORE)
        restored = restore.until("TIER_DONE")
        assert restored["snapshot"] == snapshot
        assert (arrived[:, restored["lists"][0]["pages"]] == filled[:, away]).all()
        assert restore.end() == ["SNAPSHOT_REPORT", "OPERATION_STARTED", "TIER_DONE", "FREED"]
        offload.interrupt()
        assert offload.end(-signal.SIGINT) == ["ALLOCATED", "OFFLOADING", "TIER_DONE"]
        assert not client.snapshots()
