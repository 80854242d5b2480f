"""Transfers of every layout against a byte-level oracle that knows the model, and nothing of how it is done.

Many sources of unequal stages and ranks fill several receive requests, in any order of messages and copies. What
arrives is compared over the whole memory of each destination: what belongs there is there, and no other byte has
changed. What must be refused is refused with an error that names the cause; nothing else is.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given

from kvferry.pools.layouts import manifest_of
from kvferry.pools.pool import Pool
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError
from tests.kit.bytes import fill_region, read_region, write_region
from tests.kit.devices import DEVICE
from tests.kit.tagged_transfers import (
    UNTOUCHED,
    Held,
    Memory,
    Stage,
    Transfer,
    arrays_of,
    put_pages,
    spec_of,
    tagged_page,
    transfers,
)
from tests.kit.transfers import TransferHarness

pytestmark = pytest.mark.any_device

FIRST_TOKEN = 42
SPARE_PAGES = 8
STRANGER = 999


class Party:
    """One side's rank: its session, its pool, and the pages that it names."""

    def __init__(self, harness: TransferHarness, case: Transfer, number: int, chance: random.Random) -> None:
        self.is_receive_request = number >= len(case.sources)
        self.stage = [*case.sources, *case.receive_requests][number]
        self.session = harness.session()
        model = case.model
        if case.fault == "width" and not self.is_receive_request:
            model = model._replace(dims=(model.dims[0], model.dims[1] + 1))
        if case.fault == "scale" and not self.is_receive_request:
            model = model._replace(wrong_scale=True)
        self.arrays = arrays_of(model, self.stage)
        state = case.wanted_state if self.is_receive_request else case.sent_state
        pages = max(len(case.sent), len(case.wanted), len(state.numbers)) + SPARE_PAGES + chance.randrange(4)
        views: tuple[Literal["paged", "fia"], ...] = ("paged",) if model.kind == "mla" else ("paged", "fia")
        manifest = manifest_of(spec_of(model, self.stage, pages, chance.choice(views)))
        self.pool = harness.pool_of(f"pool{number}", manifest)
        self.components = {one.name for one in manifest.components}
        self.main = self._some_pages("main", case.wanted if self.is_receive_request else case.sent, chance)
        self.state = self._some_pages(model.state or "", state.numbers, chance)
        self.chunks = self._chunks([] if self.is_receive_request else case.cuts[number])

    def _some_pages(self, component: str, numbers: range, chance: random.Random) -> PageIds:
        if component not in self.components:
            return np.empty(0, np.int64)
        allocator = self.pool.allocator_of(component)
        ids = allocator.allocate(self.session, allocator.free_count - 1).tolist()
        return np.array(chance.sample(ids, len(numbers)), np.int64)

    def _chunks(self, cuts: list[int]) -> list[range]:
        bounds = [0, *(cuts if "main" in self.components else ()), len(self.main)]
        return [range(start, stop) for start, stop in itertools.pairwise(bounds)]

    def lists(self, case: Transfer, chunk: range, *, last: bool) -> list[tuple[PageList, PageIds]]:
        named: list[tuple[PageList, PageIds]] = []
        if "main" in self.components:
            ids = self.main[chunk.start : chunk.stop]
            first = (case.wanted if self.is_receive_request else case.sent).start + chunk.start
            end = case.end_tokens[self.is_receive_request]
            tokens = end - first * case.model.page_size if last and end is not None else None
            cut = len(ids) // 2 if case.seed % 3 == 0 else 0  # in one list, or in two without a gap
            if cut:
                named.append((PageList(component="main", first_page=first, pages=cut), ids[:cut]))
                tokens = tokens and tokens - cut * case.model.page_size
            main = PageList(component="main", first_page=first + cut, pages=len(ids) - cut, tokens=tokens)
            named.append((main, ids[cut:]))
            if "draft" in self.components and case.seed % 2:
                named.append((PageList(component="draft", first_page=first, pages=len(ids)), ids))
        if case.model.state in self.components and last:
            state = case.wanted_state if self.is_receive_request else case.sent_state
            where = None if state.plain else state.first
            named.append(
                (
                    PageList(component=case.model.state, first_page=where, pages=len(self.state), none=state.none),
                    self.state,
                )
            )
        return named


class Run:
    """All parties of a transfer in one daemon, and what they say."""

    def __init__(self, case: Transfer) -> None:
        self.case = case
        self.chance = random.Random(case.seed)  # noqa: S311  page maps, no secrets
        self.harness = TransferHarness()
        count = len(case.sources) + len(case.receive_requests)
        self.parties = [Party(self.harness, case, number, self.chance) for number in range(count)]
        self.sources, self.receive_requests = self.parties[: len(case.sources)], self.parties[len(case.sources) :]
        self.said: Counter[int] = Counter()
        for one in self.sources:
            memory = np.random.default_rng(case.seed).integers(0, 256, one.pool.region.size_bytes, np.uint8)
            held = {"main": dict(zip(one.main.tolist(), case.sent, strict=False))}
            held["draft"] = held["main"]
            held[case.model.state or ""] = dict(zip(one.state.tolist(), case.sent_state.numbers, strict=False))
            put_pages(memory, one.pool.manifest, one.arrays, one.stage.rank, held)
            write_region(one.pool.region, memory)
        for one in self.receive_requests:
            fill_region(one.pool.region, UNTOUCHED)
        self.spoilt = self._spoil()

    def _spoil(self) -> set[str]:
        """Put a wrong page in a list, if the fault is one; return what it is refused with."""
        fault = self.case.fault
        if fault == "page twice" and len(self.receive_requests[0].main) > 1:
            self.receive_requests[0].main[1] = self.receive_requests[0].main[0]
            return {"DUPLICATE_PAGE"}
        spoilt = self.chance.choice([self.receive_requests[0], self.sources[0]])
        if fault == "foreign page" and len(spoilt.main):
            (spoilt.main[-1],) = spoilt.pool.allocator_of("main").allocate(STRANGER, 1)
            return {"NOT_OWNER"}
        return set()

    def speak(self, number: int) -> None:
        one, case = self.parties[number], self.case
        turn, self.said[number] = self.said[number], self.said[number] + 1
        if turn >= len(one.chunks):  # it has fewer chunks than pages of main would make
            return
        last = turn == len(one.chunks) - 1
        lists = one.lists(case, one.chunks[turn], last=last)
        if one.is_receive_request:
            self.harness.receive(one.session, one.pool, lists, sources=len(self.sources))
            return
        carries = last and (number == len(self.sources) - 1 or (case.fault == "token twice" and number == 0))
        token = FIRST_TOKEN if carries else None
        self.harness.send(
            one.session, one.pool, lists, last=last, destinations=len(self.receive_requests), first_token=token
        )

    def copy_some(self) -> None:
        ops = list(self.harness.transport.under_way)
        for op in self.chance.sample(ops, self.chance.randint(0, len(ops))):
            self.harness.transport.finish(op)

    def until_refused(self) -> str:
        for number in self.case.turns:
            try:
                self.speak(number)
            except KvferryError as error:
                return error.code
            self.copy_some()
        self.harness.transport.finish_all()
        return ""


def refusals(case: Transfer) -> set[str]:
    codes = set()
    for receive_request in case.receive_requests:
        codes |= _main_refusals(case, receive_request) | _state_refusals(case, receive_request)
        sent = {layer for one in case.sources for layer in one.layers}
        wanted = set(receive_request.layers) - set(case.model.other_layers if case.wanted_state.none else ())
        if wanted - sent:
            codes.add("UNCOVERED_ENTRY")
    if case.fault == "token twice" and len(case.sources) > 1:
        codes.add("FIRST_TOKEN_TWICE")
    return codes


def _main_refusals(case: Transfer, receive_request: Stage) -> set[str]:
    codes = set()
    model = case.model
    has_main = [
        bool({*one.layers} & {*model.layers}) or one.draft_layers > 0 for one in [*case.sources, receive_request]
    ]
    if has_main[-1]:
        if {*receive_request.layers} & {*model.layers} and not {*case.wanted} <= {*case.sent}:
            codes |= {"INCOMPLETE", "UNCOVERED_ENTRY"}
        clash = case.sent.stop > case.wanted.stop or case.fault == "tokens"
        of_itself = case.fault == "tokens" and -(-(case.end_tokens[1] or 0) // model.page_size) != case.wanted.stop
        if of_itself or (any(has_main[:-1]) and clash):
            codes.add("LENGTH_MISMATCH")
    if any(
        {*one.layers} & {*receive_request.layers} & {*model.layers}
        or min(one.draft_layers, receive_request.draft_layers)
        for one in case.sources
    ):
        codes |= _array_refusals(case, receive_request)
    return codes


def _array_refusals(case: Transfer, receive_request: Stage) -> set[str]:
    model, codes = case.model, set()
    shards = {min(one.rank.size, model.heads) for one in (case.sources[0], receive_request)}
    if case.fault == "width" or (model.scales == "page" and len(shards) > 1):
        codes.add("GEOMETRY_MISMATCH")
    if case.fault == "scale" and model.scales == "head" and model.heads - 1 in receive_request.rank.heads(model.heads):
        codes.add("SCALE_MISMATCH")
    return codes


def _state_refusals(case: Transfer, receive_request: Stage) -> set[str]:
    model, ours, theirs = case.model, case.sent_state, case.wanted_state
    both = [
        one
        for one in case.sources
        if {*one.layers} & {*model.other_layers} and {*receive_request.layers} & {*model.other_layers}
    ]
    if not both or theirs.none:
        return set()
    shared = any({*one.layers} & {*receive_request.layers} & {*model.other_layers} for one in both)
    codes = set()
    if not ours.numbers:
        codes.add("EMPTY_STATE")
    elif not (ours.plain or theirs.plain) and not {*theirs.numbers} <= {*ours.numbers}:
        codes.add("WINDOW_MISMATCH")
    if shared and model.kind == "hybrid_swa":
        codes |= _array_refusals(case, receive_request)
    elif shared and both[0].rank.size != receive_request.rank.size:
        codes.add("GEOMETRY_MISMATCH")
    return codes


class Expected(NamedTuple):
    """A destination's memory as it must be in the end, and how many bytes of it must have moved."""

    memory: Memory
    moved_bytes: int


def expected(case: Transfer, receive_request: Party) -> Expected:
    sent = {key for one in case.sources for key in arrays_of(case.model, one)}
    state = dict(zip(case.wanted_state.numbers, receive_request.state.tolist(), strict=False))
    pages = zip(receive_request.main.tolist(), case.wanted, strict=False)
    held: Held = {"main": {page: number for page, number in pages if number in case.sent}}
    held["draft"] = held["main"]  # optional: where main has no layers here, nobody misses a page of it
    held[case.model.state or ""] = {state[to]: number for number, to in case.state_pairs()} if state else {}
    memory = np.full(receive_request.pool.manifest.region_bytes, UNTOUCHED, np.uint8)
    arrays = {key: array for key, array in receive_request.arrays.items() if key in sent}
    put_pages(memory, receive_request.pool.manifest, arrays, receive_request.stage.rank, held)
    moved = sum(
        len(held[key[0]]) * len(tagged_page(key, array, receive_request.stage.rank, 0)) for key, array in arrays.items()
    )
    return Expected(memory, moved)


def trims(case: Transfer, source: Stage, receive_request: Stage) -> int:
    heads = {*source.rank.heads(case.model.heads)} & {*receive_request.rank.heads(case.model.heads)}
    layers = {*source.layers} & {*receive_request.layers} & {*case.model.other_layers}
    if not (heads and layers and case.lengths_clash):
        return 0
    return abs(len(case.sent_state.numbers) - len(case.wanted_state.numbers))


def named_bytes(pool: Pool, party: Party, case: Transfer) -> npt.NDArray[np.bool_]:
    """Return which bytes of a destination its lists name: ``(region_bytes,)`` bool."""
    named = np.zeros(pool.manifest.region_bytes, np.bool_)
    for entry in pool.manifest.entries:
        for page in (party.state if entry.component == case.model.state else party.main).tolist():
            named[entry.base + page * entry.page_bytes :][: entry.page_bytes] = True
    return named


@DEVICE.examples(300)
@given(transfers())
def test_every_byte_arrives_and_no_other_changes(case: Transfer) -> None:
    run = Run(case)
    must = refusals(case) | run.spoilt
    refused = run.until_refused()
    event(refused or f"{case.model.kind}: {len(case.sources)} to {len(case.receive_requests)}")
    if must or refused:
        assert refused in must, (refused, must)
        for receive_request in run.receive_requests:
            assert (
                read_region(receive_request.pool.region)[~named_bytes(receive_request.pool, receive_request, case)]
                == UNTOUCHED
            ).all()
        return
    for source in run.sources:
        assert run.harness.outcomes(source.session) == ["OK", "settled"]
        of_receives = sum(trims(case, source.stage, receive_request.stage) for receive_request in run.receive_requests)
        assert run.harness.finished(source.session).trimmed_pages == of_receives
    for receive_request in run.receive_requests:
        assert run.harness.outcomes(receive_request.session) == ["OK", "settled"]
        memory, moved_bytes = expected(case, receive_request)
        assert (read_region(receive_request.pool.region) == memory).all()
        done = run.harness.finished(receive_request.session)
        assert done.moved_bytes == moved_bytes
        assert done.first_token == FIRST_TOKEN
        assert done.trimmed_pages == sum(trims(case, source.stage, receive_request.stage) for source in run.sources)
    assert len(run.harness.warned) == sum(
        bool(trims(case, s.stage, r.stage)) for s in run.sources for r in run.receive_requests
    )
