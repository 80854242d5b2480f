"""``kvferry drain`` and ``undrain``: nothing new begins, what is under way goes on, and everybody who asks is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final

import pytest

from kvferry.clients import Client, new_request_id, pages
from kvferry.clients.cli.main import main
from kvferry.protocol.errors import DrainedError
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user
from tests.kit.pools import SPEC
from tests.kit.scraping import get, scrape

REQUEST: Final = "ab" * 16


@pytest.fixture
def drained(capsys: pytest.CaptureFixture[str]) -> Iterator[tuple[Daemon, Client]]:
    """Have a daemon drained, of which one side of a transfer waits for the other; undrain it in the end."""
    with kit.daemon() as daemon, kit.engine(daemon) as client:
        client.create_pool("pool", SPEC)
        client.send("pool", REQUEST, [pages(client.allocate("pool", 2))], deadline_s=600)
        client.ping()
        assert main(["drain", "--runtime-dir", str(daemon.runtime_dir)]) == 0
        said = capsys.readouterr().out
        assert said == "the daemon accepts no new transfers; sides of transfers under way: 1\n"
        yield daemon, client


def ends_with(daemon: Daemon, *words: str) -> int:
    return main([*words, "--runtime-dir", str(daemon.runtime_dir)])


def test_new_transfers_are_refused_and_those_under_way_go_on(drained: tuple[Daemon, Client]) -> None:
    daemon, client = drained
    ids = client.allocate("pool", 4)
    for begin in (client.send, client.receive):
        refused = begin("pool", new_request_id(), [pages(ids[:2])])
        with pytest.raises(DrainedError, match=r"kvferry undrain"):
            client.wait_finished(refused)
    [line, *_] = [one for one in daemon.log.read_text().splitlines() if "requests refused" in one]
    assert all(said in line for said in ("DRAINED", "engine", "accepts no new transfers"))
    receiving = client.receive("pool", REQUEST, [pages(ids[:2])])
    assert client.wait_finished(receiving).error is None, "it is the other half of what was under way"
    assert ends_with(daemon, "undrain") == 0
    request_id = new_request_id()
    client.send("pool", request_id, [pages(ids[:2])])
    assert client.wait_finished(client.receive("pool", request_id, [pages(ids[2:])])).error is None


def test_everybody_who_asks_is_told(drained: tuple[Daemon, Client], capsys: pytest.CaptureFixture[str]) -> None:
    daemon, client = drained
    assert ends_with(daemon, "ping") == 1
    assert "accepts no new transfers" in capsys.readouterr().out
    assert ends_with(daemon, "status") == 0
    assert " drained, up for " in capsys.readouterr().out
    assert ends_with(daemon, "doctor") in {0, 1}
    assert "it is drained and accepts no new transfers" in capsys.readouterr().out
    assert get(daemon.runtime_dir, "/readyz") == (503, "drained\n")
    assert get(daemon.runtime_dir, "/healthz").status == 200
    assert scrape(daemon.runtime_dir).value("kvferry_draining") == 1
    assert client.status().drained
    assert '"drained"' in daemon.log.read_text()
    assert ends_with(daemon, "undrain", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"drained": False, "transfers": 1}
    assert ends_with(daemon, "ping") == 0
    assert get(daemon.runtime_dir, "/readyz") == (200, "ok\n")


def test_it_may_wait_for_what_is_under_way(drained: tuple[Daemon, Client], capsys: pytest.CaptureFixture[str]) -> None:
    daemon, client = drained
    assert ends_with(daemon, "drain", "--wait", "0.1", "--json") == 1
    assert json.loads(capsys.readouterr().out) == {"drained": True, "transfers": 1}
    client.wait_settled(client.receive("pool", REQUEST, [pages(client.allocate("pool", 2))]))
    client.ping()
    assert ends_with(daemon, "drain", "--wait", "60", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"drained": True, "transfers": 0}


def test_another_user_may_not(daemon: Daemon) -> None:
    code = """
from kvferry.clients import calls
from kvferry.protocol.session_messages import Drain
with Client.connect(sys.argv[1]) as client:
    try:
        client.call(calls.asked(Drain()), deadline_s=5)
    except KvferryError as error:
        print(error)
"""
    assert said_by_another_user(daemon, code).startswith("ACCESS_DENIED")
    assert ends_with(daemon, "ping") == 0
