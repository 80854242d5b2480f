"""Descriptors that a daemon is sent and whose closing takes as long as their sender likes: nobody waits for it."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Final

import pytest

from kvferry.clients import Client
from kvferry.daemon.process.access import pass_descriptors
from kvferry.daemon.process.closer import Closer, is_memory
from kvferry.daemon.process.descriptors import Descriptors
from kvferry.protocol.session_stream import SessionOpen, pack
from kvferry.protocol.settings import CONTROL_SOCKET, METRICS_SOCKET, SESSION_SOCKET
from tests.kit.daemons import Daemon
from tests.kit.faults import stopped

LINGER_S: Final = 600
SOON_S: Final = 20.0
TENANT: Final = 4242
OPENING: Final = pack(SessionOpen(protocol_min=4, protocol_max=4, name="evil"))


@contextlib.contextmanager
def lingering() -> Iterator[int]:
    """Give the descriptor of a connection whose last close waits until this ends; the caller closes it."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        reader.connect(server.getsockname())
        writer, _ = server.accept()
        writer.setblocking(False)  # noqa: FBT003  socket's own signature
        with contextlib.suppress(BlockingIOError):
            while True:
                writer.send(bytes(1 << 16))
        writer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
        yield writer.detach()
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets what lingers


def pass_one(daemon: Daemon, channel: socket.socket, fds: list[int], flags: int = 0) -> bool:
    """Send descriptors, of which the daemon then has the only copies; return whether the kernel let them through."""
    with stopped(daemon.process.pid):  # it reads them once they are closed here
        try:
            channel.sendmsg([bytes(1)], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))], flags)
        except PermissionError:
            with socket.socket(fileno=fds[0]) as one:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return False
        os.close(fds[0])
        return True


def check_answers(daemon: Daemon) -> None:
    """Check that the loop goes on: whoever is new is served, too."""
    with Client.connect(daemon.runtime_dir, timeout_s=SOON_S) as client:
        client.ping()


@pytest.mark.parametrize("copies", [1, 2, 200])
@pytest.mark.parametrize("flags", [0, socket.MSG_OOB])
def test_a_session_that_sends_what_lingers_is_ended_and_holds_up_nobody(
    daemon: Daemon, copies: int, flags: int
) -> None:
    with lingering() as fd, socket.socket(socket.AF_UNIX) as channel:
        channel.settimeout(SOON_S)
        channel.connect(os.fspath(daemon.runtime_dir / SESSION_SOCKET))
        channel.send(OPENING)
        assert b"OPENED" in channel.recv(4096)
        assert pass_one(daemon, channel, [fd] * copies, flags)
        check_answers(daemon)
        with contextlib.suppress(ConnectionResetError):  # it was not read to its end
            assert not channel.recv(4096)
        check_answers(daemon)


@pytest.mark.parametrize("where", [CONTROL_SOCKET, METRICS_SOCKET, SESSION_SOCKET])
def test_who_has_no_session_can_send_no_descriptor(
    daemon: Daemon, where: str, require: Callable[[object, str], None]
) -> None:
    require(passes_descriptors_or_not(), "Linux 6.16: the socket option SO_PASSRIGHTS")
    with lingering() as fd, socket.socket(socket.AF_UNIX) as channel:
        channel.connect(os.fspath(daemon.runtime_dir / where))
        assert not pass_one(daemon, channel, [fd])
        check_answers(daemon)


def passes_descriptors_or_not() -> bool:
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket() as one:
        pass_descriptors(ours, allowed=False)
        try:
            socket.send_fds(theirs, [bytes(1)], [one.fileno()])
        except PermissionError:
            return True
    return False


def test_what_waits_to_be_closed_is_its_tenants_and_has_one_thread() -> None:
    threads: list[Callable[[], None]] = []
    descriptors = Descriptors(4096, lambda: 0)
    closer = Closer(descriptors, threads.append)
    sent = [os.open(os.devnull, os.O_RDONLY) for _ in range(3)]
    closer.close(sent[:2], TENANT)
    closer.close(sent[2:], TENANT)
    assert len(threads) == 1
    assert descriptors.promised(TENANT) == len(sent)
    closer.close([os.open(os.devnull, os.O_RDONLY)], TENANT + 1)
    assert len(threads) == 2, "another tenant waits for nobody"
    for one in threads:
        one()
    assert not descriptors.promised()
    for fd in sent:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


def test_where_there_is_no_thread_the_next_one_closes_all() -> None:
    threads: list[Callable[[], None]] = []
    tries = iter([False, True])

    def begin(call: Callable[[], None]) -> None:
        if not next(tries):
            raise RuntimeError("can't start new thread")
        threads.append(call)

    descriptors = Descriptors(4096, lambda: 0)
    closer = Closer(descriptors, begin)
    for _ in range(2):
        closer.close([os.open(os.devnull, os.O_RDONLY)], TENANT)
    [one] = threads
    one()
    assert not descriptors.promised()


def test_a_connection_is_closed_by_its_thread_only_if_something_in_it_is_unread() -> None:
    threads: list[Callable[[], None]] = []
    closer = Closer(Descriptors(4096, lambda: 0), threads.append)
    for said in (b"", b"unread"):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.send(said)
            closer.hang_up(ours, TENANT)
            with pytest.raises(BrokenPipeError):
                theirs.send(b"too late")
            assert (ours.fileno() < 0) == (not said)
    [one] = threads
    one()


def test_only_memory_waits_for_nobody() -> None:
    with socket.socket() as connection:
        assert not is_memory(connection.fileno())
    memory = os.memfd_create("memory")
    assert is_memory(memory)
    os.close(memory)
