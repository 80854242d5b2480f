"""Hosts on one machine: they reach each other, a link can be cut and restored, and nothing is ever left behind."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import IO, Final

import psutil
import pytest

from examples.demo import hosts as module
from examples.demo.errors import DemoError
from examples.demo.hosts import MAX_HOSTS, Host, Hosts, check_hosts_possible, remove_leftovers

ANSWER_S: Final = 20.0
"""TCP sends again after 0.2 s, then after twice as long each time."""
SILENT_S: Final = 0.5
PORT: Final = 7000

SERVER: Final = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as listener:
    print("listening", flush=True)
    connection, _ = listener.accept()
    while data := connection.recv(1024):
        connection.sendall(data.upper())
"""
CLIENT: Final = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=60) as connection:
    for line in sys.stdin.buffer:
        connection.sendall(line)
        sys.stdout.buffer.write(connection.recv(1024))
        sys.stdout.buffer.flush()
"""


@pytest.fixture(autouse=True)
def _possible(require: Callable[[object, str], None]) -> None:
    """Make sure that there can be namespaces, and none of ours from before."""
    require(os.geteuid() == 0 and shutil.which("ip"), "root and iproute2, for network namespaces")
    remove_leftovers()


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], check=True, capture_output=True, text=True).stdout
    return [line.split()[0] for line in listed.splitlines()]


def own_namespaces() -> list[str]:
    """Return those of this process: other runs may have theirs."""
    return [name for name in namespaces() if name.startswith(f"kvferry-{os.getpid()}-")]


@contextlib.contextmanager
def python_on(host: Host, script: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = host.command([sys.executable, "-c", script, *arguments])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            process.kill()


class Conversation:
    """A client on one host that talks to a server on another."""

    def __init__(self, server: subprocess.Popen[bytes], client: subprocess.Popen[bytes]) -> None:
        self.server = server
        self.client = client

    def say(self, line: bytes) -> None:
        """Let the client send a line."""
        pipe(self.client.stdin).write(line)
        pipe(self.client.stdin).flush()

    def heard(self, timeout_s: float) -> bytes | None:
        """Return what the client received, if that comes in time."""
        output = pipe(self.client.stdout)
        poll = select.poll()  # takes any descriptor; select only the first 1024
        poll.register(output, select.POLLIN)
        return output.readline() if poll.poll(timeout_s * 1000) else None


def pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


@contextlib.contextmanager
def conversation(server: Host, client: Host) -> Iterator[Conversation]:
    address = (server.address, str(PORT))
    with python_on(server, SERVER, *address) as listening:
        assert pipe(listening.stdout).readline() == b"listening\n"
        with python_on(client, CLIENT, *address) as talking:
            yield Conversation(listening, talking)


def test_two_processes_on_two_hosts_talk_and_nothing_is_left() -> None:
    with Hosts(2) as hosts:
        assert len(own_namespaces()) == 3
        with conversation(hosts[0], hosts[1]) as talk:
            talk.say(b"ferry\n")
            assert talk.heard(ANSWER_S) == b"FERRY\n"
    assert own_namespaces() == []


@pytest.mark.parametrize("cut", [0, 1], ids=["the server's", "the client's"])
def test_a_cut_link_stops_them_and_a_restored_one_lets_them_go_on(cut: int) -> None:
    with Hosts(3) as hosts, conversation(hosts[0], hosts[1]) as talk:
        talk.say(b"one\n")
        assert talk.heard(ANSWER_S) == b"ONE\n"
        hosts[cut].cut_link()
        talk.say(b"two\n")
        assert talk.heard(SILENT_S) is None
        hosts[cut].restore_link()
        assert talk.heard(ANSWER_S) == b"TWO\n"
        hosts[cut].restore_link()
        assert talk.client.poll() is None


def test_a_cut_link_is_one_hosts_alone() -> None:
    with Hosts(3) as hosts, conversation(hosts[0], hosts[1]) as talk:
        hosts[2].cut_link()
        talk.say(b"ferry\n")
        assert talk.heard(ANSWER_S) == b"FERRY\n"


def test_runs_beside_each_other_do_not_meet() -> None:
    with Hosts(2) as ours, Hosts(2) as others:
        assert [host.address for host in ours] == [host.address for host in others]
        with conversation(ours[0], ours[1]) as first, conversation(others[0], others[1]) as second:
            others[0].cut_link()
            first.say(b"ferry\n")
            second.say(b"ferry\n")
            assert first.heard(ANSWER_S) == b"FERRY\n"
            assert second.heard(SILENT_S) is None


def test_a_host_has_a_loopback_of_its_own_and_no_way_out() -> None:
    with Hosts(1) as hosts:
        routes = subprocess.run(hosts[0].command(["ip", "route"]), check=True, capture_output=True, text=True).stdout
        assert [line.split()[0] for line in routes.splitlines()] == [str(module.NETWORK)]
        links = subprocess.run(hosts[0].command(["ip", "link"]), check=True, capture_output=True, text=True).stdout
        assert "lo: <LOOPBACK,UP" in links


def test_leaving_ends_what_runs_on_the_hosts() -> None:
    with Hosts(1) as hosts:
        command = hosts[0].command([sys.executable, "-c", "print(1, flush=True); input()"])
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert pipe(process.stdout).readline() == b"1\n"
    with process:
        assert process.wait(ANSWER_S) == -signal.SIGKILL


def test_a_killed_runs_hosts_are_removed_with_what_runs_on_them_and_nobody_elses() -> None:
    killed = """
import subprocess, sys
from examples.demo.hosts import Hosts
hosts = Hosts(1).__enter__()
pause = "print(2, flush=True); import signal; signal.pause()"
child = subprocess.Popen(hosts[0].command([sys.executable, "-c", pause]))
print(hosts[0].name, child.pid, flush=True)
input()
"""
    command = [sys.executable, "-c", killed]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = sorted(process.stdout.readline() for _ in range(2))
        name, pid = said[1].split()
        child = psutil.Process(int(pid))
        with Hosts(1):
            assert name in namespaces()  # it lives
        process.kill()
    with Hosts(1):
        assert not [one for one in namespaces() if one.startswith(name.removesuffix("1"))]
    child.wait(ANSWER_S)


def test_what_cannot_be_made_is_said_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = Hosts(2)
    subprocess.run(["ip", "netns", "add", hosts[1].name], check=True)
    with pytest.raises(DemoError, match=rf"`ip netns add {hosts[1].name}` failed: .*File exists"):
        hosts.__enter__()
    assert own_namespaces() == []
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(DemoError, match="only root can make"):
        check_hosts_possible()
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    with pytest.raises(DemoError, match="apt-get install iproute2"):
        Hosts(1).__enter__()


@pytest.mark.parametrize("count", [0, MAX_HOSTS + 1])
def test_a_number_of_hosts_that_cannot_be(count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} hosts"):
        Hosts(count)
