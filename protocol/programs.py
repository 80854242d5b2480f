"""The arguments of the programs that ``kvferry`` becomes: the daemon, and the keeper of its memory on NPUs.

They are here, since the programs read them, and the command completes and documents them.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_daemon(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvferry daemon``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file; systemd/kvferry.toml shows every key")
    parser.add_argument(
        "--runtime-dir", type=_folder, metavar="DIR", help="where the sockets go; overrides the configuration"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        help="let pools and sessions outlive the daemon: small processes hold their memory, one for the host's and "
        "one for NPUs'; under systemd the units do that without it",
    )


def add_keeper(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of ``kvferry keeper``."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="the daemon's TOML file")
    parser.add_argument("--runtime-dir", type=_folder, metavar="DIR", help="the daemon's; overrides the configuration")


def _folder(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty path names no directory")
    return Path(text)
