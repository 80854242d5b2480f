"""``kvferry daemon``: read the configuration, take the runtime directory, serve."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import uvloop

from kvferry.daemon.config.load import load_config
from kvferry.daemon.config.schema import Config
from kvferry.daemon.daemon import run_daemon
from kvferry.daemon.process.access import RuntimeDirectory
from kvferry.daemon.process.logs import configure_logs
from kvferry.daemon.process.service_manager import ServiceManager
from kvferry.protocol.errors import ConfigError, KvferryError
from kvferry.protocol.settings import default_runtime_dir

EXIT_BAD_INPUT = 2


def main(arguments: list[str] | None = None) -> int:
    """Run the daemon; return its exit status.

    0 after SIGTERM; 1 where it could not start; 2 where arguments or configuration are wrong, which no restart mends;
    3 after a device was lost.
    """
    parser = argparse.ArgumentParser(prog="kvferry daemon", description="Run the daemon of this node.")
    parser.add_argument("--config", type=Path, help="a TOML file; see systemd/kvferry.toml for every key")
    parser.add_argument(
        "--runtime-dir", type=_folder, metavar="DIR", help="where the sockets go; overrides the configuration"
    )
    options = parser.parse_args(arguments)
    # A torch_npu without CANN would make torch itself fail: devices are asked for when a pool needs one.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    try:
        config = load_config(options.config) if options.config else Config()
        path = options.runtime_dir or Path(config.runtime_dir or default_runtime_dir(os.environ))
        runtime_directory = RuntimeDirectory(path.absolute())
        runtime_directory.check_path()
    except KvferryError as error:
        print(f"kvferry daemon: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    try:
        configure_logs(config.logging)
        with runtime_directory as directory:
            uvloop.run(run_daemon(config, directory, ServiceManager()))
    except KvferryError as error:
        print(f"kvferry daemon: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if isinstance(error, ConfigError) and not error.retryable else 1
    return 0


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty path names no directory")
    return Path(text)
