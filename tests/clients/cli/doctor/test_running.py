"""A runtime directory with and without a daemon."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import msgspec
import pytest

from kvferry.clients.cli.doctor.host import Host
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
from kvferry.protocol.errors import AccessDeniedError
from kvferry.protocol.session_messages import DeviceStatus, NetworkStatus, TierStatus
from tests.clients.cli.doctor.fake_host import make_host
from tests.daemons import DaemonProcess, running_daemon


def ask(directory: Path, timeout_s: float = 10.0) -> Running:
    return ask_daemon(Host.this_one(), directory, None, timeout_s)


def test_none(tmp_path: Path) -> None:
    running = ask(tmp_path / "none")
    assert running.pid is None
    assert check_directory(running).state == "warning"
    finding = check_daemon(running)
    assert (finding.state, finding.found) == ("warning", "none is running")
    assert check_devices(running) == ()


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    finding = check_directory(ask(file))
    assert (finding.state, finding.found) == ("missing", f"{file} is not a directory")


def test_one(daemon: DaemonProcess) -> None:
    running = ask(daemon.runtime_dir)
    assert running.pid == daemon.process.pid
    assert check_directory(running).state == "ok"
    finding = check_daemon(running)
    assert (finding.state, finding.fix) == ("ok", "")
    assert f"pid {daemon.process.pid}" in finding.found


def test_a_socket_that_was_left_behind(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "control.sock"))
    finding = check_daemon(ask(tmp_path, timeout_s=0.1))
    assert finding.state == "missing"
    assert "nobody answers" in finding.found


def test_one_that_stands_still(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as own:
        own.process.send_signal(signal.SIGSTOP)
        try:
            finding = check_daemon(ask(own.runtime_dir, timeout_s=0.1))
        finally:
            own.process.send_signal(signal.SIGCONT)
    assert finding.state == "missing"
    assert "systemctl restart" in finding.fix


def test_one_that_may_not_be_asked(tmp_path: Path) -> None:
    running = Running(tmp_path, error=AccessDeniedError("control.sock: this user may not write to it"))
    assert check_directory(running).state == "warning"
    assert check_daemon(running).state == "unknown"


@pytest.mark.parametrize(
    ("changes", "state", "said"),
    [
        ({"daemon_version": "0.0.1"}, "warning", "this command is"),
        ({"draining": True}, "warning", "is draining"),
        (
            {
                "network": NetworkStatus(
                    session="s",
                    bounce_buffer_bytes=1,
                    bounce_buffers=1,
                    free=0,
                    granted=0,
                    quarantined=1,
                    state="broken",
                )
            },
            "missing",
            "network transport is broken",
        ),
    ],
)
def test_one_that_is_not_well(daemon: DaemonProcess, changes: dict[str, object], state: str, said: str) -> None:
    running = ask(daemon.runtime_dir)
    assert running.report is not None
    ill = msgspec.structs.replace(running, report=msgspec.structs.replace(running.report, **changes))
    finding = check_daemon(ill)
    assert finding.state == state
    assert said in finding.found


def test_its_devices(daemon: DaemonProcess) -> None:
    running = ask(daemon.runtime_dir)
    assert running.report is not None
    devices = tuple(
        DeviceStatus(device=f"npu:{number}", state=state, total_bytes=64 << 30, free_bytes=4 << 30, pool_bytes=0)
        for number, state in enumerate(("ready", "lost: error 507899", "unavailable: no torch_npu"))
    )
    findings = check_devices(
        msgspec.structs.replace(running, report=msgspec.structs.replace(running.report, devices=devices))
    )
    assert [(one.name, one.state) for one in findings] == [
        ("device npu:0", "ok"),
        ("device npu:1", "missing"),
        ("device npu:2", "warning"),  # that a pool was asked for on it says nothing of what this host is to have
    ]
    assert findings[1].found.startswith("lost: error 507899")


def test_its_tiers(daemon: DaemonProcess) -> None:
    running = ask(daemon.runtime_dir)
    assert running.report is not None
    assert check_tiers(running) == ()
    states = {"host": "ready", "disk": "full", "remote": "away"}
    tiers = tuple(TierStatus(tier=one, state=state, total_bytes=9, used_bytes=7) for one, state in states.items())
    ill = msgspec.structs.replace(running, report=msgspec.structs.replace(running.report, tiers=tiers))
    assert [(one.name, one.state, one.found) for one in check_tiers(ill)] == [
        ("tier disk", "warning", "the daemon says: full"),
        ("tier remote", "warning", "the daemon says: away"),
    ]
    assert used_bytes(ill, "disk") == 7
    assert (used_bytes(Running(daemon.runtime_dir), "disk"), check_tiers(Running(daemon.runtime_dir))) == (0, ())


def test_where_it_looks(tmp_path: Path) -> None:
    host = make_host(tmp_path, environ={"KVFERRY_RUNTIME_DIR": "/run/elsewhere"})
    assert ask_daemon(host, None, None, 0.1).directory == tmp_path / "run/elsewhere"
    assert ask_daemon(host, None, "/run/configured", 0.1).directory == tmp_path / "run/configured"
    assert ask_daemon(host, Path("/run/given"), "/run/configured", 0.1).directory == tmp_path / "run/given"


def test_the_process_is_named_as_seen_from_here(daemon: DaemonProcess) -> None:
    """In a container the daemon calls itself otherwise: the kernel knows better."""
    assert process_behind(daemon.runtime_dir / "control.sock", 1, 10.0) == daemon.process.pid
    assert process_behind(daemon.runtime_dir / "none.sock", 7, 10.0) == 7
