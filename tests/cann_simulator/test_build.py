"""Building: what is missing is named, what is built is not built again, and the two layouts of a file are one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cann_simulator import build, simulator
from tests.cann_simulator.build import CannotBuildError, built_simulator


@pytest.mark.usefixtures("_libraries")
def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(CannotBuildError, match=r"g\+\+ is not on PATH"):
        built_simulator()


def test_a_missing_environment_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "NPU_PYTHON", build.REPOSITORY / "nowhere" / "bin" / "python")
    build.wheels.cache_clear()
    with pytest.raises(CannotBuildError, match="nowhere"):
        built_simulator()
    build.wheels.cache_clear()


@pytest.mark.usefixtures("_libraries")
def test_it_is_built_once_and_from_the_command_line() -> None:
    folder = built_simulator()
    before = (folder / "libascendcl.so").stat().st_mtime_ns
    command = [sys.executable, "-m", "tests.cann_simulator.build"]
    done = subprocess.run(command, cwd=build.REPOSITORY, capture_output=True, text=True, check=True, timeout=120)
    assert Path(done.stdout.strip()) == folder
    assert (folder / "libascendcl.so").stat().st_mtime_ns == before
    assert (build.CACHE / "current").resolve() == folder.resolve()


def test_the_control_file_has_one_layout() -> None:
    header = (build.SOURCES / "shared_state.h").read_text()
    body = header.split("struct Control {")[1].split("};")[0]
    names = re.findall(r"(?:std::atomic<uint64_t>|StreamRule|ProcessTasks|Teardown) (\w+)", body)
    assert names == list(simulator.FIELDS)


@pytest.mark.usefixtures("_libraries")
def test_programs_need_a_folder() -> None:
    environment = {**os.environ, "LD_LIBRARY_PATH": str(built_simulator())}
    environment.pop("CANN_SIMULATOR_DIR", None)
    code = "import ctypes; print(ctypes.CDLL('libascendcl.so').aclInit(None))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert "set CANN_SIMULATOR_DIR" in done.stderr
    assert done.stdout.strip() != "0"
