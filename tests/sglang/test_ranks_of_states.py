"""States of prefill and decode at other tensor-parallel sizes: SGLang's own pools, against slices of the model's."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateDType,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, MambaPool
from sglang.srt.utils import is_npu

from tests.kit.daemons import Daemon, soon
from tests.sglang.in_process import PAGE, SLOTS, reason
from tests.sglang.test_ranks import SPLIT, TOKENS, TOPOLOGIES, WHOLE, Place, Sides, Split, Topology, sides

HEADS: Final = 4
"""Of states, and of attention."""
DIM: Final = 8
SIZE: Final = 4
WINDOW: Final = 3
SLOT_FROM, SLOT_TO = 3, 6
SOURCE: Final = [[np.array([SLOT_FROM])]]
DESTINATION: Final = [[np.array([SLOT_TO])]]
"""As SGLang lists slots."""
TYPE: Final = Mamba2StateDType(conv=torch.bfloat16, temporal=torch.float32)


class Kind(NamedTuple):
    """A kind of states.

    Attributes:
        parts: the channels of the whole model's convolution that ranks split one by one.
        ssm: the shape of the whole model's recurrent state; () if there is none.
        groups: of B and C, or of q's and k's heads.
        says_parts: whether SGLang's pool says what the parts are.
        model_type: the model's.
    """

    parts: tuple[int, ...]
    ssm: tuple[int, ...] = (HEADS, DIM, SIZE)
    groups: int = 2
    says_parts: bool = False
    model_type: str = ""

    def shape(self, ranks: int) -> Any:  # noqa: ANN401  SGLang's class
        """Return a rank's state, as SGLang has it."""
        common = {"tp_world_size": ranks, "intermediate_size": HEADS * DIM, "conv_kernel": WINDOW + 1}
        if self is KINDS["mamba"]:
            return Mamba2StateShape.create_full_rank(**common, state_size=SIZE)
        if self is KINDS["kda"]:
            return KimiLinearStateShape.create(
                tp_world_size=ranks, num_heads=HEADS, head_dim=DIM, conv_kernel_size=WINDOW + 1
            )
        heads = {"num_heads": HEADS, "head_dim": DIM, "state_size": SIZE, "n_groups": self.groups}
        if not self.ssm:  # as of LFM2's configuration
            heads = {"num_heads": ranks, "head_dim": HEADS * DIM, "state_size": 0, "n_groups": 1}
        return Mamba2StateShape.create(
            **common, **heads, conv_shard_groups=list(self.parts) if self.says_parts else None
        )


INNER: Final = HEADS * DIM
KINDS: Final = {
    "delta net": Kind((4 * SIZE, 4 * SIZE, INNER), groups=4, says_parts=True),
    "kda": Kind((INNER, INNER, INNER), (HEADS, DIM, DIM), says_parts=True),
    "conv": Kind((INNER,), ()),
    "mamba": Kind((INNER,), (INNER, 1, SIZE)),
    "mamba 2": Kind((INNER, 2 * SIZE, 2 * SIZE), model_type="nemotron_h"),
}
UNKNOWN: Final = {
    "a group that ranks share": Kind((INNER, SIZE, SIZE), groups=1, model_type="nemotron_h"),
    "an order of parts that SGLang does not say": Kind((INNER, 2 * SIZE, 2 * SIZE)),
}
UNEQUAL: Final = ("TP 2 to 1", "TP 1 to 2", "TP 2 PP 7+8 to TP 1 PP 8+7")


def pool_of(kind: Kind, place: Place, *, amx: bool = False) -> Any:  # noqa: ANN401  SGLang's class
    """Return a rank's pool: even layers have states, odd ones attention.

    ``amx``: the axes of a convolution's state lie the other way round, as SGLang has it on processors with AMX.
    """
    params = KimiLinearCacheParams if kind is KINDS["kda"] else Mamba2CacheParams
    layers = [one for one in place.layers if one % 2 == 0]
    slots = MambaPool(
        size=SLOTS,
        spec_state_size=4,
        cache_params=params(shape=kind.shape(place.tp_size), layers=layers, dtype=TYPE),
        mamba_layer_ids=layers,
        device="cpu",
    )
    if amx:
        cache = slots.mamba_cache
        conv = [one.as_strided(one.shape, (*one.stride()[:2], 1, one.shape[2])) for one in cache.conv]
        slots.mamba_cache = dataclasses.replace(cache, conv=conv)
    return HybridLinearKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=place.heads.stop - place.heads.start,
        head_dim=DIM,
        device="cpu",
        full_attention_layer_ids=[one for one in place.layers if one % 2],
        mamba_pool=slots,
    )


class States:
    """The states of a request in all layers of a model, and what of them is a rank's."""

    def __init__(self, kind: Kind) -> None:
        chance = np.random.default_rng(1)
        count = len(range(0, WHOLE[0], 2))
        self._kind = kind
        self._parts = [chance.random((count, part, WINDOW), np.float32) for part in kind.parts]
        self._ssm = chance.random((count, *kind.ssm), np.float32)

    def of(self, place: Place) -> list[torch.Tensor]:
        """Return what a rank has of them, (layers, ...) each."""
        layers = [one // 2 for one in place.layers if one % 2 == 0]
        conv = np.concatenate([self._shard(part, place) for part in self._parts], 1)[layers]
        if self._kind is KINDS["kda"] or is_npu():
            conv = conv.transpose(0, 2, 1)
        found = [torch.from_numpy(conv).to(TYPE.conv)]
        return [*found, torch.from_numpy(self._shard(self._ssm, place)[layers])] if self._kind.ssm else found

    def _shard(self, whole: Any, place: Place) -> Any:  # noqa: ANN401  an array
        count = whole.shape[1] // place.tp_size
        return whole[:, place.tp_rank * count : (place.tp_rank + 1) * count]


def tensors_of(sglang: Any) -> list[torch.Tensor]:  # noqa: ANN401  SGLang's class
    cache = sglang.mamba_pool.mamba_cache
    return [one for one in (*cache.conv, cache.temporal) if one.numel()]


def write(both: Sides, states: States | None) -> None:
    """Write a request's states, or zeros, at all ranks of prefill."""
    for rank in both.prefill:
        for number, one in enumerate(tensors_of(rank.sglang)):
            one[:, SLOT_FROM] = states.of(rank.place)[number] if states else 0


def have(both: Sides, states: States) -> list[bool]:
    """Return whether the ranks of decode have their own of a request's states."""
    return [
        all(
            torch.equal(one[:, SLOT_TO], wanted)
            for one, wanted in zip(tensors_of(rank.sglang), states.of(rank.place), strict=True)
        )
        for rank in both.decode
    ]


def assert_resharded(daemon: Daemon, name: str, topology: Topology, kind: Kind, *, amx: bool = False) -> None:
    """Check that each rank of decode gets its share, and that it is prefill's slot that it gets."""
    with sides(daemon, name, topology, partial(pool_of, kind, amx=amx), model_type=kind.model_type) as both:
        states = States(kind)
        write(both, states)
        assert not any(have(both, states))
        both.transfer(SOURCE, DESTINATION)
        assert all(have(both, states))
        write(both, None)
        both.transfer(SOURCE, DESTINATION)
        assert not any(have(both, states)), "prefill's states count"


@pytest.mark.parametrize(
    ("topology", "kind"), [(one, kind) for kind in KINDS for one in (SPLIT if kind == "delta net" else UNEQUAL)]
)
def test_every_rank_of_decode_gets_its_share(kept_daemon: Daemon, name: str, topology: str, kind: str) -> None:
    assert_resharded(kept_daemon, name, TOPOLOGIES[topology], KINDS[kind])


@pytest.mark.parametrize("kind", ["delta net", "kda"])
def test_a_processor_with_amx_has_another_order(kept_daemon: Daemon, name: str, kind: str) -> None:
    assert_resharded(kept_daemon, name, TOPOLOGIES["TP 1 to 2"], KINDS[kind], amx=True)


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_parts_that_are_not_known_are_refused_between_ranks_that_differ(
    kept_daemon: Daemon, name: str, unknown: str
) -> None:
    kind, states = UNKNOWN[unknown], States(UNKNOWN[unknown])
    with sides(kept_daemon, name, TOPOLOGIES["TP 2 to 1"], partial(pool_of, kind), model_type=kind.model_type) as both:
        senders, receivers = both.begin(SOURCE, DESTINATION)
        assert soon(lambda: {half.poll() for half in (*senders, *receivers)} == {KVPoll.Failed})
        assert "mamba/conv/0: " in " ".join(reason(one) for one in senders)
        assert not any(have(both, states))
    with sides(kept_daemon, f"{name}-2", Topology(Split(2, WHOLE), Split(2, WHOLE)), partial(pool_of, kind)) as both:
        both.transfer(SOURCE, DESTINATION)
