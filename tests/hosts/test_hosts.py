"""Hosts on one machine: they reach each other, a link can be cut and restored, and nothing is ever left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Final

import psutil
import pytest

from examples.demo import hosts as module
from examples.demo.hosts import NAMESPACES, NETWORK, Host, check_hosts_possible, hosts, remove_leftovers

ANSWER_S: Final = 20.0
SILENT_S: Final = 0.5
SERVER: Final = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as listener:
    print("listening", flush=True)
    while True:
        listener.accept()[0].close()
"""
CLIENT: Final = "import socket, sys; socket.create_connection((sys.argv[1], 7000), float(sys.argv[2]))"


@pytest.fixture(autouse=True)
def _possible(require: Callable[[object, str], None]) -> None:
    """Make sure that there can be namespaces, and none of ours from before."""
    require(os.geteuid() == 0, "root, for network namespaces")
    remove_leftovers()


def namespaces_of(pid: int) -> list[str]:
    """Return those of a process: other runs may have theirs."""
    return sorted(file.name for file in NAMESPACES.glob(f"kvferry-{pid}-*"))


@contextlib.contextmanager
def reached(server: Host, client: Host) -> Iterator[Callable[[float], bool]]:
    """Let a server listen on one host; yield what says whether another host reaches it within so many seconds."""
    command = server.command([sys.executable, "-c", SERVER, server.address])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listening\n"

        def is_reached(timeout_s: float) -> bool:
            asking = client.command([sys.executable, "-c", CLIENT, server.address, str(timeout_s)])
            return subprocess.run(asking, check=False, capture_output=True).returncode == 0

        try:
            yield is_reached
        finally:
            process.kill()


def test_a_cut_link_stops_them_a_restored_one_lets_them_go_on_and_nothing_is_left() -> None:
    """Nor does it meet a run beside it, which has the same addresses."""
    with hosts(2) as made, hosts(2) as others, reached(made[0], made[1]) as is_reached:
        assert [host.address for host in made] == [host.address for host in others]
        others[0].cut_link()
        assert is_reached(ANSWER_S)
        for cut in made:
            cut.cut_link()
            assert not is_reached(SILENT_S)
            cut.restore_link()
            assert is_reached(ANSWER_S)
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
