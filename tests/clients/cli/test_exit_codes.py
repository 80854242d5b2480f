"""The exit status of every command: 2 for input that is wrong, 1 where it did not work; the error where it belongs.

That 0 is for what worked, the tests of each command say.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients.cli import console
from kvferry.clients.cli.main import main
from kvferry.protocol.errors import KvferryError
from tests.kit.daemons import Daemon
from tests.kit.kvferry_command import run_kvferry

HASH: Final = "00" * 16
WRONG_USAGE: Final = (
    "", "pong", "--fast", "ping --fast", "ping more", "ping --runtime-dir=", "probe PING --runtime-dir=",
    "ping --timeout", "ping --timeout x", "ping --timeout -1", "ping --timeout 0",
    "ping --timeout nan", "status --timeout 1e9", "status all", "probe", "probe --timeout x PING", "probe --file",
    "cache", "cache burn", "cache pin", f"cache evict {HASH}", "cache clear", "cache drop", "cache list --timeout -3",
    "cache watch --from now", "layout",
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
