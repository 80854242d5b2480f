"""Groups of layers with page lists of their own, and lists with gaps, against an oracle of every byte.

A pool's layers are in up to three groups, whose pages come from one allocator; each side has each group's logical pages
in as many lists as there are gaps, or more. What arrives is compared over all of the destination's memory, within one
daemon and between two.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.arrays import arrays_of, engine_lists
from kvferry.pools.planning.manifest import bytes_per_page
from kvferry.pools.tiers.blocks import BlockLayout
from kvferry.protocol.base import MAX_PAGE_LISTS, PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import DuplicatePageError, InvalidFieldError, KvferryError, UnknownComponentError
from kvferry.protocol.manifests import DraftSpec, MhaSpec, MlaSpec
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.bytes import fill_region, read_region, write_region
from tests.kit.devices import DEVICE
from tests.kit.peers import Transfer, Way
from tests.kit.transfers import ORDERS, Direction, Engine, TransferHarness

pytestmark = pytest.mark.any_device

UNTOUCHED: Final = 0x5A
LOGICAL_PAGES: Final = 12
POOL_PAGES: Final = 40
Spec = MhaSpec | MlaSpec
Logical = tuple[int, ...]
Listed = list[tuple[PageList, PageIds]]


class Case(NamedTuple):
    """One request."""

    spec: Spec  # of both pools
    wanted: tuple[Logical, ...]  # by group, the logical pages that the destination wants
    sent: tuple[Logical, ...]  # by group, those that the source has
    cut: bool  # whether the source sends what it can in a chunk before its last one
    stepped: bool  # whether the source's layers are ready one by one, from the last one on
    says_tokens: bool  # whether both sides say where the prompt ends
    way: Way  # whether both are in one daemon
    first: str  # who speaks first
    fault: str  # what is wrong
    seed: int  # of the page numbers, and of lists that are cut further

    @property
    def components(self) -> list[str]:
        return ["main", "group1", "group2"][: len(self.wanted)]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    first, count = draw(st.integers(0, 5)), draw(st.integers(1, 6))
    groups: list[list[int]] = [[] for _ in range(draw(st.integers(1, min(3, count))))]
    layers = draw(st.permutations(range(first, first + count)))
    for number, layer in enumerate(layers):
        groups[number if number < len(groups) else draw(st.integers(0, len(groups) - 1))].append(layer)
    page_size = draw(st.integers(1, 3))
    fields: dict[str, Any] = {
        "layers": count, "first_layer": first, "page_size": page_size, "tokens": POOL_PAGES * page_size,
        "groups": tuple(tuple(sorted(one)) for one in groups), "dtype": draw(st.sampled_from(["int8", "float32"])),
        "draft": draw(st.sampled_from([None, DraftSpec(layers=2)])),
    }  # fmt: skip
    if draw(st.booleans()):
        return MhaSpec(kv_heads=2, head_dim=draw(st.integers(1, 3)), v_head_dim=2, **fields)
    indexed = draw(st.none() | st.sets(st.sampled_from(sorted(layers)), min_size=1).map(sorted).map(tuple))
    index: dict[str, Any] = {} if indexed is None else {"index_head_dim": 2, "index_layers": indexed}
    return MlaSpec(kv_lora_rank=3, qk_rope_head_dim=2, joined=draw(st.booleans()), **index, **fields)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    spec = draw(specs())
    some = st.sets(st.integers(0, LOGICAL_PAGES - 1), min_size=1).map(sorted).map(tuple)
    wanted = [draw(some) for _ in spec.groups]
    sent = [tuple(sorted({*one, *draw(st.sets(st.integers(0, one[-1])))})) for one in wanted]
    fault = draw(st.sampled_from(["", "", "", "missing", "long", "twice", "tokens"]))
    group = draw(st.integers(0, len(wanted) - 1))
    if fault == "missing" and len(wanted[group]) > 1:
        sent[group] = tuple(one for one in sent[group] if one != wanted[group][0])
    elif fault == "long":
        sent[group] = (*sent[group], sent[group][-1] + draw(st.integers(1, 3)))
    elif fault == "missing" or (fault == "twice" and len(wanted) == 1):
        fault = ""
    return Case(
        spec, tuple(wanted), tuple(sent), draw(st.booleans()), draw(st.booleans()),
        draw(st.booleans()) or fault == "tokens",
        draw(st.sampled_from(["here", "here", "ipc", "tcp"])), draw(st.sampled_from(["send", "receive"])), fault,
        draw(st.integers(0, 99)),
    )  # fmt: skip


def named(component: str, *ids: int, first_page: int = 0, tokens: int | None = None) -> tuple[PageList, PageIds]:
    return PageList(component=component, first_page=first_page, pages=len(ids), tokens=tokens), np.array(ids)


def extents(logical: Logical, chance: random.Random) -> list[list[int]]:
    """Return the logical pages cut at each gap, and elsewhere at random."""
    found = [[logical[0]]]
    for before, one in itertools.pairwise(logical):
        if one != before + 1 or not chance.randrange(4):
            found.append([])
        found[-1].append(one)
    return found


def content_of(component: str, role: str, layer: int, logical: int, size: int) -> npt.NDArray[np.uint8]:
    """Return the bytes of a logical page of one entry: ``(size,)`` uint8."""
    seed = zlib.crc32(f"{'draft' if component == 'draft' else 'model'} {role} {layer} {logical}".encode())
    return np.random.default_rng(seed).integers(0, 256, size, np.uint8)


class Side(Engine):
    """One side: its pool, and the page that holds each logical page of each group."""

    def __init__(self, harness: TransferHarness, name: str, case: Case, held: Sequence[Logical]) -> None:
        session, pool = harness.session(), harness.pool_of(name, manifest_of(case.spec))
        super().__init__(harness, session, pool, pool.allocator.allocate(session, POOL_PAGES))
        self.case = case
        self.chance = random.Random(f"{case.seed} {name}")  # noqa: S311  page maps, no secrets
        ids = self.pages.tolist()
        self.chance.shuffle(ids)
        self.page_of = [{logical: ids.pop() for logical in of_group} for of_group in held]

    def memory(self, background: npt.NDArray[np.uint8], logical: Sequence[Logical]) -> npt.NDArray[np.uint8]:
        memory = background.copy()
        for entry in self.pool.manifest.entries:
            draft = entry.component == "draft"
            group = 0 if draft else next(n for n, layers in enumerate(self.case.spec.groups) if entry.layer in layers)
            assert draft or entry.component == self.case.components[group]
            for one in logical[group]:
                start = entry.base + self.page_of[group][one] * entry.page_bytes
                content = content_of(entry.component, entry.role, entry.layer, one, entry.page_bytes)
                memory[start : start + entry.page_bytes] = content
        return memory

    def lists(self, logical: Sequence[Logical], end_tokens: int | None = None) -> Listed:
        """Return the lists of a message, of all groups in any order."""
        found: Listed = []
        groups = [group for group, of_group in enumerate(logical) if of_group]
        self.chance.shuffle(groups)
        for group in groups:
            for one in extents(logical[group], self.chance):
                tokens = None
                if end_tokens is not None:
                    tokens = (len(one) - 1) * self.case.spec.page_size
                    tokens += end_tokens if one[-1] == logical[group][-1] else self.case.spec.page_size
                ids = [self.page_of[group][page] for page in one]
                found.append(named(self.case.components[group], *ids, first_page=one[0], tokens=tokens))
        return found


def chunks_of(case: Case) -> list[list[Logical]]:
    """Return what each SEND has of each group: a first one ends where the next page follows."""
    first: list[Logical] = []
    for of_group in case.sent:
        cuts = [at for at in range(1, len(of_group)) if of_group[at] == of_group[at - 1] + 1]
        first.append(of_group[: cuts[len(cuts) // 2]] if case.cut and cuts else ())
    if not any(first):
        return [list(case.sent)]
    return [first, [of_group[len(one) :] for one, of_group in zip(first, case.sent, strict=True)]]


def end_of(case: Case, *, receiving: bool) -> int | None:
    if not case.says_tokens:
        return None
    return 1 if receiving or case.fault != "tokens" or case.spec.page_size == 1 else case.spec.page_size


class Run(Transfer):
    """Both sides in their daemons."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.way)
        self.case = case
        self.ours, self.theirs = (
            Side(self.source, "ours", case, case.sent),
            Side(self.home, "theirs", case, case.wanted),
        )
        noise = np.random.default_rng(case.seed).integers(0, 256, self.ours.pool.region.size_bytes, np.uint8)
        write_region(self.ours.pool.region, self.ours.memory(noise, case.sent))
        fill_region(self.theirs.pool.region, UNTOUCHED)
        if case.fault == "twice":
            of_main, of_other = self.theirs.page_of[:2]
            of_other[case.wanted[1][-1]] = of_main[case.wanted[0][0]]

    @property
    def steps(self) -> tuple[LayerStep, ...]:
        spec = self.case.spec
        layers = reversed(range(spec.first_layer, spec.first_layer + spec.layers))
        return tuple(LayerStep(first_layer=layer, layers=1, event=event, value=1) for event, layer in enumerate(layers))

    def speak(self, direction: str) -> None:
        if direction == "receive":
            self.receive(into=self.theirs, ids=self.theirs.lists(self.case.wanted, end_of(self.case, receiving=True)))
            return
        chunks = chunks_of(self.case)
        for number, logical in enumerate(chunks):
            last = number == len(chunks) - 1
            lists = self.ours.lists(logical, end_of(self.case, receiving=False) if last else None)
            self.ours.send(ids=lists, last=last, steps=self.steps if self.case.stepped else ())

    def until_refused(self) -> str:
        try:
            for direction in ORDERS[self.case.first]:
                self.speak(direction)
                self.harness.deliver_all()
        except KvferryError as error:
            return error.code
        for ready in range(1, len(self.steps) + 1):  # their events come one after another
            self.source.events(self.ours.session, *[1] * ready, *[0] * (len(self.steps) - ready))
        self.harness.run()
        told = self.theirs.told or self.ours.told  # a home that refuses tells the source, and waits for another one
        return "" if told == "OK settled" else told.split()[0]


REFUSED: Final = {
    "missing": {"INCOMPLETE", "UNCOVERED_ENTRY"},
    "long": {"LENGTH_MISMATCH"},
    "twice": {"DUPLICATE_PAGE"},
}


@DEVICE.examples(200)
@given(cases())
def test_every_byte_arrives_and_no_other_changes(case: Case) -> None:
    run = Run(case)
    refused = run.until_refused()
    wrong = case.fault if case.fault != "tokens" or case.spec.page_size > 1 else ""
    event(f"{case.way}, {len(case.spec.groups)} groups: {refused}")
    if wrong:
        assert refused in (REFUSED | {"tokens": {"LENGTH_MISMATCH"}})[wrong]
        return
    assert refused == ""
    background = np.full(run.theirs.pool.region.size_bytes, UNTOUCHED, np.uint8)
    assert (read_region(run.theirs.pool.region) == run.theirs.memory(background, case.wanted)).all()
    skipped = sum(len(sent) - len(wanted) for sent, wanted in zip(case.sent, case.wanted, strict=True))
    skipped += (len(case.sent[0]) - len(case.wanted[0])) if case.spec.draft else 0  # draft lies on main's pages
    assert run.theirs.finished.skipped_source_pages == skipped


GROUPED: Final = MhaSpec(
    layers=4, tokens=64, page_size=4, kv_heads=1, head_dim=2, dtype="float32", groups=((0, 2), (1, 3))
)


def engine_of(spec: MhaSpec, harness: TransferHarness | None = None, count: int = 16) -> Engine:
    harness = harness or TransferHarness()
    session, pool = harness.session(), harness.pool_of("pool", manifest_of(spec))
    return Engine(harness, session, pool, pool.allocator.allocate(session, count))


def test_as_many_lists_as_a_message_may_have_reach_another_daemon() -> None:
    draft = DraftSpec(layers=1)
    spec = MhaSpec(layers=1, tokens=400, page_size=4, kv_heads=1, head_dim=1, dtype="float32", draft=draft)
    apart = Transfer("tcp")
    prefill, decode = (engine_of(spec, node, MAX_PAGE_LISTS) for node in (apart.source, apart.home))
    sent, wanted = (
        [named("main", page, first_page=2 * page) for page in one.pages.tolist()] for one in (prefill, decode)
    )
    apart.announce(into=decode, ids=wanted)
    prefill.send(ids=sent)
    apart.harness.run()
    assert decode.told == "OK settled"


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_a_group_has_a_list_of_its_own(direction: Direction) -> None:
    with pytest.raises(UnknownComponentError, match="no list for component 'group1'"):
        engine_of(GROUPED).come(direction, ids=[named("main", 1, 2)])
    optional = msgspec.structs.replace(GROUPED, optional_components=("group1",))
    engine_of(optional).come(direction, ids=[named("main", 1, 2)])


@pytest.mark.parametrize(
    ("lists", "field"),
    [
        ([named("group1", 1, 2), named("main", 1, 2)], "lists[1].pages"),
        ([named("group1", 1, 2), named("main", 2, 3)], "lists[1].pages"),
        ([named("main", 1, 2), named("main", 2, first_page=5), named("group1", 4)], "lists["),
    ],
    ids=["the same list of two groups", "one page of two groups", "one page of two lists"],
)
def test_a_page_is_in_one_list(lists: Listed, field: str) -> None:
    engine = engine_of(GROUPED)
    with pytest.raises(DuplicatePageError, match="named more than once") as refused:
        engine.receive(ids=lists)
    assert str(refused.value.field).startswith(field)
    engine.receive(ids=[named("group1", 1, 2), named("main", 3, 4)])


def test_layers_at_one_place_of_their_groups_share_an_array() -> None:
    manifest = manifest_of(GROUPED)
    bases = {entry.name: entry.base for entry in manifest.entries}
    assert bases["main/k/0"] == bases["group1/k/1"]
    assert bases["main/v/2"] == bases["group1/v/3"]
    assert len(set(bases.values())) == 4
    page_bytes = 4 * 4 * 2 * 4
    assert manifest.region_bytes == 17 * page_bytes
    assert bytes_per_page(manifest) == BlockLayout(manifest, "main").content_bytes == page_bytes
    held = arrays_of(manifest, [("main", "k", None), ("main", "v", 0), ("main", "v", 2)])
    assert [one.name for one in held] == ["main/k", "main/v/0", "main/v/2"]
    assert engine_lists(manifest).main.names == ("main/k/0", "main/k/2", "main/v/0", "main/v/2")


def test_groups_are_part_of_the_layout() -> None:
    digests = {
        manifest_of(msgspec.structs.replace(GROUPED, groups=groups)).layout_digest
        for groups in [(), ((0, 2), (1, 3)), ((1, 3), (0, 2)), ((0, 1), (2, 3)), ((0,), (1, 2, 3))]
    }
    assert len(digests) == 5
    whole = msgspec.structs.replace(GROUPED, groups=((0, 1, 2, 3),))
    assert manifest_of(whole) == manifest_of(msgspec.structs.replace(GROUPED, groups=()))


@pytest.mark.parametrize(
    ("groups", "field"),
    [
        (((0, 1), (2,)), "groups"),
        (((0, 1), (1, 2, 3)), "groups[1]"),
        (((0, 1), (2, 4)), "groups[1]"),
        (((1, 0), (2, 3)), "groups[0][1]"),
    ],
)
def test_groups_that_make_no_sense(groups: tuple[tuple[int, ...], ...], field: str) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        manifest_of(msgspec.structs.replace(GROUPED, groups=groups))
    assert refused.value.field == field


def test_a_stage_may_lack_a_group() -> None:
    stage = msgspec.structs.replace(GROUPED, layers=2, groups=((), (0, 1)))
    assert [one.name for one in manifest_of(stage).components] == ["group1"]
    drafted = manifest_of(msgspec.structs.replace(stage, draft=DraftSpec(layers=1)))
    assert [one.name for one in drafted.components] == ["main", "group1", "draft"]
