"""``kvferry transfers``, ``pools`` and ``tiers``: each names the cause and who has what, to those who may see it."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from kvferry.clients import Client, new_request_id, pages
from kvferry.clients.cli import transfers
from kvferry.clients.cli.inspect import status_lines
from kvferry.clients.cli.main import main
from kvferry.clients.cli.tiers import tier_lines
from kvferry.clients.cli.transfers import is_stuck
from kvferry.protocol.errors import DaemonLostError
from kvferry.protocol.session_messages import Status, StatusReport, TierStatus, TransferStatus
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user, soon
from tests.kit.pools import HYBRID, PAGE_BYTES, SPEC

CONFIG: Final = "[tiers]\nhost_bytes = 4194304\n"


REPORT: Final = StatusReport(
    daemon_version="1.2.3", pid=1, uptime_ms=1, draining=False, pools=(), sessions=(), transfers=(), counters={}
)


class Commands:
    """Runs commands in this process; each must work."""

    def __init__(self, daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
        self._daemon = daemon
        self._capsys = capsys

    def __call__(self, *words: str) -> str:
        """Return what a command prints."""
        assert main([*words, "--runtime-dir", str(self._daemon.runtime_dir)]) == 0
        return self._capsys.readouterr().out

    def json(self, *words: str) -> Any:  # noqa: ANN401  what the command says
        """Return it as programs read it."""
        [line] = self(*words, "--json").splitlines()
        return json.loads(line)


@pytest.fixture
def command(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(daemon, capsys)


@pytest.fixture
def waiting(daemon: Daemon, name: str) -> Iterator[tuple[Client, str]]:
    """Have an engine that waits for a sender; return it, and the request's id."""
    with kit.engine(daemon, "decoder") as client:
        client.create_pool(name, SPEC)
        request_id = new_request_id()
        client.receive(name, request_id, [pages(client.allocate(name, 3))], deadline_s=600)
        client.ping()
        yield client, request_id


def test_a_transfer_says_whose_it_is_and_what_it_waits_for(command: Commands, waiting: tuple[Client, str]) -> None:
    _, request_id = waiting
    [row] = [line for line in command("transfers").splitlines() if request_id in line]
    assert "decoder, pid " in row
    assert row.endswith("1 of 1 sources: no SEND yet")
    [line] = [line for line in command("status").splitlines() if line.startswith("transfers: ")]
    assert request_id in line
    assert line.endswith("and waits for 1 of 1 sources: no SEND yet")


def test_slow_and_stuck_ones_are_those_of_that_age(command: Commands, waiting: tuple[Client, str]) -> None:
    _, request_id = waiting

    def there(*words: str) -> bool:
        [here] = command.json("transfers", *words)["daemons"]
        return request_id in [one["request_id"] for one in here["transfers"]]

    assert soon(lambda: there("--slow", "0.01"))
    assert soon(lambda: there("--stuck", "0.01"))
    assert not there("--slow", "3600")
    assert not there("--stuck", "3600")
    assert "no transfers" in command("transfers", "--stuck", "3600")


def side(**fields: Any) -> TransferStatus:  # noqa: ANN401  TransferStatus's
    whole = {"request": "", "pool": "p", "age_ms": 1, "pages": 1, "arrived": 0, "waits_for": "copies", **fields}
    return msgspec.convert({"direction": "send", "state": "open", **whole}, TransferStatus)


def test_what_another_daemon_reads_is_not_called_stuck_here() -> None:
    assert not is_stuck(side(quiet_ms=9_000), 10_000)
    assert is_stuck(side(quiet_ms=10_000), 10_000)
    assert not is_stuck(side(quiet_ms=10_000, daemons=("tcp://10.0.0.3:7801",)), 10_000)
    assert is_stuck(side(quiet_ms=10_000, daemons=("tcp://10.0.0.3:7801",), state="finished"), 10_000)
    assert is_stuck(side(quiet_ms=1, state="quarantined"), 10_000), "nothing will ever happen to it"


def test_the_last_transfers_have_their_stages_and_why_they_failed(command: Commands, daemon: Daemon, name: str) -> None:
    with kit.engine(daemon) as client:
        client.create_pool(name, SPEC)
        ids = client.allocate(name, 4)
        good, bad = new_request_id(), new_request_id()
        receiving = client.receive(name, good, [pages(ids[:2])])
        client.wait_settled(client.send(name, good, [pages(ids[2:])], payload=b"secret"))
        client.wait_settled(receiving)
        client.wait_settled(client.receive(name, bad, [pages(ids[:2])], deadline_s=0.01))
        client.ping()  # it acknowledges the events
        ended = {}

        def all_told() -> bool:
            [here] = command.json("transfers", "--recent")["daemons"]
            ended.update({(one["request_id"], one["direction"]): one for one in here["recent"]})
            its = [one for one in ended.values() if one["request_id"] in {good, bad}]
            return len(its) == 3 and all("told_us" in one for one in its)

        assert soon(all_told)
    for direction in ("send", "receive"):
        one = ended[good, direction]
        assert one["moved_bytes"] == 2 * PAGE_BYTES
        assert 0 < one["copied_us"] <= one["moved_us"] + 1
        assert one["planned_us"] > 0
        assert one["told_us"] >= one.get("settled_us", 0)
        assert "error" not in one
    failed = ended[bad, "receive"]
    assert (failed["error"]["code"], failed["pages"]) == ("DEADLINE", 2)
    assert failed["waited_us"] >= 10_000
    text = command("transfers", "--recent")
    [row] = [line for line in text.splitlines() if bad in line]
    assert "DEADLINE" in row
    assert "no SEND yet" in row
    assert "secret" not in text
    [row] = [line for line in command("transfers", "--request", bad[:12]).splitlines() if bad in line]
    assert "DEADLINE" in row


def test_a_request_is_looked_for_at_both_daemons(capsys: pytest.CaptureFixture[str]) -> None:
    with (
        kit.daemon() as one,
        kit.daemon() as two,
        kit.engine(one, "decoder") as decoder,
        kit.engine(two, "prefill") as p,
    ):
        [address] = p.status().addresses
        request_id, command = new_request_id(), Commands(one, capsys)
        for client in (decoder, p):
            client.create_pool("pool", SPEC)
        decoder.receive("pool", request_id, [pages(decoder.allocate("pool", 2))], source_daemons=[address])
        decoder.ping()

        def sides() -> list[tuple[str, list[str]]]:
            said = command.json("transfers", "--request", request_id)["daemons"]
            return [(at["address"], [each["direction"] for each in at["transfers"]]) for at in said]

        [here, there] = sides()
        assert here == (decoder.status().addresses[0], ["receive"])
        assert there == (address, []), "it is asked, and has nothing"
        assert f"daemon {address}\n  has no side of it" in command("transfers", "--request", request_id)
        p.send("pool", request_id, [pages(p.allocate("pool", 1))], last=False)
        p.ping()
        assert soon(lambda: sides()[1] == (address, ["send"]))
        back = Commands(two, capsys)

        def addresses() -> list[str]:
            return [at["address"] for at in back.json("transfers", "--request", request_id)["daemons"]]

        assert soon(lambda: addresses() == [address, here[0]]), "once the two daemons have talked"
        two.kill()
        said = command("transfers", "--request", request_id)
        assert f"daemon {address}: DAEMON_LOST" in said


def test_a_daemon_by_tcp_is_asked_if_it_is_beside_this_one_or_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No daemon runs: the folders are there, and what each would report is said here."""
    near, far, digits = "tcp://10.0.0.3:7802", "tcp://10.0.0.9:7801", "ab" * 16
    for one in ("here", "near", "silent"):
        (tmp_path / one).mkdir()
        (tmp_path / one / "control.sock").touch()
    here = side(request_id=digits, direction="receive", daemons=(near, far))
    reports = {
        "here": msgspec.structs.replace(REPORT, transfers=(here,)),
        "near": msgspec.structs.replace(REPORT, transfers=(side(request_id=digits),), addresses=("ipc:///x", near)),
    }

    def ask(options: argparse.Namespace, _name: str, _request: Status, place: str | None = None) -> Any:  # noqa: ANN401
        name = Path(place or options.runtime_dir).name
        if name not in reports:
            raise DaemonLostError("no answer")
        return reports[name], "0" * 16

    monkeypatch.setattr(transfers, "ask", ask)
    assert main(["transfers", "--request", digits, "--json", "--runtime-dir", str(tmp_path / "here")]) == 0
    first, second, third = json.loads(capsys.readouterr().out)["daemons"]
    assert [one["direction"] for one in first["transfers"]] == ["receive"]
    assert (second["address"], [one["direction"] for one in second["transfers"]]) == (near, ["send"])
    assert third["unknown"] == f"not on this host; ask there: kvferry transfers --request {digits}"


def test_pages_have_holders_with_their_age(command: Commands, daemon: Daemon, name: str) -> None:
    with kit.engine(daemon, "leaker", instance="decode-0") as client:
        client.create_pool(name, HYBRID)
        ids = client.allocate(name, 5)
        client.allocate(name, 2, space="swa")
        client.free(name, ids[1:2])
        client.receive(name, new_request_id(), [pages(ids[2:4], component="main"), pages([], component="swa")])
        client.ping()
        [pool] = [one for one in command.json("pools")["pools"] if one["pool"] == name]
        assert [(one["space"], one["free"], one["largest_free_run"]) for one in pool["spaces"]] == [
            ("main", 12, 11), ("swa", 6, 6),
        ]  # fmt: skip
        assert [(one["space"], one["pages"], one["busy"]) for one in pool["holders"]] == [("main", 4, 2), ("swa", 2, 0)]
        assert all("'decode-0'" in one["name"] and str(os.getpid()) in one["name"] for one in pool["holders"])
        rows = [line.split() for line in command("pools").splitlines() if name in line]
        assert rows[0][2:7] == ["main", "16", "12", "11", "2"]
        assert rows[2][2:7] == ["main", "4", "2", "0", "s"]


def test_another_user_is_shown_no_holders_and_no_ended_ones(daemon: Daemon, waiting: tuple[Client, str]) -> None:
    _, request_id = waiting
    code = """
from kvferry.clients import calls
from kvferry.protocol.session_messages import Status
with Client.connect(sys.argv[1], session=False) as client:
    print(client.call(calls.asked(Status(holders=True, recent=True)), deadline_s=5))
"""
    said = said_by_another_user(daemon, code)
    assert "OthersStatus(users=1, " in said
    assert not [one for one in ("decoder", request_id, "PageHolder", "EndedTransfer") if one in said]


def test_a_slow_tier_says_so_and_how_much_each_finds() -> None:
    counters = {"cache.asked_blocks": 100, "cache.found.host": 50, "cache.found.disk": 25, "cache.found.nowhere": 25}
    slow = "slow: the last 8 writes took 400 ms a block, 120 ms would do"
    tiers = (
        TierStatus(tier="host", state="ready", total_bytes=1 << 30, used_bytes=1 << 29, blocks=7),
        TierStatus(tier="disk", state=slow, total_bytes=1 << 30, used_bytes=1 << 28, write_us=400_000),
        TierStatus(tier="remote", state="away: no master", total_bytes=0, used_bytes=0),
    )
    report = msgspec.structs.replace(REPORT, tiers=tiers, counters=counters | {"cache.unbounded_hit_blocks": 90})
    lines = [" ".join(line.split()) for line in tier_lines(report)]
    assert "host 1.00 0.50 0.00 7 0 50.0 % - - ready" in lines
    assert f"disk 1.00 0.25 0.00 0 0 50.0 % 400.0 ms - {slow}" in lines
    assert "remote ? ? ? 0 0 0.0 % - - away: no master" in lines
    assert "of 100 blocks that were asked for, 75.0 % were found; without bounds 90.0 % would be" in lines
    assert f"tiers: host ready, disk {slow}, remote away: no master (kvferry tiers)" in status_lines(report, "0" * 32)


def test_tiers_of_a_daemon_that_was_not_asked_yet(command: Commands) -> None:
    said = command.json("tiers")
    assert said["found"] == dict.fromkeys(("asked", "host", "disk", "remote", "nowhere", "unbounded"), 0)
    assert [one["tier"] for one in said["tiers"]] == ["host"]
    assert "hit rate" in command("tiers")


@pytest.mark.parametrize("words", ["--request 12x", "--request=", f"--request {'0' * 33}"])
def test_what_is_no_request_id_is_refused(words: str, daemon: Daemon, printed_error: Callable[[], str]) -> None:
    assert main(["transfers", *words.split(), "--runtime-dir", str(daemon.runtime_dir)]) == 2
    assert printed_error().startswith("kvferry transfers: INVALID_FIELD [--request]: ")


@pytest.fixture
def printed_error(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    return lambda: capsys.readouterr().err
