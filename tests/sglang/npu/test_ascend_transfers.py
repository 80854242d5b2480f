"""What SGLang's halves of a request do over its pools for NPUs: in order with the device, without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError

from kvferry.clients.sglang import pools
from kvferry.clients.sglang.retraction import Backup
from kvferry.protocol.errors import PoolLostError
from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon
from tests.sglang.in_process import SOON_S, Halves, halves, polled
from tests.sglang.npu.pools import KINDS, PAGE

CONFIG = "[tiers]\nhost_bytes = 16777216\n"
SENT, RECEIVED = np.array([1, 2, 3], np.int32), np.array([7, 5, 6], np.int32)


@pytest.fixture(params=["mha fia", "mla some index nz", "mla packed some index"])
def both(request: pytest.FixtureRequest, daemon: Daemon) -> Iterator[Halves]:
    kind = KINDS[request.param]
    with halves(daemon.runtime_dir, kind.make, KVFERRY_SGLANG_POOL="pool", **kind.environment) as one:
        yield one
        one.pool.engine.close()


def roles(both: Halves) -> list[torch.Tensor]:
    """Return the bytes of each role that the pool has: (layers, pages, …)."""
    has = {name.split("/")[1] for name in both.pool.lists.names}
    return [both.pool.tensor(role).view(torch.uint8) for role in sorted(has)]


def content(both: Halves, page_ids: npt.NDArray[np.int32]) -> list[torch.Tensor]:
    return [one[:, torch.from_numpy(page_ids).to("npu", torch.int64)].cpu() for one in roles(both)]


def here(page_ids: npt.NDArray[np.int32]) -> torch.Tensor:
    return torch.from_numpy(page_ids).to("npu", torch.int64)


def handed_over(both: Halves) -> bool:
    """Receive into pages that kernels still read, and send those that others still write: whether they are equal then.

    Each on a stream of its own, as two servers are. The simulator reports a race where nothing orders kernel and copy.
    """
    reading, writing = torch.Stream("npu"), torch.Stream("npu")
    new = [torch.randint(0, 99, one.shape, dtype=torch.uint8, device="cpu")[:, SENT].to("npu") for one in roles(both)]
    there, from_there = here(SENT), here(RECEIVED)
    room = both.new_room()
    sender, receiver = both.sender(room, len(SENT)), both.receiver(room)
    with reading:
        readers = [one[:, from_there] for one in roles(both)]
    both.pool.compute_stream = reading
    receiver.send_metadata(RECEIVED, 1)
    assert polled(sender, KVPoll.WaitingForInput)
    with writing:
        for one, value in zip(roles(both), new, strict=True):
            one[:, there] = value
    both.pool.compute_stream = writing
    sender.send(SENT)
    assert polled(sender, KVPoll.Success)
    assert polled(receiver, KVPoll.Success)
    torch.accelerator.synchronize()
    assert len(readers) == len(new)
    return all(map(torch.equal, content(both, SENT), content(both, RECEIVED)))


def test_pages_arrive_in_order_with_kernels_that_use_them(both: Halves) -> None:
    assert handed_over(both)
    assert handed_over(both)


def test_a_retracted_request_goes_to_the_host_and_back_and_no_stream_is_waited_for(
    both: Halves, simulator: Simulator
) -> None:
    """The model's stream still fills the pages, and still reads those to which they come back."""
    pool, computing = both.sglang, torch.Stream("npu")
    there = [torch.cat([torch.arange(PAGE) + PAGE * one for one in ids]).to("npu") for ids in (SENT, RECEIVED)]
    given, from_there, to_there = (
        torch.arange(7, 7 + len(SENT), dtype=torch.uint8).to("npu"),
        here(SENT),
        here(RECEIVED),
    )
    torch.accelerator.synchronize()
    both.pool.compute_stream = computing
    with computing:
        for one in roles(both):
            one[:, from_there] = given.view(-1, *[1] * (one.dim() - 2))
        readers = [one[:, to_there] for one in roles(both)]
    before = simulator.synchronized()
    backup = pool.get_cpu_copy(there[0])
    pool.load_cpu_copy(backup, there[1])
    assert simulator.synchronized() == before
    assert isinstance(backup, Backup)
    torch.accelerator.synchronize()
    assert simulator.synchronized() > before, "the simulator counts"
    assert readers
    assert all(map(torch.equal, content(both, SENT), content(both, RECEIVED)))


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[PoolLostError]:
    """Return what servers would have ended for."""
    reasons: list[PoolLostError] = []
    monkeypatch.setattr(pools, "end_server", reasons.append)
    return reasons


@pytest.fixture(scope="module")
def mortal() -> Iterator[Daemon]:
    """Return a daemon that tests kill."""
    with kit.daemon() as daemon:
        yield daemon


def until(pool: Any, condition: Callable[[], bool]) -> None:  # noqa: ANN401  a pool
    ends_at = time.monotonic() + SOON_S
    while not condition():
        pool.engine.wait_for_news(0.1)
        assert time.monotonic() < ends_at


def test_registered_memory_is_the_next_daemons_too(mortal: Daemon, lost: list[PoolLostError]) -> None:
    kind = KINDS["mha fia"]
    told = {"KVFERRY_SGLANG_POOL": "pool", "KVFERRY_SGLANG_MEMORY": "engine", **kind.environment}
    with halves(mortal.runtime_dir, kind.make, **told) as both:
        assert handed_over(both)
        before = content(both, SENT)
        boot_id = both.pool.engine.boot_id
        mortal.kill()
        until(both.pool, lambda: not both.pool.engine.boot_id)
        half = both.receiver(both.new_room())
        half.send_metadata(RECEIVED, 1)
        assert polled(half, KVPoll.Failed)
        with pytest.raises(KVTransferError, match="DAEMON_LOST"):
            half.failure_exception()
        mortal.start()
        until(both.pool, lambda: both.pool.engine.boot_id not in {"", boot_id})
        assert all(map(torch.equal, content(both, SENT), before))
        assert handed_over(both)
        assert not lost
        both.pool.engine.close()


def test_the_daemons_memory_on_a_device_is_lost_with_it(mortal: Daemon, lost: list[PoolLostError]) -> None:
    kind = KINDS["mha fia"]
    with halves(mortal.runtime_dir, kind.make, KVFERRY_SGLANG_POOL="pool", **kind.environment) as both:
        mortal.restart()
        until(both.pool, lambda: bool(lost))
        assert "memory" in str(lost[0])
        assert both.pool.engine.lost is lost[0]
        both.pool.engine.close()
