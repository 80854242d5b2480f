"""get_cpu_copy and load_cpu_copy of SGLang's pools, by which decode retracts requests, without servers."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, RetractionBackup

from kvferry.clients import Client
from kvferry.clients.sglang import retraction
from kvferry.clients.sglang.retraction import Backup
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.sglang.in_process import PAGE, SOON_S, halves, mha_pool, mla_pool

TIER: Final = "[tiers]\nhost_bytes = 16777216\n"
FROM: Final = [3, 5, 4]
TO: Final = [20, 9, 31]
TOKENS: Final = 2 * PAGE + 1
"""The last page is not full."""


@pytest.fixture
def with_tier() -> Iterator[Daemon]:
    with kit.daemon(TIER, keep=True) as daemon:
        yield daemon


@pytest.fixture
def without_tier() -> Iterator[Daemon]:
    with kit.daemon("[tiers]\nhost_bytes = 0\n", keep=True) as daemon:
        yield daemon


def slots(page_ids: list[int]) -> torch.Tensor:
    """Return the slots of the first tokens of these pages."""
    return torch.cat([torch.arange(PAGE) + one * PAGE for one in page_ids])[:TOKENS]


def values(pool: Any, at: torch.Tensor) -> list[torch.Tensor]:  # noqa: ANN401  SGLang's class
    """Return what all layers have at these slots."""
    buffers = [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else pool.kv_buffer
    return [one[at].clone() for one in buffers]


def fill(pool: Any) -> list[torch.Tensor]:  # noqa: ANN401  SGLang's class
    """Have random values in all layers, and return those of the first tokens in FROM."""
    buffers = [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else pool.kv_buffer
    for one in buffers:
        one.copy_(torch.rand(one.shape))
    return values(pool, slots(FROM))


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(bool((one == other).all()) for one, other in zip(ours, theirs, strict=True))


def held(daemon: Daemon) -> int:
    """Return how many bytes the host tier holds."""
    with Client.connect(daemon.runtime_dir) as client:
        return sum(one.used_bytes for one in client.status().tiers)


@pytest.mark.parametrize("make", [mha_pool, mla_pool])
def test_pages_come_back_to_others(with_tier: Daemon, make: Any) -> None:  # noqa: ANN401  a constructor
    with halves(with_tier.runtime_dir, make) as both:
        pool = both.made.sglang
        before = fill(pool)
        backup = pool.get_cpu_copy(slots(FROM))
        assert isinstance(backup, Backup)
        fill(pool)
        pool.load_cpu_copy(backup, slots(TO))
        assert same(values(pool, slots(TO)), before)
        assert not same(values(pool, slots(FROM)), before)
        assert held(with_tier) == 0


def test_backup_that_nobody_has_any_more_is_dropped(with_tier: Daemon) -> None:
    with halves(with_tier.runtime_dir, mha_pool) as both:
        backup = both.made.sglang.get_cpu_copy(slots(FROM))
        assert held(with_tier) > 0
        del backup
        assert soon(lambda: held(with_tier) == 0)


def test_sglang_copies_by_itself_where_there_is_no_tier(without_tier: Daemon) -> None:
    with halves(without_tier.runtime_dir, mha_pool) as both:
        pool = both.made.sglang
        before = fill(pool)
        backup = pool.get_cpu_copy(slots(FROM))
        assert not isinstance(backup, Backup)
        fill(pool)
        pool.load_cpu_copy(backup, slots(TO))
        assert same(values(pool, slots(TO)), before)


def test_sglang_copies_by_itself_while_the_daemon_is_away(with_tier: Daemon) -> None:
    with halves(with_tier.runtime_dir, mha_pool) as both:
        pool = both.made.sglang
        before = fill(pool)
        with_tier.end()
        backup = pool.get_cpu_copy(slots(FROM))
        assert not isinstance(backup, Backup)
        both.made.daemon.engine.poll()
        assert both.made.daemon.engine.generation == 0, "the scheduler has waited until the client gave up"
        with_tier.start()
        pool.load_cpu_copy(backup, slots(TO))
        assert same(values(pool, slots(TO)), before)


def test_pages_that_come_back_late_are_waited_for(with_tier: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives them to others where it is told that they do not come."""
    monkeypatch.setattr(retraction, "DEADLINE_S", 0.5)
    monkeypatch.setattr(retraction, "MARGIN_S", 0.5)
    with halves(with_tier.runtime_dir, mha_pool) as both:
        pool = both.made.sglang
        before = fill(pool)
        backup = pool.get_cpu_copy(slots(FROM))
        loads = threading.Thread(target=pool.load_cpu_copy, args=(backup, slots(TO)))
        with with_tier.stopped():
            loads.start()
            loads.join(2.0)
            assert loads.is_alive()
        loads.join(SOON_S)
        assert not loads.is_alive()
        assert same(values(pool, slots(TO)), before)


def test_request_whose_pages_do_not_come_back_is_aborted(with_tier: Daemon) -> None:
    with halves(with_tier.runtime_dir, mha_pool) as both:
        pool = both.made.sglang
        backup = RetractionBackup(cpu_tensors=pool.get_cpu_copy(slots(FROM)), mamba_cpu=None)
        with_tier.restart()
        with both.made.daemon.engine.client() as client:
            client.status()  # the daemon is back
        kept = types.SimpleNamespace(req_pool_idx=0, retraction_backup=backup, mamba_pool_idx=None, holds_mamba=False)
        req = types.SimpleNamespace(rid="one", kv=kept, seqlen=TOKENS + 1, to_finish=None)
        rows = types.SimpleNamespace(req_to_token=slots(TO).unsqueeze(0))
        Req.load_kv_cache(req, rows, pool)
        assert isinstance(req.to_finish, FINISH_ABORT)
        assert "SNAPSHOT_LOST" in req.to_finish.message
        assert req.kv.retraction_backup is None
