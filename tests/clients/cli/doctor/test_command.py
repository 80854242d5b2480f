"""``kvferry doctor`` as a whole: on laid-out hosts, and as a user runs it."""

from __future__ import annotations

import argparse
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from kvferry.clients.cli.doctor import kernel, ports, running
from kvferry.clients.cli.doctor.command import add_doctor, examine, lines
from kvferry.clients.cli.doctor.host import Finding, Host, exit_status, run_child
from kvferry.clients.cli.doctor.needs import read_needs
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


def test_the_configuration_asks_for_tiers(tmp_path: Path) -> None:
    host = plain_host(tmp_path)
    assert by_name(host)["host tier"].found.startswith("6.4 GiB")
    (tmp_path / "a.toml").write_text(
        '[tiers.disk]\npath = "/srv/blocks"\n[tiers.remote]\ntransport = "mooncake_store"\nmaster = "127.0.0.1:1"\n'
    )
    found = by_name(host, "--config", "/a.toml")
    tiers = ("host tier", "disk tier", "mooncake", "libibverbs", "tiers.remote.address", "store master")
    assert [found[name].state for name in tiers] == ["ok", "missing", "missing", "ok", "missing", "warning"]


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


@pytest.mark.parametrize(
    ("lost", "name", "state"),
    [
        ("dev/davinci_manager", "device nodes", "missing"),
        ("dev/shm/.keep", "shared memory", "missing"),
        ("opt/cann/x86_64-linux/ascend_toolkit_install.info", "CANN", "unknown"),
        ("proc/self/limits", "memlock", "unknown"),
        ("usr/local/bin/npu-smi", "npu health", "unknown"),
        ("usr/local/Ascend/driver/version.info", "driver", "missing"),
    ],
)
def test_each_thing_that_an_npu_host_loses(tmp_path: Path, lost: str, name: str, state: str) -> None:
    host = npu_host(tmp_path)
    (tmp_path / lost).unlink()
    if lost.endswith(".keep"):
        (tmp_path / lost).parent.rmdir()
    found = by_name(host)
    assert found[name].state == state
    assert found[name].fix
    assert exit_status(found.values()) == (state == "missing")


def test_a_check_that_breaks_is_a_line_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object) -> Finding:
        raise ZeroDivisionError("no cores")

    monkeypatch.setattr(kernel, "check_kernel", broken)
    findings = examine(plain_host(tmp_path), options())
    assert findings["kernel"].state == "unknown"
    assert "ZeroDivisionError: no cores" in findings["kernel"].found
    assert findings["memory"].state == "ok"


def test_the_table() -> None:
    findings = {"a": Finding("ok", "fine"), "longer": Finding("missing", "not there", "get it")}
    assert list(lines(findings)) == [
        "  check   state    found",
        "  a       ok       fine",
        "  longer  missing  not there",
        "                   -> get it",
        "",
        "missing: longer",
    ]


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
