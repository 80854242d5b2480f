"""The processes that are measured: our daemon, and the bare echo server."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0


@contextlib.contextmanager
def running_daemon(config: str = "") -> Iterator[Path]:
    """Run a daemon of ours with a TOML configuration, by default an empty one; yield its runtime directory."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder, _ready_socket(folder) as ready:
        runtime_dir = Path(folder) / "run"
        environment = os.environ | {"NOTIFY_SOCKET": str(ready.getsockname())}
        file = Path(folder) / "daemon.toml"
        file.write_text(config)
        command = [sys.executable, "-P", "-m", "kvferry.daemon"]
        command += ["--config", str(file), "--runtime-dir", str(runtime_dir)]
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)  # noqa: S603  our own daemon
        with _ended_with_us(process):
            try:
                state = ready.recv(4096)
            except TimeoutError as late:
                raise RuntimeError(f"the daemon does not serve: {(Path(folder) / 'log').read_text()}") from late
            assert state.startswith(b"READY=1"), state
            yield runtime_dir


@contextlib.contextmanager
def running_echo_server() -> Iterator[str]:
    """Run the bare echo server; yield its address."""
    with tempfile.TemporaryDirectory(prefix="kvferry-bench-") as folder:
        address = f"ipc://{folder}/echo.sock"
        command = [sys.executable, "-P", str(Path(__file__).with_name("echo_server.py")), address]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)  # noqa: S603  our own script
        with _ended_with_us(process):
            assert process.stdout is not None
            said = process.stdout.readline()
            assert said == b"ready\n", said
            yield address


@contextlib.contextmanager
def _ready_socket(folder: str) -> Iterator[socket.socket]:
    """Listen where the daemon reports that it serves, as a service manager does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(f"{folder}/notify.sock")
        channel.settimeout(START_TIMEOUT_S)
        yield channel


@contextlib.contextmanager
def _ended_with_us(process: subprocess.Popen[bytes]) -> Iterator[None]:
    with process:
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
