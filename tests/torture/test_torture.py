"""Torture: a short run finds nothing wrong, and each sabotage is found."""

from __future__ import annotations

import asyncio
import re
import resource
from pathlib import Path

import pytest

from kvferry.clients import AsyncClient, Client, KvferryError, pages
from tests import kit
from tests.kit.faults import limited
from tests.torture import oracle
from tests.torture.actors import Engine, Order
from tests.torture.oracle import Claims
from tests.torture.plan import Task, Work
from tests.torture.report import Report
from tests.torture.run import Run, Size

SOON = Size(seconds=30.0, daemons=1, engines=2, workers=8, deadline_s=1.0, margin_s=1.0, harm=False)
"""It ends with the first finding."""


def run(seed: int, size: Size, folder: Path, sabotage: str = "") -> Report:
    one = Run(seed, size, folder, sabotage)
    asyncio.run(one.run())
    return one.report


def test_a_short_run_finds_nothing(tmp_path: Path) -> None:
    report = run(11, Size(seconds=2.5, daemons=1, engines=2, workers=4), tmp_path)
    assert report.findings == []
    assert report.faults
    assert report.verified > 0
    assert report.closing().startswith("torture: ok seed=11 kills=")


@pytest.mark.full
@pytest.mark.parametrize(
    ("sabotage", "found"),
    [
        ("flip", "WRONG_BYTES"),
        ("late", "WRONG_BYTES|SNAPSHOT_DAMAGED"),
        ("leak", "readers, its holders say"),
        ("swallow", "NEVER_ENDED"),
    ],
)
def test_what_is_sabotaged_is_found(tmp_path: Path, sabotage: str, found: str) -> None:
    """A late write may hit host memory, once received into and now an offload's: its checksum is what tells."""
    report = run(1, SOON, tmp_path, sabotage)
    assert re.search(found, "\n".join(report.findings))


@pytest.mark.full
@pytest.mark.anyio
@pytest.mark.parametrize("spoiled", [False, True])
async def test_bytes_of_a_lost_session_must_be_those_of_who_got_its_pages(tmp_path: Path, *, spoiled: bool) -> None:
    """A page is lost with its session, and another engine gets it: its bytes are no finding, a late write is."""
    order = Order("keep", Task(Work.KEEP, "a" * 32, 2, lasts_s=0.3))
    with kit.daemon() as daemon:
        claims = Claims(tmp_path / "claims")
        first = await AsyncClient.connect(daemon.runtime_dir)
        memory = {role: (await first.create_pool("kv", oracle.SPEC)).tensor("main", role) for role in oracle.ROLES}
        holder = Engine(first, "kv", memory, claims)
        holding = asyncio.create_task(holder.run(order))
        while not (await first.status()).pools[0].free < oracle.PAGES:
            pass
        first.close()
        async with await AsyncClient.connect(daemon.runtime_dir) as second:
            await second.create_pool("kv", oracle.SPEC)
            while (await second.status()).pools[0].free < oracle.PAGES:
                pass
            ids = await second.allocate("kv", 2)
            claims.note(ids, "b" * 32)
            oracle.fill(memory, ids, "b" * 32)
            if spoiled:
                memory["v"][1, int(ids[1]), 3, 1, 5] += 1
            ended = await holding
    assert (ended.outcome == "WRONG_BYTES") is spoiled, ended


def test_a_first_link_without_a_descriptor_does_not_end_the_daemon(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    with kit.daemon() as daemon, Client.connect(daemon.runtime_dir) as client:
        client.create_pool("kv", oracle.SPEC)
        ids = client.allocate("kv", 1)
        pid = daemon.process.pid
        with limited(pid, resource.RLIMIT_NOFILE, len(list(Path(f"/proc/{pid}/fd").iterdir()))):
            first = client.receive("kv", "0" * 32, [pages(ids)], source_daemons=[f"ipc://{tmp_path}/other/peer.sock"])
            with pytest.raises(KvferryError) as refused:
                client.wait_finished(first, timeout_s=20)
            client.ping()
        assert refused.value.code == "BUSY", refused.value
