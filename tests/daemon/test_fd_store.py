"""Where descriptors are kept: with a real holder process, and with systemd by what it is sent."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.daemon.process import holder
from kvferry.daemon.process.access import HOLDER_SOCKET
from kvferry.daemon.process.fd_store import FdStore, FdStoreError, HolderStore, NoStore, SystemdStore, open_store
from kvferry.daemon.process.holder import Holder
from kvferry.daemon.process.inherited import Inherited
from tests.kit import faults
from tests.kit.daemons import soon

HERE = "here.sock"


def memory(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


def contents(found: dict[str, int]) -> dict[str, bytes]:
    """Return what each descriptor holds, and close them."""
    held = {}
    for name, fd in found.items():
        held[name] = os.pread(fd, 100, 0)
        os.close(fd)
    return held


def put(store: FdStore, **named: bytes) -> None:
    fds = {name: memory(content) for name, content in named.items()}
    try:
        store.put(fds)
    finally:
        for fd in fds.values():
            os.close(fd)


@contextlib.contextmanager
def held_with(directory: Path) -> Iterator[HolderStore]:
    """Keep descriptors with the holder of this directory, and leave it to the next one."""
    store = open_store(directory, Inherited(), {}, keep=True)
    assert isinstance(store, HolderStore)
    try:
        yield store
    finally:
        store.leave(60)


def left(directory: Path) -> dict[str, bytes]:
    with held_with(directory) as store:
        return contents(store.take())


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Return a runtime directory whose holder, if any, ends with the test."""
    yield tmp_path
    open_store(tmp_path, Inherited(), {})


def test_the_next_daemon_gets_what_was_kept(directory: Path) -> None:
    with held_with(directory) as first:
        assert contents(first.take()) == {}
        put(first, a=b"1", b=b"2", c=b"3")
        first.remove(["b", "unknown"])
        with pytest.raises(FdStoreError, match="taken"):
            put(first, a=b"2")
        assert stat.S_IMODE((directory / HOLDER_SOCKET).stat().st_mode) == 0o600
        assert os.getsid(first.pid) != os.getsid(0), "a signal to the daemon's group does not reach it"
    with held_with(directory) as second:
        assert second.pid == first.pid
        assert contents(second.take()) == {"a": b"1", "c": b"3"}
        with faults.ending(second.pid):
            second.leave(None)
    assert left(directory) == {}


def test_another_user_is_not_served(require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be another user")
    code = (
        "import os, socket, sys\nos.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n"
        "try: s.send(b'LIST'); print(s.recv(100))\nexcept OSError: print(b'')\n"
    )
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
        directory = Path(folder)
        with held_with(directory) as store:
            put(store, a=b"1")
        directory.chmod(0o755)
        (directory / HOLDER_SOCKET).chmod(0o777)  # the file's mode alone would keep it out
        command = [sys.executable, "-c", code, str(directory / HOLDER_SOCKET)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.stdout == "b''\n", done.stderr
        with held_with(directory) as store:
            assert contents(store.take()) == {"a": b"1"}, "it serves on"
            store.leave(None)


def test_one_daemon_at_a_time(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, bytes]] = []
    with held_with(directory) as first:
        put(first, a=b"1")
        with monkeypatch.context() as quick:
            quick.setattr("kvferry.daemon.process.fd_store.ANSWER_S", 0.2)
            assert isinstance(open_store(directory, Inherited(), {}, keep=True), NoStore), "it goes on without"
            its = open_store(directory, Inherited(), environ(directory))
            assert isinstance(its, SystemdStore), "which needs no holder"
        second = threading.Thread(target=lambda: found.append(left(directory)))
        second.start()
    second.join()
    assert found == [{"a": b"1"}], "who waits gets it when the other one is gone"


def test_a_holder_that_stands_still_is_not_waited_for(directory: Path) -> None:
    with held_with(directory) as store:
        with faults.stopped(store.pid):
            assert store.silent_s() == 0, "it owes no answer"
            put(store, a=b"1", b=b"2")
            store.remove(["a"])
            put(store, a=b"3")
            assert store.silent_s() > 0
        assert soon(lambda: not store.silent_s()), "it has answered all that it was told"
    assert left(directory) == {"a": b"3", "b": b"2"}


def test_what_a_killed_daemon_has_sent_counts(directory: Path) -> None:
    with held_with(directory) as store:
        pid = store.pid
    fds = [memory(content) for content in (b"1", b"2", b"3")]
    with faults.connected(directory / HOLDER_SOCKET, socket.SOCK_SEQPACKET) as channel:
        assert asked(channel, b"LIST") == b"OK"
        socket.send_fds(channel, [b"PUT a"], fds[:1])
        assert select.select([channel], [], [], 20)[0], "its answer is never read"
        with faults.stopped(pid):
            for name, fd in ((b"PUT b", fds[1]), (b"PUT c", fds[2])):
                socket.send_fds(channel, [name], [fd])
            channel.close()
    for fd in fds:
        os.close(fd)
    assert left(directory) == {"a": b"1", "b": b"2", "c": b"3"}


def test_what_its_full_socket_does_not_take_is_refused_or_waits(directory: Path) -> None:
    kept: list[str] = []

    def fill(store: HolderStore) -> None:
        for number in range(holder.MAX_DESCRIPTORS):
            put(store, **{str(number): b"1"})
            kept.append(str(number))

    with held_with(directory) as store:
        with faults.stopped(store.pid), pytest.raises(FdStoreError, match="stands still"):
            fill(store)
        with faults.stopped(store.pid):
            store.remove(kept[1:])
        assert soon(lambda: not store.silent_s()), "it has answered all that it was told"
    assert set(left(directory)) == {"0"}


def test_a_holder_that_is_killed_is_missed(directory: Path) -> None:
    with held_with(directory) as store:
        put(store, a=b"1")
        faults.kill(store.pid)
        with pytest.raises(FdStoreError):
            put(store, b=b"2")
        store.remove(["a"])
    assert left(directory) == {}


@contextlib.contextmanager
def held_here(tmp_path: Path, hold_s: float) -> Iterator[tuple[Path, threading.Thread]]:
    path = tmp_path / HERE
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(os.fspath(path))
        listener.listen()
        thread = threading.Thread(target=Holder(listener, hold_s).serve)
        thread.start()
        yield path, thread
        thread.join()


def asked(channel: socket.socket, request: bytes, *fds: int) -> bytes:
    socket.send_fds(channel, [request], fds)
    return channel.recv(holder.MAX_PACKET_BYTES)


def test_it_ends_when_nobody_comes_and_refuses_nonsense_and_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_here(tmp_path, 0.05) as (_, thread):
        thread.join()
    (tmp_path / HERE).unlink()
    monkeypatch.setattr(holder, "MAX_DESCRIPTORS", 2)
    fds = [memory(b"1"), memory(b"2")]
    with held_here(tmp_path, 600.0) as (path, _), faults.connected(path, socket.SOCK_SEQPACKET) as channel:
        for said in (b"PUT a", b"PUT", b"LEAVE", b"LEAVE -1", b"LEAVE x", b"\xff\xfe", b"what", b"p" * 999):
            assert asked(channel, said).startswith(b"NO ")
        assert asked(channel, b"PUT a", *fds) == b"NO it needs one descriptor"
        assert [asked(channel, b"PUT %d" % one, fds[0])[:2] for one in range(3)] == [b"OK", b"OK", b"NO"]
        assert asked(channel, b"LEAVE 0") == b"OK"
    for fd in fds:
        os.close(fd)


# -- systemd


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.bind(os.fspath(tmp_path / "notify"))
        one.settimeout(20)
        yield one


def environ(tmp_path: Path, most: int = 10) -> dict[str, str]:
    return {"NOTIFY_SOCKET": os.fspath(tmp_path / "notify"), "FDSTORE": str(most)}


def heard(manager: socket.socket) -> tuple[str, list[int]]:
    data, fds, _, _ = socket.recv_fds(manager, 1000, 4)
    return data.decode(), fds


def test_systemd_stores_before_the_barrier(tmp_path: Path, manager: socket.socket) -> None:
    store = open_store(tmp_path, Inherited(), environ(tmp_path))
    assert isinstance(store, SystemdStore)
    done = threading.Event()

    def keep() -> None:
        put(store, a=b"1", b=b"2")
        done.set()

    thread = threading.Thread(target=keep)
    thread.start()
    for name, content in (("a", b"1"), ("b", b"2")):
        said, (fd,) = heard(manager)
        assert said == f"FDSTORE=1\nFDNAME={name}"
        assert contents({name: fd}) == {name: content}
    said, (barrier,) = heard(manager)
    assert said == "BARRIER=1"
    assert not done.is_set(), "it returns when systemd has closed the barrier's descriptor"
    os.close(barrier)
    thread.join()
    store.remove(["a"])
    assert heard(manager) == ("FDSTOREREMOVE=1\nFDNAME=a", [])


def test_systemd_that_stands_still_is_waited_for_once(
    tmp_path: Path, manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SystemdStore(Inherited(), environ(tmp_path))
    monkeypatch.setattr("kvferry.daemon.process.fd_store.ANSWER_S", 0.05)
    with pytest.raises(FdStoreError, match="has not answered within"):
        put(store, a=b"1")
    with pytest.raises(FdStoreError, match="still not answered"):
        put(store, b=b"2")
    for fd in [fd for _ in range(2) for fd in heard(manager)[1]]:  # the descriptor of a, and the barrier's
        os.close(fd)
    with pytest.raises(FdStoreError, match="has not answered within"):
        put(store, b=b"2")


def test_systemd_is_not_sent_more_than_it_takes(tmp_path: Path, manager: socket.socket) -> None:
    store = SystemdStore(Inherited(), environ(tmp_path, 1))
    with pytest.raises(FdStoreError, match="FileDescriptorStoreMax"):
        put(store, a=b"1", b=b"2")
    manager.close()
    with pytest.raises(FdStoreError, match="not reached"):
        put(store, a=b"1")
    store.remove(["a"])


def test_what_systemd_passes_is_taken_by_name(tmp_path: Path, manager: socket.socket) -> None:
    twice = [memory(b"2"), memory(b"3")]
    inherited = Inherited({"kvferry.a": [memory(b"1")], "kvferry.twice": twice, "other": [memory(b"4")]})
    store = SystemdStore(inherited, environ(tmp_path))
    assert contents(store.take()) == {"kvferry.a": b"1"}
    assert heard(manager)[0] == "FDSTOREREMOVE=1\nFDNAME=kvferry.twice"
    assert inherited.names == ("other",)
    inherited.close_rest()


def test_systemd_comes_before_a_holder(directory: Path) -> None:
    """It would end the holder with the unit; one that is there, of a daemon by hand, is ended, and its memory free."""
    with held_with(directory) as store:
        put(store, a=b"1")
    with faults.ending(store.pid):
        assert isinstance(open_store(directory, Inherited(), environ(directory), keep=True), SystemdStore)


@pytest.mark.parametrize("variables", [{}, {"FDSTORE": "0"}, {"FDSTORE": "many"}])
def test_nobody_keeps_anything(tmp_path: Path, variables: dict[str, str]) -> None:
    store = open_store(tmp_path, Inherited(), {"NOTIFY_SOCKET": "/nowhere", **variables})
    assert (store.where, store.take()) == ("", {})
    with pytest.raises(FdStoreError):
        put(store, a=b"1")
