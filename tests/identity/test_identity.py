"""Decode from handed-off pages computes what the model computes without a transfer, to the bit, in every topology.

Prefill's cache is written to the pools of its ranks and stages, handed over by a real daemon, put together from the
pools of decode's ranks and stages, and continued by another copy of the model. Memory that nothing was written to is
NaN. The control: with any one part of what arrived zeroed, the comparison fails.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from typing import Final

import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers, of the demo extra", allow_module_level=True)

from kvferry.clients import Client, new_request_id
from kvferry.protocol.events import Finished
from tests.identity.caches import STEPS, Arrays, Reference, decoded, reference
from tests.identity.engines import Engine, engines_of
from tests.identity.models import DRAFTS
from tests.identity.topologies import TOPOLOGIES, Topology
from tests.kit.bytes import read_region, write_region

FIRST_TOKEN = 42
NOTHING: Final = Reference({}, torch.empty(0), torch.empty(0))
"""Of the draft model where there is none."""


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch compute on one thread: the machine's other cores are the daemon's, and small products gain nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Sides:
    """Both sides' engines of one topology, and what the models computed."""

    def __init__(self, prefill: Client, decode: Client, topology: Topology) -> None:
        self.topology = topology
        self.sources = engines_of(prefill, topology, is_source=True)
        self.receive_requests = engines_of(decode, topology, is_source=False)
        self._clients = (prefill, decode)
        self.draft_name = DRAFTS[topology.tiny.kind]
        self.main = reference(topology.model, topology.tokens)
        has_draft = topology.source.draft or topology.destination.draft
        self.draft = reference(self.draft_name, topology.tokens) if has_draft else NOTHING

    def fill(self) -> None:
        """Write prefill's cache, and the prefix that decode has already."""
        drafts = {("draft", role, layer): array for (_, role, layer), array in self.draft.arrays.items()}
        for one in self.sources:
            one.write({**self.main.arrays, **drafts})
        for one in self.receive_requests:
            one.write({**self.main.arrays, **drafts}, only_prefix=True)

    def transfer(self) -> list[Finished]:
        """Hand everything off, and return each transfer's outcome."""
        prefill, decode = self._clients
        request_id = new_request_id()
        receive_requests = [
            one.receive(request_id, len(self.sources), len(self.receive_requests)) for one in self.receive_requests
        ]
        last = self.sources[-1]
        sent = [one.send(request_id, FIRST_TOKEN if one is last else None) for one in self.sources]
        outcomes = [decode.wait_finished(one) for one in receive_requests]
        for one in sent:
            prefill.wait_finished(one)
            prefill.wait_settled(one)
        for one in receive_requests:
            decode.wait_settled(one)
        return outcomes

    def compare(self, *, steps: int = STEPS) -> None:
        """Check that decode computes from its pools what the models compute alone; drafts where both sides have one."""
        arrays: Arrays = {}
        for one in self.receive_requests:
            one.read_into(arrays)
        self._compare_model(self.topology.model, arrays, self.main, steps)
        if self.topology.source.draft and self.topology.destination.draft:
            drafts = {("main", role, layer): array for (of, role, layer), array in arrays.items() if of == "draft"}
            self._compare_model(self.draft_name, drafts, self.draft, steps)

    def _compare_model(self, name: str, arrays: Arrays, known: Reference, steps: int) -> None:
        logits = decoded(name, arrays, known, self.topology.tokens, steps)
        torch.testing.assert_close(logits, known.logits[:steps], rtol=0, atol=0)

    def close(self) -> None:
        for one in [*self.sources, *self.receive_requests]:
            one.close()


QUICK: Final = {
    "replicated heads, 4 to 2", "prefix and chunks", "window, stages and ranks", "window, prefix into it",
    "delta net, stages and ranks, all mixed", "mamba, 4 to 1", "latents, stages and ranks",
    "index keys, stages and ranks", "draft of latents", "views, FIA to paged, 2 to 1",
}  # fmt: skip
"""One or two of each model and of each way to split it; all of them in a full run."""

PARAMETERS: Final = [
    pytest.param(
        one, id=one.name.replace(", ", "-").replace(" ", "_"), marks=() if one.name in QUICK else pytest.mark.full
    )
    for one in TOPOLOGIES
]


@pytest.fixture(params=PARAMETERS)
def sides(request: pytest.FixtureRequest, client: Client, other: Client) -> Iterator[Sides]:
    made = Sides(client, other, request.param)
    yield made
    made.close()


def parts(receive_requests: Sequence[Engine], *, with_draft: bool) -> list[tuple[Engine, str, str]]:
    """Return every engine's components and roles: what a control zeroes, one at a time."""
    return [
        (one, component, role)
        for one in receive_requests
        for component, role in dict.fromkeys(key[:2] for key in one.arrays())
        if component != "draft" or with_draft
    ]


def test_decode_computes_what_the_model_computes_alone(sides: Sides) -> None:
    sides.fill()
    outcomes = sides.transfer()
    assert [one.first_token for one in outcomes] == [FIRST_TOKEN] * len(sides.receive_requests)
    sides.compare()
    one_sided = sides.topology.source.draft != sides.topology.destination.draft
    assert all(one.is_untouched("draft") for one in sides.receive_requests) or not one_sided
    has_draft = sides.topology.source.draft and sides.topology.destination.draft
    for engine, component, role in parts(sides.receive_requests, with_draft=has_draft):
        before = read_region(engine.pool.region)
        engine.zero(component, role)
        with pytest.raises(AssertionError, match="Tensor-likes are not"):
            sides.compare(steps=1)
        write_region(engine.pool.region, before)
    sides.compare(steps=1)
