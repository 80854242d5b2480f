"""Mooncake's wheels in each state."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from kvferry.clients.cli.doctor.needs import Needs
from kvferry.clients.cli.doctor.wheels import CUDA_WHEEL, NPU_WHEEL, PLAIN_WHEEL, check_verbs, check_wheel
from kvferry.protocol.config.schema import NetworkConfig, RemoteTierConfig, TiersConfig
from tests.clients.cli.doctor.fake_host import make_host, needs_of, script

TCP = needs_of(network=NetworkConfig(transport="mooncake"))
ASCEND = needs_of(network=NetworkConfig(transport="mooncake", protocol="ascend"))
STORE = needs_of(tiers=TiersConfig(remote=RemoteTierConfig(transport="mooncake_store")))
ASCEND_STORE = needs_of(tiers=TiersConfig(remote=RemoteTierConfig(transport="mooncake_store", protocol="ascend")))


def python(tmp_path: Path, wheels: list[str], importing: str = "exit 0") -> list[str]:
    """Return an interpreter with these wheels, that does this when it is to import one."""
    said = json.dumps(dict.fromkeys(wheels, "0.3.13"))
    return [script(tmp_path / "python", f"case \"$2\" in *metadata*) echo '{said}';; *) {importing};; esac")]


@pytest.mark.parametrize(
    ("needs", "wheels", "state"),
    [
        (needs_of(), [], "ok"),
        (needs_of(), [PLAIN_WHEEL, NPU_WHEEL], "ok"),
        (TCP, [], "missing"),
        (TCP, [PLAIN_WHEEL], "ok"),
        (TCP, [NPU_WHEEL], "ok"),
        (TCP, [CUDA_WHEEL], "ok"),
        (TCP, [PLAIN_WHEEL, NPU_WHEEL], "missing"),
        (ASCEND, [PLAIN_WHEEL], "missing"),
        (ASCEND, [NPU_WHEEL], "ok"),
        (STORE, [], "missing"),
        (STORE, [PLAIN_WHEEL], "ok"),
        (ASCEND_STORE, [PLAIN_WHEEL], "missing"),
    ],
)
def test_wheels(tmp_path: Path, needs: Needs, wheels: list[str], state: str) -> None:
    finding = check_wheel(make_host(tmp_path, python=python(tmp_path, wheels)), needs)
    assert finding.state == state
    assert finding.found.startswith(f"{wheels[0]} 0.3.13" if wheels else "not installed")
    assert ("pip install" in finding.fix) is (state == "missing")


def test_the_wheel_for_npus_is_named(tmp_path: Path) -> None:
    finding = check_wheel(make_host(tmp_path, python=python(tmp_path, [])), ASCEND)
    assert finding.fix == "pip install mooncake-transfer-engine-npu"


def test_a_wheel_that_cannot_be_imported(tmp_path: Path) -> None:
    failing = "echo 'ImportError: libibverbs.so.1: cannot open shared object file' >&2; exit 1"
    finding = check_wheel(make_host(tmp_path, python=python(tmp_path, [PLAIN_WHEEL], failing)), TCP)
    assert finding.state == "missing"
    assert "libibverbs.so.1" in finding.found
    assert "apt-get install libibverbs1" in finding.fix


def test_verbs(tmp_path: Path) -> None:
    assert check_verbs(make_host(tmp_path), needs_of()) is None
    assert check_verbs(make_host(tmp_path, python=[script(tmp_path / "python", "exit 0")]), STORE) is not None
    found = check_verbs(make_host(tmp_path, python=[script(tmp_path / "python", "exit 0")]), TCP)
    assert found is not None
    assert found.state == "ok"
    lacking = script(tmp_path / "python", "echo 'OSError: libibverbs.so.1: cannot open' >&2; exit 1")
    found = check_verbs(make_host(tmp_path, python=[lacking]), TCP)
    assert found is not None
    assert (found.state, found.found) == ("missing", "libibverbs.so.1: cannot open")


def test_the_real_interpreter_is_asked(tmp_path: Path) -> None:
    finding = check_wheel(make_host(tmp_path, environ={"PATH": os.environ["PATH"]}), needs_of())
    assert finding.found.endswith('not needed, network.transport is "none"')
