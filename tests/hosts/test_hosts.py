"""Hosts on one machine: they reach each other, a link can be cut and restored, and nothing is ever left behind."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO, Final

import psutil
import pytest

from examples.demo import hosts as module
from examples.demo.hosts import NAMESPACES, NETWORK, Host, check_hosts_possible, hosts, remove_leftovers

ANSWER_S: Final = 20.0
"""TCP sends again after 0.2 s, then after twice as long each time."""
SILENT_S: Final = 0.5

SERVER: Final = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as listener:
    print("listening", flush=True)
    connection, _ = listener.accept()
    while data := connection.recv(1024):
        connection.sendall(data.upper())
"""
CLIENT: Final = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=60) as connection:
    for line in sys.stdin.buffer:
        connection.sendall(line)
        sys.stdout.buffer.write(connection.recv(1024))
        sys.stdout.buffer.flush()
"""


@pytest.fixture(autouse=True)
def _possible(require: Callable[[object, str], None]) -> None:
    """Make sure that there can be namespaces, and none of ours from before."""
    require(os.geteuid() == 0, "root, for network namespaces")
    remove_leftovers()


def namespaces_of(pid: int) -> list[str]:
    """Return those of a process: other runs may have theirs."""
    return sorted(file.name for file in NAMESPACES.glob(f"kvferry-{pid}-*"))


@contextlib.contextmanager
def python_on(host: Host, script: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = host.command([sys.executable, "-c", script, *arguments])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


@contextlib.contextmanager
def conversation(server: Host, client: Host) -> Iterator[Callable[[bytes, float], bytes | None]]:
    """Let a client on one host talk to a server on another: yield what sends a line and waits for the answer."""
    with python_on(server, SERVER, server.address) as listening:
        assert pipe(listening.stdout).readline() == b"listening\n"
        with python_on(client, CLIENT, server.address) as talking:
            poll = select.poll()  # takes any descriptor; select only the first 1024
            poll.register(pipe(talking.stdout), select.POLLIN)

            def said(line: bytes, timeout_s: float = ANSWER_S) -> bytes | None:
                pipe(talking.stdin).write(line)
                pipe(talking.stdin).flush()
                return pipe(talking.stdout).readline() if poll.poll(timeout_s * 1000) else None

            yield said


def test_a_cut_link_stops_them_a_restored_one_lets_them_go_on_and_nothing_is_left() -> None:
    """Nor does it meet a run beside it, which has the same addresses."""
    with hosts(2) as made, hosts(2) as others, conversation(made[0], made[1]) as said:
        assert [host.address for host in made] == [host.address for host in others]
        others[0].cut_link()
        assert said(b"one\n", ANSWER_S) == b"ONE\n"
        made[0].cut_link()
        assert said(b"two\n", SILENT_S) is None
        made[0].restore_link()
        assert said(b"", ANSWER_S) == b"TWO\n"
        routes = subprocess.run(made[0].command(["cat", "/proc/net/route"]), check=True, capture_output=True, text=True)
        _, *rows = (line.split() for line in routes.stdout.splitlines())
        assert [row[1] for row in rows] == [NETWORK.network_address.packed[::-1].hex().upper()], "no way out"
        left = subprocess.Popen(made[0].command(["sleep", "1000"]))
    assert namespaces_of(os.getpid()) == []
    assert left.wait(ANSWER_S) == -signal.SIGKILL


@pytest.mark.full
def test_a_killed_runs_hosts_are_removed_with_what_runs_on_them_and_nobody_elses() -> None:
    killed = """
import subprocess, sys
from examples.demo import hosts as module
from examples.demo.hosts import hosts
with hosts(1) as (host,):
    pause = "print(2, flush=True); import signal; signal.pause()"
    child = subprocess.Popen(host.command([sys.executable, "-c", pause]))
    print("child", child.pid, flush=True)
    input()
"""
    command = [sys.executable, "-c", killed]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = sorted(process.stdout.readline() for _ in range(2))
        child = psutil.Process(int(said[1].split()[1]))
        with hosts(1):
            assert len(namespaces_of(process.pid)) == 2  # it lives
        process.kill()
    with hosts(1):
        assert namespaces_of(process.pid) == []
    child.wait(ANSWER_S)


def test_what_cannot_be_made_is_said_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BRIDGE", "a name that is too long for a link")
    with pytest.raises(OSError, match="cannot make hosts"), hosts(1):
        pass
    assert namespaces_of(os.getpid()) == []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(PermissionError, match="only root can make"):
        check_hosts_possible()
