"""Engines replay captured graphs over a daemon's pool, and exchange pages with a host pool, while daemons are killed.

Also twice while one adopts, with an engine that dies meanwhile, and succeeded without a stop. No replay reads an update
in part, no byte is wrong, no page is lost or owned twice, and the engine's addresses, and so its graphs, stay.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from random import Random
from typing import Final

import pytest
import torch

from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.clients.connection import Reconnected
from kvferry.protocol.errors import KvferryError
from tests import kit
from tests.cann_simulator.build import NPU_PYTHON
from tests.cann_simulator.child import Child
from tests.cann_simulator.simulator import Simulator
from tests.conftest import simulated_host
from tests.kit.daemons import Daemon, soon
from tests.kit.devices import DEVICE
from tests.npu.conftest import OPENING_S
from tests.npu.paged_attention import HEAD_DIM, HEADS, KV_HEADS, Cache, CapturedAttention, reference

CONFIG: Final = "[service]\nresume_grace_s = 120.0\n"
PAGE, PAGES = 8, 64
SPEC: Final = MhaSpec(
    layers=1, tokens=PAGE * (PAGES - 1), page_size=PAGE, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="float32"
)
CLOSE: Final = 1e-5
KILLS: Final = int(os.environ.get("KVFERRY_KILLS", "2"))
"""``KVFERRY_KILLS=100`` for an hour."""

SPARE: Final = 4
"""Pages that the engine leaves to one that dies."""

VICTIM: Final = """
from kvferry.clients import Client
client = Client.connect({directory!r}, name="victim")
pool = client.attach_pool("device")
[*ids] = client.allocate("device", {pages}).tolist()
tables = client.create_tables("theirs", "device", max_batch=2, max_context_tokens=40)
for page in ids:
    client.wait(client.update_tables(tables, [1], rows={{0: [page]}}, after=tables.replayed()))
"""

STEPS: Final = 12
"""Of the engine between two changes of the daemon, at least."""

ENDED: Final = {"STALE_BOOT", "SHUTTING_DOWN", "DAEMON_LOST", "DEADLINE", "CANCELLED", "PEER_LOST", "BUSY"}
"""How what was under way may end."""


class Engine:
    """An engine's decode steps: what it told the daemon's tables, and what its graph read."""

    def __init__(self, client: Client, random: Random) -> None:
        self.done = 0
        self.failed: set[str] = set()
        self.received = 0
        self._random = random
        self._client = client
        device = client.create_pool("device", SPEC, device=DEVICE.name, deadline_s=OPENING_S)
        host = client.create_pool("host", SPEC)
        self._host = [host.array("main", role)[0] for role in ("k", "v")]
        self._cache = Cache.random(device)
        self._all = client.allocate("device", PAGES - 1 - SPARE).tolist()
        self._sent = client.allocate("host", 4).tolist()
        self._tables = client.create_tables("tables", "device", max_batch=2, max_context_tokens=40)
        self._graph = CapturedAttention(self._cache, self._tables, 2)
        self._addresses = self._now()
        self._shown: tuple[list[list[int]], list[int]] = ([[], []], [0, 0])

    def step(self) -> None:
        """Change the tables, replay, and compare what was read; now and then receive pages before."""
        if self._random.random() < 0.3:
            self._receive()
        lengths = [self._random.randint(1, 40) for _ in range(2)]
        rows = [self._random.sample(self._all, -(-length // PAGE)) for length in lengths]
        believed = [(rows, lengths)]
        try:
            after, whole = self._tables.replayed(), dict(enumerate(rows))
            self._client.wait(self._client.update_tables(self._tables, lengths, rows=whole, after=after))
        except KvferryError as error:
            self.failed.add(error.code)
            believed.append(self._shown)
        queries = torch.randn(2, 1, HEADS, HEAD_DIM)
        found = self._graph.replay(queries)
        said = self._tables.host_lengths().lengths
        same = [
            (rows, lengths)
            for rows, lengths in believed
            if lengths == said and self._differs(found, queries, rows, lengths) < CLOSE
        ]
        assert same, (believed, said)
        [self._shown, *_] = same
        assert self._now() == self._addresses
        self.done += 1

    def check_a_wrong_table_is_seen(self) -> None:
        """Compare with what other pages would have given."""
        queries = torch.randn(2, 1, HEADS, HEAD_DIM)
        found, (rows, lengths) = self._graph.replay(queries), self._shown
        assert self._differs(found, queries, rows, lengths) < CLOSE
        others = [[*ids[:-1], ids[-1] % (PAGES - 1) + 1] for ids in rows]
        assert self._differs(found, queries, others, lengths) > CLOSE

    def check_pages(self) -> None:
        """Compare the owners of pages, and all bytes of both."""
        assert self._client.owned_pages("device")["main"].tolist() == self._all
        assert self._client.owned_pages("host")["main"].tolist() == self._sent
        for on_device, on_host in (
            (self._cache.keys, self._cache.host_keys),
            (self._cache.values, self._cache.host_values),
        ):
            assert torch.equal(on_device[self._all].cpu(), on_host[self._all])

    def _receive(self) -> None:
        """Receive pages from the host; what did not arrive as a whole is received anew."""
        target = self._random.sample(self._all, len(self._sent))
        for own in self._host:
            own[self._sent] = torch.randn(own[self._sent].shape).numpy()
        while True:
            request = new_request_id()
            try:
                receiving = self._client.receive("device", request, [pages(target)], deadline_s=OPENING_S)
                sending = self._client.send("host", request, [pages(self._sent)], deadline_s=OPENING_S)
                self._client.wait_finished(receiving, OPENING_S)
                self._client.wait_settled(sending, OPENING_S)
            except KvferryError as error:
                self.failed.add(error.code)
                continue
            break
        for known, own in zip((self._cache.host_keys, self._cache.host_values), self._host, strict=True):
            known[target] = torch.from_numpy(own[self._sent].copy())
        self.received += 1

    def _differs(self, found: torch.Tensor, queries: torch.Tensor, rows: list[list[int]], lengths: list[int]) -> float:
        return float((found - reference(self._cache, queries, rows, lengths)).abs().max())

    def _now(self) -> tuple[int, ...]:
        return self._cache.keys.data_ptr(), self._tables.block_tables.data_ptr(), self._tables.seq_lens.data_ptr()


@pytest.fixture
def life() -> Iterator[Daemon]:
    """Return a daemon that outlives its process, started as users start it: its successor is started so."""
    DEVICE.accelerator  # noqa: B018
    with kit.daemon(CONFIG, keep=True, python=NPU_PYTHON) as one:
        yield one


@pytest.mark.timeout(900 + 60 * KILLS)
def test_graphs_and_pages_outlive_their_daemons(
    life: Daemon, simulator: Simulator, request: pytest.FixtureRequest
) -> None:
    """Of a killed daemon's last copies of tables the record has no order with those in its place: the same bytes."""
    killed: list[int] = []
    random = Random(44)  # noqa: S311
    told: list[Reconnected] = []
    fifth = -(-KILLS // 5)
    changes = ["kill"] * (KILLS - KILLS // 4) + ["twice"] * (KILLS // 4) + ["upgrade"] * fifth + ["death"] * fifth
    random.shuffle(changes)
    with (
        Client.connect(life.runtime_dir, name="engine", on_reconnect=told.append) as client,
        ThreadPoolExecutor(1) as threads,
    ):
        engine = Engine(client, random)
        engine.step()
        for change in changes:
            until = engine.done + random.randint(0, STEPS)
            while engine.done < until:
                engine.step()
            changing = threads.submit(_change, life, simulator, change, killed)
            while not changing.done() or engine.done < until + STEPS:
                engine.step()
            changing.result()
        engine.check_a_wrong_table_is_seen()
        engine.check_pages()
        assert engine.failed <= ENDED
        assert engine.received
        assert not [one for one in told if one.pools or one.tables or one.pages]
        assert len(told) >= len(changes)
    host = request.config.stash[simulated_host]
    assert host is None or not host.new_races(killed)


def _change(life: Daemon, simulator: Simulator, change: str, killed: list[int]) -> None:
    """Make a change; ``killed`` gets the numbers of the processes that it kills."""

    def kill() -> None:
        killed.append(life.process.pid)
        life.kill()

    if change == "upgrade":
        life.upgrade()
        return
    if change == "death":
        with Child(simulator) as victim:
            victim.do(VICTIM.format(directory=str(life.runtime_dir), pages=SPARE))
            kill()
            victim.kill()
        life.start()
        with Client.connect(life.runtime_dir, name="another") as other:
            assert soon(lambda: _free(other) == SPARE)
            assert soon(lambda: len(other.status().tables) == 1)
        return
    kill()
    if change == "twice":
        with contextlib.suppress(pytest.fail.Exception):
            life.start()
        kill()  # it serves, and has not adopted the pools on devices
    life.start()


def _free(client: Client) -> int:
    return next((one.free for one in client.status().pools if one.pool == "device"), -1)
