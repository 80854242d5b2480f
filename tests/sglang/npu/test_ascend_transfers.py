"""What SGLang's halves of a request do over its pools for NPUs: in order with the device, without waiting for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.hardware_backend.npu.allocator_npu import NPUPagedTokenToKVPoolAllocator

from kvferry.clients import Client, pages_from_slots
from kvferry.clients.sglang import pools
from kvferry.clients.sglang.retraction import Backup
from kvferry.protocol.errors import PoolLostError
from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon
from tests.sglang.in_process import SOON_S, Halves, halves, polled
from tests.sglang.npu.pools import KINDS, PAGE, TOKENS

CONFIG = "[tiers]\nhost_bytes = 16777216\n"
NO_TIER = "[tiers]\nhost_bytes = 0\n"
Ids = npt.NDArray[np.int32]
SENT, RECEIVED = np.array([1, 2], np.int32), np.array([7, 5], np.int32)
OTHERS = np.array([3], np.int32), np.array([6], np.int32)
MANY = 1000
"""Round trips to the daemon: some 0.2 s, twenty times what a retraction takes."""
NPU: Any = torch.get_device_module("npu")


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


def on_npu(page_ids: Ids) -> torch.Tensor:
    return torch.from_numpy(page_ids).to("npu", torch.int64)


def read(both: Halves, there: torch.Tensor) -> list[torch.Tensor]:
    """Return the bytes of pages, still on the device; layer by layer, so that the simulator knows which rows."""
    return [torch.stack([layer[there] for layer in one]) for one in roles(both)]


def write(both: Halves, there: torch.Tensor, new: Sequence[torch.Tensor]) -> None:
    for one, values in zip(roles(both), new, strict=True):
        for layer, value in zip(one, values, strict=True):
            layer[there] = value


def random_pages(both: Halves, count: int) -> list[torch.Tensor]:
    """Return as many bytes for that many pages, on the device."""
    shapes = [(len(one), count, *one.shape[2:]) for one in roles(both)]
    return [torch.randint(0, 99, shape, dtype=torch.uint8).to("npu") for shape in shapes]


def slots(page_ids: Ids) -> torch.Tensor:
    """Return the slots of all tokens of these pages."""
    return torch.cat([torch.arange(PAGE) + PAGE * one for one in page_ids]).to("npu")


def content(both: Halves, page_ids: Ids) -> list[torch.Tensor]:
    return [one.cpu() for one in read(both, on_npu(page_ids))]


def computes_on(stream: Any) -> None:  # noqa: ANN401  torch_npu's
    """Have SGLang's scheduler be one whose model runs on a stream of its own."""
    pools.note_scheduler(None, SimpleNamespace(sliding_window_size=None, enable_overlap=True, forward_stream=stream))


def begun(both: Halves, sent: Ids, received: Ids) -> tuple[Any, Any]:
    """Return both halves of a request that has pages at either side, of which none is sent yet."""
    room = both.new_room()
    sender, receiver = both.sender(room, len(sent)), both.receiver(room)
    receiver.send_metadata(received, 1)
    assert polled(sender, KVPoll.WaitingForInput)
    return sender, receiver


def handed_over(both: Halves, sent: Ids = SENT, received: Ids = RECEIVED) -> bool:
    """Fill pages and hand them over: whether decode's are equal then."""
    write(both, on_npu(sent), random_pages(both, len(sent)))
    sender, receiver = begun(both, sent, received)
    sender.send(sent)
    assert polled(sender, KVPoll.Success)
    assert polled(receiver, KVPoll.Success)
    return all(map(torch.equal, content(both, sent), content(both, received)))


def test_pages_are_sent_once_the_models_stream_has_filled_them(both: Halves, simulator: Simulator) -> None:
    model, there = NPU.Stream(), on_npu(SENT)
    new = random_pages(both, len(SENT))
    sender, receiver = begun(both, SENT, RECEIVED)
    with simulator.held(os.getpid(), model.npu_stream):
        with NPU.stream(model):
            write(both, there, new)
        computes_on(model)
        sender.send(SENT)
        both.pool.compute_stream = None
        assert handed_over(both, *OTHERS), "other requests go on"
        assert receiver.poll() == KVPoll.Transferring
    assert polled(sender, KVPoll.Success)
    assert polled(receiver, KVPoll.Success)
    assert all(torch.equal(one, value.cpu()) for one, value in zip(content(both, RECEIVED), new, strict=True))


def test_pages_are_written_once_the_models_stream_reads_them_no_more(both: Halves, simulator: Simulator) -> None:
    model, there, before = NPU.Stream(), on_npu(RECEIVED), content(both, RECEIVED)
    room = both.new_room()
    sender, receiver = both.sender(room, len(SENT)), both.receiver(room)
    with simulator.held(os.getpid(), model.npu_stream):
        with NPU.stream(model):
            seen = read(both, there)
        computes_on(model)
        receiver.send_metadata(RECEIVED, 1)
        both.pool.compute_stream = None
        sender.send(SENT)
        assert handed_over(both, *OTHERS), "other requests go on"
        assert receiver.poll() == KVPoll.Transferring
    assert polled(sender, KVPoll.Success)
    assert polled(receiver, KVPoll.Success)
    assert all(torch.equal(one.cpu(), was) for one, was in zip(seen, before, strict=True))
    assert all(map(torch.equal, content(both, SENT), content(both, RECEIVED)))


def test_retracted_pages_go_to_the_host_and_back_in_order_with_the_models_stream(
    both: Halves, simulator: Simulator, daemon: Daemon
) -> None:
    """They are read once they are filled, and written once they are read no more; nobody waits for a whole stream."""
    model, pool = NPU.Stream(), both.sglang
    new, from_there, to_there = random_pages(both, len(SENT)), on_npu(SENT), on_npu(RECEIVED)
    from_slots, to_slots = slots(SENT), slots(RECEIVED)
    assert handed_over(both)
    were, before = content(both, RECEIVED), simulator.synchronized()
    computes_on(model)

    def waits_for_the_model(call: Callable[[], Any]) -> Any:  # noqa: ANN401  what it returns
        """Call it while the model's stream is held, and let that go when the daemon could have done it many times."""
        with ThreadPoolExecutor(1) as threads, Client.connect(daemon.runtime_dir) as watch:
            called = threads.submit(call)
            for _ in range(MANY):
                watch.ping()
            assert not called.done()
            simulator.release()
            return called.result()

    with simulator.held(os.getpid(), model.npu_stream), NPU.stream(model):
        write(both, from_there, new)
        backup = waits_for_the_model(lambda: pool.get_cpu_copy(from_slots))
    with simulator.held(os.getpid(), model.npu_stream), NPU.stream(model):
        seen = read(both, to_there)
        waits_for_the_model(lambda: pool.load_cpu_copy(backup, to_slots))
    assert simulator.synchronized() == before
    assert isinstance(backup, Backup)
    assert all(torch.equal(one.cpu(), was) for one, was in zip(seen, were, strict=True))
    assert simulator.synchronized() > before, "the simulator counts"
    assert all(torch.equal(one, value.cpu()) for one, value in zip(content(both, RECEIVED), new, strict=True))


@pytest.mark.parametrize(
    ("name", "config"),
    [("mha narrow v", CONFIG), ("mha narrow v", NO_TIER), ("mla packed some index", NO_TIER)],
    ids=["narrow v", "narrow v without a tier", "packed without a tier"],
)
def test_retracted_pages_come_back_whatever_their_arrays_widths_and_no_other_changes(name: str, config: str) -> None:
    """Without a tier SGLang copies by itself: V of another width than K's wrongly, were it left alone."""
    kind, every = KINDS[name], np.arange(1 + TOKENS // PAGE, dtype=np.int32)
    told = {"KVFERRY_SGLANG_POOL": "pool", **kind.environment}
    with kit.daemon(config) as daemon, halves(daemon.runtime_dir, kind.make, **told) as both:
        write(both, on_npu(every), random_pages(both, len(every)))
        expected = content(both, every)
        backup = both.sglang.get_cpu_copy(slots(SENT), mamba_indices=None, req_pool_index=1)
        assert isinstance(backup, Backup) == (config == CONFIG)
        new = random_pages(both, len(SENT))
        write(both, on_npu(SENT), new)
        for one, value in zip(expected, new, strict=True):
            one[:, RECEIVED], one[:, SENT] = one[:, SENT], value.cpu()
        both.sglang.load_cpu_copy(backup, slots(RECEIVED), mamba_indices=None, req_pool_index=2)
        assert all(map(torch.equal, content(both, every), expected))
        both.pool.engine.close()


def test_sglangs_allocator_hands_out_each_of_the_daemons_pages_once(daemon: Daemon) -> None:
    """In int32; where there are none it says so, and a slot that is freed twice counts once."""
    kind = KINDS["mha fia"]
    with halves(daemon.runtime_dir, kind.make, KVFERRY_SGLANG_POOL="pool", **kind.environment) as both:
        allocator = NPUPagedTokenToKVPoolAllocator(TOKENS, PAGE, torch.int32, "npu", both.sglang, need_sort=True)

        def extended(tokens: int) -> Any:  # noqa: ANN401  slots of a new request's tokens, or None
            none, length = torch.zeros(1, dtype=torch.int64), torch.tensor([tokens])
            return allocator.alloc_extend(none.to("npu"), none, length.to("npu"), length, none.to("npu") - 1, tokens)

        def decoded(length: int, last: int) -> Any:  # noqa: ANN401  the slot of a request's next token, or None
            now = torch.tensor([length])
            return allocator.alloc_decode(now.to("npu"), now, torch.tensor([last]).to("npu"))

        first = extended(TOKENS - PAGE)
        last = decoded(TOKENS - PAGE + 1, int(first[-1]))
        assert first.dtype == last.dtype == torch.int32
        taken = torch.cat([first, last]).cpu().numpy()
        assert sorted(pages_from_slots(taken, PAGE)) == list(range(1, 1 + TOKENS // PAGE))
        with both.pool.engine.client() as client:
            (held,) = [one for one in client.status().pools if one.pool == "pool"]
        assert held.free == 0, "they are all SGLang's"
        assert extended(1) is None
        assert decoded(PAGE + 1, int(first[PAGE - 1])) is None
        allocator.free(torch.cat([first, first, last]))
        assert allocator.available_size() == TOKENS
        assert sorted(extended(TOKENS).cpu().tolist()) == list(range(PAGE, TOKENS + PAGE))
        both.pool.engine.close()


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


def test_a_session_that_outlives_its_daemon_opens_its_events_anew(lost: list[PoolLostError]) -> None:
    kind = KINDS["mha fia"]
    told = {"KVFERRY_SGLANG_POOL": "pool", "KVFERRY_SGLANG_MEMORY": "engine", **kind.environment}
    with kit.daemon(keep=True) as daemon, halves(daemon.runtime_dir, kind.make, **told) as both:
        boot_id = both.pool.engine.boot_id
        daemon.restart()
        until(both.pool, lambda: both.pool.engine.boot_id not in {"", boot_id})
        assert handed_over(both)
        assert not lost
        assert both.pool.engine.generation == 0, "the client itself went on"
        both.pool.engine.close()


def test_the_daemons_memory_on_a_device_is_lost_with_it(mortal: Daemon, lost: list[PoolLostError]) -> None:
    kind = KINDS["mha fia"]
    with halves(mortal.runtime_dir, kind.make, KVFERRY_SGLANG_POOL="pool", **kind.environment) as both:
        mortal.restart()
        until(both.pool, lambda: bool(lost))
        assert "memory" in str(lost[0])
        assert both.pool.engine.lost is lost[0]
        both.pool.engine.close()
