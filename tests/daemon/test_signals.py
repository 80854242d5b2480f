"""Signals at every stage of a real daemon: those that ask to end it do, in order; no other takes anything away."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.protocol.errors import DaemonLostError, ShuttingDownError
from tests import kit
from tests.kit.daemons import END_S, START_S, soon

NAMES = ("HUP", "USR1", "USR2", "ALRM", "VTALRM", "PROF", "IO", "PWR", "XCPU", "STKFLT", "RTMIN", "RTMAX")
IGNORED = {f"SIG{name}": getattr(signal, f"SIG{name}") for name in NAMES} | {
    f"SIGRTMIN+{at}": signal.SIGRTMIN + at for at in range(1, signal.SIGRTMAX - signal.SIGRTMIN)
}
SPEC = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
CONFIG = "[logging]\nformat = 'json'\n"


def events(log: Path, name: str) -> list[dict[str, Any]]:
    *lines, _being_written = log.read_text().split("\n")
    told = [json.loads(line) for line in lines if line.startswith("{")]
    return [line for line in told if line["event"] == name]


def ignored(log: Path) -> set[str]:
    return {line["signal"] for line in events(log, "signal ignored")}


def signals_of(status: str, field: str) -> set[int]:
    """Return the signals of a mask in the text of ``/proc/PID/status``."""
    (mask,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(f"{field}:")]
    return {number for number in signal.valid_signals() if mask >> (number - 1) & 1}


def test_signals_before_the_daemon_serves_are_logged_once_it_does(tmp_path: Path) -> None:
    """What the daemon imports takes most of a second: a signal in it must not be its end."""
    log, notify = tmp_path / "log", tmp_path / "notify"
    file = tmp_path / "daemon.toml"
    file.write_text(CONFIG)
    command = [sys.executable, "-P", "-m", "kvferry.clients.cli.main", "daemon", "--config", os.fspath(file)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notifications, log.open("wb") as output:
        notifications.bind(os.fspath(notify))
        notifications.settimeout(START_S)
        process = subprocess.Popen(
            [*command, "--runtime-dir", os.fspath(tmp_path / "run")],
            env={**os.environ, "NOTIFY_SOCKET": os.fspath(notify)},
            stderr=output,
        )
        try:
            status = Path(f"/proc/{process.pid}/status")
            command_line = Path(f"/proc/{process.pid}/cmdline")
            while (  # it has become the daemon: before, it is the command line
                b"kvferry.daemon" not in command_line.read_bytes().split(b"\0")
                or signals_of(status.read_text(), "SigBlk") != set(IGNORED.values())
            ):
                assert process.poll() is None, log.read_text()
            for number in IGNORED.values():
                process.send_signal(number)
            try:
                assert b"READY=1" in notifications.recv(4096), log.read_text()
            except TimeoutError:
                pytest.fail(f"not ready, status {process.poll()}: {log.read_text()}")
            process.send_signal(signal.SIGQUIT)
            assert process.wait(END_S) == 0, log.read_text()
        finally:
            process.kill()
            process.wait(END_S)
    assert ignored(log) == set(IGNORED)
    assert [line["signal"] for line in events(log, "asked to end")] == ["SIGQUIT"]


def told_by(program: str) -> str:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def test_what_becomes_the_daemon_holds_the_same_signals_back() -> None:
    """Until the daemon's own first line does: threads that take no part in that ignore them."""
    status = told_by(
        "import os; from kvferry.clients.cli.main import main\n"
        "os.execv = lambda *_: print(open('/proc/self/status').read())\n"
        "main(['daemon'])"
    )
    assert signals_of(status, "SigBlk") == set(IGNORED.values())
    assert set(IGNORED.values()) <= signals_of(status, "SigIgn")


def test_a_signal_that_a_library_uses_is_left_to_it() -> None:
    """As some that are written in C do: they install handlers that Python knows nothing of."""
    number = signal.SIGRTMIN + 5
    said = told_by(
        "import asyncio, ctypes, signal\n"
        "from kvferry.daemon.process.signals import answered\n"
        "taken = []\n"
        "handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(taken.append)\n"
        f"ctypes.CDLL(None).signal({number}, handler)\n"
        "async def serve():\n"
        "    with answered(asyncio.get_running_loop(), asyncio.Event()):\n"
        f"        signal.raise_signal({number})\n"
        "asyncio.run(serve())\n"
        "print(taken)"
    )
    assert said == f"[{number}]\n"


def test_libraries_of_the_store_process_may_use_real_time_signals_and_it_has_an_end_though_it_hangs() -> None:
    program = (
        "from kvferry.daemon.process.signals import *; import signal; hold_back(); ignore_but_for_libraries()\n"
        "print(open('/proc/self/status').read(), flush=True); end_within(0.01); signal.pause()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=END_S)
    assert done.returncode == -signal.SIGALRM, done.stderr
    real_time = {number for number in IGNORED.values() if number >= signal.SIGRTMIN}
    assert signals_of(done.stdout, "SigBlk") == set(IGNORED.values()) - real_time
    assert set(IGNORED.values()) <= signals_of(done.stdout, "SigIgn")


def test_signals_while_it_drains_do_not_cut_it_short() -> None:
    with kit.daemon(CONFIG) as daemon, Client.connect(daemon.runtime_dir, reconnect=False) as client:
        client.create_pool("pool", SPEC)
        sent, received, waiting = (client.allocate("pool", 2) for _ in range(3))
        ring = client.open_events()
        step = ring.step(0, 1)
        request_id = new_request_id()
        receiving = client.receive("pool", request_id, [pages(received)])
        sending = client.send("pool", request_id, [pages(sent)], steps=[step])  # runs until its step is recorded
        late = client.receive("pool", new_request_id(), [pages(waiting)])
        client.ping()
        daemon.process.terminate()
        with pytest.raises(ShuttingDownError):
            client.wait_finished(late)  # it drains
        for number in (*IGNORED.values(), signal.SIGINT):
            daemon.process.send_signal(number)
        assert soon(lambda: client.ping() >= 0 and ignored(daemon.log) == set(IGNORED))
        for line in events(daemon.log, "signal ignored"):
            assert line["level"] == "warning"
            assert "upgrade" in line["remedy"]
        ring.record(step)
        assert client.wait_finished(receiving).error is None
        client.wait_settled(sending)
        with pytest.raises(DaemonLostError):  # noqa: PT012  some pings are answered before the end
            while True:
                client.ping()
        assert daemon.process.wait(END_S) == 0
        assert [line["signal"] for line in events(daemon.log, "asked to end")] == ["SIGTERM", "SIGINT"]
        assert [one.name for one in daemon.runtime_dir.iterdir()] == ["daemon.lock"]


def test_a_reader_of_the_log_who_is_gone_does_not_matter(tmp_path: Path) -> None:
    """As a terminal that was closed, which sends SIGHUP and takes no lines any more."""
    fifo = tmp_path / "lines"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    prefix = ["sh", "-c", f'exec "$@" 2> {fifo}', "sh"]
    with kit.daemon(CONFIG, prefix=prefix) as daemon, Client.connect(daemon.runtime_dir) as client:
        os.close(reader)
        client.create_pool("pool", SPEC)
        for number in IGNORED.values():
            daemon.process.send_signal(number)
        client.delete_pool("pool")
        assert daemon.end() == 0
