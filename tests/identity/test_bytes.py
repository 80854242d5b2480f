"""The same topologies against the byte-level oracle, which knows no model: messages and copies in any order.

The model's tests say that what decode needs is right; these, that no other byte of a destination has changed.
"""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.attention.state_windows import window_of
from tests.identity.models import DRAFTS, MODELS
from tests.identity.topologies import PAGE_SIZE, TOPOLOGIES, Side, Topology
from tests.kit.devices import DEVICE
from tests.kit.tagged_transfers import STATE, Model, Rank, Stage, Transfer, Window
from tests.transfer import test_transfer_oracle as oracle


def model_of(topology: Topology) -> Model:
    """Return the facts as the oracle has them; its states have as many heads as its attention."""
    tiny = topology.tiny
    return Model(
        kind=tiny.kind,
        page_size=PAGE_SIZE,
        layers=tiny.main,
        other_layers=tiny.windows + tiny.states,
        heads=tiny.kv_heads,
        dims=tiny.dims,
        dtype="float32",
        window=tiny.window or 1,
        index_dim=tiny.index_dim,
        index_layers=() if tiny.index_dim is None else tiny.main,
        index_scale=False,
        conv=None if tiny.conv is None else (tiny.conv[0], sum(tiny.conv[1])),
        ssm=None if tiny.ssm is None else (tiny.ssm[1], math.prod(tiny.ssm[2:])),
    )


def stages_of(topology: Topology, side: Side) -> list[Stage]:
    """Return every rank of every stage of one side."""
    tiny = topology.tiny
    draft = len(MODELS[DRAFTS[tiny.kind]].main) if side.draft else 0
    return [
        Stage(tuple(layers), Rank(side.tp, number), draft if layers.stop == tiny.layers else 0)
        for layers in side.layers(tiny)
        for number in range(side.tp)
    ]


def state_of(topology: Topology, window: int | None, prefix: int) -> Window:
    """Return one side's list of windows or states."""
    if window is None:
        return Window(STATE, STATE + 1)
    return Window(*window_of(prefix, topology.tokens, window, PAGE_SIZE), plain=topology.plain)


def transfer_of(topology: Topology, seed: int) -> Transfer:
    """Return the topology's transfer; sources speak first."""
    tiny = topology.tiny
    pages = -(-topology.tokens // PAGE_SIZE)
    sources = stages_of(topology, topology.source)
    receive_requests = stages_of(topology, topology.destination)
    chunk_ends = list(range(topology.chunk_pages, pages, topology.chunk_pages)) if topology.chunk_pages else []
    turns = [number for number in range(len(sources)) for _ in range(1 + len(chunk_ends))]
    return Transfer(
        model=model_of(topology),
        sources=sources,
        receive_requests=receive_requests,
        sent=range(pages),
        wanted=range(topology.prefix_pages, pages),
        end_tokens=(topology.tokens, topology.tokens),
        sent_state=state_of(topology, topology.source_window or tiny.window, 0),
        wanted_state=state_of(topology, tiny.window, topology.prefix_pages * PAGE_SIZE),
        cuts=[chunk_ends] * len(sources),
        turns=[*turns, *range(len(sources), len(sources) + len(receive_requests))],
        fault="",
        seed=seed,
    )


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=lambda one: one.name)
@DEVICE.examples(4)
@given(data=st.data())
def test_every_byte_of_a_topology_arrives_and_no_other_changes(topology: Topology, data: st.DataObject) -> None:
    case = transfer_of(topology, data.draw(st.integers(0, 99)))
    assert not oracle.refusals(case)
    case = case._replace(turns=data.draw(st.permutations(case.turns)))
    oracle.test_every_byte_arrives_and_no_other_changes.hypothesis.inner_test(case)  # type: ignore[attr-defined]
