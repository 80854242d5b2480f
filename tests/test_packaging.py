"""The package as others get it: its list of packages, and a wheel installed away from the checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
LAYERS: Final = ("attention", "clients", "daemon", "pools", "protocol")
DATA_FILES: Final = ("hosts.conf", "kvferry.toml", "kvferry@.service", "npu.conf")

BUILD_SDIST: Final = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
IMPORT_ALL: Final = (
    "import importlib, json, sys; "
    "print(json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))"
)

LAYOUT_SPEC: Final = {
    "kind": "mha",
    "layers": 3,
    "first_layer": 0,
    "tokens": 256,
    "page_size": 128,
    "kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "dtype": "float16",
    "view": "paged",
}


def run(*command: str | Path, cwd: Path, stdin: str = "") -> str:
    """Run a command without this environment's Python settings and return its output; it must succeed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def project() -> dict[str, Any]:
    """Return what pyproject.toml says."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def source_files() -> set[str]:
    """Return the path of each of the package's modules, relative to the repository."""
    found = (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
    return {str(path.relative_to(ROOT)) for path in found}


def module_name(path: str) -> str:
    """Return the name under which ``clients/cli/main.py`` is imported, ``kvferry.clients.cli.main``."""
    return ".".join(("kvferry", *Path(path).with_suffix("").parts)).removesuffix(".__init__")


def test_package_list_equals_the_folders() -> None:
    folders = {Path(path).parent for path in source_files()}
    assert sorted(project()["tool"]["setuptools"]["packages"]) == sorted(
        ".".join(("kvferry", *folder.parts)) for folder in folders
    )
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()] == []


def test_every_top_level_folder_with_code_is_a_layer() -> None:
    with_code = {path.parent.name for path in ROOT.glob("[a-z]*/*.py")}
    assert with_code - {"benchmarks", "examples", "tests"} == set(LAYERS)
    assert not (ROOT / "__init__.py").exists(), "kvferry is a namespace package"


@pytest.mark.parametrize("layer", LAYERS)
def test_every_layer_is_typed(layer: str) -> None:
    assert (ROOT / layer / "py.typed").is_file()


def test_typing_links_equal_the_layers() -> None:
    links = {link.name: str(link.readlink()) for link in (ROOT / "src" / "kvferry").iterdir()}
    assert links == {layer: f"../../{layer}" for layer in LAYERS}


def test_tools_know_every_layer() -> None:
    tools = project()["tool"]
    assert set(tools["importlinter"]["root_packages"]) == {f"kvferry.{layer}" for layer in LAYERS}
    assert set(tools["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == set(LAYERS)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as an index would: from a source distribution of a clean copy."""
    folder = tmp_path_factory.mktemp("dist")
    source = folder / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "*.egg-info", "__pycache__"))
    run(sys.executable, "-c", BUILD_SDIST, folder, cwd=source)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        assert any(name.endswith("/examples/scheduler.py") for name in packed.getnames())
    pip_wheel = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-index", "--no-build-isolation")
    run(*pip_wheel, "--wheel-dir", folder, archive, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the wheel, and return its folder.

    Its dependencies are the running environment's: a path in a .pth file makes them visible. The .pth files
    there are not read, so the hook of an editable install does not come along, and kvferry is the wheel's.
    """
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    python = home / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index")
    run(*pip, wheel, cwd=home)
    site_packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=home).strip())
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "dependencies.pth").write_text("\n".join(sorted(dependencies)) + "\n")
    return home


def test_wheel_holds_the_package_and_the_unit_files_only(wheel: Path) -> None:
    version = project()["project"]["version"]
    names = zipfile.ZipFile(wheel).namelist()
    expected = {f"kvferry/{path}" for path in source_files()}
    expected |= {f"kvferry/{layer}/py.typed" for layer in LAYERS}
    expected |= {f"kvferry-{version}.data/data/share/kvferry/systemd/{name}" for name in DATA_FILES}
    assert {name for name in names if not name.startswith(f"kvferry-{version}.dist-info/")} == expected


def test_every_module_is_imported_from_the_wheel(environment: Path) -> None:
    names = sorted(module_name(path) for path in source_files() if not path.endswith("__main__.py"))
    files = json.loads(run(environment / "bin" / "python", "-c", IMPORT_ALL, *names, cwd=environment))
    assert [name for name in names if not Path(files[name]).is_relative_to(environment)] == []


def test_installed_unit_files_are_those_of_the_repository(environment: Path) -> None:
    installed = environment / "share" / "kvferry" / "systemd"
    for name in DATA_FILES:
        assert (installed / name).read_bytes() == (ROOT / "systemd" / name).read_bytes()


def test_installed_command_shows_its_help(environment: Path) -> None:
    assert "kvferry" in run(environment / "bin" / "kvferry", "--help", cwd=environment)


def test_installed_command_derives_a_manifest(environment: Path) -> None:
    spec = json.dumps(LAYOUT_SPEC)
    manifest = json.loads(run(environment / "bin" / "kvferry", "layout", "-", cwd=environment, stdin=spec))
    assert manifest["pages"] == 3
    assert manifest["region_bytes"] == 3 * (3 + 3) * 4096
    assert [entry["role"] for entry in manifest["entries"]] == ["k"] * 3 + ["v"] * 3
