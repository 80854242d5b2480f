"""The unit and its example configuration, by systemd's own word and by the daemon's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from kvferry.daemon.config import Config, load_config

FOLDER = Path(__file__).parents[2] / "systemd"
INSTALLED = "/usr/bin/kvferry"
MAX_EXPOSURE = 2.0


@pytest.fixture
def unit(tmp_path: Path, require: Callable[[object, str], None]) -> Path:
    """Return an instance of the unit whose ExecStart exists on this machine, as systemd wants it."""
    require(shutil.which("systemd-analyze"), "systemd-analyze")
    text = (FOLDER / "kvferry@.service").read_text()
    assert INSTALLED in text
    instance = tmp_path / "kvferry@test.service"
    instance.write_text(text.replace(INSTALLED, str(Path(sys.executable).with_name("kvferry"))))
    return instance


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run systemd-analyze."""
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_systemd_has_nothing_to_say_about_the_unit(unit: Path) -> None:
    done = analyze("verify", unit)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_systemd_would_say_so(unit: Path) -> None:
    unit.write_text(unit.read_text().replace("[Service]\n", "[Service]\nColour=red\n"))
    assert "Colour" in analyze("verify", unit).stderr, "unknown keys leave the exit status at 0"


def test_the_unit_is_hardened(unit: Path) -> None:
    done = analyze("security", "--offline=true", unit)
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= MAX_EXPOSURE


@pytest.fixture
def unit_for_hosts(unit: Path) -> Path:
    """Return the unit with the drop-in for hand-offs between hosts."""
    folder = unit.with_name(f"{unit.name}.d")
    folder.mkdir()
    (folder / "hosts.conf").write_text((FOLDER / "hosts.conf").read_text())
    return unit


def test_the_drop_in_for_hosts_is_understood_and_hardened(unit_for_hosts: Path) -> None:
    done = analyze("verify", unit_for_hosts)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    report = analyze("security", "--offline=true", unit_for_hosts).stdout
    found = re.search(r"Overall exposure level for .*: ([0-9.]+)", report)
    assert found, report
    assert float(found[1]) <= MAX_EXPOSURE


def test_stopping_takes_longer_than_draining() -> None:
    unit = (FOLDER / "kvferry@.service").read_text()
    stop = re.search(r"TimeoutStopSec=(\d+)s", unit)
    assert stop
    assert int(stop[1]) > Config().service.drain_timeout_s


def test_the_example_shows_every_key_with_its_default(tmp_path: Path) -> None:
    text = (FOLDER / "kvferry.toml").read_text()
    assert load_config(FOLDER / "kvferry.toml") == Config()
    shown = tomllib.loads(re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE))
    # Their defaults depend on the machine, or on another key.
    machine = {"runtime_dir", "max_bytes", "threads", "listen", "address", "quarantined_bytes"}
    defaults = msgspec.to_builtins(Config())
    assert _without(shown, machine) == _without(defaults, machine)
    assert {*_keys(shown)} == {*_keys(defaults)}
    written = tmp_path / "all.toml"
    written.write_text(re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE))
    load_config(written)


def _without(table: dict[str, object], names: set[str]) -> dict[str, object]:
    return {
        key: _without(value, names) if isinstance(value, dict) else value
        for key, value in table.items()
        if key not in names
    }


def _keys(table: dict[str, object], prefix: str = "") -> list[str]:
    return [
        name
        for key, value in table.items()
        for name in (_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [f"{prefix}{key}"])
    ]
