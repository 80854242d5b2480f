"""The runtime directory, against another user who was faster; and what a service manager passes at start."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvferry.daemon.daemon import EXIT_BAD_INPUT, main
from kvferry.daemon.process import access
from kvferry.daemon.process.access import LOCK_FILE, SOCKET_MODE, SOCKETS, RuntimeDirectory, folder_of_others, listen_on
from kvferry.daemon.process.inherited import Inherited
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.settings import CONTROL_SOCKET, PEER_SOCKET, SESSION_SOCKET
from tests.kit.faults import connected

NOBODY = 65534


@pytest.fixture
def path(tmp_path: Path) -> Path:
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
            with connected(path / CONTROL_SOCKET):
                ours.accept()[0].close()
                with pytest.raises(BlockingIOError):
                    theirs.accept()


def test_a_cleaner_of_old_files_lets_no_second_daemon_in(path: Path) -> None:
    with RuntimeDirectory(path) as first:
        (path / LOCK_FILE).unlink()
        with pytest.raises(ConfigError, match="another daemon") as refused:
            RuntimeDirectory(path).__enter__()
        assert refused.value.retryable
        with first.listen(CONTROL_SOCKET).socket:
            connected(path / CONTROL_SOCKET).close()


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
        connected(path / SESSION_SOCKET).close()


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
    with RuntimeDirectory(path, Inherited({SOCKETS: [os.dup(one.fileno()) for one in theirs]})) as directory:
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
        directory = RuntimeDirectory(path, Inherited({SOCKETS: [os.dup(passed.fileno())]}))
        with pytest.raises(ConfigError, match="none of") as refused:
            directory.check_path()
        directory.close()
    assert "ListenStream=" in refused.value.remedy
    assert not refused.value.retryable


@pytest.mark.parametrize(
    ("mode", "holds", "then"),
    [
        (0o700, "precious", 0o700),
        (0o750, "precious", 0o710),
        (0o700, LOCK_FILE, 0o700),
        (0o757, "", 0o710),
        (0o755, "precious", None),
        (0o1777, "precious", None),
        (0o1777, LOCK_FILE, None),
    ],
)
def test_a_directory_that_is_there_is_never_opened_and_a_shared_one_left_alone(
    path: Path, mode: int, holds: str, then: int | None
) -> None:
    path.chmod(mode)
    if holds:
        (path / holds).touch()
    if then is not None:
        with RuntimeDirectory(path):
            assert stat.S_IMODE(path.stat().st_mode) == then
        return
    with pytest.raises(ConfigError, match="a directory of its own") as refused:
        RuntimeDirectory(path).__enter__()
    assert (refused.value.retryable, stat.S_IMODE(path.stat().st_mode)) == (False, mode)


# -- what a service manager passes, as systemd passes it: to a process of its own, from descriptor 3 on

PROGRAM = """
import json, os, sys
from kvferry.daemon.process.inherited import VARIABLES, take_inherited

def is_open(fd):
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True

passed = [fd for fd in (3, 4, 5) if is_open(fd)]
os.environ["LISTEN_PID"] = os.environ["LISTEN_PID"].replace("OWN", str(os.getpid()))
inherited = take_inherited()
said = {"taken": inherited.take(sys.argv[1]), "left": inherited.names}
said["inheritable"] = [fd for fd in passed if os.get_inheritable(fd)] if said["taken"] else []
inherited.close_rest()
said["open"] = [fd for fd in passed if is_open(fd)]
said["variables"] = [name for name in VARIABLES if name in os.environ]
print(json.dumps(said))
"""
# Becomes the program with the descriptors 3, 4 and 5 open, and inheritable.
START = "import os, sys\nfor fd in (3, 4, 5): os.dup2(1, fd)\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
THREE = "control:session:control"


@pytest.mark.parametrize(
    ("pid", "count", "names", "taken", "left", "stays_open"),
    [
        ("OWN", "3", THREE, [3, 5], ["session"], [3, 5]),
        ("OWN", "3", "control", [3], ["unknown"], [3]),  # what has no name is closed too
        ("OWN", "60", ":".join(["control"] * 60), [3, 4, 5], [], [3, 4, 5]),  # more than are open
        ("OWN", "-1", "control", [], [], [3, 4, 5]),
        ("OWN", "9" * 5000, "control", [], [], [3, 4, 5]),
        ("1", "3", THREE, [], [], [3, 4, 5]),  # another process was meant to have them
    ],
    ids=["three", "no name", "sixty", "less than none", "no number", "another's"],
)
def test_each_is_taken_by_its_name_and_the_others_are_closed(
    pid: str, count: str, names: str, taken: list[int], left: list[str], stays_open: list[int]
) -> None:
    passed = {"LISTEN_PID": pid, "LISTEN_FDS": count, "LISTEN_FDNAMES": names}
    command = [sys.executable, "-c", START, "-P", "-c", PROGRAM, "control"]
    done = subprocess.run(command, env={**os.environ, **passed}, capture_output=True, text=True, check=True, timeout=60)
    said = json.loads(done.stdout.splitlines()[-1])
    assert said == {"taken": taken, "left": left, "inheritable": [], "open": stays_open, "variables": []}


@pytest.mark.parametrize(
    ("mode", "is_there", "found"),
    [
        (0o755, False, False),
        (0o775, True, True),
        (0o1777, True, False),
        (0o1777, False, True),
    ],
    ids=["its own", "of a group", "in a shared folder", "not there in a shared folder"],
)
def test_a_folder_in_which_others_make_files_is_found(
    tmp_path: Path, mode: int, *, is_there: bool, found: bool
) -> None:
    folder, link = tmp_path / "folder", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    folder.chmod(mode)
    if is_there:
        (folder / "socket").touch()
    for path in (folder / "socket", link / "socket"):
        assert (folder_of_others(path) is not None) is found


def test_a_file_of_another_user_in_a_shared_folder_is_not_believed(
    tmp_path: Path, require: Callable[[object, str], None]
) -> None:
    require(os.geteuid() == 0, "root, who gives files away")
    tmp_path.chmod(0o1777)
    file = tmp_path / "socket"
    file.touch()
    assert folder_of_others(file) is None
    os.chown(file, 65533, 65533)
    assert folder_of_others(file) == tmp_path
    folder = tmp_path / "folder"
    folder.mkdir()
    os.chown(folder, 65533, 65533)
    assert folder_of_others(folder / "missing" / "socket") == tmp_path
