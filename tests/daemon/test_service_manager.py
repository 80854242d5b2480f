"""What the service manager hears, on a real socket; and where the command serves."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvferry.daemon.daemon import EXIT_BAD_INPUT, main
from kvferry.daemon.process import host
from kvferry.daemon.process.host import ServiceManager
from kvferry.pools.copy_kernel import SWITCH


@pytest.fixture(params=["path", "abstract"])
def channel(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    """Return a bound socket and its address as NOTIFY_SOCKET has it."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as one:
        one.settimeout(10)
        one.bind(address if request.param == "path" else "\0" + address)
        yield one, address if request.param == "path" else "@" + address


def test_ready_and_stopping_are_told(channel: tuple[socket.socket, str]) -> None:
    receiver, address = channel
    manager = ServiceManager({"NOTIFY_SOCKET": address})
    manager.starting("opening npu:0")
    assert receiver.recv(1000) == b"EXTEND_TIMEOUT_USEC=60000000\nSTATUS=opening npu:0"
    manager.ready("serving")
    assert receiver.recv(1000) == b"READY=1\nSTATUS=serving"
    manager.alive()
    assert receiver.recv(1000) == b"WATCHDOG=1"
    manager.stopping()
    assert receiver.recv(1000).startswith(b"STOPPING=1\n")


def test_a_manager_that_reads_nothing_holds_up_nobody(
    channel: tuple[socket.socket, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "SEND_S", 0.01)
    receiver, address = channel
    manager = ServiceManager({"NOTIFY_SOCKET": address})
    while "not notified" not in capsys.readouterr().out:
        manager.alive()  # until its queue is full
    manager.ready("serving")
    assert "READY=1" in capsys.readouterr().out
    while receiver.recv(1000) == b"WATCHDOG=1":
        manager.ready("serving")


def test_a_manager_that_is_gone_or_none_does_not_matter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for environ, said in (({}, False), ({"NOTIFY_SOCKET": str(tmp_path / "none")}, True)):
        ServiceManager(environ).ready("serving")
        assert ("service manager not notified" in "".join(capsys.readouterr())) == said


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, None),
        ({"WATCHDOG_USEC": "2500000"}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": str(os.getpid())}, 2.5),
        ({"WATCHDOG_USEC": "2500000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
    ],
)
def test_the_watchdog_of_another_process_is_none(environ: dict[str, str], watchdog_s: float | None) -> None:
    assert ServiceManager({"NOTIFY_SOCKET": "/nowhere", **environ}).watchdog_s == watchdog_s
    assert ServiceManager(environ).watchdog_s is None, "there is nobody to say it to"


def test_a_misspelt_switch_of_the_copy_kernel_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SWITCH, "pyhton")
    assert main(["--runtime-dir", str(tmp_path)]) == EXIT_BAD_INPUT
    assert f"{SWITCH}=pyhton: must be python, or not set" in capsys.readouterr().err
