"""The session's socket while an engine says more than the daemon reads at once; and where a client finds its daemon."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from kvferry.clients.daemon_socket import choose, find_runtime_dir
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.errors import DaemonLostError, InvalidFieldError, MalformedError
from kvferry.protocol.session_stream import (
    FrameSplitter,
    SessionOpened,
    SharedEvents,
    ShareFollows,
    TablesFollow,
    pack,
    unpack_frame,
)

SOON_S = 2.0
READ_BYTES = 1 << 16


class Ends(NamedTuple):
    """A session's two ends."""

    client: SessionChannel
    daemon: socket.socket


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Return both ends, joined."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0)
    with ours, theirs:
        theirs.settimeout(SOON_S)
        yield Ends(SessionChannel(ours, SessionOpened(session=1, secret=b"", boot_id="0" * 32)), theirs)


def much(message_id: int) -> list[ShareFollows]:
    return [ShareFollows(message_id=message_id, events=SharedEvents(handles=(b"h" * 64,) * 64))] * 200


def read(daemon: socket.socket, count: int) -> list[int]:
    """Return the messages that so many frames are of, as the daemon reads them."""
    splitter = FrameSplitter()
    found: list[int] = []
    while len(found) < count:
        for frame in splitter.feed(daemon.recv(READ_BYTES)):
            message = unpack_frame(frame)
            assert isinstance(message, ShareFollows)
            found.append(message.message_id)
    return found


def test_what_arrives_is_taken_at_once_while_another_thread_says_much(ends: Ends) -> None:
    ends.daemon.sendall(pack(ShareFollows(message_id=7)))
    with ThreadPoolExecutor(1) as other:
        saying = other.submit(ends.client.send, much(1))
        assert ends.daemon.recv(1, socket.MSG_PEEK), "it has begun"
        started = time.monotonic()
        ends.client.receive()
        took_s = time.monotonic() - started
        assert not saying.done()
        assert read(ends.daemon, 200) == [1] * 200
        saying.result(SOON_S)
    assert took_s < SOON_S / 2
    assert ends.client.take(7, ShareFollows)[0].message_id == 7


def test_what_two_threads_say_at_a_time_does_not_mix(ends: Ends) -> None:
    with ThreadPoolExecutor(2) as others:
        saying = [others.submit(ends.client.send, much(number)) for number in (1, 2)]
        assert sorted(read(ends.daemon, 400)) == [1] * 200 + [2] * 200
        for one in saying:
            one.result(SOON_S)


def test_what_did_not_come_is_named(ends: Ends) -> None:
    ends.daemon.sendall(pack(ShareFollows(message_id=7)))
    ends.client.receive()
    with pytest.raises(MalformedError, match="no ShareFollows came with the reply to message 8"):
        ends.client.take(8, ShareFollows)
    with pytest.raises(MalformedError, match="no TablesFollow came with the reply to message 7"):
        ends.client.take(7, TablesFollow)


AS_ANOTHER_USER = """
import os, sys
from kvferry.clients.daemon_socket import choose
from kvferry.protocol.errors import KvferryError
os.setgroups([]), os.setgid(12345), os.setuid(12345)
try: print(choose(sys.argv[1:]))
except KvferryError as error: print(error.code, error.detail)
"""


def make(directory: Path) -> str:
    """Leave a daemon's socket in a directory, and return that."""
    directory.mkdir(parents=True, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.fspath(directory / "control.sock"))
    return os.fspath(directory)


def test_a_daemons_own_directory_comes_before_those_below_it(tmp_path: Path) -> None:
    below = make(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    assert choose([os.fspath(tmp_path)]) == find_runtime_dir(tmp_path) == below
    assert choose([make(tmp_path)]) == os.fspath(tmp_path)


def test_several_are_named_and_none_is_guessed(tmp_path: Path) -> None:
    first, second = make(tmp_path / "a"), make(tmp_path / "b")
    with pytest.raises(InvalidFieldError) as refused:
        find_runtime_dir(tmp_path)
    assert refused.value.field == "runtime_dir"
    assert all(one in refused.value.detail for one in ("2 daemons", first, second))
    assert "--runtime-dir" in refused.value.remedy
    assert find_runtime_dir(second) == second


def test_the_first_place_with_a_daemon_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, nodes = tmp_path / "mine", tmp_path / "nodes"
    places = [os.fspath(mine), os.fspath(nodes)]
    with pytest.raises(DaemonLostError, match=f"no daemon at {mine}, nor at {nodes}: No such file"):
        choose(places)
    theirs = make(nodes / "main")
    mine.mkdir()
    assert choose(places) == theirs
    assert choose(places[::-1]) == theirs
    assert choose([make(mine), *places]) == os.fspath(mine)
    monkeypatch.setenv("KVFERRY_RUNTIME_DIR", os.fspath(nodes))
    assert find_runtime_dir(None) == theirs


@pytest.mark.parametrize("named", [True, False])
def test_a_relative_path_holds_wherever_the_process_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, named: bool
) -> None:
    mine = make(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVFERRY_RUNTIME_DIR", "mine")
    assert find_runtime_dir("mine" if named else None) == mine
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with pytest.raises(DaemonLostError, match="no daemon at mine: the working directory was deleted"):
        find_runtime_dir("mine" if named else None)


@pytest.fixture
def nodes() -> Iterator[Path]:
    """Return a folder that everybody may enter, with those of two daemons, which their own group alone may."""
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
        Path(folder).chmod(0o755)
        for name in ("a", "b"):
            make(Path(folder) / name)
            (Path(folder) / name).chmod(0o750)
        yield Path(folder)


def test_those_that_one_may_enter_come_first(nodes: Path, require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be another user")

    def said() -> str:
        command = [sys.executable, "-c", AS_ANOTHER_USER, os.fspath(nodes)]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()

    assert said().startswith("INVALID_FIELD 2 daemons")
    os.chown(nodes / "b", 12345, 12345)
    os.chown(nodes / "b" / "control.sock", 12345, 12345)
    assert said() == os.fspath(nodes / "b")
    os.chown(nodes / "b" / "control.sock", 0, 0)
    assert said() == f"ACCESS_DENIED {nodes / 'b' / 'control.sock'}: this user may not write to it"
    (nodes / "b" / "control.sock").unlink()
    assert said() == f"ACCESS_DENIED {nodes / 'a'}: Permission denied"
