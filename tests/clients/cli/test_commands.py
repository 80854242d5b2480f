"""Every command: its exit status, and its error where it belongs; what the quick ones load; the files of systemd.

The status is 2 for input that is wrong, 1 where it did not work; that 0 is for what worked, their own tests say.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients.cli import console, units
from kvferry.clients.cli.main import DAEMON, KEEPER, MODULES, PURPOSES, main
from kvferry.protocol import VERSION
from kvferry.protocol.errors import KvferryError
from tests.kit.daemons import Daemon
from tests.kit.kvferry_command import run_kvferry

HASH: Final = "00" * 16
WRONG_USAGE: Final = (
    "", "pong", "--fast", "ping --fast", "ping more", "ping --runtime-dir=", "probe PING --runtime-dir=",
    "ping --timeout", "ping --timeout x", "ping --timeout -1", "ping --timeout 0",
    "ping --timeout nan", "status --timeout 1e9", "status all", "probe", "probe --timeout x PING", "probe --file",
    "cache", "cache burn", "cache pin", f"cache evict {HASH}", "cache clear", "cache drop", "cache list --timeout -3",
    "events --from then", "events --from -1", "layout",
    "layout --model", "layout --model llama-3-8b --tokens many", "layout --model llama-3-8b --packed tightly",
    "layout a b", "layout spec.json --models", "plan", "plan a b", "doctor --timeout no",
)  # fmt: skip
AS_TEXT: Final = (
    "cache pin zz --pool p", f"cache evict {HASH}00 --pool p", "layout DIR/none", "layout DIR", "layout DIR/broken",
    "layout DIR/wrong",
    "layout --model llama-9", "layout --model llama-3-8b --layers 3", "plan DIR/none", "plan DIR/broken",
    "plan DIR/wrong --explain", "doctor --config DIR/none", "doctor --config DIR/none --json",
    "doctor --user nobody-of-that-name", "daemon --config DIR/broken",
    "daemon --runtime-dir DIR/broken",
)  # fmt: skip
AS_JSON: Final = (
    "probe PINGG", "probe ALLOCATE {", "probe ALLOCATE [1]", "probe ALLOCATE {}", "probe PING --file DIR/none",
    "probe PING --file DIR", "probe PING --file DIR/broken", "layout DIR/broken --json",
    "layout --model llama-9 --json", "plan DIR/none --json", "plan DIR/wrong --explain --json",
)  # fmt: skip
"""Wrong input, and whether the error is JSON on standard output."""

FAILING: Final = (
    "ping --runtime-dir DIR", "status --runtime-dir DIR", "status --json --runtime-dir DIR",
    "probe PING --runtime-dir DIR", "probe SNAPSHOTS --runtime-dir DIR", "cache list --runtime-dir DIR",
    "events --runtime-dir DIR", "events --follow --runtime-dir DIR", "events --cache --json --runtime-dir DIR",
    f"cache pin {HASH} --pool p --runtime-dir DIR", "daemon --runtime-dir /proc/none",
)  # fmt: skip
"""No daemon is there."""


class Command:
    """Runs a command line: in this process, but for the daemon, which would take its place."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Return the exit status, and what was printed on standard output and standard error."""
        if words[:1] == ("daemon",):
            done = run_kvferry(*words)
            return done.returncode, done.stdout, done.stderr
        try:
            status = main(words)
        except SystemExit as ended:
            status = int(ended.code or 0)
        printed = self._capsys.readouterr()
        return status, printed.out, printed.err


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


@pytest.mark.parametrize("line", WRONG_USAGE)
def test_wrong_usage_ends_with_2(line: str, command: Command) -> None:
    status, out, err = command(*line.split())
    assert (status, out) == (2, "")
    assert err.startswith("usage: kvferry")


@pytest.mark.parametrize("line", [*AS_TEXT, *AS_JSON])
def test_wrong_input_ends_with_2(line: str, command: Command, daemon: Daemon, tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("{")
    (tmp_path / "wrong").write_text('{"kind": "mha", "layers": 0}')
    words = line.replace("DIR", str(tmp_path)).split()
    if words[0] in {"probe", "cache"}:
        words += ["--runtime-dir", str(daemon.runtime_dir)]
    status, out, err = command(*words)
    assert status == 2
    if line in AS_JSON:
        assert err == ""
        error = json.loads(out)["error"]
        assert error["code"]
        assert error["detail"]
    else:
        assert out == ""
        assert err.startswith(f"kvferry {words[0]}: ")
        assert err.count("\n") == 1


@pytest.mark.parametrize("line", FAILING)
def test_what_did_not_work_ends_with_1_and_one_line(line: str, command: Command, tmp_path: Path) -> None:
    words = line.replace("DIR", str(tmp_path)).split()
    status, out, err = command(*words)
    assert (status, out) == (1, "")
    lost = "" if words[0] == "daemon" else f"DAEMON_LOST: no daemon at {tmp_path}: "
    assert err.startswith(f"kvferry {words[0]}: {lost}")
    assert err.count("\n") == 1


def test_a_refusal_by_the_daemon_is_no_wrong_input(command: Command, daemon: Daemon) -> None:
    where = ("--runtime-dir", str(daemon.runtime_dir))
    status, _, err = command("cache", "drop", HASH, *where)
    assert (status, "UNKNOWN_SNAPSHOT" in err) == (1, True)
    assert command("cache", "pin", HASH, "--identity", HASH, *where)[:2] == (1, "0 blocks pinned\n")
    status, out, _ = command("probe", "ALLOCATE", '{"pool": "nobodys", "count": 1}', *where)
    assert (status, json.loads(out)["error"]["code"]) == (1, "UNKNOWN_POOL")


def test_input_is_told_from_failure_by_the_errors_code() -> None:
    codes = {code for code, kind in KvferryError.by_code.items() if console.status_of(kind("")) == 2}
    assert codes == {"INVALID_FIELD", "UNKNOWN_TYPE", "CONFIG"}


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
    assert set(PURPOSES) == {DAEMON, KEEPER, *MODULES}
    listed = run_kvferry("--help").stdout.splitlines()
    assert [line.split()[0] for line in listed if line.startswith("    ") and line[4] != " "] == list(PURPOSES)
    for name in MODULES:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert capsys.readouterr().out.startswith(f"usage: kvferry {name} ")


def test_the_version_is_the_packages() -> None:
    assert run_kvferry("--version").stdout == f"kvferry {VERSION}\n"
    assert metadata.version("kvferry") == VERSION
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


HERE = str(Path(sys.executable).with_name("kvferry"))
FILES = {
    "etc/systemd/system/kvferry@.service",
    "etc/systemd/system/kvferry@.socket",
    "etc/systemd/system/kvferry-failed@.target",
    "etc/systemd/system/kvferry-keeper@.service",
    "etc/sysusers.d/kvferry.conf",
    "etc/tmpfiles.d/kvferry.conf",
}
NEWER = {"etc/systemd/system/kvferry@.service.d/254.conf"}


@pytest.fixture
def _seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the checkout lie where the unit hides nothing, wherever it is."""
    monkeypatch.setattr(units, "HIDDEN", ())


@pytest.mark.usefixtures("_seen")
@pytest.mark.parametrize(("version", "more"), [(253, set[str]()), (254, NEWER)])
def test_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int, more: set[str]) -> None:
    monkeypatch.setattr(units, "systemd_version", lambda: version)
    assert main(["systemd", "--install", "--root", str(tmp_path)]) == 0
    assert {str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*") if one.is_file()} == FILES | more
    service = (tmp_path / "etc/systemd/system/kvferry@.service").read_text()
    assert f"\nExecStart={HERE} daemon --config /etc/kvferry/%i.toml " in service


@pytest.mark.usefixtures("_seen")
def test_without_the_option_nothing_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["systemd", "--root", str(tmp_path)]) == 0
    assert not [*tmp_path.iterdir()]
    said = capsys.readouterr().out
    assert all(str(tmp_path / one) in said for one in FILES)
    assert all(
        one in said for one in ("systemd-sysusers", "daemon-reload", "kvferry@NAME.socket", "usermod -aG kvferry")
    )


@pytest.mark.usefixtures("_seen")
def test_what_it_cannot_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "etc").touch()
    assert main(["systemd", "--install", "--root", str(tmp_path)]) == 1
    monkeypatch.setattr(units, "HIDDEN", (Path(HERE).anchor,))
    assert main(["systemd", "--install", "--root", str(tmp_path / "image")]) == 2
    assert "/opt/kvferry" in capsys.readouterr().err
    assert not (tmp_path / "image").exists()


@pytest.mark.parametrize(("said", "version"), [("systemd 257 (257.4-1)\n+PAM\n", 257), ("OpenRC\n", 0)])
def test_the_version_is_systemds_own(monkeypatch: pytest.MonkeyPatch, said: str, version: int) -> None:
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess[str]([], 0, said))
    assert units.systemd_version() == version
