"""On a terminal of 80 columns: tables fit, waits are shown; what goes to a file or a program has neither."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Final

import pytest

from kvferry.clients import Client, new_request_id, pages
from kvferry.clients.cli import units
from kvferry.clients.cli.main import MODULES, main
from kvferry.clients.cli.transfers import LIVE
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.kvferry_command import COMMAND
from tests.kit.pools import SPEC
from tests.kit.terminal import COLUMNS, WIPE, on_terminal

DRAWN_OR_SPOKEN: Final = {"top", "probe", "completion"}
"""A screen; lines that are JSON in any case; a script."""


@pytest.fixture
def waiting(client: Client) -> str:
    """Have a transfer that waits; return its request."""
    client.create_pool("pool", SPEC)
    request_id = new_request_id()
    client.receive("pool", request_id, [pages(client.allocate("pool", 2))], deadline_s=600)
    client.ping()
    return request_id


def test_a_row_that_is_too_wide_goes_on_in_the_next_line(
    daemon: Daemon, waiting: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--runtime-dir", str(daemon.runtime_dir))
    text = on_terminal("transfers", *where).text
    title, *lines = text.splitlines()
    assert title == "transfers"
    assert max(map(len, lines)) <= COLUMNS
    [row] = [number for number, line in enumerate(lines) if waiting in line]
    assert lines[row].split()[:3] == [waiting, "receive", "pool"]
    assert row > 1, "the header has as many lines"
    assert " ".join(lines[row:]).endswith("no SEND yet")
    header = " ".join(LIVE).split()
    assert " ".join(lines[:row]).split()[: len(header)] == header  # what other tests have left may come next
    assert main(["transfers", *where]) == 0
    title, _, *rows_of_pipe = capsys.readouterr().out.splitlines()
    assert title == "transfers"
    [row_of_pipe] = [one for one in rows_of_pipe if waiting in one]
    assert row_of_pipe.endswith("no SEND yet")
    assert max(map(len, on_terminal("status", *where).text.splitlines())) <= COLUMNS


def test_a_wait_is_shown_and_wiped() -> None:
    with kit.daemon() as daemon, daemon.stopped():
        words = ("ping", "--timeout", "2.5", "--runtime-dir", str(daemon.runtime_dir))
        said = on_terminal(*words).text
        piped = subprocess.run([COMMAND, *words], capture_output=True, text=True, check=False)
    shown, _, error = said.rpartition(WIPE)
    assert "kvferry ping: the daemon has not answered yet, 1 s" in shown
    assert error.startswith("kvferry ping: DAEMON_LOST: ")
    assert WIPE not in piped.stderr
    assert piped.stderr.count("\n") == 1


def test_every_command_has_json(capsys: pytest.CaptureFixture[str]) -> None:
    for name in MODULES.keys() - DRAWN_OR_SPOKEN:
        for words in of_actions(name):
            with pytest.raises(SystemExit):
                main([*words, "--help"])
            assert "--json" in capsys.readouterr().out, words


def of_actions(name: str) -> list[list[str]]:
    actions = {
        "cache": ("list", "pin", "unpin", "evict", "clear", "snapshots", "drop"),
        "config": ("show", "check"),
        "keys": ("make", "show", "allow", "revoke"),
    }
    return [[name, one] for one in actions.get(name, ())] or [[name]]


def test_what_programs_read(
    daemon: Daemon, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(units, "HIDDEN", ())  # the checkout may be in one of these folders
    where = ("--runtime-dir", str(daemon.runtime_dir))

    def said(*words: str) -> dict[str, object]:
        main(words)
        found: dict[str, object] = json.loads(capsys.readouterr().out)
        return found

    assert said("ping", "--json", *where).keys() == {
        "boot_id", "daemon_version", "round_trip_us", "refuses_transfers",
    }  # fmt: skip
    assert said("cache", "pin", "00" * 16, "--identity", "00" * 16, "--json", *where) == {"blocks": 0, "pinned": True}
    assert said("cache", "clear", "--all", "--json", *where) == {"blocks": 0, "size_bytes": 0, "kept": 0}
    file = tmp_path / "dump.tar.gz"
    dumped = said("dump", str(file), "--json", *where)
    assert dumped["file"] == str(file)
    assert file.is_file()
    assert "llama-3-8b" in said("layout", "--models", "--json")
    installed = said("systemd", "--root", str(tmp_path), "--install", "--json")
    assert installed["written"] is True
    assert all(Path(one).is_file() for one in installed["files"])  # type: ignore[attr-defined]
