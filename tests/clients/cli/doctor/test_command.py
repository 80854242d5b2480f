"""``kvferry doctor`` as a whole, with and without a daemon, and who listens."""

from __future__ import annotations

import argparse
import json
import os
import socket
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from kvferry.clients.cli.doctor import kernel, ports, running
from kvferry.clients.cli.doctor.command import add_doctor, examine
from kvferry.clients.cli.doctor.host import Finding, Host, exit_status, run_child
from kvferry.clients.cli.doctor.needs import read_needs
from kvferry.clients.cli.doctor.ports import Listener, listeners
from kvferry.clients.cli.doctor.running import (
    Running,
    ask_daemon,
    check_daemon,
    check_devices,
    check_directory,
    check_tenants,
    check_tiers,
    process_behind,
)
from kvferry.protocol import VERSION
from kvferry.protocol.config.schema import Config, TenantConfig
from kvferry.protocol.session_messages import DeviceStatus, NetworkStatus, StatusReport, TierStatus
from tests import kit
from tests.clients.cli.doctor.fake_host import GIB_IN_KIB, MODERN_KERNEL, limits, make_host, npu_files, script
from tests.kit.daemons import Daemon
from tests.kit.kvferry_command import run_kvferry

BASE = {
    "/proc/sys/kernel/osrelease": MODERN_KERNEL,
    "/proc/meminfo": f"MemTotal: {64 * GIB_IN_KIB} kB\nMemAvailable: {60 * GIB_IN_KIB} kB\n",
    "/proc/self/limits": limits(),
    "/dev/shm/.keep": "",  # noqa: S108  below the laid-out root
}
PLAIN_PYTHON = """case "$*" in
*kvferry.daemon.trial*) echo '{"problem": "", "remedy": ""}';;
*mooncake*) echo '{}';;
*ascendcl*) exit 0;;
*) echo '{"torch": "2.13.0", "torch_npu": "", "step": ""}';;
esac"""
NPU_PYTHON = PLAIN_PYTHON.replace('"torch_npu": ""', '"torch_npu": "2.13.0", "devices": 2')
NPU_ONLY = {"driver", "npu health", "device nodes", "group", "numa", "CANN", "CANN library"}


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_doctor(parser)
    return parser.parse_args([*arguments, "--runtime-dir", "/run/kvferry", "--timeout", "0.1"])


def by_name(host: Host, *arguments: str) -> dict[str, Finding]:
    findings = examine(host, options(*arguments))
    assert not any("the check itself failed" in one.found for one in findings.values())
    return findings


def plain_host(root: Path) -> Host:
    return make_host(root, BASE, python=[script(root / "python", PLAIN_PYTHON)])


def npu_host(root: Path) -> Host:
    files = {**BASE, **npu_files(), "/opt/cann/x86_64-linux/ascend_toolkit_install.info": "version=8.5.0\n"}
    script(root / "usr/local/bin/npu-smi", "echo '| 0 910B3 | OK | 90 |'; echo '| 1 910B3 | OK | 90 |'")
    python = [script(root / "python", NPU_PYTHON)]
    return make_host(root, files, environ={"ASCEND_HOME_PATH": "/opt/cann", "PATH": "/bin:/usr/bin"}, python=python)


def test_a_host_without_npus_is_well(tmp_path: Path) -> None:
    found = by_name(plain_host(tmp_path))
    assert exit_status(found.values()) == 0
    assert found["npu"] == Finding("ok", "no NPU on this host: host pools only")
    assert not found.keys() & NPU_ONLY
    assert {name for name, one in found.items() if one.state != "ok"} <= {
        "runtime directory", "daemon", "copies"
    }  # fmt: skip


def test_an_npu_that_is_asked_for_is_missing(tmp_path: Path) -> None:
    found = by_name(plain_host(tmp_path), "--npu")
    assert exit_status(found.values()) == 1
    assert {name for name, one in found.items() if one.state == "missing"} == {
        "driver", "device nodes", "CANN", "torch_npu"
    }  # fmt: skip
    assert all(one.fix for one in found.values() if one.state != "ok")


@pytest.mark.parametrize(
    ("toml", "name"),
    [
        ('[peers]\nlisten = "tcp://0.0.0.0:7801"\n', "peers.listen"),
        ('[peers]\nlisten = "tcp://127.0.0.1:0"\n', "peers.listen"),
        ('[peers]\nlisten = "127.0.0.1:7801"\n', "peers.listen"),
        ('[peers]\nlisten = "tcp://127.0.0.1:7801"\n[network]\ntransport = "mooncake"\naddress = "::"\n',
         "network.address"),
        ('[tiers.disk]\npath = ""\n', "disk tier"),
        ('[tiers.remote]\nmaster = "nowhere"\n', "store master"),
        ('[pools]\nmax_bytes = "1TB"\n', "memory"),
        ("devices = 1\n", "devices.open"),
        ("[peers\n", "peers.listen"),
        ('[metrics]\nlisten = "tcp://127.0.0.1:0"\n', "metrics.listen"),
    ],
)  # fmt: skip
def test_no_line_is_content_with_a_key_that_the_daemon_refuses(tmp_path: Path, toml: str, name: str) -> None:
    host = plain_host(tmp_path)
    (tmp_path / "a.toml").write_text(toml)
    found = by_name(host, "--config", "/a.toml")
    assert found[name].state == "missing"
    assert "the daemon refuses" in found[name].found


def test_a_port_that_is_bound_and_not_listened_on_is_not_free(tmp_path: Path) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        file = tmp_path / "a.toml"
        file.write_text(f'[peers]\nlisten = "tcp://127.0.0.1:{bound.getsockname()[1]}"\n')
        needs, _ = read_needs(Host.this_one(), file, npu=False)
        found = ports.check_listen(Host.this_one(), needs, [], running.Running(tmp_path))
    assert (found.state, "Address already in use" in found.found) == ("missing", True)


def test_a_whole_npu_host(tmp_path: Path) -> None:
    found = by_name(npu_host(tmp_path))
    assert exit_status(found.values()) == 0
    assert found.keys() >= NPU_ONLY
    assert {found[name].state for name in NPU_ONLY | {"torch_npu", "memlock"}} == {"ok"}
    assert "npu" not in found


def test_a_check_that_breaks_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> Finding:
        raise ZeroDivisionError("no cores")

    monkeypatch.setattr(kernel, "check_kernel", broken)
    findings = examine(plain_host(tmp_path), options())
    assert findings["kernel"].state == "unknown"
    assert "ZeroDivisionError: no cores" in findings["kernel"].found
    assert findings["memory"].state == "ok"


def test_for_programs(daemon: Daemon) -> None:
    done = run_kvferry("doctor", "--json", "--runtime-dir", daemon.runtime_dir)
    assert (done.stderr, done.stdout.count("\n")) == ("", 1)
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["status"] == done.returncode
    assert {"name", "state", "found", "fix"} == set(report["findings"][0])
    daemons = [one for one in report["findings"] if one["name"] == "daemon"]
    assert [one["state"] for one in daemons] == ["ok"]


def test_torch_is_not_imported_here(daemon: Daemon) -> None:
    """Where torch_npu is installed without CANN, ``import torch`` fails."""
    program = (
        "import sys; from kvferry.clients.cli.main import main; "
        f"main(['doctor', '--runtime-dir', {str(daemon.runtime_dir)!r}]); "
        "sys.exit(77 if 'torch' in sys.modules else 0)"
    )
    host = Host.this_one()
    done = run_child([*host.python, "-c", program], host.environ, 60)
    assert done.status == 0, done.errors
    assert "  daemon " in done.output


REPORT: Final = StatusReport(
    daemon_version=VERSION, pid=1, uptime_ms=1, draining=False, pools=(), sessions=(), transfers=(), counters={}
)
BROKEN: Final = NetworkStatus(
    session="s", bounce_buffer_bytes=1, bounce_buffers=1, free=0, credits=0, quarantined=1, state="broken"
)


def ask(directory: Path, timeout_s: float = 10.0) -> Running:
    return ask_daemon(Host.this_one(), directory, None, timeout_s)


def that_says(**changes: object) -> Running:
    return Running(Path("/run/kvferry"), msgspec.structs.replace(REPORT, **changes), pid=1)


def test_one(daemon: Daemon) -> None:
    """In a container the daemon calls itself otherwise: the kernel knows better."""
    running = ask(daemon.runtime_dir)
    finding = check_daemon(running)
    assert (running.pid, check_directory(running).state) == (daemon.process.pid, "ok")
    assert (finding.state, finding.fix) == ("ok", "")
    assert f"pid {daemon.process.pid}" in finding.found
    assert process_behind(daemon.runtime_dir / "control.sock", 1, 10.0) == daemon.process.pid
    assert process_behind(daemon.runtime_dir / "none.sock", 7, 10.0) == 7


def test_a_socket_that_was_left_behind(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "control.sock"))
    finding = check_daemon(ask(tmp_path, timeout_s=0.1))
    assert (finding.state, "nobody answers" in finding.found) == ("missing", True)
    assert "it has ended and left its sockets" in finding.found


def test_one_that_stands_still() -> None:
    with kit.daemon() as own, own.stopped():
        finding = check_daemon(ask(own.runtime_dir, timeout_s=0.1))
    assert (finding.state, "systemctl restart" in finding.fix) == ("missing", True)


@pytest.mark.parametrize(
    ("changes", "state", "said"),
    [
        ({}, "ok", "up for 0 s"),
        ({"daemon_version": "0.0.1"}, "warning", "this command is"),
        ({"draining": True}, "warning", "is draining"),
        ({"drained": True}, "warning", "is drained"),
        ({"network": BROKEN}, "missing", "network transport is broken"),
    ],
)
def test_one_that_is_not_well(changes: dict[str, object], state: str, said: str) -> None:
    finding = check_daemon(that_says(**changes))
    assert (finding.state, said in finding.found) == (state, True)


def test_its_devices() -> None:
    devices = tuple(
        DeviceStatus(device=f"npu:{number}", state=state, total_bytes=64 << 30, free_bytes=4 << 30, pool_bytes=0)
        for number, state in enumerate(("ready", "lost: error 507899", "unavailable: no torch_npu"))
    )
    findings = check_devices(that_says(devices=devices))
    assert {name: (one.state, one.found) for name, one in findings.items()} == {
        "device npu:0": ("ok", "ready, 4096 of 65536 MiB free"),
        "device npu:1": ("missing", "lost: error 507899"),
        # That a pool was asked for on it says nothing of what this host is to have.
        "device npu:2": ("warning", "unavailable: no torch_npu"),
    }


def test_a_tier_that_is_slow_is_not_well() -> None:
    tiers = tuple(
        TierStatus(tier=tier, state=state, total_bytes=1, used_bytes=0)
        for tier, state in (
            ("host", "ready"),
            ("disk", "slow: the last 8 writes took 400 ms a block"),
            ("remote", "off"),
        )
    )
    [(name, finding)] = check_tiers(that_says(tiers=tiers)).items()
    assert (name, finding.state) == ("tier disk", "warning")
    assert finding.found == "the daemon says: slow: the last 8 writes took 400 ms a block"


def test_a_keeper_that_is_lost_is_worth_a_restart() -> None:
    ready = DeviceStatus(
        device="npu:0", state="ready", total_bytes=0, free_bytes=0, pool_bytes=0, keeper="lost: the keeper has ended"
    )
    [finding] = check_devices(that_says(devices=(ready,))).values()
    assert (finding.state, "end with the daemon" in finding.found) == ("warning", True)
    [finding] = check_devices(that_says(devices=(msgspec.structs.replace(ready, keeper="process 7"),))).values()
    assert finding.state == "ok"


def test_where_it_looks(tmp_path: Path) -> None:
    host = make_host(tmp_path, environ={"KVFERRY_RUNTIME_DIR": "/run/environment"})
    for given, configured, place in (
        (None, None, "environment"),
        (None, "/run/configured", "configured"),
        (Path("/run/given"), "/run/configured", "given"),
    ):
        assert ask_daemon(host, given, configured, 0.1).directory == tmp_path / "run" / place


HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
ROW = "   0: {local} {remote} {state} 00000000:00000000 00:00000000 00000000  1000  0 {inode} 1 ffff 100 0 0 10 0\n"
ANY, ANY6 = "00000000:0000", "00000000000000000000000000000000:0000"


def test_laid_out(tmp_path: Path) -> None:
    files = {
        "/proc/net/tcp": HEAD
        + ROW.format(local="0100007F:1E79", remote=ANY, state="0A", inode=500)
        + ROW.format(local="0100007F:1E80", remote="0100007F:9999", state="01", inode=501),
        "/proc/net/tcp6": HEAD
        + ROW.format(local="B80D0120000000000000000001000000:0050", remote=ANY6, state="0A", inode=502)
        + ROW.format(local="0000000000000000FFFF00000200000A:0051", remote=ANY6, state="0A", inode=503),
        "/proc/77/comm": "mysqld\n",
        "/proc/77/fd/.keep": "",
    }  # fmt: skip
    host = make_host(tmp_path, files)
    (tmp_path / "proc/77/fd/9").symlink_to("socket:[500]")
    (tmp_path / "proc/77/fd/8").symlink_to("/dev/null")
    assert listeners(host) == [
        Listener("127.0.0.1", 7801, 77, "mysqld"),
        Listener("2001:db8::1", 80, None),
        Listener("10.0.0.2", 81, None),
    ]


def test_the_real_ones() -> None:
    with socket.socket() as four, socket.socket(socket.AF_INET6) as six:
        four.bind(("127.0.0.1", 0))
        four.listen()
        six.bind(("::1", 0))
        six.listen()
        found = {(one.address, one.port): one.pid for one in listeners(Host.this_one())}
        assert found["127.0.0.1", four.getsockname()[1]] == os.getpid()
        assert found["::1", six.getsockname()[1]] == os.getpid()


def test_addresses_in_each_others_way() -> None:
    own = ("10.0.0.3", "0.0.0.0", "::", "127.0.0.1")  # noqa: S104  addresses to compare with
    assert [Listener(one, 1, None).covers("10.0.0.3") for one in own] == [True, True, True, False]


@pytest.mark.parametrize(
    ("groups", "finding"),
    [
        (("nogroup", 77), Finding("ok", "tenants, with their users and groups: team-a of 3, team-b of 1")),
        (
            ("no-such-group",),
            Finding(
                "missing",
                "tenants.team-a.groups has 'no-such-group': this host has no such group",
                "make it, or give its number",
            ),
        ),
    ],
)
def test_a_tenant_whose_group_does_not_exist_is_named(groups: tuple[str | int, ...], finding: Finding) -> None:
    tenants = {"team-a": TenantConfig(users=(7,), groups=groups), "team-b": TenantConfig(groups=(78,))}
    assert check_tenants(Config(tenants=tenants)) == finding
    assert check_tenants(Config()) is None
