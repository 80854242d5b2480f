"""Pages of prefill and decode that hold different numbers of tokens, against an oracle of every byte.

What arrives is compared over all of the destination's memory, within one daemon and between two.
"""

from __future__ import annotations

import math
import random
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.transfer.peer_transfers import op_of
from kvferry.daemon.transports.network_copier import NetworkCopier
from kvferry.daemon.transports.network_sender import NetworkSender
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.copies import copy_one_by_one, total_segments
from kvferry.pools.planning.geometry import rank_heads
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import GeometryMismatchError, IncompleteError, KvferryError
from kvferry.protocol.manifests import HybridSwaSpec, MhaSpec, MlaSpec, PoolSpec
from kvferry.protocol.peer_messages import WriteCredit
from tests.kit.bytes import fill_region, read_region, write_region
from tests.kit.devices import DEVICE
from tests.kit.network import ManualExecutor, Said, network_memory
from tests.kit.peers import Transfer, Way
from tests.kit.transfers import ORDERS, Engine, TransferHarness

pytestmark = pytest.mark.any_device

Bytes = npt.NDArray[np.uint8]

LAYERS: Final = 2
HEADS: Final = 4
KEY, VALUE = 3, 2
"""Elements of a head of a token."""
ELEMENT: Final = 4
MOST_TOKENS: Final = 80
UNTOUCHED: Final = 0x5A
FORMS: Final[dict[str, dict[str, Any]]] = {
    "k and v": {"view": "paged"},
    "k and v, heads first": {"view": "hnd"},
    "rows": {"view": "paged", "joined": True},
    "rows, heads first": {"view": "hnd", "joined": True},
    "k in columns": {"view": "hnd", "joined": True, "packing": "cpu_vec"},
    "latents": {},
}
CONTENT: Final = np.random.default_rng(1).integers(
    0, 256, (LAYERS, MOST_TOKENS, HEADS, KEY + VALUE, ELEMENT), dtype=np.uint8
)


class Case(NamedTuple):
    """One request: how both sides hold it, and how it is said."""

    form: str
    sizes: tuple[int, int]  # tokens of a page
    ranks: tuple[int, int]
    tokens: int
    prefix: int  # pages that decode has
    chunk: int  # pages of each chunk
    way: Way
    first: str  # who speaks first
    seed: int  # of page numbers


@st.composite
def cases(draw: st.DrawFn) -> Case:
    form = draw(st.sampled_from(sorted(FORMS)))
    sizes = draw(st.tuples(*[st.sampled_from([1, 2, 3, 4, 6, 8])] * 2))
    tokens = draw(st.integers(1, 40))
    one_rank = form == "latents"
    ranks = (1, 1) if one_rank else draw(st.tuples(*[st.sampled_from([1, 2, 4])] * 2))
    return Case(
        form, sizes, ranks, tokens, draw(st.integers(0, -(-tokens // sizes[1]) - 1)), draw(st.integers(1, 9)),
        draw(st.sampled_from(["here", "ipc", "tcp"])), draw(st.sampled_from(["send", "receive"])),
        draw(st.integers(0, 99)),
    )  # fmt: skip


def spec_of(form: str, size: int, ranks: int = 1, rank: int = 0) -> PoolSpec:
    common: dict[str, Any] = {"layers": LAYERS, "tokens": 2 * MOST_TOKENS // size * size, "page_size": size}
    if form == "latents":
        return MlaSpec(kv_lora_rank=HEADS * KEY, qk_rope_head_dim=HEADS * VALUE, joined=True, dtype="float32", **common)
    held = rank_heads(HEADS, ranks, rank)
    return MhaSpec(
        kv_heads=held.count, head_start=held.start, total_heads=HEADS, head_dim=KEY, v_head_dim=VALUE,
        dtype="float32", **common, **FORMS[form],
    )  # fmt: skip


def page_of(form: str, role: str, tokens: Bytes) -> Bytes:
    """Return a page that holds ``(tokens, heads, elements, bytes)``."""
    keys, values = tokens[:, :, :KEY], tokens[:, :, KEY:]
    if not FORMS[form].get("joined", form == "latents"):
        tokens = keys if role == "k" else values
    if form == "k in columns":
        of_heads = [
            part
            for head in range(tokens.shape[1])
            for part in (keys[:, head].swapaxes(0, 1).reshape(-1), values[:, head].reshape(-1))
        ]
        return np.concatenate(of_heads)
    return (tokens.swapaxes(0, 1) if FORMS[form].get("view") == "hnd" else tokens).reshape(-1)


class Side(Engine):
    """A rank: its pool, and which of its pages holds which logical one."""

    def __init__(self, harness: TransferHarness, name: str, case: Case, side: int, rank: int) -> None:
        self.case, self.size = case, case.sizes[side]
        session = harness.session()
        pool = harness.pool_of(name, manifest_of(spec_of(case.form, self.size, case.ranks[side], rank)))
        count = -(-case.tokens // self.size)
        super().__init__(harness, session, pool, pool.allocator.allocate(session, pool.manifest.pages - 1))
        held = rank_heads(HEADS, case.ranks[side], rank)
        self.heads = slice(held.start, held.stop)
        ids = self.pages.tolist()
        random.Random(f"{case.seed} {name}").shuffle(ids)  # noqa: S311  page numbers, no secrets
        self.ids = np.array(ids[:count])

    def memory(self, background: Bytes, first: int, stop: int) -> Bytes:
        """Return what its memory is if it holds the tokens ``[first, stop)``, with ``background`` elsewhere."""
        memory = background.copy()
        for entry in self.pool.manifest.entries:
            for number, page in enumerate(self.ids.tolist()):
                at = entry.base + page * entry.page_bytes
                marks = [np.zeros((self.size, HEADS, KEY + VALUE, ELEMENT), np.uint8) for _ in range(2)]
                for token in range(max(first, number * self.size), min(stop, (number + 1) * self.size)):
                    marks[0][token - number * self.size] = CONTENT[entry.layer, token]
                    marks[1][token - number * self.size] = 1
                content, is_there = (page_of(self.case.form, entry.role, one[:, self.heads]) for one in marks)
                memory[at : at + entry.page_bytes][is_there == 1] = content[is_there == 1]
        return memory


class Run(Transfer):
    """All ranks of prefill and one of decode in their daemons."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.way)
        self.case = case
        self.ours = [Side(self.source, f"ours{rank}", case, 0, rank) for rank in range(case.ranks[0])]
        self.theirs = Side(self.home, "theirs", case, 1, case.seed % case.ranks[1])
        for number, one in enumerate(self.ours):
            noise = np.random.default_rng(case.seed + number).integers(0, 256, one.pool.region.size_bytes, np.uint8)
            write_region(one.pool.region, one.memory(noise, 0, MOST_TOKENS))
        fill_region(self.theirs.pool.region, UNTOUCHED)

    def speak(self, direction: str) -> None:
        case = self.case
        if direction == "receive":
            first, size = case.prefix, case.sizes[1]
            self.receive(
                into=self.theirs, ids=self.theirs.ids[first:], first_page=first, tokens=case.tokens - first * size,
                sources=case.ranks[0],
            )  # fmt: skip
            return
        for one in self.ours:
            for at in range(0, len(one.ids), case.chunk):
                last = at + case.chunk >= len(one.ids)
                tokens = case.tokens - at * case.sizes[0] if last else None
                one.send(at, ids=one.ids[at : at + case.chunk], tokens=tokens, last=last)

    def all(self) -> None:
        for direction in ORDERS[self.case.first]:
            self.speak(direction)
            self.harness.deliver_all()
        self.harness.run()


@DEVICE.examples(200)
@given(cases())
def test_every_token_arrives_and_no_other_byte_changes(case: Case) -> None:
    run = Run(case)
    run.all()
    ours, theirs = case.sizes
    event(f"{case.form}, {case.way}, {'larger' if ours > theirs else 'smaller' if ours < theirs else 'equal'} pages")
    assert run.theirs.told == "OK settled"
    unit = math.gcd(ours, theirs)
    stop = -(-case.tokens // unit) * unit if ours != theirs else -(-case.tokens // theirs) * theirs
    background = np.full(run.theirs.pool.region.size_bytes, UNTOUCHED, np.uint8)
    expected = run.theirs.memory(background, case.prefix * theirs, stop)
    assert (read_region(run.theirs.pool.region) == expected).all()


PLAIN: Final = Case("k and v", (4, 8), (1, 1), 23, 0, 1, "here", "receive", 0)


def test_a_page_has_arrived_once_all_of_its_tokens_have() -> None:
    run = Run(PLAIN)
    run.speak("receive")
    (one,) = run.ours
    counts = []
    for at in range(6):
        one.send(at, ids=one.ids[at : at + 1], tokens=3 if at == 5 else None, last=at == 5)
        run.harness.run()
        (endpoint,) = run.home.state_machine.endpoints.receive_requests.values() if at < 5 else (None,)
        counts.append(3 if endpoint is None else endpoint.arrived_pages)
    assert counts == [0, 1, 1, 2, 2, 3]
    assert run.theirs.told == "OK settled"


@pytest.mark.parametrize("tokens", [19, 20])
def test_fewer_tokens_than_decode_wants_are_refused(tokens: int) -> None:
    run = Run(PLAIN)
    run.speak("receive")
    (one,) = run.ours
    with pytest.raises(KvferryError, match="the source ends after token"):
        one.send(0, ids=one.ids[:5], tokens=tokens)
    assert not run.theirs.told


@pytest.mark.parametrize(("first", "stop"), [(0, 4), (5, 6)])
def test_a_part_that_no_source_sends_is_missed(first: int, stop: int) -> None:
    run = Run(PLAIN)
    (one,) = run.ours
    one.send(first, ids=one.ids[first:stop])
    with pytest.raises(IncompleteError, match="main/k/0: transfer page"):
        run.receive(into=run.theirs, ids=run.theirs.ids, tokens=23)


def test_sources_of_other_sizes_are_refused() -> None:
    """The second one alone: the first one goes on."""
    run = Run(PLAIN._replace(ranks=(2, 1)))
    other = Side(run.source, "other", PLAIN._replace(sizes=(2, 8), ranks=(2, 1)), 0, 1)
    run.receive(into=run.theirs, ids=run.theirs.ids, tokens=23, sources=2)
    run.ours[0].send(0, ids=run.ours[0].ids, tokens=23)
    with pytest.raises(GeometryMismatchError, match="another number of tokens than those of an earlier one"):
        other.send(0, ids=other.ids, tokens=23)
    run.ours[1].send(0, ids=run.ours[1].ids, tokens=23)
    run.harness.run()
    assert run.theirs.told == "OK settled"


def replaced(spec: PoolSpec, **more: Any) -> PoolSpec:  # noqa: ANN401  fields
    return msgspec.structs.replace(spec, **more)


HALF: Final = spec_of("k and v", 8)
WINDOWS: Final = HybridSwaSpec(
    full_layers=(0,), window_layers=(1,), window=8, tokens=64, window_tokens=64, page_size=8, kv_heads=2, head_dim=3,
    dtype="float32",
)  # fmt: skip
REFUSED: Final[dict[str, tuple[PoolSpec, dict[str, Any], str]]] = {
    "fractals": (replaced(HALF, view="nz", head_dim=8, v_head_dim=8), {}, "page_tokens is 4 at the source, 8 at the"),
    "another order": (replaced(HALF, view="hnd", joined=True, packing="cpu_amx"), {}, "cannot be cut by tokens"),
    "scales of pages": (replaced(HALF, dtype="int8", k_scale="page"), {}, "main/k_scale/0: pages of the two sides"),
    "many parts": (replaced(HALF, page_size=65, tokens=650), {"tokens": 640}, "260 kinds of parts, at most 64"),
    "another width": (HALF, {"head_dim": 5}, "20 bytes there, 12 here"),
    "windows": (WINDOWS, {}, "swa: pages of 4 tokens at the source, 8 at the destination, and windows are not cut"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_cut_is_refused_with_both_sizes(what: str) -> None:
    spec, more, says = REFUSED[what]
    harness = TransferHarness()
    engines = []
    for name, one in (("ours", replaced(spec, page_size=4, **more)), ("theirs", spec)):
        session, pool = harness.session(), harness.pool_of(name, manifest_of(one))
        for allocator in pool.allocators.values():
            allocator.allocate(session, 2)
        engines.append(Engine(harness, session, pool, np.array([1, 2])))
    ours, theirs = engines
    lists = [[named(one.name, 1, 2) for one in its.pool.manifest.components] for its in engines]
    theirs.receive(ids=lists[1])
    with pytest.raises(GeometryMismatchError, match=says):
        ours.send(ids=lists[0])


def named(component: str, *ids: int) -> tuple[PageList, PageIds]:
    return PageList(component=component, first_page=0, pages=len(ids)), np.array(ids)


@pytest.mark.anyio
@pytest.mark.parametrize("form", FORMS)
async def test_a_source_on_another_host_gathers_the_parts_that_it_is_asked_for(form: str) -> None:
    run = Run(PLAIN._replace(form=form, sizes=(6, 4), chunk=9, way="tcp"))
    for direction in ("receive", "send"):
        run.speak(direction)
        run.harness.deliver_all()
    executor, (writer, memory) = ManualExecutor(), network_memory(buffer_bytes=1 << 16)
    sender = NetworkSender(Said(), memory, NetworkCopier(executor), run.source.state_machine.peers, Counters())
    (connection,) = run.source.links.connections.values()
    (op,) = run.home.state_machine.endpoints.ops.values()
    assert connection.peer is not None
    sender.op(connection.peer, op_of(op), lambda: None)
    assert len(op.planned_copies) == 6
    for number, planned_copy in enumerate(op.planned_copies):
        plan = planned_copy.plan
        size, stop = plan.total_bytes, total_segments(plan.source)
        credit = WriteCredit(
            op=op.op_id, credit=number, segment=number, first=0, stop=stop, session="home", address=0, size_bytes=size
        )
        sender.credit(connection.peer, credit)
        await executor.run()
        expected = np.empty(size, np.uint8)
        run.ours[0].pool.region.gather(plan.source, 0, stop, expected.ctypes.data, copy_one_by_one)
        assert writer.begun[-1].content == expected.tobytes()
        writer.begun[-1].on_done(None)
