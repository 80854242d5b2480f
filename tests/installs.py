"""Kvferry as others get it: built like an index builds it, and installed into environments away from the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LAYERS: Final = ("attention", "clients", "daemon", "pools", "protocol")

_BUILD_SDIST: Final = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
_OFFLINE: Final = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "-q")


def run(*command: str | Path, cwd: Path, stdin: str = "", **environment: str) -> str:
    """Run a command without this environment's Python settings and return its output; it must succeed."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=kept | environment,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{command} exited with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def copy_checkout(folder: Path) -> Path:
    """Return a copy of the checkout below ``folder``, as a clone would be: links are links, without what was built."""
    ignored = shutil.ignore_patterns(".*", "build", "dist", "*.egg-info", "__pycache__")
    return Path(shutil.copytree(ROOT, folder / "checkout", symlinks=True, ignore=ignored))


def build_sdist(checkout: Path, folder: Path) -> Path:
    """Return the source distribution of a checkout."""
    run(sys.executable, "-c", _BUILD_SDIST, folder, cwd=checkout)
    [archive] = folder.glob("*.tar.gz")
    return archive


def build_wheel(source: Path, folder: Path) -> Path:
    """Return the wheel of a source distribution, or of a checkout."""
    run(sys.executable, "-m", "pip", "wheel", *_OFFLINE, "--wheel-dir", folder, source, cwd=ROOT)
    [wheel] = folder.glob("*.whl")
    return wheel


def new_environment(folder: Path, *what: str | Path) -> Path:
    """Return the Python of a new environment with ``what``, a wheel or ``-e`` and a checkout; without dependencies.

    These are the running environment's: a path in a .pth file makes them visible. The .pth files there are not read,
    so its own kvferry does not come along.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=ROOT)
    python = folder / "bin" / "python"
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages(python) / "dependencies.pth").write_text("\n".join(sorted(dependencies)) + "\n")
    if what:
        install = ("install", "--ignore-installed", *_OFFLINE)
        run(sys.executable, "-m", "pip", "--python", python, *install, *what, cwd=ROOT)
    return python


def site_packages(python: Path) -> Path:
    """Return where an environment has its packages."""
    [found] = python.parents[1].glob("lib/python3*/site-packages")
    return found
