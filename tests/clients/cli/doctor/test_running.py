"""A runtime directory with and without a daemon, and who listens: by /proc, a laid-out one and the real one."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path
from typing import Final

import msgspec
import pytest

from kvferry.clients.cli.doctor.host import Host
from kvferry.clients.cli.doctor.ports import Listener, listeners
from kvferry.clients.cli.doctor.running import (
    Running,
    ask_daemon,
    check_daemon,
    check_devices,
    check_directory,
    check_tiers,
    process_behind,
    used_bytes,
)
from kvferry.protocol import VERSION
from kvferry.protocol.session_messages import DeviceStatus, NetworkStatus, StatusReport, TierStatus
from tests import kit
from tests.clients.cli.doctor.fake_host import make_host
from tests.kit.daemons import Daemon

REPORT: Final = StatusReport(
    daemon_version=VERSION, pid=1, uptime_ms=1, draining=False, pools=(), sessions=(), transfers=(), counters={}
)
BROKEN: Final = NetworkStatus(
    session="s", bounce_buffer_bytes=1, bounce_buffers=1, free=0, credits=0, quarantined=1, state="broken"
)


def ask(directory: Path, timeout_s: float = 10.0) -> Running:
    return ask_daemon(Host.this_one(), directory, None, timeout_s)


def that_says(**changes: object) -> Running:
    """Return a daemon whose report has these values."""
    return Running(Path("/run/kvferry"), msgspec.structs.replace(REPORT, **changes), pid=1)


def test_none(tmp_path: Path) -> None:
    running = ask(tmp_path / "none")
    finding = check_daemon(running)
    assert (running.pid, check_directory(running).state) == (None, "warning")
    assert (finding.state, finding.found) == ("warning", "none is running")
    assert (check_devices(running), check_tiers(running), used_bytes(running, "disk")) == ({}, {}, 0)


def test_one(daemon: Daemon) -> None:
    """In a container the daemon calls itself otherwise: the kernel knows better."""
    running = ask(daemon.runtime_dir)
    finding = check_daemon(running)
    assert (running.pid, check_directory(running).state) == (daemon.process.pid, "ok")
    assert (finding.state, finding.fix) == ("ok", "")
    assert f"pid {daemon.process.pid}" in finding.found
    assert process_behind(daemon.runtime_dir / "control.sock", 1, 10.0) == daemon.process.pid
    assert process_behind(daemon.runtime_dir / "none.sock", 7, 10.0) == 7


def test_a_socket_that_was_left_behind(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "control.sock"))
    finding = check_daemon(ask(tmp_path, timeout_s=0.1))
    assert (finding.state, "nobody answers" in finding.found) == ("missing", True)
    assert "it has ended and left its sockets" in finding.found


def test_one_that_stands_still() -> None:
    with kit.daemon() as own, own.stopped():
        finding = check_daemon(ask(own.runtime_dir, timeout_s=0.1))
    assert (finding.state, "systemctl restart" in finding.fix) == ("missing", True)


@pytest.mark.parametrize(
    ("changes", "state", "said"),
    [
        ({}, "ok", "up for 0 s"),
        ({"daemon_version": "0.0.1"}, "warning", "this command is"),
        ({"draining": True}, "warning", "is draining"),
        ({"network": BROKEN}, "missing", "network transport is broken"),
    ],
)
def test_one_that_is_not_well(changes: dict[str, object], state: str, said: str) -> None:
    finding = check_daemon(that_says(**changes))
    assert (finding.state, said in finding.found) == (state, True)


def test_its_devices() -> None:
    devices = tuple(
        DeviceStatus(device=f"npu:{number}", state=state, total_bytes=64 << 30, free_bytes=4 << 30, pool_bytes=0)
        for number, state in enumerate(("ready", "lost: error 507899", "unavailable: no torch_npu"))
    )
    findings = check_devices(that_says(devices=devices))
    assert {name: (one.state, one.found) for name, one in findings.items()} == {
        "device npu:0": ("ok", "ready, 4096 of 65536 MiB free"),
        "device npu:1": ("missing", "lost: error 507899"),
        # That a pool was asked for on it says nothing of what this host is to have.
        "device npu:2": ("warning", "unavailable: no torch_npu"),
    }


def test_its_tiers() -> None:
    states = {"host": "ready", "disk": "full", "remote": "away"}
    running = that_says(
        tiers=tuple(TierStatus(tier=one, state=state, total_bytes=9, used_bytes=7) for one, state in states.items())
    )
    assert {name: (one.state, one.found) for name, one in check_tiers(running).items()} == {
        "tier disk": ("warning", "the daemon says: full"),
        "tier remote": ("warning", "the daemon says: away"),
    }
    assert used_bytes(running, "disk") == 7


def test_where_it_looks(tmp_path: Path) -> None:
    host = make_host(tmp_path, environ={"KVFERRY_RUNTIME_DIR": "/run/environment"})
    for given, configured, place in (
        (None, None, "environment"),
        (None, "/run/configured", "configured"),
        (Path("/run/given"), "/run/configured", "given"),
    ):
        assert ask_daemon(host, given, configured, 0.1).directory == tmp_path / "run" / place


def test_several_of_a_node_are_told_apart_by_the_configurations_name(tmp_path: Path) -> None:
    host = make_host(tmp_path, environ={})
    with contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            folder = tmp_path / "run" / "kvferry" / name
            folder.mkdir(parents=True)
            stack.enter_context(socket.socket(socket.AF_UNIX)).bind(str(folder / "control.sock"))
        running = ask_daemon(host, None, None, 0.1)
        finding = check_directory(running)
        assert (finding.state, "2 daemons" in finding.found, "--runtime-dir" in finding.fix) == ("warning", True, True)
        assert ask_daemon(host, None, None, 0.1, "b").directory == tmp_path / "run" / "kvferry" / "b"
        assert ask_daemon(host, "/run/kvferry/a", None, 0.1, "b").directory == tmp_path / "run" / "kvferry" / "a"


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
ROW = "   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  1000  0 {inode} 1 ffff 100 0 0 10 0\n"
ANY, ANY6 = "00000000:0000", "00000000000000000000000000000000:0000"


def test_laid_out(tmp_path: Path) -> None:
    files = {
        "/proc/net/tcp": HEAD
        + ROW.format(local="0100007F:1E79", remote=ANY, state="0A", inode=500)
        + ROW.format(local="0100007F:1E80", remote="0100007F:9999", state="01", inode=501),
        "/proc/net/tcp6": HEAD
        + ROW.format(local="B80D0120000000000000000001000000:0050", remote=ANY6, state="0A", inode=502)
        + ROW.format(local="0000000000000000FFFF00000200000A:0051", remote=ANY6, state="0A", inode=503),
        "/proc/77/comm": "mysqld\n",
        "/proc/77/fd/.keep": "",
    }  # fmt: skip
    host = make_host(tmp_path, files)
    (tmp_path / "proc/77/fd/9").symlink_to("socket:[500]")
    (tmp_path / "proc/77/fd/8").symlink_to("/dev/null")
    assert listeners(host) == [
        Listener("127.0.0.1", 7801, 77, "mysqld"),
        Listener("2001:db8::1", 80, None),
        Listener("10.0.0.2", 81, None),
    ]


def test_the_real_ones() -> None:
    with socket.socket() as four, socket.socket(socket.AF_INET6) as six:
        four.bind(("127.0.0.1", 0))
        four.listen()
        six.bind(("::1", 0))
        six.listen()
        found = {(one.address, one.port): one.pid for one in listeners(Host.this_one())}
        assert found["127.0.0.1", four.getsockname()[1]] == os.getpid()
        assert found["::1", six.getsockname()[1]] == os.getpid()


def test_addresses_in_each_others_way() -> None:
    own = ("10.0.0.3", "0.0.0.0", "::", "127.0.0.1")  # noqa: S104  addresses to compare with
    assert [Listener(one, 1, None).covers("10.0.0.3") for one in own] == [True, True, True, False]
