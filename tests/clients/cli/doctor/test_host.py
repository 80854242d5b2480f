"""A host's files, users, groups and versions; and children that say something, fail, hang, or leave others behind."""

from __future__ import annotations

import os
import select
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients.cli.doctor.host import Outcome, User, at_least, parse_version, run_child, same_release, values
from tests.clients.cli.doctor.fake_host import make_host


def test_what_cannot_be_read_is_empty(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/etc/file": " text \n"})
    assert (host.text("/etc/file"), host.text("/etc/none"), host.text("/etc")) == ("text", "", "")
    assert (host.names("/etc"), host.names("/none")) == (["file"], [])


def test_groups(tmp_path: Path) -> None:
    host = make_host(tmp_path, {"/etc/group": "broken\nroot:x:0:\nnpu:x:1000:a,b\nodd:x:y:\n"})
    assert (host.group_id("npu"), host.group_id("odd"), host.group_id("none")) == (1000, None, None)


@given(mode=st.integers(0, 0o777), owner=st.booleans(), member=st.booleans())
def test_modes_are_read_as_the_kernel_does(mode: int, *, owner: bool, member: bool) -> None:
    """The first class that fits decides: an owner without rights has none, whatever the group may."""
    user = User("worker", 7, frozenset({8} if member else {9}))
    file = os.stat_result((mode, 0, 0, 1, 7 if owner else 70, 8, 0, 0, 0, 0))
    digit = oct(mode | 0o1000)[-3:][0 if owner else 1 if member else 2]
    assert user.may_use(file) is (digit in "67")
    assert User("root", 0, frozenset()).may_use(file)


def test_values() -> None:
    assert values("a = 1\n# b\nVersion=25.5.0\na=2\nempty=\nx=y=z") == {
        "a": "1",
        "Version": "25.5.0",
        "empty": "",
        "x": "y=z",
    }


PATH = {"PATH": os.environ["PATH"]}
DEAD_WITHIN_S = 30.0


def test_what_it_says() -> None:
    done = run_child(["sh", "-c", "echo out; echo $WORD; echo one >&2; echo two >&2; echo >&2; exit 3"],
                     {**PATH, "WORD": "given"}, 30)  # fmt: skip
    assert done == Outcome(3, "out\ngiven\n", "one\ntwo\n\n")
    assert done.last_error == "two"


def test_no_such_command(tmp_path: Path) -> None:
    done = run_child([str(tmp_path / "none")], PATH, 30)
    assert done.status == 127
    assert done.last_error.endswith("No such file or directory")


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


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ("8.5.0.alpha001", "8.5.0"),
        ("8.5.RC1", "8.5.0"),
        ("8.2.RC1", "8.2.RC2"),
        ("8.5.0", "8.10.0"),
        ("25.2.0", "25.5.0"),
        ("5.10.0-136.12.0.86.oe2203sp1.aarch64", "5.14.0"),
    ],
)
def test_order(older: str, newer: str) -> None:
    assert at_least(newer, older)
    assert at_least(older, newer) is False


@pytest.mark.parametrize("text", ["", "unknown", "rc1", "N/A", "7"])
def test_no_version(text: str) -> None:
    assert parse_version(text) is None
    assert at_least(text, "1.0.0") is None


def test_torch_and_torch_npu_are_of_one_release() -> None:
    fits = [("2.13.0+cpu", "2.13.0"), ("2.7.1", "2.7.1.post2"), ("2.13.0", "2.13.1"), ("", "2.13.0")]
    assert [same_release(*one) for one in fits] == [True, True, False, False]
