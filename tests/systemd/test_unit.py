"""The unit and its example configuration, by systemd's own word and by the daemon's."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from kvferry.daemon.daemon import EXIT_BAD_INPUT, EXIT_DEVICE_LOST
from kvferry.daemon.process.access import ACTIVATED, SOCKET_MODE, SOCKETS
from kvferry.pools.host.placement import offer
from kvferry.protocol.config.load import load_config
from kvferry.protocol.config.schema import Config

FOLDER = Path(__file__).parents[2] / "systemd"
INSTALLED = "/usr/bin/kvferry"
MAX_EXPOSURE = 2.0


@pytest.mark.parametrize("drop_ins", [(), ("hosts.conf", "npu.conf")], ids="+".join)
def test_systemd_has_nothing_to_say_and_finds_it_hardened(
    tmp_path: Path, require: Callable[[object, str], None], drop_ins: tuple[str, ...]
) -> None:
    require(shutil.which("systemd-analyze"), "systemd-analyze")
    assert INSTALLED in (FOLDER / "kvferry@.service").read_text()
    services = [tmp_path / one for one in ("kvferry@test.service", "kvferry-keeper@test.service")]
    units = [*services, tmp_path / "kvferry@test.socket", tmp_path / "kvferry-failed@test.target"]
    for unit in units:
        text = (FOLDER / unit.name.replace("@test", "@")).read_text()
        unit.write_text(text.replace(INSTALLED, str(Path(sys.executable).with_name("kvferry"))))
    folder = tmp_path / "kvferry@test.service.d"
    folder.mkdir()
    for name in drop_ins:
        (folder / name).write_text((FOLDER / name).read_text())
    for one in units:
        done = analyze("verify", one)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for service in services:
        report = analyze("security", "--offline=true", service).stdout
        found = re.search(r"Overall exposure level for .*: ([0-9.]+)", report)
        assert found, report
        assert float(found[1]) <= MAX_EXPOSURE


def analyze(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["systemd-analyze", *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_the_sockets_are_where_the_daemon_looks_for_them() -> None:
    service = assignments((FOLDER / "kvferry@.service").read_text())
    sockets = assignments((FOLDER / "kvferry@.socket").read_text())
    (given,) = re.findall(r"--runtime-dir (\S+)", service["ExecStart"][-1])
    assert given == f"%t/{service['RuntimeDirectory'][-1]}"
    assert sockets["ListenStream"] == [f"{given}/{name}" for name in ACTIVATED]
    assert sockets["FileDescriptorName"] == [SOCKETS]
    assert sockets["SocketMode"] == [f"{SOCKET_MODE:04o}"]
    assert {*sockets["SocketUser"], *sockets["SocketGroup"]} == {*service["User"], *service["Group"]}
    made = (FOLDER / "sysusers.d" / "kvferry.conf").read_text()
    assert re.search(rf"^u {service['User'][-1]} ", made, re.MULTILINE)


def test_with_the_drop_in_nothing_keeps_the_daemon_from_an_npu() -> None:
    settings = assignments((FOLDER / "kvferry@.service").read_text() + (FOLDER / "npu.conf").read_text())
    # Each keeps torch_npu from its device: no device nodes, no fabric, foreign process ids, no code made at run time.
    for key in ("PrivateDevices", "PrivateNetwork", "PrivateUsers", "MemoryDenyWriteExecute"):
        assert settings.get(key, ["no"])[-1] not in {"yes", "true"}, key
    assert "pid" not in settings.get("ProcSubset", [])
    allowed = {value.split()[0] for value in settings["DeviceAllow"]}
    assert {"/dev/davinci0", "/dev/davinci15", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc"} <= allowed
    assert settings["LimitMEMLOCK"][-1] == "infinity"
    assert settings["RemoveIPC"][-1] == "no", "an engine's reference counts in /dev/shm would go with the daemon"
    assert settings["RestartForceExitStatus"] == [str(EXIT_DEVICE_LOST)]


def assignments(text: str) -> dict[str, list[str]]:
    """Return all values of each key of unit files, in order."""
    found: dict[str, list[str]] = {}
    for key, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        found.setdefault(key, []).append(value)
    return found


def test_the_unit_is_as_the_daemon_needs_it() -> None:
    settings = assignments((FOLDER / "kvferry@.service").read_text() + (FOLDER / "npu.conf").read_text())
    (most,) = settings["FileDescriptorStoreMax"]
    assert f"FDSTORE={most}" in settings["Environment"], "systemd 252 does not say so itself"
    assert settings["RestartPreventExitStatus"] == [str(EXIT_BAD_INPUT)], "it would be tried again for ever"
    assert settings["StartLimitIntervalSec"] == ["0"], "a limit that is reached empties the store"
    assert settings["RuntimeDirectoryPreserve"] == ["yes"], "the sockets are in it, and which pools were lost"
    assert settings["KillMode"] == ["mixed"], "the store process would end at the beginning of the drain"
    (stop_s,) = settings["TimeoutStopSec"]
    assert int(stop_s.removesuffix("s")) > Config().service.drain_timeout_s
    shown = re.search(r'^#path = "(.*)"$', (FOLDER / "kvferry.toml").read_text(), re.MULTILINE)
    assert shown
    assert Path(shown[1]) == Path("/var/lib") / settings["StateDirectory"][-1].replace("%i", "NAME")
    assert settings["StateDirectoryMode"][-1] == "0700", "the daemon takes no folder that others can write"


def test_the_keeper_is_where_the_daemon_looks_for_it_and_not_its_own() -> None:
    """It stays when the daemon's unit ends, and sees the same devices in the same environment."""
    keeper = assignments((FOLDER / "kvferry-keeper@.service").read_text())
    of_daemon = (FOLDER / "kvferry@.service").read_text()
    daemon = assignments(of_daemon + (FOLDER / "npu.conf").read_text())
    for same in ("User", "Group", "RuntimeDirectory", "RuntimeDirectoryMode", "RuntimeDirectoryPreserve",
                 "EnvironmentFile", "SupplementaryGroups", "RestartPreventExitStatus"):  # fmt: skip
        assert keeper[same] == daemon[same][-1:], same
    assert keeper["DeviceAllow"] == assignments(of_daemon)["DeviceAllow"]
    assert keeper["ExecStart"][0].partition(" keeper ")[2] == daemon["ExecStart"][-1].partition(" daemon ")[2]
    assert keeper["RemoveIPC"] == ["no"], "it is the daemon's user, whose files engines need"
    assert daemon["Wants"] == ["kvferry@%i.socket", "kvferry-keeper@%i.service"]
    assert not {"PartOf", "BindsTo", "Requires", "StopPropagatedFrom"} & keeper.keys()


# Their defaults depend on the machine, or on another key.
DEPENDING = {
    "runtime_dir", "pools.max_bytes", "memory.numa_node", "peers.listen", "peers.keys", "network.address",
    "tiers.host_bytes", "tiers.disk.path", "tiers.remote.address", "metrics.listen",
}  # fmt: skip


def test_the_example_shows_every_key_with_its_default(tmp_path: Path) -> None:
    text = (FOLDER / "kvferry.toml").read_text()
    assert load_config(FOLDER / "kvferry.toml", offer()) == Config()
    shown = re.sub(r"^#(\w+ = )", r"\1", text, flags=re.MULTILINE)
    written = tmp_path / "all.toml"
    written.write_text(shown)
    read, defaults = (dict(_leaves(msgspec.to_builtins(one))) for one in (load_config(written, offer()), Config()))
    assert {key for key in defaults if read[key] != defaults[key]} <= DEPENDING
    assert dict(_leaves(tomllib.loads(shown))).keys() == defaults.keys()
    assert "tiers.remote.master" in defaults, "tables in tables are looked at"


def _leaves(table: dict[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
