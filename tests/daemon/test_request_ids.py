"""A request's id is the same 32 digits wherever a daemon speaks of it: one search joins two daemons' logs."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.protocol.errors import CancelledError, NotOwnerError, PeerCancelledError
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.kit.kvferry_command import run_kvferry

SPEC = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
CONFIG = "[logging]\nformat = 'json'\nlevel = 'debug'\n"
WHOLE = re.compile(r"[0-9a-f]{32}\Z")


def check_uncut(text: str, request_id: str) -> None:
    """Check that wherever the id begins in a text all of it follows."""
    assert text.count(request_id[:6]) == text.count(request_id) > 0


def logged(daemon: Daemon) -> list[dict[str, Any]]:
    return [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]


def line_of(daemon: Daemon, client: Client, request_id: str) -> dict[str, Any]:
    """Return the line on how a request ended, once it is there: engines are told first."""

    def lines() -> list[dict[str, Any]]:
        return [one for one in logged(daemon) if one.get("request_id") == request_id and "outcome" in one]

    assert soon(lambda: client.ping() > 0 and bool(lines()))
    (line,) = lines()
    return line


def test_logs_status_errors_and_events_have_all_of_it() -> None:
    request_id = new_request_id()
    with (
        kit.daemon(CONFIG) as source,
        kit.daemon(CONFIG) as home,
        kit.engine(source) as prefill,
        kit.engine(home) as decode,
    ):
        prefill.create_pool("prefill", SPEC)
        decode.create_pool("decode", SPEC)
        (address,), ids = prefill.status().addresses, decode.allocate("decode", 2)
        receiving = decode.receive("decode", request_id, [pages(ids)], source_daemons=[address], deadline_s=600.0)
        sending = prefill.send("prefill", request_id, [pages(prefill.allocate("prefill", 1))], last=False)
        prefill.ping()
        refused = prefill.send("prefill", new_request_id(), [pages([9])])
        with pytest.raises(NotOwnerError) as caught:
            prefill.wait_finished(refused)
        assert caught.value.request_id == refused.key.request_id
        for daemon in (source, home):
            check_uncut(run_kvferry("status", "--runtime-dir", daemon.runtime_dir).stdout, request_id)
        decode.cancel(receiving)
        for daemon, client, transfer, kind in (
            (home, decode, receiving, CancelledError),
            (source, prefill, sending, PeerCancelledError),
        ):
            with pytest.raises(kind) as failed:
                client.wait_finished(transfer)
            assert failed.value.request_id == request_id
            check_uncut(f"{failed.value} {transfer!r}", request_id)
            client.wait_settled(transfer)
            line = line_of(daemon, client, request_id)
            told = line["event"], line["direction"], line["pool"], line["outcome"]
            assert told == ("transfer finished", transfer.key.direction, transfer.key.pool, kind.code)
            check_uncut(daemon.log.read_text(), request_id)
            assert all(WHOLE.match(one.get("request_id", request_id)) for one in logged(daemon))
