"""The runtime directory, against another user who was faster; and the sockets that a service manager passes."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.daemon.daemon import EXIT_BAD_INPUT, main
from kvferry.daemon.process import access
from kvferry.daemon.process.access import LOCK_FILE, SOCKET_MODE, RuntimeDirectory, listen_on
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import CONTROL_SOCKET, PEER_SOCKET, SESSION_SOCKET

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a runtime directory that others could write."""
    there = tmp_path / "run"
    there.mkdir()
    there.chmod(0o777)
    return there


def test_a_planted_lock_ends_the_start_for_good(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    precious = path.parent / "precious"
    precious.write_text("precious")
    (path / LOCK_FILE).symlink_to(precious)
    assert main(["--runtime-dir", str(path)]) == EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert all(one in said for one in ("CONFIG [runtime_dir]", str(path / LOCK_FILE), "no regular file", "remove it"))
    assert precious.read_text() == "precious"


def test_a_socket_of_another_user_gives_way(path: Path, require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be two users")
    with contextlib.closing(listen_on(path / CONTROL_SOCKET, 0o777)) as theirs:
        os.chown(path / CONTROL_SOCKET, NOBODY, NOBODY)
        with RuntimeDirectory(path) as directory, directory.listen(CONTROL_SOCKET).socket as ours:
            found = (path / CONTROL_SOCKET).stat()
            assert (found.st_uid, stat.S_IMODE(found.st_mode)) == (os.geteuid(), SOCKET_MODE)
            assert stat.S_IMODE(path.stat().st_mode) == 0o710
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(os.fspath(path / CONTROL_SOCKET))
                ours.accept()[0].close()
                with pytest.raises(BlockingIOError):
                    theirs.accept()


def test_a_cleaner_of_old_files_lets_no_second_daemon_in(path: Path) -> None:
    with RuntimeDirectory(path) as first:
        (path / LOCK_FILE).unlink()
        with pytest.raises(ConfigError, match="another daemon") as refused:
            RuntimeDirectory(path).__enter__()
        assert refused.value.retryable
        with first.listen(CONTROL_SOCKET).socket, socket.socket(socket.AF_UNIX) as client:
            client.connect(os.fspath(path / CONTROL_SOCKET))


def test_a_daemon_that_ends_removes_its_own_sockets_alone(path: Path) -> None:
    with RuntimeDirectory(path):
        (path / CONTROL_SOCKET).unlink()
        theirs = listen_on(path / CONTROL_SOCKET, SOCKET_MODE)
    assert (path / CONTROL_SOCKET).exists()
    assert not (path / SESSION_SOCKET).exists()
    theirs.close()


def test_a_socket_on_which_a_service_manager_listens_stays(path: Path) -> None:
    path.chmod(0o750)
    with listen_on(path / SESSION_SOCKET, SOCKET_MODE):
        with pytest.raises(ConfigError, match="socket unit"):
            RuntimeDirectory(path).__enter__()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(os.fspath(path / SESSION_SOCKET))


def test_a_socket_of_a_daemon_that_is_being_killed_is_left_over(path: Path) -> None:
    """The kernel frees its lock before it closes its sockets."""
    path.chmod(0o750)
    dying = listen_on(path / CONTROL_SOCKET, SOCKET_MODE)

    def die() -> None:
        select.select([dying], [], [], 20)
        dying.close()

    seen = threading.Thread(target=die)
    seen.start()
    with RuntimeDirectory(path) as directory, directory.listen(CONTROL_SOCKET).socket as ours:
        assert ours.getsockname() == os.fspath(path / CONTROL_SOCKET)
    seen.join()


@pytest.mark.parametrize("planted", [False, True])
def test_no_socket_goes_into_another_directory_of_that_name(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, planted: bool
) -> None:
    moved = path.with_name("moved")

    def bind(place: Path, mode: int) -> socket.socket:
        monkeypatch.undo()
        path.rename(moved)  # at the last moment
        path.mkdir()
        if planted:
            listen_on(moved / place.name, mode).close()
        return access.bind(place, mode)

    monkeypatch.setattr(access, "bind", bind)
    with pytest.raises(ConfigError, match="another directory"):
        RuntimeDirectory(path).__enter__()
    assert [*path.iterdir()] == []


def test_what_is_made_is_closed_to_others_whatever_the_umask_is(tmp_path: Path) -> None:
    umask = os.umask(0)
    try:
        with RuntimeDirectory(tmp_path / "a" / "b" / "run"):
            made = [tmp_path / one for one in ("a", "a/b", "a/b/run")]
            made += [made[-1] / one for one in (CONTROL_SOCKET, SESSION_SOCKET, PEER_SOCKET)]
            modes = [stat.S_IMODE(one.stat().st_mode) for one in made]
    finally:
        os.umask(umask)
    assert modes == [0o755, 0o755, 0o710, 0o660, 0o660, 0o600], "an engine is no daemon"


@pytest.mark.parametrize("passed", [(SESSION_SOCKET, CONTROL_SOCKET), (CONTROL_SOCKET,)], ids=["both", "one"])
def test_the_service_managers_sockets_are_taken_and_stay(path: Path, passed: tuple[str, ...]) -> None:
    theirs = [listen_on(path / name, 0o666) for name in passed]
    inodes = {name: (path / name).stat().st_ino for name in passed}
    with RuntimeDirectory(path, [os.dup(one.fileno()) for one in theirs]) as directory:
        for name in (CONTROL_SOCKET, SESSION_SOCKET, PEER_SOCKET):
            with directory.listen(name).socket as one:
                assert one.getsockname() == os.fspath(path / name)
    assert {one.name: one.stat().st_ino for one in path.glob("*.sock")} == inodes, "but for the daemon's own"
    for one in theirs:
        one.close()


@pytest.mark.parametrize(
    ("kind", "name", "listens"),
    [
        (socket.SOCK_STREAM, f"../{CONTROL_SOCKET}", True),
        (socket.SOCK_STREAM, CONTROL_SOCKET, False),
        (socket.SOCK_DGRAM, CONTROL_SOCKET, False),
        (socket.SOCK_STREAM, PEER_SOCKET, True),
        (socket.SOCK_STREAM, "", True),
    ],
    ids=["elsewhere", "not listening", "datagrams", "peer.sock", "tcp"],
)
def test_other_sockets_are_refused(path: Path, kind: int, name: str, *, listens: bool) -> None:
    with socket.socket(socket.AF_UNIX if name else socket.AF_INET, kind) as passed:
        passed.bind(os.fspath((path / name).resolve()) if name else ("127.0.0.1", 0))
        if listens:
            passed.listen()
        directory = RuntimeDirectory(path, [os.dup(passed.fileno())])
        with pytest.raises(ConfigError, match="none of") as refused:
            directory.check_path()
        directory.close()
    assert "ListenStream=" in refused.value.remedy
    assert not refused.value.retryable


@pytest.mark.parametrize(
    ("mode", "then", "holds"),
    [(0o700, 0o700, "precious"), (0o750, 0o710, "precious"), (0o700, 0o700, "daemon.lock"), (0o757, 0o710, "")],
)
def test_a_directory_that_is_there_is_never_opened(path: Path, mode: int, then: int, holds: str) -> None:
    path.chmod(mode)
    if holds:
        (path / holds).touch()
    with RuntimeDirectory(path):
        assert stat.S_IMODE(path.stat().st_mode) == then


@pytest.mark.parametrize(("mode", "holds"), [(0o755, "precious"), (0o1777, "precious"), (0o1777, LOCK_FILE)])
def test_a_shared_directory_is_left_alone(path: Path, mode: int, holds: str) -> None:
    path.chmod(mode)
    (path / holds).touch()
    with pytest.raises(ConfigError, match="a directory of its own") as refused:
        RuntimeDirectory(path).__enter__()
    assert (refused.value.retryable, stat.S_IMODE(path.stat().st_mode)) == (False, mode)
