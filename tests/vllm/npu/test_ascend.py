"""vllm-ascend's KV cache on a *simulated* NPU: registered, or the daemon's, and what travels between two of them.

The worker's side of the connector is real, and so are vLLM, torch_npu and the daemon. vllm-ascend is not here:
``ascend`` allocates what it allocates.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.worker_base import WorkerBase

from kvferry.clients import Client, MhaSpec, pages
from kvferry.clients.vllm.configuration import model_identity
from kvferry.clients.vllm.metadata import Blocks, Load, Part, Receive, Send, StepWork, Store
from kvferry.clients.vllm.weights import Weights
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.ids import new_request_id
from kvferry.protocol.tier_messages import CacheGroup
from tests import kit
from tests.cann_simulator.simulator import Simulator
from tests.kit.daemons import Daemon, soon
from tests.kit.devices import DEVICE
from tests.kit.tiers import names
from tests.vllm.in_process import HOST_TIER
from tests.vllm.npu.ascend import BLOCK, BLOCKS, HEADS, KINDS, LAYERS, NAMES, WIDTH, Worker, vllm_config, worker

MEMORY = ("registered", "owned")


@pytest.fixture(autouse=True)
def _expandable_segments() -> Iterator[None]:
    """Allocate as vllm-ascend has torch_npu allocate by default."""
    with DEVICE.expandable_segments():
        yield


class LookedAt(WorkerBase):
    """A worker of vLLM's with weights; its base's beginnings are left out."""

    def __init__(self, config: Any, model: torch.nn.Module) -> None:  # noqa: ANN401  vLLM's
        self.vllm_config, self.model_runner = config, None
        self._model = model

    def get_model(self) -> torch.nn.Module:
        """Return what has them."""
        return self._model


def fill(one: Worker, blocks: Sequence[int], seed: int) -> list[torch.Tensor]:
    """Write blocks of all tensors, and return what is written."""
    generator = torch.Generator().manual_seed(seed)
    written = []
    for tensor in one.tensors:
        content = torch.randn((len(blocks), *tensor.shape[1:]), generator=generator).to(tensor.dtype)
        for number, block in enumerate(blocks):
            tensor[block].copy_(content[number])
        written.append(content)
    return written


def step(one: Worker, work: StepWork) -> None:
    """Do a step without layers: its loads and receives before, its stores and sends after."""
    one.connector.bind_connector_metadata(work)
    one.connector.wait_for_save()
    one.connector.clear_connector_metadata()


def sent(request: str, blocks: Sequence[int]) -> Send:
    """Return the send of a whole prompt in these blocks."""
    tokens = len(blocks) * BLOCK
    return Send("r", (Blocks(list(blocks), 0, 0, tokens),), (request,), is_last=True, prompt=b"prompt")


def received(request: str, blocks: Sequence[int]) -> Receive:
    """Return what takes that into these blocks."""
    tokens = len(blocks) * BLOCK
    return Receive("r", (Blocks(list(blocks), 0, 0, tokens),), (Part(request),), (), b"prompt")


def until_finished(*workers: Worker) -> set[int]:
    """Return what has not come, once each has told that a request of its is over."""
    left = list(workers)

    def are_done() -> bool:
        left[:] = [one for one in left if not any(one.connector.get_finished(set()))]
        return not left

    assert soon(are_done)
    return set().union(*(one.connector.get_block_ids_with_load_errors() for one in workers))


def assert_arrived(one: Worker, blocks: Sequence[int], want: Sequence[torch.Tensor]) -> None:
    """Check blocks of each tensor, and that all others are zeros."""
    others = [block for block in range(BLOCKS) if block not in blocks]
    for tensor, content in zip(one.tensors, want, strict=True):
        assert torch.equal(tensor.cpu()[list(blocks)], content)
        assert not tensor.cpu()[others].any()


def hand_over(prefill: Worker, decode: Worker, ours: Sequence[int], theirs: Sequence[int]) -> set[int]:
    """Send blocks as a prompt's, and receive them; return what has not come."""
    request = new_request_id()
    step(decode, StepWork(receives=[received(request, theirs)]))
    step(prefill, StepWork(sends=[sent(request, ours)], ended=["r"]))
    return until_finished(prefill, decode)


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_goes_from_npu_to_npu(
    kept_daemon: Daemon, kind: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a copy in between: the daemon reads and writes vllm-ascend's own tensors."""
    with ExitStack() as stack, Client.connect(kept_daemon.runtime_dir) as client:
        start = partial(worker, kept_daemon, kind=KINDS[kind], memory=memory, monkeypatch=monkeypatch)
        prefill, decode = (stack.enter_context(start(pool=name)) for name in ("prefill", "decode"))
        pools = {one.pool: one for one in client.status().pools}
        assert {one.device for one in pools.values()} == {DEVICE.name}
        assert {one.registered_by is not None for one in pools.values()} == {memory == "registered"}
        before = client.status().counters.get("transfers.receive.ok", 0)
        want = fill(prefill, [3, 5], seed=1)
        assert not hand_over(prefill, decode, [3, 5], [6, 2])
        assert_arrived(decode, [6, 2], want)
        assert client.status().counters["transfers.receive.ok"] == before + 1
        (moved,) = (one.connector.get_kv_connector_stats() for one in [decode])
        assert moved is not None


@pytest.mark.parametrize("waits", ["prefill", "decode"])
def test_blocks_are_read_and_written_behind_the_forward_pass(
    kept_daemon: Daemon, simulator: Simulator, monkeypatch: pytest.MonkeyPatch, waits: str
) -> None:
    """What a model's stream has not done when the daemon is asked: it fills prefill's block, or writes decode's."""
    start = partial(worker, kept_daemon, kind=KINDS["mha"], memory="registered", monkeypatch=monkeypatch)
    with (
        start(pool="prefill") as prefill,
        start(pool="decode") as decode,
        Client.connect(kept_daemon.runtime_dir) as client,
    ):
        contents = [torch.full_like(one[0], number + 1) for number, one in enumerate(prefill.tensors)]
        if waits == "decode":
            for one, content in zip(prefill.tensors, contents, strict=True):
                one[3].copy_(content)
        torch.accelerator.synchronize()
        request = new_request_id()
        steps = {
            "prefill": lambda: step(prefill, StepWork(sends=[sent(request, [3])], ended=["r"])),
            "decode": lambda: step(decode, StepWork(receives=[received(request, [6])])),
        }
        steps["decode" if waits == "prefill" else "prefill"]()
        with simulator.held(os.getpid(), torch.get_device_module(DEVICE.name).current_stream().npu_stream):
            tensors, block = (prefill.tensors, 3) if waits == "prefill" else (decode.tensors, 6)
            for one, content in zip(tensors, contents, strict=True):
                one[block].copy_(content)
            steps[waits]()
            for _ in range(300):
                client.ping()
            assert not any(decode.connector.get_finished(set()))
        assert not until_finished(prefill, decode)
        assert_arrived(decode, [6], [one[None].cpu() for one in contents])


@pytest.mark.parametrize("memory", MEMORY)
def test_a_prefix_is_stored_and_loaded(kept_daemon: Daemon, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        worker(kept_daemon, "cached", KINDS["sparse"], memory, monkeypatch) as one,
        Client.connect(kept_daemon.runtime_dir, instance="vllm-cached") as client,
    ):
        want = fill(one, [1, 4], seed=2)
        of = names(1, 2)
        step(one, StepWork(stores=[Store(1, "r", Blocks([1, 4], 0), of, None)]))
        done: list[int] = []

        def is_stored() -> bool:
            one.connector.get_finished(set())
            said = one.connector.build_connector_worker_meta()
            done.extend(said.stores if said else ())
            return bool(done)

        assert soon(is_stored)
        for tensor in one.tensors:
            tensor.zero_()
        found = client.lookup("cached", of, groups=[CacheGroup(group="main")])
        assert found.blocks == 2
        step(one, StepWork(loads=[Load("s", Blocks([7, 2], 0), (found.lease,), 0, is_last=True)]))
        assert not until_finished(one)
        assert_arrived(one, [7, 2], want)


def test_layers_travel_while_later_ones_are_computed(kept_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first four are at decode when prefill gives up, and the last has not been computed; then all of them."""
    ours, theirs = list(range(1, BLOCKS)), list(range(BLOCKS - 1, 0, -1))
    start = partial(worker, kept_daemon, kind=KINDS["mha"], memory="registered", monkeypatch=monkeypatch)
    with (
        start(pool="prefill") as prefill,
        start(pool="decode") as decode,
        Client.connect(kept_daemon.runtime_dir) as client,
    ):
        want = fill(prefill, ours, seed=3)

        def begin() -> None:
            """Begin a step of prefill which decode waits for."""
            request = new_request_id()
            step(decode, StepWork(receives=[received(request, theirs)]))
            prefill.connector.bind_connector_metadata(StepWork(sends=[sent(request, ours)]))

        def there() -> list[bool]:
            found = [torch.equal(one.cpu()[theirs], content) for one, content in zip(decode.tensors, want, strict=True)]
            return [k and v for k, v in zip(found[::2], found[1::2], strict=True)]

        for pings in (30, 300, 3000):
            begin()
            for name in NAMES[:4]:
                prefill.connector.save_kv_layer(name, prefill.caches[name][0], None)
            for _ in range(pings):
                client.ping()
            prefill.connector.handle_preemptions(StepWork(preempted=["r"]))
            assert until_finished(decode) == set(theirs)
            if any(there()):
                break
        assert there() == [True] * 4 + [False] * (LAYERS - 4)
        begin()
        for name in NAMES:
            prefill.connector.save_kv_layer(name, prefill.caches[name][0], None)
        prefill.connector.wait_for_save()
        step(prefill, StepWork(ended=["r"]))
        assert not until_finished(prefill, decode)
        assert_arrived(decode, theirs, want)


def test_another_layout_is_refused_with_both_sides(
    kept_daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That of a vLLM that has k and v of a head side by side, say; the log has what to configure."""
    spec = MhaSpec(
        layers=LAYERS,
        tokens=(BLOCKS - 1) * BLOCK,
        page_size=BLOCK,
        kv_heads=HEADS,
        head_dim=WIDTH,
        dtype="bfloat16",
        joined=True,
        view="hnd",
    )
    with (
        worker(kept_daemon, "prefill", KINDS["mha"], "registered", monkeypatch) as prefill,
        Client.connect(kept_daemon.runtime_dir) as client,
    ):
        client.create_pool("theirs", spec, model=model_identity(prefill.config))
        request = new_request_id()
        room = client.receive("theirs", request, [pages(client.allocate("theirs", 1))])
        step(prefill, StepWork(sends=[sent(request, [1])], ended=["r"]))
        assert soon(lambda: any(prefill.connector.get_finished(set())))
        with pytest.raises(KvferryError, match="the other server could not"):
            client.wait_finished(room, 30)
        (said,) = (one.message for one in caplog.records if "send failed" in one.message)
        for part in ("ND", "KV_128_128", "vllm-ascend at both or at neither", "--kv-cache-dtype"):
            assert part in said


@pytest.mark.parametrize("memory", MEMORY)
def test_the_daemon_is_killed_and_comes_back(memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-ascend's tensors keep their bytes, and travel as before."""
    with ExitStack() as stack:
        daemon = stack.enter_context(kit.daemon(HOST_TIER, keep=True))
        start = partial(worker, daemon, kind=KINDS["mla"], memory=memory, monkeypatch=monkeypatch)
        prefill, decode = (stack.enter_context(start(pool=name)) for name in ("prefill", "decode"))
        want = fill(prefill, [3, 5], seed=4)
        torch.accelerator.synchronize()
        daemon.kill()
        daemon.start()
        with Client.connect(daemon.runtime_dir, session=False) as watcher:
            assert soon(lambda: {one.pool for one in watcher.status().pools} == {"prefill", "decode"})
        assert soon(lambda: not hand_over(prefill, decode, [3, 5], [6, 2]))
        assert_arrived(decode, [6, 2], want)


def test_an_allocation_that_the_daemon_has_not_is_refused(kept_daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    start = partial(worker, kept_daemon, "owned", memory="owned", monkeypatch=monkeypatch)
    wider = KINDS["mha"]._replace(tokens=((HEADS, 2 * WIDTH), (HEADS, WIDTH)))
    with (
        pytest.raises(InvalidFieldError, match=r'where the daemon has 524288 bytes: say "memory": "registered"'),
        start(kind=wider),
    ):
        pass
    with (
        pytest.raises(InvalidFieldError, match="allocates its KV cache in another way"),
        start(kind=KINDS["mha"], runner=object),
    ):
        pass


def test_weights_that_sparse_attention_has_emptied_are_looked_at_where_they_are(
    kept_daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    """It computes with what it has made of them; of a weight that is nowhere each look counts as a change."""
    model, config = torch.nn.Module(), vllm_config(kept_daemon, "pool", "registered")
    model.kv_b_proj = torch.nn.Module()
    model.kv_b_proj.weight = torch.nn.Parameter(torch.empty(0, device=DEVICE.name))
    holder = LookedAt(config, model)
    nowhere = Weights(config)
    assert nowhere.look() != nowhere.look()
    assert "kv_b_proj.weight is elsewhere" in caplog.text
    made = {name: torch.ones(4, 8, 16, device=DEVICE.name) for name in ("W_UK_T", "W_UV")}
    model.attention = torch.nn.Module()
    vars(model.attention)["impl"] = SimpleNamespace(kv_b_proj=model.kv_b_proj, **made)
    weights = Weights(config)
    assert weights.look() == b""
    for one in made.values():
        one[1].fill_(2)
        assert weights.look()
        one[1].fill_(1)
        assert weights.look() == b""
    assert holder.vllm_config is config
