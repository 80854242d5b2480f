"""What a daemon's metrics say: sums that hold at any time, names that are bounded, and what asking costs."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.clients import AsyncClient, Client, MhaSpec, new_request_id, pages
from kvferry.daemon.control.http_socket import Asker
from kvferry.daemon.control.loop_lag import INTERVAL_S, LoopLag
from kvferry.daemon.control.metrics import SECONDS, Counters, Histogram
from kvferry.daemon.services import metric_sources, metrics
from kvferry.daemon.services.copy_times import MOST_GROUPS, CopyTimes
from kvferry.daemon.services.metric_catalogue import COUNTED, DRAINING, METRICS, CounterNames, Sample
from kvferry.daemon.services.metrics import Metrics
from kvferry.daemon.transports.local import LocalTransport
from kvferry.protocol.config.schema import MetricsConfig, ServiceConfig
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user
from tests.kit.devices import DEVICE
from tests.kit.documents import page
from tests.kit.in_process import CONFIG as PLAIN
from tests.kit.in_process import serving
from tests.kit.scraping import Scrape, get, scrape, scrape_until

BY_ITS_COMMAND: Final = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
"""Which starts a daemon by the command that it starts the next one by."""

SPEC: Final = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
PAGES: Final = 16
PAGE_BYTES: Final = 2 * 4 * 4 * 4


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let a daemon on the test's loop end as it does; that a scrape does not block is shown in test_loop.py."""


@pytest.fixture
def pool(client: Client) -> Iterator[str]:
    """Have a pool; in the end its pages are freed."""
    client.create_pool("secret", SPEC)
    yield "secret"
    for ids in client.owned_pages("secret").values():
        if len(ids):
            client.free("secret", ids)
    client.delete_pool("secret")


def states(found: Scrape, **labels: str) -> dict[str, float]:
    return {one["state"]: found.value("kvferry_pool_pages", **one) for one in found.labels("kvferry_pool_pages")
            if labels.items() <= one.items()}  # fmt: skip


def test_each_page_of_a_pool_is_in_one_state(daemon: Daemon, client: Client, pool: str) -> None:
    ids = client.allocate(pool, 8)
    sending = client.send(pool, new_request_id(), [pages(ids[:3])], deadline_s=600)
    receiving = client.receive(pool, new_request_id(), [pages(ids[3:5])], deadline_s=600)
    client.free(pool, ids[2:4])
    found = scrape_until(
        daemon.runtime_dir, lambda one: one.sum("kvferry_pool_pages", pool=pool, state="releasing") > 0
    )
    assert states(found, pool=pool) == {"free": 8, "idle": 3, "read": 2, "written": 1, "releasing": 2}
    assert found.sum("kvferry_pool_pages", pool=pool) == PAGES
    assert found.value("kvferry_pool_largest_free_run_pages", pool=pool) == 8
    assert found.value("kvferry_pool_page_bytes", pool=pool) == PAGE_BYTES
    assert found.value("kvferry_live_transfers", direction="send", state="waiting") == 1
    assert found.value("kvferry_oldest_transfer_seconds", direction="receive", state="waiting") > 0
    for one in (sending, receiving):
        client.cancel(one)
        client.wait_settled(one)


def test_transfers_are_counted_by_outcome_and_bytes(daemon: Daemon, client: Client, pool: str) -> None:
    before, request_id, ids = scrape(daemon.runtime_dir), new_request_id(), client.allocate(pool, 4)
    receiving = client.receive(pool, request_id, [pages(ids[:2])])
    client.wait_settled(client.send(pool, request_id, [pages(ids[2:])]))
    client.wait_settled(receiving)
    client.ping()  # it acknowledges the events
    name_of_stages = "kvferry_transfer_stage_seconds_count"
    found = scrape_until(daemon.runtime_dir, lambda one: one.since(before, name_of_stages, stage="told") >= 2)
    name = "kvferry_transfers_total"
    for way in ("send", "receive"):
        assert found.since(before, name, direction=way, outcome="ok") == 1
        name_of_times = "kvferry_transfer_seconds_count"
        for part in ("waited", "moved"):
            assert found.since(before, name_of_times, direction=way, part=part) == 1
    for one in ("kvferry_transfer_bytes_total", "kvferry_copy_bytes_total", "kvferry_copy_group_bytes_total"):
        assert found.since(before, one) == 2 * PAGE_BYTES
    stages = {
        (one["stage"], one["transport"]): found.since(before, name_of_stages, **one)
        for one in found.labels(name_of_stages)
    }
    told = stages.pop(("told", "any"))
    assert stages == {("planned", "any"): 2, ("copied", "local"): 1, ("committed", "local"): 1}
    assert told >= 2, "a FINISHED of each side"
    busy_s = found.since(before, "kvferry_copy_busy_seconds_total", transport="local")
    assert 0 < busy_s <= found.since(before, "kvferry_transfer_seconds_sum", direction="receive")
    client.free(pool, ids)


ASKED_BY_ANOTHER: Final = """
import socket
with socket.socket(socket.AF_UNIX) as one:
    one.connect(sys.argv[1] + "/metrics.sock")
    one.sendall(b"GET /metrics HTTP/1.1\\r\\n\\r\\n")
    print(b"".join(iter(lambda: one.recv(65536), b"")).decode().partition("\\r\\n\\r\\n")[2])
"""


def test_another_user_is_told_sums_and_no_names(daemon: Daemon, client: Client, pool: str) -> None:
    client.allocate(pool, 3)
    ours = scrape_until(daemon.runtime_dir, lambda one: one.sum("kvferry_pool_pages", pool=pool, state="idle") == 3)
    text = said_by_another_user(daemon, ASKED_BY_ANOTHER)
    theirs = Scrape(text + "\n")
    assert pool in {one["pool"] for one in ours.labels("kvferry_pool_pages")}
    assert pool not in text
    assert states(theirs) == {"free": 13, "idle": 3, "read": 0, "written": 0, "releasing": 0}
    assert theirs.families.keys() == ours.families.keys()


def test_what_is_exported_is_the_catalogue(daemon: Daemon) -> None:
    exported = set(re.findall(r"^# TYPE (\S+)", get(daemon.runtime_dir).text, re.MULTILINE))
    of_process = {name for name in exported if name.startswith("process_")}
    assert exported - of_process == METRICS.keys()
    assert len(of_process) > 3


def test_what_writes_metrics_is_not_imported_before_somebody_asks() -> None:
    code = "import sys, kvferry.clients, kvferry.daemon.daemon; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def counters_of_the_page() -> Iterator[str]:
    """Yield each counter that docs/operations.md names, with a value for each placeholder."""
    table = page("operations.md").split("### Counters")[1].split("\n## ")[0]
    for name in re.findall(r"`([a-z_]+\.[A-Za-z_.*]+)`", table):
        for part in ("done", "missed", "no_room", "failed", "bytes") if "*" in name else ("",):
            whole = (
                name.replace("*", part).replace("CODE", "too_large").replace("KIND", "restore").replace("GROUP", "main")
            )
            yield whole.replace("OUTCOME", "peer_cancelled")


def test_every_counter_is_a_metric_and_every_metric_of_counters_counts_one() -> None:
    names, counters = CounterNames(), set(counters_of_the_page())
    assert len(counters) > 100
    assert [one for one in counters if names.of(one) is None] == []
    found = {names.of(one) for one in counters}
    assert {one.metric.name for one in COUNTED} == {one[0].metric.name for one in found if one is not None}


def test_samples_of_counters_keep_their_sums() -> None:
    counts = {"requests.refused.busy": 2, "requests.refused.deadline": 3, "adoption.fence_ms": 1500, "odd.one": 1}
    samples = list(CounterNames().samples(counts))
    by_name = {(one.metric.name, one.labels): one.value for one in samples}
    assert by_name["kvferry_requests_refused_total", ("busy",)] == 2
    assert by_name["kvferry_requests_refused_total", ("deadline",)] == 3
    assert by_name["kvferry_adoption_fence_seconds_total", ()] == 1.5
    assert by_name["kvferry_cache_lookups_total", ()] == 0, "what has no labels is there from the start"
    assert len(by_name) == len(samples)


@DEVICE.examples(100)
@given(values=st.lists(st.floats(0, 100)))
def test_a_histogram_counts_each_value_once(values: list[float]) -> None:
    histogram = Histogram()
    for value in values:
        histogram.observe(value)
    seen = histogram.snapshot()
    assert seen.at_most == tuple(sum(value <= bound for value in values) for bound in SECONDS)
    assert seen.values == len(values)
    assert seen.total == pytest.approx(sum(values))


def test_time_in_which_copies_overlap_counts_once() -> None:
    now_s, counters = 0.0, Counters()
    copies = CopyTimes(counters, clock=lambda: now_s)
    acts: tuple[tuple[float, Callable[[], object]], ...] = (
        (1.0, lambda: copies.began(1, "local")),
        (2.0, lambda: copies.began(2, "local")),
        (2.5, lambda: copies.began(3, "network")),
        (4.0, lambda: copies.reported(1)),
        (5.0, lambda: copies.ended(1, [("main", 10), ("draft", 5)])),
        (6.0, lambda: copies.ended(2, None)),
        (9.0, lambda: copies.began(4, "local")),
    )
    for at_s, act in acts:
        now_s = at_s
        act()
    now_s = 9.5
    assert dict(copies.busy_seconds()) == {"local": 5.5, "pull": 0.0, "network": 7.0}
    counted = {"copies.local.bytes": 15, "copies.groups.main": 10, "copies.groups.draft": 5}
    assert counters.snapshot() == dict(sorted(counted.items())), "what has failed moved nothing that counts"
    times = {name: (seen.values, seen.total) for name, seen in counters.times().items()}
    assert times == {"stages.copied.local": (1, 3.0), "stages.committed.local": (1, 1.0)}


def test_groups_beyond_a_few_are_counted_together() -> None:
    counters = Counters()
    copies = CopyTimes(counters)
    for number in range(2 * MOST_GROUPS):
        copies.began(number, "local")
        copies.ended(number, [(f"group{number}", 1)])
    groups = [name for name in counters.snapshot() if name.startswith("copies.groups.")]
    assert len(groups) == MOST_GROUPS + 1
    assert counters.snapshot()["copies.groups.others"] == MOST_GROUPS


class Timers:
    """What a loop is asked to call, and after how long."""

    def __init__(self) -> None:
        self.calls = list[Callable[[], None]]()

    def call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        assert delay_s == INTERVAL_S
        self.calls.append(call)


def test_lag_is_how_late_the_timer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, timers = 100.0, Timers()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    loop: Any = timers
    lag = LoopLag(loop)
    lag.start()
    for late_s in (0.0, 0.03, 7.0):
        now_s += INTERVAL_S + late_s
        timers.calls.pop()()
    seen = lag.seconds.snapshot()
    assert seen.values == 3
    assert seen.total == pytest.approx(7.03)


class Counting:
    """A source that counts how often it was asked, and may raise."""

    def __init__(self) -> None:
        self.asked = list[Asker]()
        self.fails = False

    def __call__(self, asker: Asker) -> Iterator[Sample | None]:
        self.asked.append(asker)
        if self.fails:
            raise OSError("no descriptor")
        yield None
        yield Sample(DRAINING, (), len(self.asked))


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as one:
        yield one


@pytest.mark.anyio
async def test_many_who_ask_at_once_are_given_one_text(executor: ThreadPoolExecutor) -> None:
    source = Counting()
    one = Metrics([source], executor)
    answers = await asyncio.gather(*(one.page("user") for _ in range(50)), one.page("operator"))
    assert sorted(source.asked) == ["operator", "user"]
    assert {answer.status for answer in answers} == {HTTPStatus.OK}


@pytest.mark.anyio
async def test_a_text_is_kept_for_as_long_as_it_may_be(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Counting()
    one = Metrics([source], executor)
    monkeypatch.setattr(metrics, "KEPT", 1e9)
    first = await one.page("user")
    assert await one.page("user") is first
    monkeypatch.setattr(metrics, "KEPT", 0)
    other = Metrics([source], executor)
    assert [(await other.page("user")).body.count(b"kvferry_draining 2") for _ in range(2)] == [1, 0]


@pytest.mark.anyio
async def test_a_source_that_fails_is_said_and_asked_again(executor: ThreadPoolExecutor) -> None:
    source = Counting()
    one = Metrics([source], executor)
    source.fails = True
    failed = await one.page("user")
    assert (failed.status, failed.body) == (HTTPStatus.SERVICE_UNAVAILABLE, b"OSError: no descriptor\n")
    source.fails = False
    assert (await one.page("user")).status == HTTPStatus.OK


@pytest.mark.anyio
async def test_others_have_their_turns_while_metrics_are_collected(
    executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "SLICE_S", 0)
    turns = list[int]()

    def source(_asker: Asker) -> Iterator[Sample | None]:
        for number in range(10):
            asyncio.get_running_loop().call_soon(turns.append, number)
            yield None
            assert turns[-1] == number

    assert (await Metrics([source], executor).page("user")).status == HTTPStatus.OK
    assert turns == list(range(10))


@pytest.mark.anyio
async def test_pools_beyond_a_few_are_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric_sources, "MOST_POOLS", 2)
    async with serving() as (path, _, _), await AsyncClient.connect(path) as client:
        for name in "abcd":
            await client.create_pool(name, SPEC)
            await client.allocate(name, 1 + (name == "d"))
        found = await asyncio.to_thread(scrape, path)
    assert {one["pool"] for one in found.labels("kvferry_pool_pages")} == {"a", "b", ""}
    assert states(found, pool="") == {"free": 29, "idle": 3, "read": 0, "written": 0, "releasing": 0}
    assert found.sum("kvferry_pool_pages") == 4 * PAGES
    assert found.value("kvferry_pools", device="host", memory_of="daemon") == 4
    assert found.value("kvferry_pool_largest_free_run_pages", pool="") == PAGES - 1


@pytest.mark.anyio
async def test_ready_until_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalTransport, "start", lambda *_: None)  # no copy ends, so neither does the drain
    config = msgspec.structs.replace(PLAIN, service=ServiceConfig(drain_timeout_s=1))
    async with serving(config) as (path, _, stopping), await AsyncClient.connect(path) as client:
        await client.create_pool("pool", SPEC)
        ids, request_id = await client.allocate("pool", 2), new_request_id()
        client.send("pool", request_id, [pages(ids[:1])])
        client.receive("pool", request_id, [pages(ids[1:])])
        await client.ping()
        assert await asyncio.to_thread(get, path, "/readyz") == (200, "ok\n")
        stopping.set()
        assert await asyncio.to_thread(get, path, "/readyz") == (503, "draining\n")
        assert await asyncio.to_thread(get, path, "/healthz") == (200, "ok\n")
        assert (await asyncio.to_thread(scrape, path)).value("kvferry_draining") == 1


@pytest.mark.anyio
async def test_by_tcp_where_that_is_configured() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = msgspec.structs.replace(PLAIN, metrics=MetricsConfig(listen=f"tcp://127.0.0.1:{port}"))
    async with serving(config) as (path, _, _), await AsyncClient.connect(path) as client:
        await client.create_pool("pool", SPEC)
        found = await asyncio.to_thread(scrape, ("127.0.0.1", port))
        assert {one["pool"] for one in found.labels("kvferry_pool_pages")} == {"pool"}


def test_a_restart_says_what_it_went_on_with() -> None:
    with kit.daemon(keep=True, environment=BY_ITS_COMMAND) as daemon, kit.engine(daemon) as client:
        client.create_pool("pool", SPEC)
        client.allocate("pool", 3)
        began = scrape(daemon.runtime_dir).value("process_start_time_seconds")
        daemon.restart()
        client.ping()
        found = scrape(daemon.runtime_dir)
        adopted = {one: found.value("kvferry_adopted_total", what=one) for one in ("pools", "sessions", "pages")}
        assert adopted == {"pools": 1, "sessions": 1, "pages": 3}
        assert found.value("process_start_time_seconds") > began
        daemon.upgrade()
        assert scrape(daemon.runtime_dir).value("kvferry_adopted_total", what="pools") == 1
