"""The package as others get it: what is built and what is installed; nothing is imported under a second name."""

from __future__ import annotations

import json
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any, Final

import pytest

from tests.kit.installs import LAYERS, ROOT, build_sdist, build_wheel, copy_checkout, new_environment, run

UNITS: Final = (
    "254.conf", "hosts.conf", "kvferry-failed@.target", "kvferry-keeper@.service", "kvferry.nft", "kvferry.toml",
    "kvferry@.service", "kvferry@.socket", "npu.conf", "sysusers.d/kvferry.conf", "tmpfiles.d/kvferry.conf",
)  # fmt: skip
DATA_FILES: Final = {
    "kvferry/monitoring/grafana.json": "monitoring/grafana.json",
    "kvferry/monitoring/kvferry.rules.yml": "monitoring/kvferry.rules.yml",
    **{f"kvferry/systemd/{name}": f"systemd/{name}" for name in UNITS},
    "man/man1/kvferry.1": "docs/kvferry.1",
}
"""Where each file is in ``share``, and in the repository."""

IMPORT_ALL: Final = """
import importlib, json, sys
print(json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))
"""
FIND_ALL: Final = """
import json, sys
from importlib import util
files = {name: util.find_spec(name).origin for name in sys.argv[1:]}
print(json.dumps({"files": files, "path": sys.path, "finders": [str(finder) for finder in sys.meta_path]}))
"""
WALK: Final = """
import json, pkgutil
import kvferry
print(json.dumps(sorted(found.name for found in pkgutil.walk_packages(kvferry.__path__, "kvferry."))))
"""
IMPORT_BY_WRONG_NAMES: Final = """
import importlib, json, sys
said = {}
for folder, name in json.loads(sys.argv[1]):
    sys.path.insert(0, folder)
    try:
        importlib.import_module(name)
    except ImportError as error:
        said[name] = str(error)
    sys.path.remove(folder)
    importlib.invalidate_caches()
print(json.dumps(said))
"""
OF_ENGINES: Final = {
    "kvferry.clients.sglang.hicache",
    "kvferry.clients.sglang.bootstrap",
    "kvferry.clients.sglang.carried",
    "kvferry.clients.sglang.transfer",
    *(
        f"kvferry.clients.vllm.{name}"
        for name in ("connector", "events", "groups", "memory", "metadata", "metrics", "scheduler", "weights", "worker")
    ),
}
"""What derives from classes of an engine, and is imported where that is installed."""

CONSUMER: Final = """
from kvferry.clients import Client
from kvferry.clients.pool import AttachedPool
from kvferry.protocol.manifests import MhaSpec
"""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


NATIVE = "kvferry.pools.native_kernel"
"""Built from C."""


def source_files() -> set[str]:
    """Return the path of each of the package's modules, relative to the repository."""
    found = (path for layer in LAYERS for path in (ROOT / layer).rglob("*.py"))
    return {str(path.relative_to(ROOT)) for path in found}


def module_name(path: str) -> str:
    """Return the name under which ``clients/cli/main.py`` is imported, ``kvferry.clients.cli.main``."""
    return ".".join(("kvferry", *Path(path).with_suffix("").parts)).removesuffix(".__init__")


def test_package_list_equals_the_folders() -> None:
    folders = {Path(path).parent for path in source_files()}
    expected = {"kvferry", *(".".join(("kvferry", *folder.parts)) for folder in folders)}
    assert sorted(project()["tool"]["setuptools"]["packages"]) == sorted(expected)
    assert [folder for folder in folders if not (ROOT / folder / "__init__.py").is_file()] == []


def test_every_top_level_folder_with_code_is_a_layer() -> None:
    with_code = {path.parent.name for path in ROOT.glob("[a-z]*/*.py")}
    assert with_code - {"benchmarks", "examples", "tests"} == set(LAYERS)
    assert not (ROOT / "__init__.py").exists(), "kvferry is a namespace package"
    assert [layer for layer in LAYERS if not (ROOT / layer / "py.typed").is_file()] == [], "each is typed"


def test_the_source_folder_has_links_to_the_layers_and_nothing_else() -> None:
    links = {link.name: str(link.readlink()) for link in (ROOT / "src" / "kvferry").iterdir()}
    assert links == {layer: f"../../{layer}" for layer in LAYERS}


def test_git_keeps_the_links(require: Callable[[object, str], None]) -> None:
    require((ROOT / ".git").exists(), "a checkout by git")
    listed = run("git", "ls-files", "--stage", "src", cwd=ROOT).splitlines()
    assert {line.split()[0] for line in listed} == {"120000"}
    assert {line.rpartition("/")[2] for line in listed} == set(LAYERS)


def test_tools_know_every_layer() -> None:
    tools = project()["tool"]
    assert set(tools["importlinter"]["root_packages"]) == {f"kvferry.{layer}" for layer in LAYERS}
    assert set(tools["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"]) == {*LAYERS, "src"}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return copy_checkout(tmp_path_factory.mktemp("clean"))


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel as an index would: from a source distribution."""
    folder = tmp_path_factory.mktemp("dist")
    archive = build_sdist(checkout, folder)
    with tarfile.open(archive) as packed:
        assert {"scheduler.py", "prefill.py"} <= {Path(name).name for name in packed.getnames() if "/examples/" in name}
    return build_wheel(archive, folder)


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with the wheel, and return its folder."""
    return new_environment(tmp_path_factory.mktemp("environment"), wheel).parents[1]


@pytest.fixture(scope="module")
def editable(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment with an editable install of the checkout, and return its folder."""
    return new_environment(tmp_path_factory.mktemp("editable"), "-e", checkout).parents[1]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an environment without kvferry, but with what it needs, and return its folder."""
    return new_environment(tmp_path_factory.mktemp("bare")).parents[1]


@pytest.mark.full
def test_wheel_holds_the_package_and_the_unit_files_only(wheel: Path, environment: Path) -> None:
    version = project()["project"]["version"]
    names = zipfile.ZipFile(wheel).namelist()
    expected = {f"kvferry/{path}" for path in source_files()}
    expected |= {f"kvferry/{layer}/py.typed" for layer in LAYERS}
    expected |= {"kvferry/pools/native_kernel.abi3.so", "kvferry/pools/native_kernel.pyi"}
    expected |= {f"kvferry-{version}.data/data/share/{name}" for name in DATA_FILES}
    assert {name for name in names if not name.startswith(f"kvferry-{version}.dist-info/")} == expected
    for name, source in DATA_FILES.items():
        assert (environment / "share" / name).read_bytes() == (ROOT / source).read_bytes()


@pytest.mark.full
def test_wheel_of_a_checkout_is_that_of_its_source_distribution(
    wheel: Path, checkout: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    both = [zipfile.ZipFile(one) for one in (wheel, build_wheel(checkout, tmp_path_factory.mktemp("direct")))]
    built, direct = ({name: one.read(name) for name in one.namelist()} for one in both)
    assert direct == built


def all_modules() -> list[str]:
    """Return the names of all modules; what is run by ``python -m`` is not imported."""
    return sorted(module_name(path) for path in source_files() if not path.endswith("__main__.py"))


@pytest.mark.full
def test_an_editable_install_is_a_path_and_no_import_hook(editable: Path, checkout: Path, environment: Path) -> None:
    names = all_modules()
    found = json.loads(run(editable / "bin" / "python", "-c", FIND_ALL, *names, cwd=editable))
    source = checkout / "src"
    assert [name for name in names if not Path(found["files"][name]).is_relative_to(source)] == []
    assert str(source) in found["path"]
    assert str(checkout) not in found["path"]
    plain = json.loads(run(environment / "bin" / "python", "-c", FIND_ALL, cwd=environment))
    assert len(found["finders"]) == len(plain["finders"])
    assert not list(source.glob("*.egg-info")), "a second distribution on sys.path"


@pytest.mark.full
def test_checkout_editable_install_and_wheel_have_the_same_modules(
    environment: Path, editable: Path, checkout: Path, bare: Path
) -> None:
    """And each is imported from there."""
    modules = {module_name(path) for path in source_files()}
    names = [name for name in all_modules() if name not in OF_ENGINES]
    files = json.loads(run(environment / "bin" / "python", "-c", IMPORT_ALL, *names, cwd=environment))
    assert [name for name in names if not Path(files[name]).is_relative_to(environment)] == []
    installed = set(json.loads(run(environment / "bin" / "python", "-c", WALK, cwd=environment)))
    assert installed == {*modules, NATIVE}
    assert set(json.loads(run(editable / "bin" / "python", "-c", WALK, cwd=editable))) == installed
    found = json.loads(run(bare / "bin" / "python", "-c", WALK, cwd=bare, PYTHONPATH=str(checkout / "src")))
    assert {*found, NATIVE} == installed, "which the editable install has built there, if it came before"


@pytest.mark.full
def test_no_package_is_imported_under_a_second_name(editable: Path, checkout: Path) -> None:
    """From the root, as under ``python -m pytest``; from the folder around it; from a folder within."""
    packages = [Path(path).parent for path in source_files() if path.endswith("__init__.py")]
    wrong = []
    for package in packages:
        dotted = ".".join(package.parts)
        wrong += [
            (checkout, dotted),
            (checkout, f"src.kvferry.{dotted}"),
            (checkout.parent, f"{checkout.name}.{dotted}"),
            (checkout.parent, f"{checkout.name}.src.kvferry.{dotted}"),
        ]
        wrong += [
            (checkout / Path(*package.parts[:at]), ".".join(package.parts[at:])) for at in range(1, len(package.parts))
        ]
    arguments = json.dumps([(str(folder), name) for folder, name in wrong])
    said = json.loads(run(editable / "bin" / "python", "-I", "-c", IMPORT_BY_WRONG_NAMES, arguments, cwd=editable))
    assert [name for _, name in wrong if name not in said] == []
    assert [text for text in said.values() if not text.startswith("import kvferry.")] == []


@pytest.mark.full
def test_type_checkers_resolve_it_everywhere(
    environment: Path,
    editable: Path,
    checkout: Path,
    bare: Path,
    tmp_path: Path,
    require: Callable[[object, str], None],
) -> None:
    """By mypy, which like an editor runs no code of an environment; what is imported is resolved and not checked."""
    require(util.find_spec("mypy"), "mypy")
    (tmp_path / "consumer.py").write_text(CONSUMER)
    mypy = (sys.executable, "-m", "mypy", "--follow-imports=skip", "--cache-dir", tmp_path / "cache")
    for home in (environment, editable):
        run(*mypy, "--strict", "--python-executable", home / "bin" / "python", "consumer.py", cwd=tmp_path)
    run(*mypy, "--python-executable", bare / "bin" / "python", "-m", "kvferry.clients", cwd=checkout)
    with pytest.raises(AssertionError, match=r"import-not-found"):  # it does say so where there is none
        run(*mypy, "--python-executable", bare / "bin" / "python", "consumer.py", cwd=tmp_path)


@pytest.mark.full
def test_installed_command_derives_a_manifest(environment: Path) -> None:
    layout = (environment / "bin" / "kvferry", "layout", "--model", "llama-3-8b", "--json")
    assert len(json.loads(run(*layout, cwd=environment))["entries"]) == 2 * 32
