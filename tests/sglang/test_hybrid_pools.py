"""SGLang's pools of windows, of states and of an indexer's keys in the daemon's memory, without servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import KVTransferError
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool
from sglang.srt.mem_cache.memory_pool import MambaPool, MLATokenToKVPool
from sglang.srt.runtime_context import get_context

from kvferry.clients import Client
from kvferry.clients.sglang.retraction import Backup
from kvferry.protocol.errors import InvalidFieldError
from tests import kit
from tests.kit.daemons import Daemon, soon
from tests.sglang.in_process import (
    ON,
    PAGE,
    SLOTS,
    WINDOW_TOKENS,
    Halves,
    chosen,
    current_pool,
    halves,
    manager,
    polled,
    sparse_pool,
    states_pool,
    told,
    windows_pool,
)

pytestmark = pytest.mark.any_device

POOLS: Final = ("sglang.srt.mem_cache", "sglang.srt.hardware_backend")
FROM: Final = [1, 2, 3, 4]
TO: Final = [40, 30, 20, 10]
WINDOW_FROM: Final = [7, 5]
WINDOW_TO: Final = [9, 11]
"""Of the last two pages of the prompt."""
SLOT_FROM, SLOT_TO = 3, 6
TIER: Final = "[tiers]\nhost_bytes = 16777216\n"
NO_TIER: Final = "[tiers]\nhost_bytes = 0\n"

conv_only = partial(states_pool, shape={"temporal": (0, 0, 0)})
ssm_only = partial(states_pool, shape={"conv": [(0, 0)]})
"""As of lightning attention."""
MAKERS: Final[dict[str, Callable[[], Any]]] = {
    "windows": windows_pool,
    "states": states_pool,
    "conv": conv_only,
    "ssm": ssm_only,
}
WITH_STATES: Final = tuple(MAKERS)
"""Whose states have pages or slots of their own; an index is on the prompt's."""
if ON != "cpu":
    MAKERS["sparse"] = sparse_pool
SHAPES: Final = ("0",) if ON == "cpu" else ("0", "1")
"""Of keys and values, on an NPU alone: with ``ASCEND_USE_FIA``, and without."""


def tensors_of(value: Any) -> Iterator[torch.Tensor]:  # noqa: ANN401  SGLang's objects
    """Yield all tensors in an object of SGLang's, in order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_of(one)
    elif type(value).__module__.startswith(POOLS) and hasattr(value, "__dict__"):
        for one in vars(value).values():
            yield from tensors_of(one)


def pages_of(both: Halves, component: str, ids: list[int]) -> list[torch.Tensor]:
    """Return what the daemon's pool has in these pages or slots of a component, each role."""
    roles = ("k", "v", "index_k") if component in {"main", "swa"} else ("conv", "ssm")
    return [both.pool.tensor(role, component)[:, ids].clone() for role in roles if (component, role) in roles_of(both)]


def roles_of(both: Halves) -> set[tuple[str, str]]:
    names = [*both.pool.lists.names, *both.pool.state_lists.names]
    return {(component, role) for component, role, _ in (name.split("/") for name in names)}


def fill(both: Halves) -> None:
    """Write random values everywhere."""
    for component, role in sorted(roles_of(both)):
        one = both.pool.tensor(role, component)
        one.copy_(torch.rand(one.shape))


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) > 0 and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class States(NamedTuple):
    """What SGLang says of a request's states at either side: the component, and the pages or slot."""

    component: str
    source: list[Any]
    destination: list[Any]


def states_of(both: Halves) -> States:
    if ("swa", "k") in roles_of(both):
        return States("swa", [np.array(WINDOW_FROM)], [np.array(WINDOW_TO)])
    if ("main", "index_k") in roles_of(both):  # and of the layers without an index their keys and values once more
        return States("main", [np.array(FROM)] * 2, [np.array(TO)] * 2)
    return States("mamba", [[np.array(SLOT_FROM)]], [[np.array(SLOT_TO)]])  # as SGLang's _mamba_payload gives them


def sent(both: Halves, source: list[Any] | None, destination: list[Any] | None, prefix: int = 0) -> tuple[Any, Any]:
    """Send a request of four pages in two chunks, of which decode has so many; return both halves."""
    room = both.new_room()
    sender, receiver = both.sender(room, len(FROM), row=1), both.receiver(room)
    receiver.send_metadata(np.array(TO[prefix:], np.int32), 2, destination, decode_prefix_len=prefix * PAGE)
    assert soon(lambda: sender.poll() == KVPoll.WaitingForInput or receiver.poll() == KVPoll.Failed)
    sender.send(np.array(FROM[:2], np.int32))
    sender.send(np.array(FROM[2:], np.int32), source)
    return sender, receiver


def both_failed(sender: Any, receiver: Any) -> bool:  # noqa: ANN401  SGLang's classes
    """Return whether both halves of a request fail soon: SGLang's schedulers look at them in turns."""
    return soon(lambda: {sender.poll(), receiver.poll()} == {KVPoll.Failed})


def reason(half: Any) -> str:  # noqa: ANN401  SGLang's class
    with pytest.raises(KVTransferError) as raised:
        half.failure_exception()
    return str(raised.value)


@pytest.fixture(scope="module", params=["daemon", "engine"])
def memory(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=SHAPES)
def fia(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=MAKERS)
def both(request: pytest.FixtureRequest, memory: str, fia: str, kept_daemon: Daemon) -> Iterator[Halves]:
    environment = {"KVFERRY_SGLANG_POOL": f"{request.param}-{memory}-{fia}", "KVFERRY_SGLANG_MEMORY": memory}
    with halves(kept_daemon.runtime_dir, MAKERS[request.param], **environment, ASCEND_USE_FIA=fia) as one:
        yield one
        one.pool.engine.close()


@pytest.fixture(scope="module")
def windows(kept_daemon: Daemon) -> Iterator[Halves]:
    with halves(kept_daemon.runtime_dir, windows_pool, KVFERRY_SGLANG_POOL="windows") as one:
        yield one
        one.pool.engine.close()


def states_listed(pool: Any) -> Any:  # noqa: ANN401  SGLang's object
    name = "get_index_k_state_buf_infos" if hasattr(pool, "index_k_pool") else "get_state_buf_infos"
    return getattr(pool, name)()


def test_pool_is_as_sglang_makes_it(both: Halves) -> None:
    """Lists, attributes, shapes and strides; addresses alone are others."""
    name = both.pool.name.partition("-")[0]
    with told():
        plain = MAKERS[name]()
    ours = both.sglang
    assert vars(ours).keys() == vars(plain).keys()
    assert [(one.shape, one.dtype, one.stride(), one.device) for one in tensors_of(ours)] == [
        (one.shape, one.dtype, one.stride(), one.device) for one in tensors_of(plain)
    ]
    assert ours.get_contiguous_buf_infos()[1:] == plain.get_contiguous_buf_infos()[1:]
    assert states_listed(ours)[1:] == states_listed(plain)[1:]
    assert ours.get_kv_size_bytes() == plain.get_kv_size_bytes()
    for theirs, lists, without in (
        (ours.get_contiguous_buf_infos(), both.pool.lists, "/index_k/"),  # which SGLang lists as states alone
        (states_listed(ours), both.pool.state_lists, "none"),
    ):
        rows = zip(lists.names, lists.data_ptrs, lists.data_lens, lists.item_lens, strict=True)
        assert [*zip(*theirs, strict=True)] == [tuple(row) for name, *row in rows if without not in name]
    for part in (getattr(ours, "full_kv_pool", None), getattr(ours, "swa_kv_pool", None)):
        if part is not None and ON == "cpu":  # SGLang has no tables of addresses of an NPU's
            assert part.data_ptrs.tolist() == [one.data_ptr() for one in (*part.k_buffer, *part.v_buffer)]


def test_pages_and_states_arrive(both: Halves) -> None:
    fill(both)
    states = states_of(both)
    given = [np.ravel(one).tolist() for one in (*states.source, *states.destination)]
    pages = pages_of(both, "main", FROM)
    ids = [np.ravel(one).tolist() for one in (states.source, states.destination)]
    before = pages_of(both, states.component, ids[0])
    assert not equal(pages_of(both, states.component, ids[1]), before)
    sender, receiver = sent(both, states.source, states.destination)
    assert polled(receiver, KVPoll.Success), reason(receiver)
    assert polled(sender, KVPoll.Success)
    assert equal(pages_of(both, "main", TO), pages)
    assert equal(pages_of(both, states.component, ids[1]), before)
    assert [np.ravel(one).tolist() for one in (*states.source, *states.destination)] == given


@pytest.mark.parametrize("prefix", [2, len(FROM)])
def test_a_prefix_at_decode_is_not_written(both: Halves, prefix: int) -> None:
    """The pages after it arrive, and the window or state; of a prompt that decode has whole, these alone."""
    fill(both)
    states = states_of(both)
    ids = [np.ravel(one).tolist() for one in (states.source, states.destination)]
    pages, kept = pages_of(both, "main", FROM[prefix:]), pages_of(both, "main", TO[:prefix])
    sender, receiver = sent(both, states.source, states.destination, prefix)
    assert polled(receiver, KVPoll.Success), reason(receiver)
    assert polled(sender, KVPoll.Success)
    assert equal(pages_of(both, "main", TO[prefix:]), pages)
    assert equal(pages_of(both, "main", TO[:prefix]), kept)
    if states.component != "main":  # else an index is on the prompt's own pages
        assert equal(pages_of(both, states.component, ids[1]), pages_of(both, states.component, ids[0]))


@pytest.mark.device_only
def test_pages_go_while_later_layers_are_computed(both: Halves) -> None:
    """The forward pass has an event for each layer, of pages or not."""
    fill(both)
    states, room = states_of(both), both.new_room()
    sender, receiver = both.sender(room, len(FROM)), both.receiver(room)
    receiver.send_metadata(np.array(TO, np.int32), 1, states.destination)
    assert polled(sender, KVPoll.WaitingForInput)
    steps = both.pool.layer_steps()
    assert len(steps) == both.pool.layers > 1
    sender.send(np.array(FROM[:3], np.int32), steps=steps)
    fill(both)  # as the pass does, of which no layer is done yet
    both.pool.signals.end(None)
    sender.send(np.array(FROM[3:], np.int32), states.source)
    assert polled(receiver, KVPoll.Success), reason(receiver)
    assert equal(pages_of(both, "main", TO), pages_of(both, "main", FROM))
    ids = [np.ravel(one).tolist() for one in (states.source, states.destination)]
    assert equal(pages_of(both, states.component, ids[1]), pages_of(both, states.component, ids[0]))


@pytest.mark.parametrize("both", WITH_STATES, indirect=True)
def test_padding_is_not_part_of_it(both: Halves) -> None:
    """SGLang hands out slots from 1 on, and so it does pages."""
    states = states_of(both)
    sender, receiver = sent(both, [np.array([0])] * len(states.source), states.destination)
    assert both_failed(sender, receiver)
    assert "PAGE_OUT_OF_RANGE" in reason(sender)


@pytest.mark.parametrize("both", WITH_STATES, indirect=True)
@pytest.mark.parametrize("side", ["source", "destination"])
def test_the_last_slot_is_one_and_the_next_is_none(both: Halves, side: str) -> None:
    component = states_of(both).component
    last = {"swa": WINDOW_TOKENS // PAGE, "mamba": SLOTS}[component]

    def ends(slot: int) -> list[list[Any]]:
        """Return the lists of source and destination, of which one has this slot."""
        return [[np.array([slot if one == side else 1])] for one in ("source", "destination")]

    fill(both)
    source, destination = ends(last)
    before = pages_of(both, component, source[0].tolist())
    _, receiver = sent(both, source, destination)
    assert polled(receiver, KVPoll.Success)
    assert equal(pages_of(both, component, destination[0].tolist()), before)
    source, destination = ends(last + 1)
    sender, receiver = sent(both, source, destination)
    assert both_failed(sender, receiver)
    assert "PAGE_OUT_OF_RANGE" in reason(sender) + reason(receiver)


def test_a_longer_window_at_prefill_is_cut_at_its_front(windows: Halves) -> None:
    """So that pages are those of the same tokens; the request's own lists stay as they are."""
    fill(windows)
    source, destination = np.array([6, *WINDOW_FROM]), np.array(WINDOW_TO)
    before = pages_of(windows, "swa", WINDOW_FROM)
    _, receiver = sent(windows, [source], [destination])
    assert polled(receiver, KVPoll.Success)
    assert equal(pages_of(windows, "swa", WINDOW_TO), before)
    assert (source.tolist(), destination.tolist()) == ([6, *WINDOW_FROM], WINDOW_TO)


@pytest.mark.parametrize(
    ("source", "destination", "says"),
    [
        ([WINDOW_FROM], [[12, *WINDOW_TO]], "WINDOW_MISMATCH"),
        ([[6, *WINDOW_FROM, 33]], [WINDOW_TO], "PAGE_OUT_OF_RANGE"),  # though it is cut
        ([[33, *WINDOW_FROM]], [WINDOW_TO], "PAGE_OUT_OF_RANGE"),
        ([[]], [WINDOW_TO], "EMPTY_STATE"),
        (None, [WINDOW_TO], "UNKNOWN_COMPONENT"),
        ([WINDOW_FROM], [[]], "EMPTY_STATE"),
        ([WINDOW_FROM], None, "UNKNOWN_COMPONENT"),
        ([[1, 2, 3, 4, 5]], [WINDOW_TO], "5 window pages of a prompt of 4"),
        ([WINDOW_FROM], [[1, 2, 3, 4, 5]], "5 window pages of a prompt of 4"),
        ([WINDOW_FROM, WINDOW_FROM], [WINDOW_TO], "2 lists of 1 kinds of states"),
        ([WINDOW_FROM], [], "0 lists of 1 kinds of states"),
    ],
)
def test_lists_that_do_not_fit_end_the_request(windows: Halves, source: Any, destination: Any, says: str) -> None:  # noqa: ANN401
    fill(windows)
    before = pages_of(windows, "swa", WINDOW_TO)
    sender, receiver = sent(windows, source, destination)
    assert both_failed(sender, receiver)
    assert says in reason(sender) + reason(receiver)
    assert equal(pages_of(windows, "swa", WINDOW_TO), before)


def test_states_that_are_not_the_pools_are_refused_by_name(windows: Halves) -> None:
    args = windows.decode.kv_args
    for field in ("state_data_ptrs", "state_data_lens", "state_item_lens"):
        lists = getattr(args, field)
        setattr(args, field, [[*lists[0][:-1], lists[0][-1] + 64]])
        with pytest.raises(InvalidFieldError, match=r"SGLang's states \(swa\) are not those of pool windows"):
            manager(args, DisaggregationMode.DECODE)
        setattr(args, field, lists)


@pytest.mark.parametrize("both", ["states", "conv", "ssm"], indirect=True)
def test_hicache_beside_a_prefix_cache_of_states_at_decode_is_refused_by_name(both: Halves) -> None:
    """SGLang 0.5.23 would load the prefix's state into the slot that prefill's comes into, whichever is later."""
    caches = {"disaggregation_decode_enable_radix_cache": True, "enable_hierarchical_cache": True}
    with (
        get_context().override_server_args(**caches),
        pytest.raises(InvalidFieldError, match=r"does not carry HiCache beside decode's prefix cache of states .* yet"),
    ):
        manager(both.decode.kv_args, DisaggregationMode.DECODE)


_LATENT: Final[dict[str, Any]] = {
    "page_size": PAGE, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "device": ON, "enable_memory_saver": False
}  # fmt: skip
LATENT: Final[dict[str, Any]] = {
    "full_kv_pool_class": MLATokenToKVPool if ON == "cpu" else NPUMLATokenToKVPool,
    "swa_kv_pool_class": MLATokenToKVPool if ON == "cpu" else NPUMLATokenToKVPool,
    "full_kv_pool_kwargs": _LATENT,
    "swa_kv_pool_kwargs": _LATENT,
}
ROWS: Final[dict[str, Any]] = {
    "use_mla": True, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "full_kv_pool_class": LATENT["full_kv_pool_class"]
}  # fmt: skip
REFUSED: Final[list[tuple[str, Callable[[], Any]]]] = [
    ("latent rows beside windows", lambda: windows_pool(**LATENT)),
    ("latent rows beside .* or states", lambda: states_pool(**ROWS)),
    ("2 convolutions a layer", lambda: states_pool(shape={"conv": [(6, 3), (8, 3)]})),
    (
        "states with intermediate_ssm, intermediate_conv_window",
        lambda: states_pool(states={"speculative_num_draft_tokens": 3}),
    ),
    ("the state pool Other", lambda: states_pool(kind=type("Other", (MambaPool,), {}))),
]


@pytest.mark.parametrize(("says", "make"), REFUSED)
def test_what_is_not_carried_is_refused_by_name(says: str, make: Callable[[], Any], tmp_path: Path) -> None:
    with (
        chosen({"KVFERRY_RUNTIME_DIR": str(tmp_path)}),
        current_pool(lambda: None),
        pytest.raises(InvalidFieldError, match=f"does not carry {says}.*: choose another"),
    ):
        make()


# -- retraction: OFFLOAD and RESTORE of all components

TOKENS: Final = 3 * PAGE + 1


def slots(page_ids: list[int]) -> torch.Tensor:
    """Return the slots of the first tokens of these pages."""
    return torch.cat([torch.arange(PAGE) + one * PAGE for one in page_ids])[:TOKENS].to(ON)


def mapped(both: Halves, page_ids: list[int], window_ids: list[int]) -> None:
    """Have these pages' last tokens be in these window pages, as the allocator of both says it."""
    mapping = torch.zeros(256 + PAGE + 1, dtype=torch.int64)
    window = torch.cat([torch.arange(PAGE) + one * PAGE for one in window_ids])
    mapping[torch.cat([torch.arange(PAGE) + one * PAGE for one in page_ids])[-len(window) :]] = window
    both.sglang.register_mapping(mapping.to(ON))


# The simulated NPU cannot select by a mask, as SGLang's own copy does.
@pytest.mark.parametrize("tier", [TIER, pytest.param(NO_TIER, marks=pytest.mark.host_only)])
@pytest.mark.parametrize(("held", "taken"), [([5, 7, 9], [1, 2, 3]), ([5, 7, 9], [2, 3]), ([7, 9], [1, 2, 3])])
def test_a_window_comes_back_to_other_pages(held: list[int], taken: list[int], tier: str) -> None:
    """Decode may hold more pages than the window needs; without a tier SGLang copies by itself."""
    with kit.daemon(tier, keep=True) as daemon, halves(daemon.runtime_dir, windows_pool) as both:
        both.pool.window = PAGE
        fill(both)
        mapped(both, FROM, held)
        main, window = pages_of(both, "main", FROM[:3]), pages_of(both, "swa", held[-2:])
        backup = both.sglang.get_cpu_copy(slots(FROM))
        assert isinstance(backup, Backup) == (tier == TIER)
        fill(both)
        mapped(both, TO, taken)
        both.sglang.load_cpu_copy(backup, slots(TO))
        assert equal(pages_of(both, "main", TO[:3]), main)
        last = PAGE + 1
        here = [one.flatten(1, 2)[:, :last] for one in pages_of(both, "swa", taken[-2:])]
        assert equal(here, [one.flatten(1, 2)[:, :last] for one in window])
        with Client.connect(daemon.runtime_dir) as client:
            assert sum(one.used_bytes for one in client.status().tiers) == 0


@pytest.mark.device_only
def test_without_a_tier_values_of_another_width_than_keys_come_back() -> None:
    """SGLang's own copy takes both for as wide; of a request whose window has no page left, here."""
    with kit.daemon(NO_TIER) as daemon, halves(daemon.runtime_dir, windows_pool) as both:
        fill(both)
        both.sglang.register_mapping(torch.zeros(256 + PAGE + 1, dtype=torch.int64, device=ON))
        main = pages_of(both, "main", FROM[:3])
        backup = both.sglang.get_cpu_copy(slots(FROM))
        assert not isinstance(backup, Backup)
        fill(both)
        both.sglang.load_cpu_copy(backup, slots(TO))
        here = pages_of(both, "main", TO[:3])
        assert equal(*([one.flatten(1, 2)[:, :TOKENS] for one in ids] for ids in (here, main)))
        both.pool.engine.close()


@pytest.mark.device_only
def test_an_index_comes_back_with_its_pages() -> None:
    """SGLang itself has no copy of such a pool."""
    with kit.daemon(TIER) as daemon, halves(daemon.runtime_dir, sparse_pool) as both:
        fill(both)
        main = pages_of(both, "main", FROM[:3])
        assert len(main) == 3
        backup = both.sglang.get_cpu_copy(slots(FROM))
        fill(both)
        both.sglang.load_cpu_copy(backup, slots(TO))
        assert equal(pages_of(both, "main", TO[:3]), main)
        both.pool.engine.close()


@pytest.mark.device_only
@pytest.mark.parametrize("kind", ["minimax_index_k", "minimax_dense_kv"])
def test_lists_of_an_index_that_are_not_the_pools_are_refused_by_name(kind: str, kept_daemon: Daemon) -> None:
    with halves(kept_daemon.runtime_dir, sparse_pool, KVFERRY_SGLANG_POOL=f"other-{kind}") as both:
        args = both.decode.kv_args
        at = [one.value for one in args.state_types].index(kind)
        args.state_data_ptrs[at] = [args.state_data_ptrs[at][0] + 64, *args.state_data_ptrs[at][1:]]
        with pytest.raises(InvalidFieldError, match=f"SGLang's states .*{kind}.* are not those of pool"):
            manager(args, DisaggregationMode.DECODE)
        both.pool.engine.close()


@pytest.mark.parametrize("make", [states_pool, conv_only])
def test_a_state_comes_back_to_another_slot(make: Callable[[], Any]) -> None:
    with kit.daemon(TIER, keep=True) as daemon, halves(daemon.runtime_dir, make) as both:
        fill(both)
        main, state = pages_of(both, "main", FROM[:3]), pages_of(both, "mamba", [SLOT_FROM])
        backup = both.sglang.get_cpu_copy(slots(FROM), mamba_indices=torch.tensor(SLOT_FROM, device=ON))
        assert isinstance(backup, Backup)
        fill(both)
        both.sglang.load_cpu_copy(backup, slots(TO), mamba_indices=torch.tensor(SLOT_TO, device=ON))
        assert equal(pages_of(both, "main", TO[:3]), main)
        assert equal(pages_of(both, "mamba", [SLOT_TO]), state)
        assert SLOTS > SLOT_TO
