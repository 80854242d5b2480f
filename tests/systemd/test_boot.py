"""The units under a real systemd: activation, restarts, hangs, two instances, wrong configurations, and their ends."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvferry.clients.cli.units import unit_files

FOLDER = Path(__file__).parents[2] / "systemd"
KVFERRY = str(Path(sys.executable).with_name("kvferry"))
TOOLS = ("unshare", "nsenter", "systemctl", "mount", "systemd-sysusers")
PATIENCE_S = 60.0
UNITS = ("kvferry@", "kvferry-keeper@")
DROP_IN = f"""\
[Service]
# The checkout and its Python may lie in a home directory or in /tmp.
ProtectHome=no
PrivateTmp=no
Environment=PYTHONPATH={FOLDER.parent / "src"}
"""
OF_THE_DAEMON = """\
WatchdogSec=2s
# As an installed package has it: what is imported was compiled before.
CacheDirectory=kvferry-test
Environment=PYTHONPYCACHEPREFIX=/var/cache/kvferry-test
"""


class Machine:
    """A booted systemd."""

    def __init__(self, pid: int) -> None:
        self._pid = pid

    def inside(self, *command: str) -> list[str]:
        return ["nsenter", "-t", str(self._pid), "-m", "-p", "-C", "-u", "-i", "--", *command]

    def run(self, *command: str, status: int | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command inside; ``status``: what it must end with."""
        done = subprocess.run(self.inside(*command), capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        assert status in {None, done.returncode}, (done, self.log())
        return done

    def shell(self, script: str) -> str:
        """Run a shell script inside, which must succeed; return what it prints."""
        return self.run("bash", "-euc", script, status=0).stdout.strip()

    def log(self) -> str:
        units = [f"--unit={unit}{name}.service" for name in ("test", "other") for unit in UNITS]
        units += [f"--unit=kvferry@{name}.socket" for name in ("test", "other")]
        return self.run("journalctl", "--no-pager", *units).stdout

    def property(self, name: str, unit: str = "kvferry@test.service") -> str:
        return self.run("systemctl", "show", unit, "--value", "--property", name).stdout.strip()

    def until(self, name: str, wanted: str, unit: str = "kvferry@test.service") -> None:
        """Wait until a property of a unit has this value."""
        ends_at = time.monotonic() + PATIENCE_S
        while (found := self.property(name, unit)) != wanted:
            assert time.monotonic() < ends_at, (unit, name, found, self.log())

    def until_logged(self, text: str) -> None:
        """Wait until a daemon has written this into its log."""
        ends_at = time.monotonic() + PATIENCE_S
        while text not in self.log():
            assert time.monotonic() < ends_at, (text, self.log())

    def start(self, *units: str) -> None:
        self.run("systemctl", "start", *units, status=0)

    def stop(self) -> None:
        self.run("systemctl", "stop", "kvferry@*.socket", *(f"{unit}*.service" for unit in UNITS), status=0)

    def ping(self, name: str = "test", wait_s: int = 30) -> bool:
        """Return whether a daemon answers in time."""
        where = ("--runtime-dir", f"/run/kvferry/{name}")
        return self.run(KVFERRY, "ping", "--timeout", str(wait_s), *where).returncode == 0


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory, require: Callable[[object, str], None]) -> Iterator[Machine]:
    """Boot a systemd that has the units, and the user that they run as."""
    require(os.geteuid() == 0, "root, to boot a systemd in namespaces")
    require(all(shutil.which(tool) for tool in TOOLS), f"{', '.join(TOOLS)}")
    require("overlay" in Path("/proc/filesystems").read_text(), "overlayfs")
    folder = tmp_path_factory.mktemp("machine")
    (folder / "overlay").mkdir()
    _etc(folder)
    boot = subprocess.Popen([Path(__file__).with_name("boot.sh"), folder], stdout=subprocess.PIPE, text=True)
    assert boot.stdout is not None
    with boot:
        try:
            assert boot.stdout.readline().strip() == "booted"
            one = Machine(int((folder / "pid").read_text()))
            up = {"running", "degraded"}  # once systemd listens, it says itself when it is up
            while one.run("systemctl", "is-system-running", "--wait").stdout.strip() not in up:
                assert boot.poll() is None, "the machine did not boot"
            # The interpreter and the checkout may be in folders that are root's alone.
            ways = {
                way
                for file in (sys.executable, os.path.realpath(sys.executable), __file__)
                for way in Path(file).parents
            }
            one.shell(f"chmod o+x {shlex.join(map(str, ways))}")
            one.shell("systemd-sysusers; systemd-tmpfiles --create /etc/tmpfiles.d/kvferry.conf")
            yield one
        finally:
            boot.send_signal(signal.SIGTERM)


def _etc(folder: Path) -> None:
    """Write what goes into the machine's /etc: the units, as the command writes them, and two configurations."""
    for file in unit_files(FOLDER, KVFERRY, version=0):
        target = folder / file.path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.text)
    etc = folder / "etc"
    for unit, text in zip(UNITS, (DROP_IN + OF_THE_DAEMON, DROP_IN), strict=True):
        drop_in = etc / "systemd" / "system" / f"{unit}.service.d" / "test.conf"
        drop_in.parent.mkdir()
        drop_in.write_text(text)
    # With a disk tier, where the example has it: in the one place where the unit lets the daemon write.
    config = (FOLDER / "kvferry.toml").read_text()
    (etc / "kvferry").mkdir()
    for name in ("test", "other"):
        (etc / "kvferry" / f"{name}.toml").write_text(config.replace("\n#path = ", "\npath = ").replace("NAME", name))


@pytest.fixture
def machine(booted: Machine) -> Iterator[Machine]:
    """Return a machine on which no daemon runs."""
    yield booted
    booted.stop()
    booted.run("systemctl", "reset-failed")


def test_start_answer_and_stop(machine: Machine) -> None:
    machine.start("kvferry@test.service")  # returns once the daemon has said READY
    assert machine.property("ActiveState", "kvferry@test.socket") == "active", "the service brings its sockets"
    assert machine.property("StatusText").startswith("serving")
    assert "answers in" in machine.run(KVFERRY, "ping", status=0).stdout, "found at its default place"
    assert machine.shell("stat -c '%a %U %G' /run/kvferry /run/kvferry/test /var/lib/kvferry/test").splitlines() == [
        "755 root root",
        "710 kvferry kvferry",
        "700 kvferry kvferry",
    ]
    assert machine.shell("stat -c '%a %U %G' /run/kvferry/test/*.sock").splitlines() == [
        "660 kvferry kvferry",  # control
        "660 kvferry kvferry",  # metrics
        "600 kvferry kvferry",  # peer
        "660 kvferry kvferry",  # session
    ]
    tiers = json.loads(machine.run(KVFERRY, "status", "--json", status=0).stdout)["tiers"]
    assert [(one["tier"], one["state"]) for one in tiers] == [("host", "ready"), ("disk", "ready")]
    machine.run("systemctl", "stop", "kvferry@test.socket", "kvferry@test.service", status=0)
    assert (machine.property("Result"), machine.property("ExecMainStatus")) == ("success", "0")
    assert machine.run(KVFERRY, "ping").returncode == 1


def test_an_engine_that_connects_starts_the_daemon_and_a_restart_only_lets_it_wait(machine: Machine) -> None:
    machine.start("kvferry@test.socket")
    assert machine.property("ActiveState") == "inactive"
    assert machine.ping()
    machine.until("ActiveState", "active")  # it answers before it says READY
    inode = machine.shell("stat -c %i /run/kvferry/test/control.sock")
    before = machine.property("MainPID")
    machine.run("systemctl", "restart", "--no-block", "kvferry@test.service", status=0)
    assert machine.ping()
    machine.until("ActiveState", "active")
    assert machine.property("MainPID") != before
    assert machine.shell("stat -c %i /run/kvferry/test/control.sock") == inode
    machine.run("systemctl", "stop", "kvferry@test.service", status=0)
    assert machine.ping(), "the sockets stay, and start it again"


def test_the_watchdog_ends_a_daemon_that_hangs(machine: Machine) -> None:
    machine.start("kvferry@test.service")
    pid = machine.property("MainPID")
    machine.run("kill", "-STOP", pid, status=0)
    machine.until("NRestarts", "1")
    assert machine.ping()
    log = machine.log()
    assert "Watchdog timeout" in log
    assert "Fatal Python error: Aborted" in log, "nobody could tell where it hung"
    assert machine.property("MainPID") != pid


def test_one_instance_leaves_the_other_alone(machine: Machine) -> None:
    machine.start("kvferry@test.service", "kvferry@other.service")
    several = machine.run(KVFERRY, "ping")
    assert several.returncode == 2
    assert "/run/kvferry/other, /run/kvferry/test" in several.stderr
    machine.run("systemctl", "stop", "kvferry@test.socket", "kvferry@test.service", status=0)
    assert machine.ping("other")
    assert not machine.ping("test")
    assert machine.run(KVFERRY, "ping").returncode == 0, "there is but one"


@pytest.mark.full
def test_a_wrong_configuration_ends_once_and_the_sockets_with_it(machine: Machine) -> None:
    machine.shell("cp /etc/kvferry/test.toml /tmp/right.toml; echo 'colour = 1' > /etc/kvferry/test.toml")
    since = machine.shell("date +%s")
    machine.start("kvferry@test.socket")
    assert not machine.ping(wait_s=1)
    machine.until("ActiveState", "failed")
    machine.until("ActiveState", "inactive", "kvferry@test.socket")
    assert (machine.property("ExecMainStatus"), machine.property("NRestarts")) == ("2", "0")
    said = machine.shell(f"journalctl --unit=kvferry@test.service --since=@{since} --no-pager")
    assert said.count("CONFIG [colour]") == 1, said
    assert not machine.ping()
    machine.shell("cp /tmp/right.toml /etc/kvferry/test.toml")
    machine.start("kvferry@test.service")
    assert machine.property("ActiveState", "kvferry@test.socket") == "active"
    assert machine.property("ActiveState", "kvferry-failed@test.target") == "inactive"
    assert machine.ping()


def test_a_device_that_is_not_named_cannot_be_opened(machine: Machine) -> None:
    """Both nodes have no driver: ENXIO is what the driver would say, EPERM what the unit says."""
    machine.shell("mknod -m 666 /dev/davinci0 c 240 0; mknod -m 666 /dev/davinci16 c 240 16")
    drop_in = "[Service]\nExecStartPre=-/bin/sh -c '</dev/davinci0'\nExecStartPre=-/bin/sh -c '</dev/davinci16'\n"
    place = "/etc/systemd/system/kvferry@.service.d/devices.conf"
    machine.shell(f"printf %s {shlex.quote(drop_in)} > {place}; systemctl daemon-reload")
    machine.start("kvferry@test.service")
    said = machine.log()
    machine.shell(f"rm {place} /dev/davinci*; systemctl daemon-reload")
    assert re.search(r"/dev/davinci0: .*No such device or address", said), said
    assert re.search(r"/dev/davinci16: .*(Operation not|Permission)", said), said


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(("systemctl", "kill", "--kill-whom=main", "--signal=KILL"), id="kill -9"),
        pytest.param(("systemctl", "reload"), id="reload"),
        pytest.param(("systemctl", "restart", "--no-block"), id="restart", marks=pytest.mark.full),
    ],
)
def test_a_pool_outlives_the_daemon_and_its_engine_only_waits(machine: Machine, command: tuple[str, ...]) -> None:
    machine.start("kvferry@test.service")
    pid, hung = machine.property("MainPID"), machine.log().count("Watchdog timeout")
    engine = str(Path(__file__).with_name("patient_engine.py"))
    done = machine.run(sys.executable, engine, "/run/kvferry/test", *command, "kvferry@test.service")
    assert done.returncode == 0, f"{done.stderr}\n{machine.log()}"
    report = json.loads(done.stdout)
    sys.stdout.write(f"{report}\n")  # shown by pytest -s
    assert (report["size_bytes"] >= 256 << 20, report["same"], report["same_for_others"]) == (True, True, True)
    assert machine.property("NFileDescriptorStore") == "5", "the index; memory and record of pool and host tier"
    machine.until("ActiveState", "active")
    assert machine.property("MainPID") != pid
    machine.run(KVFERRY, "probe", "DELETE_POOL", '{"pool": "patient"}', status=0)
    machine.until("NFileDescriptorStore", "3")
    assert machine.log().count("Watchdog timeout") == hung


def test_a_reload_with_a_wrong_configuration_says_so_and_the_daemon_goes_on(machine: Machine) -> None:
    machine.start("kvferry@test.service")
    pid = machine.property("MainPID")
    machine.shell("cp /etc/kvferry/test.toml /tmp/right.toml; echo 'colour = 1' > /etc/kvferry/test.toml")
    assert machine.run("systemctl", "reload", "kvferry@test.service").returncode == 1
    machine.shell("cp /tmp/right.toml /etc/kvferry/test.toml")
    assert "UPGRADE_REFUSED" in machine.log()
    assert (machine.property("MainPID"), machine.property("ActiveState")) == (pid, "active")
    assert machine.ping()


@pytest.mark.full
def test_the_keeper_stays_whatever_becomes_of_the_daemon(machine: Machine) -> None:
    """With the drop-in for NPUs, of which there are none: their memory is in tests/npu."""
    keeper = "kvferry-keeper@test.service"
    place = "/etc/systemd/system/kvferry@.service.d/npu.conf"
    machine.shell(f"cp {shlex.quote(str(FOLDER / 'npu.conf'))} {place}; touch /etc/kvferry/cann.env")
    machine.shell("echo 'g HwHiAiUser -' | systemd-sysusers -; systemctl daemon-reload")
    try:
        machine.start("kvferry@test.service")
        machine.until("ActiveState", "active", keeper)
        pid = machine.property("MainPID", keeper)
        assert machine.shell(f"ps -o user=,args= {pid}").split()[0] == "kvferry"
        assert machine.shell("stat -c '%a %U' /run/kvferry/test/keeper.sock") == "600 kvferry"
        machine.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", "kvferry@test.service", status=0)
        machine.until("NRestarts", "1")
        assert machine.ping()
        machine.run("systemctl", "reload", "kvferry@test.service", status=0)
        machine.run("systemctl", "stop", "kvferry@test.socket", "kvferry@test.service", status=0)
        machine.start("kvferry@test.service")
        assert (machine.property("MainPID", keeper), machine.property("NRestarts", keeper)) == (pid, "0")

        machine.run("kill", "-KILL", pid, status=0)
        machine.until_logged("the keeper has ended")
        machine.until("NRestarts", "1", keeper)
        machine.until("ActiveState", "active", keeper)
        assert machine.ping()
        assert machine.property("MainPID", keeper) != pid
        machine.run("systemctl", "stop", keeper, status=0)
        assert (machine.property("Result", keeper), machine.property("ActiveState")) == ("success", "active")
    finally:
        machine.shell(f"rm {place}; systemctl daemon-reload")
