"""Compile the CANN simulator with g++, once for each state of its sources, of torch and of the torch_npu wheel.

``python -m tests.cann_simulator.build`` prints the folder for LD_LIBRARY_PATH. It runs with any Python of 3.11 or
later; torch and torch_npu are looked up in the environment ``.venv-npu`` and are not imported.

Does not know how the simulator is used; see simulator.py.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib.metadata import Distribution, PathDistribution
from pathlib import Path
from typing import Final, NamedTuple

SOURCES: Final = Path(__file__).resolve().parent
REPOSITORY: Final = SOURCES.parents[1]
CACHE: Final = REPOSITORY / "build" / "cann_simulator"
NPU_PYTHON: Final = REPOSITORY / ".venv-npu" / "bin" / "python"

COMPILER: Final = "g++"
COMPILE_TIMEOUT_S: Final = 600
WARNINGS: Final = ("-Wall", "-Wextra", "-Wno-missing-field-initializers", "-Wno-deprecated-declarations")
KEPT_BUILDS: Final = 4

# torch_npu is linked against these; only libascendcl.so has to have something in it.
EMPTY_LIBRARIES: Final = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
# What of torch_npu's undefined symbols CANN's C interface would define.
CANN_SYMBOL: Final = re.compile(r"(acl|rt[A-Z]|Msprof)\w*")


class CannotBuildError(RuntimeError):
    """Something that the build needs is not on this machine; the message says what."""


class Wheels(NamedTuple):
    """Where torch and torch_npu are installed, and their versions."""

    torch: Path
    torch_npu: Path
    versions: str


class Unit(NamedTuple):
    """One compilation: a source, what else decides its result, and its flags."""

    source: Path
    headers: tuple[Path, ...]
    flags: tuple[str, ...]
    versions: str


@functools.cache
def wheels() -> Wheels:
    """Find torch and torch_npu for ``.venv-npu``.

    Raises:
        CannotBuildError: the environment or one of the packages is missing.
    """
    if not NPU_PYTHON.exists():
        raise CannotBuildError(f"there is no {NPU_PYTHON.relative_to(REPOSITORY)}: torch_npu needs its own environment")
    listed = subprocess.run(
        [NPU_PYTHON, "-c", "import sys; print(*sys.path, sep='\\n')"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    folders = [Path(line) for line in listed.stdout.splitlines() if line]
    found = {name: _installed(name, folders) for name in ("torch", "torch_npu")}
    versions = " ".join(f"{name} {distribution.version}" for name, (_, distribution) in found.items())
    return Wheels(found["torch"][0], found["torch_npu"][0], versions)


def _installed(name: str, folders: Sequence[Path]) -> tuple[Path, Distribution]:
    for folder in folders:
        information = next(folder.glob(f"{name}-*.dist-info"), None)
        if information is not None and (folder / name).is_dir():
            return folder / name, PathDistribution(information)
    raise CannotBuildError(f"{name} is not installed in {NPU_PYTHON.parents[1].name}")


def built_simulator() -> Path:
    """Build what is not built yet and return the folder with the libraries, for LD_LIBRARY_PATH.

    Raises:
        CannotBuildError: the compiler, nm or one of the wheels is missing.
    """
    needed = wheels()
    for tool in (COMPILER, "nm"):
        if shutil.which(tool) is None:
            raise CannotBuildError(f"{tool} is not on PATH: install g++ and binutils (Debian: apt-get install g++)")
    folder = CACHE / _digest(sorted(SOURCES.glob("*.[ch]*")), needed.versions + Path(__file__).read_text())
    if not (folder / "complete").exists():
        with _one_build_at_a_time():
            if not (folder / "complete").exists():
                _build(folder, needed)
    _make_current(folder)
    return folder


def _digest(files: Sequence[Path], more: str) -> str:
    digest = hashlib.sha256(more.encode())
    for file in files:
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _one_build_at_a_time() -> Iterator[None]:
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_current(folder: Path) -> None:
    current = CACHE / "current"
    if current.is_symlink() and current.readlink() == Path(folder.name):
        return
    fresh = CACHE / f".current-{os.getpid()}"
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(folder.name)
    fresh.replace(current)


def _build(folder: Path, needed: Wheels) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    runtime, operators = _units(needed)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(_compiled, [*operators, *runtime]))
    operator_objects, runtime_objects = objects[: len(operators)], objects[len(operators) :]
    stubs = _stubs(folder, runtime_objects, needed)
    _link(folder, "ascendcl", [*runtime_objects, stubs], ["-lpthread"])
    here = [f"-L{folder}", "-lascendcl"]
    torch_libraries = [f"-L{needed.torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    _link(folder, "opapi", operator_objects, ["-Wl,--no-as-needed", *here, *torch_libraries])
    _link(folder, "nnopbase", [SOURCES / "executor.cpp"], [])
    for name in EMPTY_LIBRARIES:
        _link(folder, name, [], ["-Wl,--no-as-needed", *here])
    (folder / "complete").touch()
    _forget_old_builds()


def _units(needed: Wheels) -> tuple[list[Unit], list[Unit]]:
    headers = tuple(sorted(SOURCES.glob("*.h")))
    acl = ("-isystem", str(needed.torch_npu / "include"))
    torch_flags = ("-isystem", str(needed.torch / "include"))
    operator_sources = sorted(SOURCES.glob("operators*.cpp"))
    runtime_sources = sorted(set(SOURCES.glob("*.cpp")) - {*operator_sources, SOURCES / "executor.cpp"})
    own = tuple(header for header in headers if header.name == "operators.h")
    runtime = [Unit(source, headers, ("-std=c++17", "-O1", "-g", *acl), needed.versions) for source in runtime_sources]
    operators = [
        Unit(source, own, ("-std=c++20", "-O0", *acl, *torch_flags), needed.versions) for source in operator_sources
    ]
    return runtime, operators


def _compiled(unit: Unit) -> Path:
    """Return the object file of a unit, from the cache where neither it nor its headers have changed."""
    command = [COMPILER, *unit.flags, *WARNINGS, "-fPIC", "-c"]
    result = CACHE / "objects" / f"{_digest([unit.source, *unit.headers], unit.versions + ' '.join(command))}.o"
    if not result.exists():
        result.parent.mkdir(parents=True, exist_ok=True)
        unfinished = result.with_suffix(f".{os.getpid()}")
        _run([*command, str(unit.source), "-o", str(unfinished)])
        unfinished.replace(result)
    return result


def _stubs(folder: Path, objects: Sequence[Path], needed: Wheels) -> Path:
    """Write and compile what torch_npu needs and the simulator lacks: functions that stop the process by name."""
    libraries = [*needed.torch_npu.glob("lib/libtorch_npu.so"), *needed.torch_npu.glob("lib/libnpu_profiler.so")]
    wanted = _symbols(["-D", "--undefined-only"], [*libraries, *needed.torch_npu.glob("_C.*.so")])
    missing = sorted(name for name in wanted - _symbols(["--defined-only"], objects) if CANN_SYMBOL.fullmatch(name))
    body = "".join(f"STUB({name})\n" for name in missing)
    source = folder / "stubs.c"
    source.write_text(STUBS_HEAD + body)
    result = folder / "stubs.o"
    _run(["gcc", "-O1", "-fPIC", "-c", str(source), "-o", str(result)])
    return result


STUBS_HEAD: Final = """#include <stdio.h>
#include <stdlib.h>
#define STUB(name) \\
  __attribute__((visibility("default"))) int name(void) { \\
    fprintf(stderr, "CANN simulator: " #name " is not simulated\\n"); \\
    abort(); \\
  }
"""


def _symbols(flags: Sequence[str], files: Sequence[Path]) -> set[str]:
    listed = _run(["nm", *flags, *map(str, files)])
    return {line.split()[-1].split("@")[0] for line in listed.splitlines() if len(line.split()) > 1}


def _link(folder: Path, name: str, objects: Sequence[Path], more: Sequence[str]) -> None:
    target = folder / f"lib{name}.so"
    flags = ["-shared", "-fPIC", f"-Wl,-soname,{target.name}", "-o", str(target)]
    _run([COMPILER, *flags, *map(str, objects), *more])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=COMPILE_TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    if "warning:" in done.stderr:
        sys.stderr.write(done.stderr)
    return done.stdout


def _forget_old_builds() -> None:
    builds = sorted(CACHE.glob("*/complete"), key=lambda file: file.stat().st_mtime)
    for complete in builds[:-KEPT_BUILDS]:
        if not complete.parent.is_symlink():
            shutil.rmtree(complete.parent, ignore_errors=True)


if __name__ == "__main__":
    sys.stdout.write(f"{built_simulator()}\n")
