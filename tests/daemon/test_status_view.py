"""STATUS tells each user its own; and no command prints what a terminal would obey."""

from __future__ import annotations

import inspect
import json
import os

from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.daemon.process.access import may_see_all
from tests.kit.daemons import Daemon, said_by_another_user
from tests.kit.kvferry_command import run_kvferry

CONFIG = '[logging]\nformat = "console"\n[tiers]\nhost_bytes = 4194304\n'
HOSTILE = "evil\x1b]0;owned\x07\n\u202esession"


def work(client: Client, name: str) -> None:
    """Have a pool, tables, and a transfer and a restore that wait."""
    client.create_pool(name, MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32"))
    client.create_tables(f"{name}-tables", name, max_batch=1, max_context_tokens=4)
    ids = client.allocate(name, 16)
    snapshot = client.wait_done(client.offload(name, [pages(ids[:1])])).snapshot
    here = client.status().addresses[0]
    client.receive(name, new_request_id(), [pages(ids[1:2])], source_daemons=[here + f".{name}"])
    client.wait_accepted(client.restore(name, snapshot))


STRANGER = f"""
from kvferry.clients import new_request_id, pages
{inspect.getsource(work)}
with Client.connect(sys.argv[1], name="stranger") as client:
    work(client, "own")
    print(client.status())
with Client.connect(sys.argv[1], session=False) as client:
    print(client.status())
"""


def test_another_user_is_told_nothing_of_ours_but_totals(daemon: Daemon, client: Client) -> None:
    """Neither with a session nor without: who asks is what the kernel says of its connection."""
    work(client, "secret")
    whole = client.status()
    assert whole.others is None
    with_session, without = said_by_another_user(daemon, STRANGER).splitlines()
    assert [one.address for one in whole.peers] == [whole.addresses[0] + ".secret"]
    assert ".own'" in with_session, "what it has named itself"
    [pool] = whole.pools
    totals = f"users=1, pools=1, region_bytes={pool.region_bytes}, sessions=1, transfers=1, operations=1, tables=1"
    for seen, count in ((with_session, 1), (without, 0)):
        assert f"OthersStatus({totals}, " in seen
        assert not [one for one in ("secret", whole.transfers[0].request_id, "name='engine'") if one in seen]
        owned = ("SessionStatus(", "TransferStatus(", "OperationStatus(", "TablesStatus(")
        assert [seen.count(one) for one in owned] == [count] * 4
        assert seen.count("PoolStatus(") == 1, "it outlives its session"
    assert [may_see_all(user) for user in (0, os.geteuid(), None)] == [True, True, False]


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
