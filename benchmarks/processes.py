"""The processes that are measured: our daemon, and the bare echo server."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from kvferry.clients import Client
from kvferry.protocol.errors import DaemonLostError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
LOOK_S = 0.05


@contextlib.contextmanager
def running(command: Sequence[str], **popen: Any) -> Iterator[subprocess.Popen[bytes]]:  # noqa: ANN401  Popen's
    """Run a process; on leaving it is ended."""
    with subprocess.Popen(command, **popen) as process:  # noqa: S603  what is measured
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()


@contextlib.contextmanager
def running_daemon(config: str = "") -> Iterator[Path]:
    """Run a daemon of ours with a TOML configuration, by default an empty one; yield its runtime directory."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        runtime_dir, file, log = (Path(folder) / name for name in ("run", "daemon.toml", "log"))
        file.write_text(config)
        command = [sys.executable, "-P", "-m", "kvferry.daemon"]
        command += ["--config", str(file), "--runtime-dir", str(runtime_dir)]
        with log.open("wb") as out, running(command, stdout=out, stderr=out) as daemon:
            ends_at = time.monotonic() + START_TIMEOUT_S
            while not _serves(runtime_dir):
                if daemon.poll() is not None or time.monotonic() > ends_at:
                    raise RuntimeError(f"the daemon does not serve: {log.read_text()}")
                time.sleep(LOOK_S)
            yield runtime_dir


@contextlib.contextmanager
def two_engines() -> Iterator[tuple[Client, Client]]:
    """Run a daemon; yield the clients of a prefill and of a decode engine."""
    with (
        running_daemon() as runtime_dir,
        Client.connect(runtime_dir, name="prefill") as prefill,
        Client.connect(runtime_dir, name="decode") as decode,
    ):
        yield prefill, decode


@contextlib.contextmanager
def running_echo_server() -> Iterator[str]:
    """Run the bare echo server; yield its address."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        address = f"ipc://{folder}/echo.sock"
        command = [sys.executable, "-P", str(Path(__file__).with_name("echo_server.py")), address]
        with running(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield address


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds; see clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def anonymous_bytes(pid: int | str) -> int:
    """Return the resident memory of a process that it shares with none."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "RssAnon":
            return int(value.split()[0]) << 10
    raise RuntimeError("the kernel does not say RssAnon")


def _serves(runtime_dir: Path) -> bool:
    try:
        Client.connect(runtime_dir, session=False).close()
    except DaemonLostError:
        return False
    return True
