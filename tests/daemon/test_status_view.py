"""STATUS tells each user its own; and no command prints what a terminal would obey."""

from __future__ import annotations

import json
import os

from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.daemon.process.access import may_see_all
from kvferry.daemon.services.status_view import seen_by
from kvferry.protocol.session_messages import (
    OperationStatus,
    PoolStatus,
    SessionStatus,
    StatusReport,
    TablesStatus,
    TransferStatus,
)
from tests.kit.daemons import Daemon, said_by_another_user
from tests.kit.kvferry_command import run_kvferry

CONFIG = '[logging]\nformat = "console"\n'
SPEC = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
HOSTILE = "evil\x1b]0;owned\x07\n\u202esession"


def report() -> StatusReport:
    """Return a report of two users, 7 and 8, with one of everything each."""
    return StatusReport(
        daemon_version="1",
        pid=1,
        uptime_ms=1,
        draining=False,
        pools=tuple(
            PoolStatus(
                pool=f"pool-{user}", tenant=user, layout_digest="0", region_bytes=100, page_bytes=1, pages=1, free=1,
                busy=0,
            )
            for user in (7, 8)
        ),
        sessions=tuple(
            SessionStatus(
                session=user, name=f"name-{user}", tenant=user, pid=user, pages=0, transfers=1,
                unacknowledged_events=0, connected=True, kept_bytes=5, reply_bytes=6,
            )
            for user in (7, 8)
        ),
        transfers=tuple(
            TransferStatus(
                request=f"request-{user}", direction="send", pool=f"pool-{user}", state="open", age_ms=1, pages=1,
                arrived=0, waits_for="", request_id=f"request-{user}", tenant=user,
            )
            for user in (7, 8)
        ),
        counters={"messages.received": 9},
        tables=tuple(
            TablesStatus(session=user, tables=f"t-{user}", device="host", max_batch=1, columns=1, updates=0, waiting=0)
            for user in (7, 8)
        ),
        operations=tuple(
            OperationStatus(session=user, operation=user, kind="offload", pool=f"pool-{user}", pages=1, age_ms=1)
            for user in (7, 8)
        ),
    )  # fmt: skip


def test_a_user_sees_its_own_and_totals_of_the_others_and_root_all() -> None:
    whole, seen = report(), seen_by(report(), 7)
    assert (seen.pools, seen.sessions, seen.transfers) == (whole.pools[:1], whole.sessions[:1], whole.transfers[:1])
    assert (seen.tables, seen.operations) == (whole.tables[:1], whole.operations[:1])
    assert "-8" not in repr(seen)
    assert seen.others is not None
    assert (seen.others.users, seen.others.pools, seen.others.region_bytes, seen.others.kept_bytes) == (1, 1, 100, 11)
    assert (seen.others.sessions, seen.others.transfers, seen.others.operations, seen.others.tables) == (1, 1, 1, 1)
    for user in (None, 9):
        seen = seen_by(whole, user)
        assert not any((seen.pools, seen.sessions, seen.transfers, seen.tables, seen.operations))
        assert seen.others is not None
        assert (seen.others.users, seen.others.sessions) == (2, 2)
    assert seen_by(whole, 0) == whole
    assert [may_see_all(user) for user in (0, os.geteuid(), None)] == [True, True, False]


def test_another_user_is_told_nothing_of_ours(daemon: Daemon, client: Client) -> None:
    """Neither with a session nor without: who asks is what the kernel says of its connection."""
    client.create_pool("secret-pool", SPEC)
    ids = client.allocate("secret-pool", 1)
    request_id = new_request_id()
    client.receive("secret-pool", request_id, [pages(ids)])
    assert request_id in repr(client.status())
    asks = """
for session in (True, False):
    with Client.connect(sys.argv[1], name="stranger", session=session) as client:
        print(client.status())
"""
    said = said_by_another_user(daemon, asks)
    assert said.count("OthersStatus(users=1, pools=1,") == 2
    assert said.count("name='stranger'") == 1
    assert not [one for one in ("secret-pool", request_id, "name='engine'") if one in said]


def test_what_an_engine_calls_itself_cannot_command_a_terminal(daemon: Daemon, client: Client) -> None:
    client.ping()
    with Client.connect(daemon.runtime_dir, name=HOSTILE):
        text = run_kvferry("status", "--runtime-dir", daemon.runtime_dir).stdout
        as_json = run_kvferry("status", "--json", "--runtime-dir", daemon.runtime_dir).stdout
        refused = run_kvferry("status", "--runtime-dir", f"/nowhere/{HOSTILE}")
    assert r"evil\x1b]0;owned\x07\n\u202esession" in text
    assert all(line.isprintable() for out in (text, as_json, refused.stderr) for line in out.splitlines())
    log = daemon.log.read_text()
    assert r"evil\x1b]0;owned\x07\n\u202esession" in log
    assert "\x1b]0;" not in log
    assert HOSTILE in [one["name"] for one in json.loads(as_json)["sessions"]]
