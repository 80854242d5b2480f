"""``kvferry systemd``: which files it writes, where, and that they start this installation's daemon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.clients.cli import units
from kvferry.clients.cli.main import main

HERE = str(Path(sys.executable).with_name("kvferry"))
FILES = {
    "etc/systemd/system/kvferry@.service",
    "etc/systemd/system/kvferry@.socket",
    "etc/systemd/system/kvferry-failed@.target",
    "etc/sysusers.d/kvferry.conf",
    "etc/tmpfiles.d/kvferry.conf",
}
NEWER = {"etc/systemd/system/kvferry@.service.d/254.conf"}


@pytest.fixture(autouse=True)
def seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checkout lie where the unit hides nothing, wherever it is."""
    monkeypatch.setattr(units, "HIDDEN", ())


@pytest.mark.parametrize(("version", "more"), [(253, set[str]()), (254, NEWER)])
def test_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, more: set[str]) -> None:
    monkeypatch.setattr(units, "systemd_version", lambda: version)
    assert main(["systemd", "--install", "--root", str(tmp_path)]) == 0
    assert {str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file()} == FILES | more
    service = (tmp_path / "etc/systemd/system/kvferry@.service").read_text()
    assert f"\nExecStart={HERE} daemon --config /etc/kvferry/%i.toml " in service


def test_without_the_option_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["systemd", "--root", str(tmp_path)]) == 0
    assert not [*tmp_path.iterdir()]
    said = capsys.readouterr().out
    assert all(str(tmp_path / one) in said for one in FILES)
    assert all(
        one in said for one in ("systemd-sysusers", "daemon-reload", "kvferry@NAME.socket", "usermod -aG kvferry")
    )


def test_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "etc").touch()
    assert main(["systemd", "--install", "--root", str(tmp_path)]) == 1
    monkeypatch.setattr(units, "HIDDEN", (Path(HERE).anchor,))
    assert main(["systemd", "--install", "--root", str(tmp_path / "image")]) == 2
    assert "/opt/kvferry" in capsys.readouterr().err
    assert not (tmp_path / "image").exists()


@pytest.mark.parametrize(("said", "version"), [("systemd 257 (257.4-1)\n+PAM\n", 257), ("OpenRC\n", 0)])
def test_the_version_is_systemds_own(monkeypatch: pytest.MonkeyPatch, said: str, version: int) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess[str]([], 0, said))
    assert units.systemd_version() == version
