"""A request's id is the same 32 digits wherever a daemon speaks of it: one search joins two daemons' logs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import pytest

from kvferry.clients import Client, MhaSpec, Transfer, new_request_id, pages
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import CancelledError, KvferryError, NotOwnerError, PeerCancelledError, raised
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.kvferry_command import run_kvferry

SPEC = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
CONFIG = "[logging]\nformat = 'json'\nlevel = 'debug'\n"
WHOLE = re.compile(r"[0-9a-f]{32}\Z")
REQUEST = "0123456789abcdef" * 2


class Endpoint(NamedTuple):
    """A daemon, an engine of its, and the engine's pages."""

    daemon: Daemon
    client: Client
    pages: PageIds

    def lines(self) -> list[dict[str, Any]]:
        """Return the log's lines by now."""
        return [json.loads(line) for line in self.daemon.log.read_text().splitlines() if line.startswith("{")]

    def lines_of(self, request_id: str) -> list[dict[str, Any]]:
        """Return the lines on how a request ended, once there are any: engines are told first."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            self.client.ping()
            found[:] = [one for one in self.lines() if one.get("request_id") == request_id and "outcome" in one]
            return bool(found)

        assert soon(look), request_id
        return found


@pytest.fixture(scope="module")
def sides() -> Iterator[tuple[Endpoint, Endpoint]]:
    """Return prefill's side and decode's, with daemons of their own."""
    with (
        kit.daemon(CONFIG) as source,
        kit.daemon(CONFIG) as home,
        Client.connect(source.runtime_dir) as prefill,
        Client.connect(home.runtime_dir) as decode,
    ):
        prefill.create_pool("prefill", SPEC)
        decode.create_pool("decode", SPEC)
        allocated = prefill.allocate("prefill", 2), decode.allocate("decode", 2)
        yield Endpoint(source, prefill, allocated[0]), Endpoint(home, decode, allocated[1])


def receive(sides: tuple[Endpoint, Endpoint], request_id: str) -> Transfer:
    """Begin a RECEIVE at decode from prefill's daemon."""
    source, home = sides
    (address,) = source.client.status().addresses
    return home.client.receive("decode", request_id, [pages(home.pages)], source_daemons=[address], deadline_s=600.0)


def check_uncut(text: str, request_id: str) -> None:
    """Check that wherever the id begins in a text all of it follows."""
    assert text.count(request_id[:6]) == text.count(request_id) > 0


def test_the_logs_of_two_daemons_are_joined_by_the_request_id(sides: tuple[Endpoint, Endpoint]) -> None:
    source, home = sides
    request_id = new_request_id()
    sending = source.client.send("prefill", request_id, [pages(source.pages)])
    receiving = receive(sides, request_id)
    for side, transfer, direction in ((source, sending, "send"), (home, receiving, "receive")):
        assert side.client.wait_finished(transfer).request_id == request_id
        side.client.wait_settled(transfer)
        (line,) = side.lines_of(request_id)
        told = line["event"], line["direction"], line["pool"], line["outcome"]
        assert told == ("transfer finished", direction, transfer.key.pool, "OK")
        check_uncut(side.daemon.log.read_text(), request_id)


def test_status_errors_and_events_have_all_of_it(sides: tuple[Endpoint, Endpoint]) -> None:
    source, home = sides
    request_id = new_request_id()
    receiving = receive(sides, request_id)
    sending = source.client.send("prefill", request_id, [pages(source.pages[:1])], last=False)
    source.client.ping()
    refused = source.client.send("prefill", new_request_id(), [pages(source.pages + 5)])
    with pytest.raises(NotOwnerError) as caught:
        source.client.wait_finished(refused)
    assert caught.value.request_id == refused.key.request_id
    for side in sides:
        check_uncut(run_kvferry("status", "--runtime-dir", side.daemon.runtime_dir).stdout, request_id)
    home.client.cancel(receiving)
    for side, transfer, kind in ((home, receiving, CancelledError), (source, sending, PeerCancelledError)):
        with pytest.raises(kind) as failed:
            side.client.wait_finished(transfer)
        assert failed.value.request_id == request_id
        check_uncut(f"{failed.value} {transfer!r}", request_id)
        side.client.wait_settled(transfer)
        assert {one["outcome"] for one in side.lines_of(request_id)} == {kind.code}
        check_uncut(side.daemon.log.read_text(), request_id)


def test_a_receive_hears_at_once_that_its_send_was_cancelled_at_another_daemon(
    sides: tuple[Endpoint, Endpoint],
) -> None:
    source, home = sides
    request_id = new_request_id()
    sending = source.client.send("prefill", request_id, [pages(source.pages)])
    source.client.cancel(sending)
    source.client.wait_settled(sending)
    receiving = receive(sides, request_id)
    with pytest.raises(PeerCancelledError, match="the other side ended"):
        home.client.wait_finished(receiving)
    home.client.wait_settled(receiving)
    (line,) = home.lines_of(request_id)
    assert (line["outcome"], "the other side ended" in line["detail"]) == ("PEER_CANCELLED", True)
    for side in sides:
        assert all(WHOLE.match(line.get("request_id", REQUEST)) for line in side.lines())


def test_an_error_keeps_its_request_on_the_way() -> None:
    error = KvferryError("late")
    assert REQUEST not in str(error)
    error.request_id = REQUEST
    again = raised(msgspec.msgpack.decode(msgspec.msgpack.encode(error.info()), type=type(error.info())))
    assert again.request_id == REQUEST
    assert f"request {REQUEST}: late" in str(again)
