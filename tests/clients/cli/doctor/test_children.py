"""Children that say something, fail, hang, die, or leave others behind."""

from __future__ import annotations

import os
import select
from pathlib import Path

from kvferry.clients.cli.doctor.host import Outcome, run_child

PATH = {"PATH": os.environ["PATH"]}
DEAD_WITHIN_S = 30.0


def test_what_it_says() -> None:
    done = run_child(["sh", "-c", "echo out; echo $WORD; echo one >&2; echo two >&2; echo >&2; exit 3"],
                     {**PATH, "WORD": "given"}, 30)  # fmt: skip
    assert done == Outcome(3, "out\ngiven\n", "one\ntwo\n\n")
    assert done.last_error == "two"


def test_nothing_to_read() -> None:
    assert run_child(["cat"], PATH, 30) == Outcome(0, "", "")


def test_no_such_command(tmp_path: Path) -> None:
    done = run_child([str(tmp_path / "none")], PATH, 30)
    assert done.status == 127
    assert done.last_error.endswith("No such file or directory")


def test_a_signal() -> None:
    assert run_child(["sh", "-c", "kill -SEGV $$"], PATH, 30).status == -11


def test_one_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    os.mkfifo(pids)
    reader = os.open(pids, os.O_RDONLY | os.O_NONBLOCK)
    done = run_child(["sh", "-c", f"echo before; sleep 600 & echo $! > {pids}; wait"], PATH, 2)
    assert done == Outcome(None, "before\n", "")
    child = int(os.read(reader, 64))
    os.close(reader)
    try:
        watch = os.pidfd_open(child)
    except ProcessLookupError:
        return
    ended, _, _ = select.select([watch], [], [], DEAD_WITHIN_S)
    os.close(watch)
    assert ended
