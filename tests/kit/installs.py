"""Kvferry as others get it: built like an index builds it, and installed into environments away from the checkout.

``python -m tests.kit.installs`` downloads what fresh environments need, so that no test asks an index.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
LAYERS: Final = ("attention", "clients", "daemon", "pools", "protocol")

PYTHONS: Final = ("3.11", "3.12", "3.13")
WHEELS: Final = Path(sys.prefix) / "wheels"
"""What ``make test`` downloads for fresh environments: what kvferry needs, the pinned versions and the lowest."""

_BUILD_SDIST: Final = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
_OFFLINE: Final = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "-q")


def run(*command: str | Path, cwd: Path, stdin: str = "", **environment: str) -> str:
    """Run a command without this environment's Python settings and return its output; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=kept | environment, input=stdin, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def copy_checkout(folder: Path) -> Path:
    """Return a copy of the checkout below ``folder``, as a clone would be: links are links, without what was built."""
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "*.so", "__pycache__")
    return Path(shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=ignored))


def build_sdist(checkout: Path, folder: Path) -> Path:
    run(sys.executable, "-c", _BUILD_SDIST, folder, cwd=checkout)
    [archive] = folder.glob("*.tar.gz")
    return archive


def build_wheel(source: Path, folder: Path) -> Path:
    """Return the wheel of a source distribution, or of a checkout."""
    run(sys.executable, "-m", "pip", "wheel", *_OFFLINE, "--wheel-dir", folder, source, cwd=ROOT)
    [wheel] = folder.glob("*.whl")
    return wheel


def bare_environment(folder: Path, interpreter: str | Path = sys.executable) -> Path:
    """Return the Python of a new environment with nothing in it."""
    run(interpreter, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    return folder / "bin" / "python"


def new_environment(folder: Path, *what: str | Path) -> Path:
    """Return the Python of a new environment with ``what``, a wheel or ``-e`` and a checkout; without dependencies.

    These are the running environment's: a path in a .pth file makes them visible. The .pth files there are not read,
    so its own kvferry does not come along.
    """
    python = bare_environment(folder)
    dependencies = [path for path in sys.path if path.endswith("site-packages")]
    (site_packages(python) / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    if what:
        install = ("install", "--ignore-installed", *_OFFLINE)
        run(sys.executable, "-m", "pip", "--python", python, *install, *what, cwd=ROOT)
    return python


def lowest_versions() -> dict[str, str]:
    """Return what kvferry needs, with the lowest version of each that its metadata allows."""
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found = {name: lowest for name, _, lowest in (one.partition(">=") for one in listed)}
    assert all(found.values()), "each has a lowest version, and nothing else: no upper bound"
    return found


def download_wheels() -> None:
    """Fill ``WHEELS``: the pinned versions for each Python, and the lowest ones for the oldest."""
    shutil.rmtree(WHEELS, ignore_errors=True)
    lowest = lowest_versions()
    quiet = ("-q", "--disable-pip-version-check", "--only-binary", ":all:", "--dest", WHEELS)
    download = (sys.executable, "-m", "pip", "download", *quiet, "--python-version")
    for version in PYTHONS:
        run(*download, version, "-c", "constraints.txt", *lowest, cwd=ROOT)
    run(*download, PYTHONS[0], *(f"{name}=={version}" for name, version in lowest.items()), cwd=ROOT)


def find_python(version: str) -> Path | None:
    """Return an interpreter of a version such as 3.12, by PATH or among pyenv's; None without one."""
    on_path = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for found in (*([Path(on_path)] if on_path else []), *pyenv.glob(f"{version}.*/bin/python{version}")):
        ask = (found, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])")
        said = subprocess.run(ask, capture_output=True, text=True, check=False, timeout=60)
        if said.stdout.strip() == version:  # one of pyenv's shims has no version behind it, perhaps
            return found
    return None


def fresh_environment(folder: Path, interpreter: Path, *what: str | Path) -> Path:
    """Return the Python of a new environment with ``what`` and all that it requires, as pip finds it in ``WHEELS``."""
    python = bare_environment(folder, interpreter)
    run(*pip_into(python), "--no-compile", *what, cwd=ROOT)
    return python


def pip_into(python: Path) -> tuple[str | Path, ...]:
    """Return the beginning of a command that installs into an environment, from ``WHEELS`` alone."""
    install = ("install", "--isolated", "-q", "--disable-pip-version-check", "--no-index", "--find-links", WHEELS)
    return (sys.executable, "-m", "pip", "--python", python, *install)


def site_packages(python: Path) -> Path:
    [found] = python.parents[1].glob("lib/python3*/site-packages")
    return found


if __name__ == "__main__":
    download_wheels()
