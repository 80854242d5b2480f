"""What the quick commands load: they are run by scripts, once a second and more, on hosts that serve."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients.cli.main import DAEMON, MODULES, PURPOSES, main
from kvferry.protocol import VERSION
from tests.kit.daemons import Daemon
from tests.kit.kvferry_command import run_kvferry

ROOT: Final = Path(__file__).resolve().parents[3]

OBSERVED: Final = """
import json, sys
import zmq, msgspec
before = set(sys.modules)
from kvferry.clients.cli.main import main
try:
    status = main(sys.argv[1:])
except SystemExit as ended:
    status = ended.code
print(json.dumps([status, sorted(set(sys.modules) - before)]), file=sys.stderr)
"""
ARGPARSE: Final = {"argparse", "gc", "gettext", "locale", "_locale"}
PATHS: Final = {"fnmatch", "ipaddress", "ntpath", "pathlib", "urllib", "urllib.parse"}
SOCKETS: Final = {"array", "math", "select", "selectors", "socket"}
"""Of Python itself; the rest of what a command loads is ours."""

DAEMONS: Final = ("--runtime-dir", "DIR")
CASES: Final = {
    "help": (["--help"], 10),
    "status for programs": (["status", "--json", *DAEMONS], 40),
    "probe with a session": (["probe", "SNAPSHOTS", *DAEMONS], 50),
    "probe with pages": (["probe", "--keep-going", "ALLOCATE", '{"pool": "none", "count": 1}', *DAEMONS], 50),
}
"""Arguments, and how many modules of ours at most."""


@pytest.mark.parametrize("case", CASES)
def test_a_quick_command_loads_little(daemon: Daemon, case: str) -> None:
    arguments, most = CASES[case]
    given = [str(daemon.runtime_dir) if one == "DIR" else one for one in arguments]
    done = subprocess.run(
        [sys.executable, "-P", "-c", OBSERVED, *given], capture_output=True, text=True, check=True, timeout=60
    )
    status, loaded = json.loads(done.stderr.splitlines()[-1])
    assert status == (1 if case == "probe with pages" else 0)
    ours = {name for name in loaded if name.partition(".")[0] == "kvferry"}
    assert set(loaded) - ours <= (ARGPARSE if case == "help" else ARGPARSE | PATHS | SOCKETS)
    assert len(ours) <= most, sorted(ours)
    assert not {name for name in ours if name.startswith(("kvferry.pools", "kvferry.attention", "kvferry.daemon"))}


def test_every_command_can_be_loaded_and_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(PURPOSES) == {DAEMON, *MODULES}
    listed = run_kvferry("--help").stdout
    for name in MODULES:
        assert f" {name} " in listed
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: kvferry {name} ")


def test_the_version_is_the_packages() -> None:
    assert run_kvferry("--version").stdout == f"kvferry {VERSION}\n"
    assert metadata.version("kvferry") == VERSION
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION
