"""get_cpu_copy and load_cpu_copy of SGLang's pools, by which decode retracts requests, without servers."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, RetractionBackup

from kvferry.clients import Client
from kvferry.clients.sglang import retraction
from kvferry.clients.sglang.retraction import Backup
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.sglang.in_process import PAGE, SOON_S, buffers_of, halves, mha_pool, mla_pool, same

TIER: Final = "[tiers]\nhost_bytes = 16777216\n"
FROM: Final = [3, 5, 4]
TO: Final = [20, 9, 31]
TOKENS: Final = 2 * PAGE + 1
"""The last page is not full."""


def slots(page_ids: list[int]) -> torch.Tensor:
    """Return the slots of the first tokens of these pages."""
    return torch.cat([torch.arange(PAGE) + one * PAGE for one in page_ids])[:TOKENS]


def values(pool: Any, page_ids: list[int]) -> list[torch.Tensor]:  # noqa: ANN401  SGLang's class
    """Return what all layers have of the first tokens of these pages."""
    return [one[slots(page_ids)].clone() for one in buffers_of(pool)]


def fill(pool: Any) -> list[torch.Tensor]:  # noqa: ANN401  SGLang's class
    """Have random values in all layers, and return those in FROM."""
    for one in buffers_of(pool):
        one.copy_(torch.rand(one.shape))
    return values(pool, FROM)


def held(daemon: Daemon) -> int:
    """Return how many bytes the host tier holds."""
    with Client.connect(daemon.runtime_dir) as client:
        return sum(one.used_bytes for one in client.status().tiers)


@pytest.mark.parametrize(
    ("make", "config"), [(mha_pool, TIER), (mla_pool, TIER), (mha_pool, "[tiers]\nhost_bytes = 0\n")]
)
def test_pages_come_back_to_others(make: Callable[[], Any], config: str) -> None:
    """Where there is no tier SGLang copies by itself."""
    with kit.daemon(config, keep=True) as daemon, halves(daemon.runtime_dir, make) as both:
        pool = both.sglang
        before = fill(pool)
        backup = pool.get_cpu_copy(slots(FROM))
        assert isinstance(backup, Backup) == (config == TIER)
        fill(pool)
        pool.load_cpu_copy(backup, slots(TO))
        assert same(values(pool, TO), before)
        assert not same(values(pool, FROM), before)
        assert held(daemon) == 0


def test_backup_that_nobody_has_any_more_is_dropped() -> None:
    with kit.daemon(TIER, keep=True) as daemon, halves(daemon.runtime_dir, mha_pool) as both:
        backup = both.sglang.get_cpu_copy(slots(FROM))
        assert held(daemon) > 0
        del backup
        assert soon(lambda: held(daemon) == 0)


def test_sglang_copies_by_itself_while_the_daemon_is_away() -> None:
    with kit.daemon(TIER, keep=True) as daemon, halves(daemon.runtime_dir, mha_pool) as both:
        before = fill(both.sglang)
        daemon.kill()
        backup = both.sglang.get_cpu_copy(slots(FROM))
        assert not isinstance(backup, Backup)
        both.pool.engine.poll()
        assert both.pool.engine.generation == 0, "the scheduler has waited until the client gave up"
        daemon.start()
        both.sglang.load_cpu_copy(backup, slots(TO))
        assert same(values(both.sglang, TO), before)


def test_pages_that_come_back_late_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang gives them to others where it is told that they do not come."""
    monkeypatch.setattr(retraction, "DEADLINE_S", 0.5)
    monkeypatch.setattr(retraction, "MARGIN_S", 0.5)
    with kit.daemon(TIER, keep=True) as daemon, halves(daemon.runtime_dir, mha_pool) as both:
        before = fill(both.sglang)
        backup = both.sglang.get_cpu_copy(slots(FROM))
        loads = threading.Thread(target=both.sglang.load_cpu_copy, args=(backup, slots(TO)))
        with daemon.stopped():
            loads.start()
            loads.join(2.0)
            assert loads.is_alive()
        loads.join(SOON_S)
        assert not loads.is_alive()
        assert same(values(both.sglang, TO), before)


def test_pages_come_back_after_the_daemon_was_restarted() -> None:
    with kit.daemon(TIER, keep=True) as daemon, halves(daemon.runtime_dir, mha_pool) as both:
        before = fill(both.sglang)
        backup = both.sglang.get_cpu_copy(slots(FROM))
        daemon.restart()
        both.sglang.load_cpu_copy(backup, slots(TO))
        assert same(values(both.sglang, TO), before)


def test_request_whose_pages_do_not_come_back_is_aborted() -> None:
    with kit.daemon(TIER, keep=True) as daemon, halves(daemon.runtime_dir, mha_pool) as both:
        backup = RetractionBackup(cpu_tensors=both.sglang.get_cpu_copy(slots(FROM)), mamba_cpu=None)
        daemon.configure("[tiers]\nhost_bytes = 8388608\n")
        daemon.restart()
        with both.pool.engine.client() as client:
            client.status()  # the daemon is back, with another host tier
        kept = types.SimpleNamespace(req_pool_idx=0, retraction_backup=backup, mamba_pool_idx=None, holds_mamba=False)
        req = types.SimpleNamespace(rid="one", kv=kept, seqlen=TOKENS + 1, to_finish=None)
        Req.load_kv_cache(req, types.SimpleNamespace(req_to_token=slots(TO).unsqueeze(0)), both.sglang)
        assert isinstance(req.to_finish, FINISH_ABORT)
        assert "SNAPSHOT_LOST" in req.to_finish.message
        assert req.kv.retraction_backup is None
