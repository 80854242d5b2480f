"""``kvferry ping`` and ``kvferry status``: what they print, and their exit status."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import msgspec
import pytest

from kvferry.clients import Client, new_request_id, pages
from kvferry.clients.cli.inspect import status_lines
from kvferry.clients.cli.main import main
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.session_messages import DeviceStatus, PoolStatus, StatusReport, TablesStatus, TenantStatus
from tests.kit.daemons import Daemon
from tests.kit.pools import HYBRID, SPEC


@pytest.fixture
def printed(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what runs a command in this process, which must work, and returns what it prints."""

    def run(*words: str) -> str:
        assert main([*words, "--runtime-dir", str(daemon.runtime_dir)]) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
        return shown.out

    return run


@pytest.fixture
def status_with(printed: Callable[..., str]) -> Callable[..., str]:
    """Return what prints a status once it has a name in it: without a session one may be a moment old."""

    def run(name: str, *words: str) -> str:
        while name not in (shown := printed("status", *words)):
            pass
        return shown

    return run


@pytest.fixture
def busy(daemon: Daemon, name: str) -> str:
    """Leave a pool with pages behind, whose session ends at once; return its name."""
    with Client.connect(daemon.runtime_dir, name="maker") as client:
        client.create_pool(name, SPEC)
    return name


def test_status_for_programs(daemon: Daemon, busy: str, status_with: Callable[..., str]) -> None:
    with Client.connect(daemon.runtime_dir, name="holder") as client:
        ids = client.allocate(busy, 5)
        request_id = new_request_id()
        client.receive(busy, request_id, [pages(ids[:2])])
        client.ping()
        (line,) = status_with(request_id, "--json").splitlines()
        status = json.loads(line)
        assert (status["boot_id"], status["pid"], status["draining"]) == (client.boot_id, daemon.process.pid, False)
        (pool,) = [one for one in status["pools"] if one["pool"] == busy]
        assert (pool["pages"], pool["free"], pool["busy"], pool["tenant"]) == (16, 11, 2, os.getuid())
        assert pool["region_bytes"] == 17 * pool["page_bytes"]
        (session,) = [one for one in status["sessions"] if one["name"] == "holder"]
        assert (session["pages"], session["transfers"], session["pid"]) == (5, 1, os.getpid())
        (transfer,) = [one for one in status["transfers"] if one["pool"] == busy]
        assert (transfer["request_id"], transfer["direction"], transfer["state"]) == (request_id, "receive", "open")
        assert transfer["waits_for"] == "1 of 1 sources: no SEND yet"
        assert status["counters"]["messages.received"] > 0


def test_every_page_space_is_shown(daemon: Daemon, name: str, status_with: Callable[..., str]) -> None:
    with Client.connect(daemon.runtime_dir, name="a holder") as client:
        client.create_pool(name, HYBRID)
        client.allocate(name, 3)
        client.allocate(name, 5, space="swa")
        (pool,) = [one for one in client.status().pools if one.pool == name]
        shown = status_with(name)
    assert [(one.space, one.pages, one.free, one.busy) for one in pool.spaces] == [
        ("main", 16, 13, 0),
        ("swa", 8, 3, 0),
    ]
    assert (pool.pages, pool.free, pool.page_bytes) == (16, 13, 2 * 2 * 4 * 2 * 4 * 4)
    rows = [line.split()[1:] for line in shown.splitlines() if name in line.split()]
    assert rows[0][:1] + rows[0][2:5] == ["main", "16", "13", "0"]
    assert rows[1][:4] == ["swa", "8", "3", "0"]


REPORT = StatusReport(
    daemon_version="1.2.3", pid=1, uptime_ms=1, draining=False, pools=(), sessions=(), transfers=(), counters={}
)
POOL = PoolStatus(
    pool="p", tenant=7, layout_digest="0" * 32, region_bytes=1 << 30, page_bytes=1024, pages=9, free=9, busy=0
)


def rows_of(report: StatusReport, title: str) -> list[str]:
    """Return a table's rows without its head, as printed, with single spaces."""
    lines = list(status_lines(report, "0" * 32))
    start = lines.index(title)
    end = next((at for at in range(start, len(lines)) if not lines[at]), len(lines))
    return [" ".join(line.split()) for line in lines[start + 2 : end]]


def test_where_a_pool_is_and_whose_memory_it_is() -> None:
    model = ModelIdentity(name="some/model", revision="1")
    registered = msgspec.structs.replace(POOL, pool="q", device="npu:1", registered_by=5, model=model)
    of_instance = msgspec.structs.replace(POOL, pool="r", lifetime="instance", ends_with=6)
    report = msgspec.structs.replace(REPORT, pools=(POOL, registered, of_instance))
    assert rows_of(report, "pools") == [
        "p 7 9 9 0 1.0 1.00 00000000 - host",
        "q 7 9 9 0 1.0 1.00 00000000 some/model@1 npu:1, registered by session 5",
        "r 7 9 9 0 1.0 1.00 00000000 - host, ends with instance 6",
    ]


def test_what_each_tenant_has_is_shown_where_there_are_several() -> None:
    user = TenantStatus(tenant=7, sessions=1, descriptors=3)
    team = TenantStatus(
        tenant=1 << 32,
        name="team-a",
        share=0.25,
        kept_bytes=3 << 20,
        pool_bytes=1 << 30,
        tier_bytes=2 << 30,
        disk_bytes=3 << 30,
    )
    pools = (POOL, msgspec.structs.replace(POOL, pool="q", tenant=1 << 32))
    report = msgspec.structs.replace(REPORT, pools=pools, tenants=(user, team))
    assert rows_of(report, "tenants") == ["7 - 1 3 0.0 0.00 0.00 0.00", "team-a 25% 0 0 3.0 1.00 2.00 3.00"]
    assert [row.split()[1] for row in rows_of(report, "pools")] == ["7", "team-a"]
    assert "tenants" not in list(status_lines(msgspec.structs.replace(REPORT, tenants=(user,)), "0" * 32))


def test_graph_tables_are_shown() -> None:
    idle = TablesStatus(session=5, tables="t", device="host", max_batch=3, columns=2, updates=1, waiting=0)
    report = msgspec.structs.replace(REPORT, tables=(idle, msgspec.structs.replace(idle, waiting=1)))
    assert rows_of(report, "graph tables") == ["t 5 host 3 2 1 idle", "t 5 host 3 2 1 an update waits"]


def test_devices_are_shown_with_their_memory_and_why_they_fail() -> None:
    ready = DeviceStatus(
        device="npu:0",
        state="ready",
        total_bytes=64 << 30,
        free_bytes=16 << 30,
        pool_bytes=32 << 30,
        reaches=("npu:1",),
        keeper="process 77",
    )
    failed = DeviceStatus(device="npu:9", state="unavailable: no device", total_bytes=0, free_bytes=0, pool_bytes=0)
    report = msgspec.structs.replace(REPORT, devices=(ready, failed))
    assert rows_of(report, "devices") == [
        "npu:0 64.0 16.0 32.00 npu:1 process 77 ready",
        "npu:9 ? ? 0.00 - - unavailable: no device",
    ]
    assert "devices" not in status_lines(REPORT, "0" * 32)
