"""The kernel and its limits."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.clients.cli.doctor.kernel import GIB, check_copies, check_files, check_kernel, check_memlock
from tests.clients.cli.doctor.fake_host import MODERN_KERNEL, OLD_KERNEL, limits, make_host

RELEASE = "/proc/sys/kernel/osrelease"


@pytest.mark.parametrize(
    ("release", "state"), [(MODERN_KERNEL, "ok"), ("5.14.0-427.el9", "ok"), (OLD_KERNEL, "warning"), ("", "unknown")]
)
def test_kernel(tmp_path: Path, release: str, state: str) -> None:
    finding = check_kernel(make_host(tmp_path, {RELEASE: release}))
    assert finding.state == state
    assert release.strip() in finding.found


@pytest.mark.parametrize(
    ("kernel", "locked", "npu", "state"),
    [
        (MODERN_KERNEL, 8 << 20, False, "ok"),
        (OLD_KERNEL, 8 << 20, False, "ok"),
        (MODERN_KERNEL, 8 << 20, True, "warning"),
        (OLD_KERNEL, 8 << 20, True, "missing"),
        (OLD_KERNEL, 64 * GIB - 1, True, "missing"),
        (OLD_KERNEL, 64 * GIB, True, "ok"),
        (OLD_KERNEL, "unlimited", True, "ok"),
    ],
)
def test_memlock(tmp_path: Path, kernel: str, locked: int | str, *, npu: bool, state: str) -> None:
    host = make_host(tmp_path, {RELEASE: kernel, "/proc/self/limits": limits(locked=locked)})
    finding = check_memlock(host, None, 64 * GIB, npu=npu)
    assert finding.state == state
    assert "this shell" in finding.found
    assert ("LimitMEMLOCK=infinity" in finding.fix) is (state != "ok")


def test_the_daemons_limits_count_where_it_runs(tmp_path: Path) -> None:
    files = {RELEASE: OLD_KERNEL, "/proc/self/limits": limits(64, 0), "/proc/4711/limits": limits()}
    host = make_host(tmp_path, files)
    assert check_memlock(host, 4711, 64 * GIB, npu=True).state == "ok"
    finding = check_files(host, 4711)
    assert (finding.state, finding.found) == ("ok", "65536 for the daemon (pid 4711)")
    assert check_files(host, None).state == "warning"


def test_limits_that_cannot_be_read(tmp_path: Path) -> None:
    host = make_host(tmp_path)
    assert "not seen from here" in check_files(host, 0).found
    assert check_files(host, 1).state == "unknown"
    assert check_memlock(host, 1, GIB, npu=True).state == "unknown"


@pytest.mark.parametrize(("files", "state"), [(8191, "warning"), (8192, "ok"), ("unlimited", "ok")])
def test_files(tmp_path: Path, files: int | str, state: str) -> None:
    finding = check_files(make_host(tmp_path, {"/proc/self/limits": limits(files)}), None)
    assert finding.state == state
    assert finding.found.startswith(str(files))


def test_copies() -> None:
    assert check_copies().state in {"ok", "warning"}
