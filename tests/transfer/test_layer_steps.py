"""SENDs whose layers are ready step by step: what starts when, in which order, and what if a step never comes."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import Entry
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.devices import DEVICE
from tests.kit.transfers import PAGE_BYTES, Engine, Pair, layers

LAYERS = 4
PAGES = 3
BYTES_OF_A_LAYER = PAGES * 2 * PAGE_BYTES


def range_of(step: LayerStep) -> range:
    return range(step.first_layer, step.first_layer + step.layers)


def step(first_layer: int, count: int = 1, *, event: int = 0, value: int = 1) -> LayerStep:
    return LayerStep(first_layer=first_layer, layers=count, event=event, value=value)


ONE_A_LAYER = tuple(step(layer, event=layer) for layer in range(LAYERS))


def entries_of_layers(*numbers: int) -> set[str]:
    return {f"main/{role}/{layer}" for role in "kv" for layer in numbers}


class Ferry(Pair):
    """A prefill and a decode side of four layers."""

    def __init__(self, whole_below_bytes: int = 0, entries: Sequence[Entry] = ()) -> None:
        super().__init__(entries or layers(LAYERS), whole_below_bytes=whole_below_bytes)
        self.before = self.decode.content

    def meet(self, steps: tuple[LayerStep, ...] = ONE_A_LAYER) -> None:
        self.decode.receive()
        self.prefill.send(steps=steps)

    def events(self, *values: int) -> None:
        self.harness.events(self.prefill.session, *values)

    def layers_of(self, op: int, names: Sequence[str] = ("main",)) -> list[int]:
        planned_copies = self.harness.state_machine.endpoints.ops[op].planned_copies
        return sorted(
            {pair.destination.layer for one in planned_copies for pair in one.pairs if one.component in names}
        )

    def arrived(self, at: Engine | None = None) -> set[str]:
        """Return the entries of which all pages are there; of the others nothing must be there."""
        sent, got = self.prefill.content, (at or self.decode).content
        there = {name for name in got[0] if all(one[name] == other[name] for one, other in zip(got, sent, strict=True))}
        assert at or all(
            got[n][name] == page[name] for n, page in enumerate(self.before) for name in page.keys() - there
        )
        return there


@pytest.fixture
def ferry() -> Ferry:
    return Ferry()


def test_steps_become_ready_in_their_order_and_not_in_that_of_their_events(ferry: Ferry) -> None:
    ferry.meet()
    ferry.events(0, 1, 1, 0)
    assert ferry.under_way == []
    ferry.events(1, 1, 0, 0)  # the third one's counter has gone back: hostile, and of no use
    assert [ferry.layers_of(op) for op in ferry.under_way] == [[0], [1]]
    ferry.events(0, 0, 0, 0)
    assert len(ferry.under_way) == 2
    ferry.events(1, 1, 1, 1)
    ferry.finish()
    assert ferry.arrived() == entries_of_layers(*range(LAYERS))


@pytest.mark.parametrize(
    ("steps", "what"),
    [
        ((step(0, 2, value=1),), "layer 2 is in no step (2 layers)"),
        ((step(1, value=1), step(3, value=2)), "layer 0 is in no step (2 layers)"),
        ((step(0, 3, value=1), step(1, 3, value=2)), "layer 1 is in more than one step (2 layers)"),
        ((step(0, 4, value=1), step(0, 4, value=2)), "layer 0 is in more than one step (4 layers)"),
    ],
)
def test_steps_that_do_not_name_each_layer_once_are_refused(
    ferry: Ferry, steps: tuple[LayerStep, ...], what: str
) -> None:
    ferry.decode.receive()
    with pytest.raises(InvalidFieldError, match=re.escape(what)) as refused:
        ferry.prefill.send(steps=steps)
    assert refused.value.field == "steps"
    ferry.prefill.send(steps=(step(0, LAYERS, value=1),))
    ferry.events(1)
    ferry.finish()
    assert ferry.decode.told == "OK settled", "a refusal leaves no trace"


def test_draft_layers_are_numbered_apart_and_go_with_the_last_step() -> None:
    ferry = Ferry(entries=[*layers(2), *layers(2, component="draft")])
    ferry.meet((step(0, value=1), step(1, value=2)))
    ferry.events(1)
    assert ferry.layers_of(ferry.under_way[0], ("main", "draft")) == [0]
    assert ferry.layers_of(ferry.under_way[0], ("draft",)) == []
    ferry.events(2)
    assert ferry.layers_of(ferry.under_way[1], ("draft",)) == [0, 1]
    ferry.end_well()


def test_a_step_starts_into_every_receive(ferry: Ferry) -> None:
    other = ferry.harness.engine("other", layers(LAYERS))
    ferry.prefill.send(steps=ONE_A_LAYER)
    ferry.decode.receive(destinations=2)
    ferry.events(1, 0, 0, 0)
    other.receive(destinations=2)
    assert len(ferry.under_way) == 2, "the later receive request takes what is ready at once"
    ferry.events(1, 1, 1, 1)
    assert len(ferry.under_way) == 2 * LAYERS
    ferry.finish()
    assert ferry.arrived() == ferry.arrived(other) == entries_of_layers(*range(LAYERS))
    assert ferry.prefill.told == "OK settled"


def test_events_of_another_session_start_nothing(ferry: Ferry) -> None:
    stranger = ferry.harness.session()
    ferry.meet()
    ferry.harness.events(stranger, 1, 1, 1, 1)
    ferry.harness.events(ferry.decode.session, 1, 1, 1, 1)
    assert ferry.under_way == []
    assert ferry.harness.state_machine.waits_for_events(ferry.prefill.session)
    assert not ferry.harness.state_machine.waits_for_events(stranger)


def test_a_step_that_never_comes_ends_at_the_deadline(ferry: Ferry) -> None:
    ferry.meet()
    ferry.events(1, 1, 0, 1)
    ferry.finish()
    (send_request, receive_request) = ferry.harness.state_machine.endpoints
    assert send_request.waits_for() == "the events of 2 layer steps"
    assert receive_request.waits_for() == f"copies: 0 of {PAGES} pages there; the events of 2 layer steps"
    ferry.harness.pass_time(30.0)
    assert ferry.prefill.told == "DEADLINE settled"
    assert "the events of 2 layer steps" in ferry.prefill.reason
    assert ferry.decode.told == "DEADLINE settled"
    ferry.events(1, 1, 1, 1)
    assert ferry.under_way == []
    assert not ferry.harness.state_machine.waits_for_events(ferry.prefill.session)


@pytest.mark.parametrize(("more_bytes", "ops"), [(-1, 4), (0, 4), (1, 1)])
def test_less_than_the_threshold_goes_whole_with_its_last_step(more_bytes: int, ops: int) -> None:
    ferry = Ferry(whole_below_bytes=LAYERS * BYTES_OF_A_LAYER + more_bytes)
    ferry.meet()
    ferry.events(1, 1, 1, 0)
    assert len(ferry.under_way) == ops - 1
    ferry.events(1, 1, 1, 1)
    assert len(ferry.under_way) == ops
    ferry.finish()
    assert ferry.arrived() == entries_of_layers(*range(LAYERS))


@DEVICE.examples(100)
@given(st.data())
def test_any_steps_and_any_order_of_events_bring_everything(data: st.DataObject) -> None:
    whole_below_bytes = data.draw(st.sampled_from([0, 0, LAYERS * BYTES_OF_A_LAYER + 1]))
    ferry = Ferry(whole_below_bytes)
    cuts = [0, *sorted(data.draw(st.sets(st.integers(1, LAYERS + 1), max_size=4))), LAYERS + 2]  # beyond the pool's too
    extents = data.draw(st.permutations([*itertools.pairwise(cuts)]))
    steps = [
        step(first, stop - first, event=data.draw(st.integers(0, 2)), value=data.draw(st.integers(1, 3)))
        for first, stop in extents
    ]
    last_step = len(steps) - 1
    of_layers = [
        next((n for n, one in enumerate(steps) if layer in range_of(one)), last_step) for layer in range(LAYERS)
    ]
    needed = 1 + (last_step if whole_below_bytes else max(of_layers))
    counters = [0, 0, 0]
    receive_at = data.draw(st.integers(0, 9))
    ferry.prefill.send(steps=tuple(steps))
    for moment in range(10):
        if moment == receive_at:
            ferry.decode.receive()
        counters[data.draw(st.integers(0, 2))] += 1
        ferry.events(*counters)
        ready = next((n for n, one in enumerate(steps) if counters[one.event] < one.value), len(steps))
        if moment >= receive_at and data.draw(st.booleans()):
            ferry.finish()
            here = {layer for one in steps[:ready] for layer in range_of(one) if layer < LAYERS}
            whole = ready >= needed
            assert ferry.told == (("OK settled",) * 2 if whole else ("", ""))
            assert ferry.arrived() == entries_of_layers(
                *(range(LAYERS) if whole else () if whole_below_bytes else here)
            )
    ferry.events(3, 3, 3)
    ferry.finish()
    assert ferry.arrived() == entries_of_layers(*range(LAYERS))
    assert ferry.decode.finished.moved_bytes == LAYERS * BYTES_OF_A_LAYER
