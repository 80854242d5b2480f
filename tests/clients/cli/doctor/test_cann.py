"""Where CANN is, its version, and whether its libraries load."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.clients.cli.doctor.npus import check_cann, check_library, loader_fix, loading_problem
from tests.clients.cli.doctor.fake_host import make_host, script

INFO = "package_name=Ascend-cann-toolkit\nversion={}\ninnerversion=V100R001\narch=aarch64\n"


@pytest.mark.parametrize("variable", ["ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"])
@pytest.mark.parametrize(
    ("version", "state"), [("8.5.0", "ok"), ("9.0.0", "ok"), ("8.5.0.alpha002", "warning"), ("8.2.RC1", "warning")]
)
def test_version(tmp_path: Path, variable: str, version: str, state: str) -> None:
    file = "/opt/cann/aarch64-linux/ascend_toolkit_install.info"
    finding = check_cann(make_host(tmp_path, {file: INFO.format(version)}, environ={variable: "/opt/cann"}))
    assert finding.state == state
    assert finding.found.startswith(f"{version} in /opt/cann")
    assert bool(finding.fix) is (state != "ok")


def test_no_version_is_written_down(tmp_path: Path) -> None:
    finding = check_cann(make_host(tmp_path, {"/opt/cann/set_env.sh": ""}, environ={"ASCEND_HOME_PATH": "/opt/cann"}))
    assert finding.state == "unknown"


def test_the_variable_names_nothing(tmp_path: Path) -> None:
    finding = check_cann(make_host(tmp_path, environ={"ASCEND_HOME_PATH": "/opt/cann"}))
    assert finding.state == "missing"
    assert "/opt/cann" in finding.found


@pytest.mark.parametrize(
    ("installed", "to_source"),
    [
        ("/usr/local/Ascend/cann/set_env.sh", "/usr/local/Ascend/cann/set_env.sh"),
        ("/usr/local/Ascend/ascend-toolkit/set_env.sh", "/usr/local/Ascend/ascend-toolkit/set_env.sh"),
    ],
)
def test_set_env_was_not_sourced(tmp_path: Path, installed: str, to_source: str) -> None:
    host = make_host(tmp_path, {installed: "", str(Path(installed).parent / "latest/version.cfg"): ""})
    finding = check_cann(host)
    assert finding.state == "missing"
    assert finding.fix == f"source {to_source}"


def test_not_installed(tmp_path: Path) -> None:
    finding = check_cann(make_host(tmp_path))
    assert finding.state == "missing"
    assert "install CANN 8.5.0" in finding.fix


def test_a_library_that_is_not_found(tmp_path: Path) -> None:
    finding = check_library(make_host(tmp_path))
    assert finding.state == "missing"
    assert finding.found.startswith("libascendcl.so: cannot open shared object file")
    assert "LD_LIBRARY_PATH" in finding.fix


def test_a_library_that_loads(tmp_path: Path) -> None:
    assert loading_problem(make_host(tmp_path), "libc.so.6") == ""


def test_a_library_that_ends_the_process(tmp_path: Path) -> None:
    python = script(tmp_path / "python", "kill -SEGV $$")
    assert loading_problem(make_host(tmp_path, python=[python]), "libc.so.6").endswith("signal 11")


@pytest.mark.parametrize(
    ("problem", "fix"),
    [
        ("ImportError: libhccl.so: cannot open shared object file: No such file or directory", "source CANN's"),
        ("libascend_hal.so: cannot open shared object file", "the driver's lib64"),
        ("libtorch_npu.so: undefined symbol: aclrtMemcpyBatch", "are incompatible"),
    ],
)
def test_the_fix_fits_the_library(problem: str, fix: str) -> None:
    assert fix in loader_fix(problem)
