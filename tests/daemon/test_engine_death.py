"""An engine that dies between any two of its messages: nothing of it is left, and everybody else is served."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

import psutil

from kvferry.clients import Client
from tests.daemon.dying_engine import NAME, SPEC
from tests.kit.daemons import Daemon, soon
from tests.kit.started import started

ENGINE: Final = Path(__file__).with_name("dying_engine.py")
STEPS: Final = 18


def test_after_each_of_its_messages(daemon: Daemon, client: Client) -> None:
    client.create_pool("shared", SPEC)
    process = psutil.Process(daemon.process.pid)
    files = process.num_fds()

    def nothing_is_left() -> bool:
        report = client.status()
        [pool] = report.pools if len(report.pools) == 1 else [None]
        descriptors = report.descriptors
        return (
            pool is not None
            and (pool.free, pool.busy) == (pool.pages, 0)
            and not any(one.name == NAME for one in report.sessions)
            and not report.transfers
            and not report.tables
            and descriptors is not None
            and descriptors.promised == promised
            and process.num_fds() <= files
        )

    before = client.status().descriptors
    assert before is not None
    promised = before.promised
    with started([str(ENGINE), str(daemon.runtime_dir), "shared"]) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        for number in range(1, STEPS + 1):
            assert engine.stdout.readline() == f"{number} {signal.SIGKILL.value}\n"
            assert soon(nothing_is_left), (number, client.status(), process.num_fds() - files)
            engine.stdin.write("\n")
            engine.stdin.flush()
        assert engine.stdout.readline() == "", "more steps than these"
        assert engine.wait(20) == 0
    assert "Traceback" not in daemon.log.read_text()
