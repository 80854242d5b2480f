"""``kvferry events``: what happens at the daemon, from a cursor on, also over its restart."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from kvferry.clients import Client, new_request_id, pages
from kvferry.clients.cli.main import main
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user
from tests.kit.documents import page
from tests.kit.pools import SPEC

ROOT: Final = Path(__file__).resolve().parents[3]

QUIET: Final = '[logging]\nlevel = "error"\n'
BY_ITS_COMMAND: Final = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Which starts a daemon by the command that it starts the next one by."""

Lines = list[dict[str, Any]]


class Events:
    """Runs the command on a daemon, in this process."""

    def __init__(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        self.daemon = daemon
        self._capsys = capsys

    def text(self, *words: str) -> str:
        self._capsys.readouterr()
        assert main(["events", *words, "--runtime-dir", str(self.daemon.runtime_dir)]) == 0
        return self._capsys.readouterr().out

    def lines(self, *words: str) -> Lines:
        return [json.loads(one) for one in self.text("--json", *words).splitlines()]


@pytest.fixture
def events(capsys: pytest.CaptureFixture[str]) -> Iterator[Events]:
    with kit.daemon(QUIET) as daemon:
        yield Events(daemon, capsys)


def exchange(client: Client) -> str:
    """Send a page to the other pool's; return the request."""
    ids, request_id = client.allocate("pool", 2), new_request_id()
    receiving = client.receive("pool", request_id, [pages(ids[:1])])
    client.wait_settled(client.send("pool", request_id, [pages(ids[1:])]))
    client.wait_settled(receiving)
    client.free("pool", ids)
    return request_id


def test_they_say_what_has_happened_whatever_the_log_shows(events: Events) -> None:
    with kit.engine(events.daemon, "prefill-3") as client:
        client.create_pool("pool", SPEC)
        request_id = exchange(client)
        refused = client.send("nobodys", new_request_id(), [pages([1])])
        with pytest.raises(Exception, match="UNKNOWN_POOL"):
            client.wait_finished(refused)
        client.delete_pool("pool")
    assert main(["drain", "--runtime-dir", str(events.daemon.runtime_dir)]) == 0
    lines = events.lines()
    happened = [one["event"] for one in lines]
    wanted = ["serving", "session opened", "pool created", "pool deleted"]
    rest = iter(happened)
    assert all(one in rest for one in wanted), happened
    assert {"requests refused", "session ended", "drained"} <= set(happened)
    assert happened.count("transfer finished") == 2  # written once nothing else is to be done
    finished = [one for one in lines if one["event"] == "transfer finished"]
    assert {(one["request_id"], one["outcome"]) for one in finished} == {(request_id, "OK")}
    assert {one["direction"] for one in finished} == {"send", "receive"}
    [drained] = [one for one in lines if one["event"] == "drained"]
    assert drained["level"] == "warning"
    assert not events.daemon.log.read_text(), "the configuration wants errors only"
    assert "WARNING drained: " in events.text()


def test_a_cursor_goes_on_after_its_line(events: Events) -> None:
    everything = events.lines()
    assert events.lines("--from", str(everything[-2]["cursor"])) == everything[-1:]
    assert events.lines("--from", str(everything[-1]["cursor"])) == []
    assert events.lines("--from", "now") == []
    with kit.engine(events.daemon, "late"):
        pass
    [opened, ended] = events.lines("--from", str(everything[-1]["cursor"]))
    assert (opened["event"], opened["name"], ended["event"]) == ("session opened", "late", "session ended")


def test_a_cursor_of_another_daemon_says_that_something_is_lost(events: Events) -> None:
    lost, first, *_ = events.lines("--from", "7")
    assert lost == {"lost_before": first["cursor"] - 1, "boot_id": lost["boot_id"]}
    assert events.text("--from", "7").startswith(
        f"-- what was before is lost; this daemon is boot {lost['boot_id'][:8]}"
    )


@pytest.mark.parametrize("way", ["it ends", "the next one takes over"])
def test_following_goes_on_over_a_restart(way: str) -> None:
    with kit.daemon(QUIET, keep=True, environment=BY_ITS_COMMAND) as daemon:
        following_over_a_restart(daemon, way)


def following_over_a_restart(daemon: Daemon, way: str) -> None:
    command = [sys.executable, "-P", "-m", "kvferry.clients.cli.main", "events", "--follow", "--json"]
    command += ["--runtime-dir", str(daemon.runtime_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert following.stderr is not None
        try:
            assert "cursor" in json.loads(following.stdout.readline())
            if way == "it ends":
                assert daemon.end() == 0
                assert "waiting for it" in following.stderr.readline()
                daemon.start()
            else:
                following.send_signal(signal.SIGSTOP)  # mostly between two looks: the next daemon gets the next one
                daemon.upgrade()
                following.send_signal(signal.SIGCONT)
            said = (json.loads(one) for one in following.stdout)
            assert "lost_before" in next(one for one in said if "event" not in one)
            assert next(one for one in said if one["event"] == "serving")
        finally:
            following.send_signal(signal.SIGINT)
    assert following.returncode == 130


def test_another_user_may_not(events: Events) -> None:
    code = """
from kvferry.clients import calls
from kvferry.protocol.log_messages import Log
with Client.connect(sys.argv[1]) as client:
    try:
        client.call(calls.asked(Log()), deadline_s=5)
    except KvferryError as error:
        print(error)
"""
    assert said_by_another_user(events.daemon, code).startswith("ACCESS_DENIED")


def test_the_manual_names_what_the_daemon_says() -> None:
    section = page("operations.md").partition("### What has happened")[2].partition("\n### ")[0]
    rows = [line.split("|")[2] for line in section.splitlines() if line.startswith("| ")][1:]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    source = "".join(one.read_text() for one in (ROOT / "daemon").rglob("*.py"))
    assert len(named) > 20
    assert [name for name in named if f'"{name}"' not in source] == [], "the daemon says no such thing"
