"""``pip install kvferry`` in environments of others: a daemon and two engines run there, and nothing is replaced.

pip finds what kvferry needs in the folder that ``make test-full`` has filled, so none of this asks an index.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import uuid
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest

from tests import kit
from tests.kit import installs
from tests.kit.forked import REPOSITORY
from tests.kit.installs import PYTHONS, run

ENGINE: Final = REPOSITORY / "tests" / "kit" / "small_engine.py"
ENGINE_S: Final = 120.0

Requires = Callable[[object, str], None]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    return installs.build_wheel(installs.build_sdist(installs.copy_checkout(folder), folder), folder)


def transfer(python: Path, tmp_path: Path, *options: str) -> dict[str, str]:
    """Run a daemon, a prefill and a decode engine of one environment; return the versions that they ran by."""
    with kit.daemon(environment={"PYTHONPATH": ""}, python=python) as daemon:
        run(python.with_name("kvferry"), "ping", "--runtime-dir", daemon.runtime_dir, cwd=tmp_path)
        request_id = uuid.uuid4().hex
        sides = [
            subprocess.Popen(
                [python, "-P", ENGINE, side, daemon.runtime_dir, request_id, *options],
                env={**os.environ, "PYTHONPATH": ""},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for side in ("prefill", "decode")
        ]
        said = [side.communicate(timeout=ENGINE_S)[0] for side in sides]
        assert [side.returncode for side in sides] == [0, 0], said
    versions: list[dict[str, str]] = [json.loads(text.splitlines()[-1]) for text in said]
    assert versions[0] == versions[1]
    return versions[0]


def interpreter_of(version: str, require: Requires) -> Path:
    interpreter = installs.find_python(version)
    require(interpreter, f"Python {version}")
    require(installs.WHEELS.is_dir(), f"what make test-full downloads into {installs.WHEELS}")
    assert interpreter is not None
    return interpreter


@pytest.mark.full
@pytest.mark.parametrize("version", PYTHONS)
def test_a_fresh_environment_without_torch(wheel: Path, tmp_path: Path, version: str, require: Requires) -> None:
    python = installs.fresh_environment(tmp_path / "fresh", interpreter_of(version, require), wheel)
    versions = transfer(python, tmp_path)
    assert versions["python"].startswith(f"{version}.")
    assert set(versions) == {"python", *installs.lowest_versions()}, "and no torch"


@pytest.mark.full
def test_a_fresh_environment_with_the_lowest_versions(wheel: Path, tmp_path: Path, require: Requires) -> None:
    interpreter = interpreter_of(PYTHONS[0], require)
    lowest = installs.lowest_versions()
    exact = [f"{name}=={version}" for name, version in lowest.items()]
    versions = transfer(installs.fresh_environment(tmp_path / "fresh", interpreter, wheel, *exact), tmp_path)
    assert {name: pair(versions[name]) for name in lowest} == {name: pair(lowest[name]) for name in lowest}


def pair(version: str) -> tuple[int, int]:
    first, second, *_ = version.split(".")
    return int(first), int(second)


@pytest.mark.full
def test_an_environment_with_torch(wheel: Path, tmp_path: Path) -> None:
    """Its torch, and what else kvferry needs, are those of the running one."""
    versions = transfer(installs.new_environment(tmp_path / "environment", wheel), tmp_path, "--tensors")
    assert versions["torch"] == metadata.version("torch")


@pytest.mark.parametrize("name", ["constraints.txt", "tests/sglang/requirements.txt", "tests/vllm/requirements.txt"])
def test_every_version_is_pinned(name: str) -> None:
    lines = [line for line in (REPOSITORY / name).read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][0-9A-Za-z.]*(\+cpu)?", line)] == []
    assert len({line.partition("==")[0].lower() for line in lines}) == len(lines) > 50


ENGINES: Final[dict[str, dict[str, str]]] = {
    "an engine of 2025": {"torch": "2.6.0", "numpy": "1.26.4", "pyzmq": "25.1.2", "msgspec": "0.18.6"},
    "vllm-ascend": {"torch": "2.10.0", "torch-npu": "2.10.0.post6", "numpy": "1.26.4", "pyzmq": "26.4.0"},
    "vLLM 0.32": {"torch": "2.13.0", "numpy": "2.3.5", "pyzmq": "27.0.2", "msgspec": "0.20.0"},
    "SGLang 0.5.23": {"torch": "2.14.1", "numpy": "2.4.0", "msgspec": "0.21.0", "uvloop": "0.21.0", "xxhash": "3.5.0"},
}


@pytest.mark.full
@pytest.mark.parametrize(("engine", "extra"), [*((engine, "") for engine in ENGINES), ("an engine of 2025", "[torch]")])
def test_pip_leaves_what_an_engine_has(wheel: Path, tmp_path: Path, engine: str, extra: str, require: Requires) -> None:
    """By metadata: the engine's packages are stand-ins, of a name and a version each."""
    require(installs.WHEELS.is_dir(), f"what make test-full downloads into {installs.WHEELS}")
    python = installs.bare_environment(tmp_path / "engine")
    for name, version in ENGINES[engine].items():
        stand_in(installs.site_packages(python), name, version)
    dry = ("--dry-run", "--report", tmp_path / "report.json")
    run(*installs.pip_into(python), *dry, f"kvferry{extra} @ {wheel.as_uri()}", cwd=tmp_path)
    installed = json.loads((tmp_path / "report.json").read_text())["install"]
    assert {one["metadata"]["name"] for one in installed} == {"kvferry", *installs.lowest_versions()} - set(
        ENGINES[engine]
    )


def stand_in(folder: Path, name: str, version: str) -> None:
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "INSTALLER").write_text("stand-in\n")
    (info / "RECORD").write_text(f"{info.name}/METADATA,,\n{info.name}/INSTALLER,,\n{info.name}/RECORD,,\n")
