"""``kvferry systemd``: the units for this installation, where systemd looks for them.

The package has them for a daemon in /usr/bin; one that pip installed is elsewhere, so its commands are written anew.
Everything is a file that an operator can read, and nothing is started.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from kvferry.clients.cli.console import WORKED
from kvferry.protocol.errors import AccessDeniedError, ConfigError
from kvferry.protocol.printable import json_line

SHARED: Final = "share/kvferry/systemd"
"""Below the prefix of an installed package; a checkout has them in ``systemd``."""

UNITS: Final = "etc/systemd/system"
PLACES: Final = {
    "kvferry@.service": UNITS,
    "kvferry@.socket": UNITS,
    "kvferry-failed@.target": UNITS,
    "kvferry-keeper@.service": UNITS,
    "sysusers.d/kvferry.conf": "etc",
    "tmpfiles.d/kvferry.conf": "etc",
}
SINCE_254: Final = "254.conf"
DROP_INS: Final = f"{UNITS}/kvferry@.service.d"
HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108  only compared as names
"""What the unit hides from the daemon (ProtectHome=, PrivateTmp=)."""

NEXT: Final = """\
Then, with NAME for your configuration:
  systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload
  usermod -aG kvferry USER                    # for the user of each engine
  test -e /etc/kvferry/NAME.toml || install -D -m 0644 {example} /etc/kvferry/NAME.toml
  kvferry doctor --config /etc/kvferry/NAME.toml
  systemctl enable --now kvferry@NAME.socket kvferry@NAME.service    # after an upgrade: systemctl restart kvferry@NAME
Drop-ins for other hosts and for NPUs, hosts.conf and npu.conf, and kvferry.nft for nftables, are in {folder}."""


class UnitFile(NamedTuple):
    """One file to be installed, and its text."""

    path: Path
    text: str


def add_systemd(command: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    command.add_argument("--install", action="store_true", help="write the files; without it they are only named")
    command.add_argument("--json", action="store_true", help="for programs")
    command.add_argument("--root", type=Path, default=Path("/"), metavar="DIR", help="of an image, in place of /")


def systemd(options: argparse.Namespace) -> int:
    """Write the units, or say which files it would write, and what to do then.

    Raises:
        AccessDeniedError: a file cannot be written.
        ConfigError: the package's files are missing, or the units would hide this installation from the daemon.
    """
    folder = find_units()
    command = command_of_daemon()
    hidden = next((one for one in HIDDEN if Path(command).is_relative_to(one)), None)
    if hidden is not None:
        raise ConfigError(
            f"the units hide {hidden} from the daemon, and {command} is there",
            remedy="install kvferry in an environment elsewhere, /opt/kvferry say",
        )
    files = list(unit_files(folder, command, systemd_version()))
    for file in files:
        target = options.root / file.path
        if options.install:
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(file.text)
            except OSError as cause:
                raise AccessDeniedError(f"{target}: {cause.strerror}", remedy="run it as root") from cause
        if not options.json:
            print(f"{'wrote' if options.install else 'would write'} {target}")
    if options.json:
        print(json_line({"files": [str(options.root / one.path) for one in files], "written": options.install}))
        return WORKED
    print(NEXT.format(example=folder / "kvferry.toml", folder=folder))
    return WORKED


def find_units() -> Path:
    """Return the folder of this installation's unit files.

    Raises:
        ConfigError: there is none.
    """
    for folder in (Path(__file__).resolve().parents[2] / "systemd", Path(sys.prefix) / SHARED):
        if (folder / "kvferry@.service").is_file():
            return folder
    raise ConfigError(f"{Path(sys.prefix) / SHARED} has no unit files", remedy="install the package with pip")


def command_of_daemon() -> str:
    """Return the path of this installation's ``kvferry``."""
    return str(Path(sys.executable).with_name("kvferry"))


def systemd_version() -> int:
    """Return this host's version of systemd; 0 where there is none."""
    try:
        said = subprocess.run(["systemctl", "--version"], capture_output=True, text=True, check=False, timeout=10)  # noqa: S607  by name, as a user does
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.match(r"systemd (\d+)", said.stdout)
    return int(found[1]) if found else 0


def unit_files(folder: Path, command: str, version: int) -> Iterator[UnitFile]:
    """Yield what is to be installed, with paths below the root, for a version of systemd."""
    for name, place in PLACES.items():
        text = (folder / name).read_text()
        yield UnitFile(Path(place, name), text.replace("=/usr/bin/kvferry ", f"={command} "))
    if version >= 254:  # noqa: PLR2004  as its name says
        yield UnitFile(Path(DROP_INS, SINCE_254), (folder / SINCE_254).read_text())
