"""Checks of CANN: its location and version, and whether the loader finds its libraries, in a child process only."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

from kvferry.clients.cli.doctor.children import run_child
from kvferry.clients.cli.doctor.findings import Finding
from kvferry.clients.cli.doctor.host import Host, values
from kvferry.clients.cli.doctor.versions import at_least

WANTED: Final = "8.5.0"
VARIABLES: Final = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
LIBRARY: Final = "libascendcl.so"
PLACES: Final = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")
_LOAD: Final = "import ctypes, sys; ctypes.CDLL(sys.argv[1])"
_TIMEOUT_S: Final = 20.0


def check_cann(host: Host) -> Finding:
    """Look for CANN by its environment variables, else in the default locations."""
    name = "CANN"
    home = next((PurePosixPath(host.environ[one]) for one in VARIABLES if host.environ.get(one)), None)
    if home is None:
        return _not_in_the_environment(host)
    if not host.path(home).is_dir():
        fix = "source the set_env.sh of the installed CANN, or mount it into the container"
        return Finding(name, "missing", f"the environment names {home}, which does not exist", fix)
    version = _version(host, home)
    new_enough = at_least(version, WANTED)
    if new_enough:
        return Finding(name, "ok", f"{version} in {home}")
    fix = f"install CANN {WANTED} or later: with older versions, copies to registered host memory are slower"
    found = f"{version or 'of unknown version'} in {home}, wanted: {WANTED} or later"
    return Finding(name, "unknown" if new_enough is None else "warning", found, fix)


def check_library(host: Host) -> Finding:
    """Check whether a new process can load CANN's runtime."""
    problem = loading_problem(host, LIBRARY)
    if not problem:
        return Finding("CANN library", "ok", f"{LIBRARY} loads")
    return Finding("CANN library", "missing", problem, loader_fix(problem))


def loading_problem(host: Host, library: str) -> str:
    """Return why a new process cannot load a library; empty if it can."""
    done = run_child([*host.python, "-S", "-c", _LOAD, library], host.environ, _TIMEOUT_S)
    if done.status is None:
        return f"loading {library} took longer than {_TIMEOUT_S:g} s"
    if done.status < 0:
        return f"loading {library} terminates the process with signal {-done.status}"
    return done.last_error.removeprefix("OSError: ") if done.status else ""


def loader_fix(problem: str) -> str:
    """Return what to do if a library of CANN or the driver does not load."""
    if "undefined symbol" in problem:
        return "the versions of driver, CANN and torch_npu are incompatible: see torch_npu's version table"
    if any(library in problem for library in ("libascend_hal", "libdrv", "libdcmi")):
        return "put the driver's lib64/driver and lib64/common on LD_LIBRARY_PATH: CANN's set_env.sh does it"
    return "source CANN's set_env.sh before starting; a systemd unit needs LD_LIBRARY_PATH in Environment="


def _not_in_the_environment(host: Host) -> Finding:
    for place in PLACES:
        if host.path(place).is_dir():
            found = f"installed in {place}, but neither {' nor '.join(VARIABLES)} is set"
            scripts = (f"{place}/set_env.sh", str(PurePosixPath(place).parent / "set_env.sh"))
            script = next((one for one in scripts if host.path(one).exists()), scripts[0])
            return Finding("CANN", "missing", found, f"source {script}")
    fix = f"install CANN {WANTED} or later and source its set_env.sh"
    return Finding("CANN", "missing", f"neither {' nor '.join(VARIABLES)} is set, and {PLACES[0]} does not exist", fix)


def _version(host: Host, home: PurePosixPath) -> str:
    """Return the version that the toolkit's installer recorded, else empty."""
    for folder in (home, *(home / name for name in host.names(home) if name.endswith("-linux"))):
        for name in host.names(folder):
            if name.startswith("ascend_") and name.endswith("_install.info"):
                version = values(host.text(folder / name)).get("version", "")
                if version:
                    return version
    return ""
