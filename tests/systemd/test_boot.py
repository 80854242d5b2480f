"""The unit under a real systemd: it becomes ready, answers, comes back after a kill, and stops cleanly."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "systemd"
KVFERRY = str(Path(sys.executable).with_name("kvferry"))
UNIT = "kvferry@test.service"
TOOLS = ("unshare", "nsenter", "systemctl", "mount")


class Machine:
    """A booted systemd."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command inside."""
        inside = ["nsenter", "-t", str(self._pid), "-m", "-p", "-C", "-u", "-i", "--", *command]
        return subprocess.run(inside, capture_output=True, text=True, check=False, timeout=60)

    def property(self, name: str) -> str:
        """Return a property of the unit."""
        return self.run("systemctl", "show", UNIT, "--value", "--property", name).stdout.strip()


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory, require: Callable[[object, str], None]) -> Iterator[Machine]:
    """Boot a systemd that has the unit, and the user and group it runs as."""
    require(os.geteuid() == 0, "root, to boot a systemd in namespaces")
    require(all(shutil.which(tool) for tool in TOOLS), f"{', '.join(TOOLS)}")
    require("overlay" in Path("/proc/filesystems").read_text(), "overlayfs")
    folder = tmp_path_factory.mktemp("machine")
    (folder / "overlay").mkdir()
    _etc(folder / "etc")
    boot = subprocess.Popen([Path(__file__).with_name("boot.sh"), folder], stdout=subprocess.PIPE, text=True)
    assert boot.stdout is not None
    with boot:
        try:
            assert boot.stdout.readline().strip() == "booted"
            one = Machine(int((folder / "pid").read_text()))
            _wait_until_booted(one, boot)
            yield one
        finally:
            boot.send_signal(signal.SIGTERM)


def _etc(etc: Path) -> None:
    """Write what goes into the machine's /etc: the unit, its configuration, user and group."""
    (etc / "systemd" / "system").mkdir(parents=True)
    (etc / "kvferry").mkdir()
    unit = (FOLDER / "kvferry@.service").read_text().replace("/usr/bin/kvferry", KVFERRY)
    # The checkout under test may lie in a home directory or in /tmp, and its files belong to root.
    unit = unit.replace("ProtectHome=yes", "ProtectHome=no").replace("PrivateTmp=yes", "PrivateTmp=no")
    unit = unit.replace("User=HwHiAiUser", "User=root")
    (etc / "systemd" / "system" / "kvferry@.service").write_text(unit)
    # With a disk tier, where the example has it: in the one place where the unit lets the daemon write.
    config = (FOLDER / "kvferry.toml").read_text()
    assert config.count("\n#path = ") == 1
    (etc / "kvferry" / "test.toml").write_text(config.replace("\n#path = ", "\npath = "))
    (etc / "group").write_text(Path("/etc/group").read_text() + "HwHiAiUser:x:1999:\n")


def _wait_until_booted(one: Machine, boot: subprocess.Popen[str]) -> None:
    """Ask until systemd listens, then let it say itself when it is up; each question is a process of its own."""
    while boot.poll() is None:
        done = one.run("systemctl", "is-system-running", "--wait")
        if done.stdout.strip() in {"running", "degraded"}:
            return
    pytest.fail("the machine did not boot")


def test_start_answer_kill_and_stop(machine: Machine) -> None:
    started = machine.run("systemctl", "start", UNIT)  # returns once the daemon has said READY
    assert started.returncode == 0, machine.run("journalctl", "-u", UNIT, "--no-pager").stdout
    assert machine.property("ActiveState") == "active"
    assert machine.property("StatusText").startswith("serving")
    assert "answers in" in machine.run(KVFERRY, "ping").stdout
    assert machine.run("stat", "-c", "%a %G", "/run/kvferry").stdout.strip() == "750 HwHiAiUser"
    assert machine.run("stat", "-c", "%a", "/var/lib/kvferry").stdout.strip() == "700"
    tiers = json.loads(machine.run(KVFERRY, "status", "--json").stdout)["tiers"]
    assert [(one["tier"], one["state"]) for one in tiers] == [("host", "ready"), ("disk", "ready")]

    before = machine.property("MainPID")
    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", UNIT)
    while machine.property("NRestarts") == "0" or machine.property("ActiveState") != "active":
        assert machine.property("ActiveState") != "failed"
    assert machine.property("MainPID") != before
    assert "answers in" in machine.run(KVFERRY, "ping").stdout

    assert machine.run("systemctl", "stop", UNIT).returncode == 0
    assert machine.property("Result") == "success"
    assert machine.property("ExecMainStatus") == "0"
    assert machine.run(KVFERRY, "ping").returncode == 1
