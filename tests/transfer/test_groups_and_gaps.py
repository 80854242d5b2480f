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
from typing import Any, Final, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.arrays import arrays_of, engine_lists
from kvferry.pools.planning.manifest import bytes_per_page
from kvferry.pools.pool import Pool
from kvferry.pools.tiers.blocks import BlockLayout
from kvferry.protocol.base import MAX_PAGE_LISTS, PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import DuplicatePageError, InvalidFieldError, KvferryError, UnknownComponentError
from kvferry.protocol.manifests import DraftSpec, MhaSpec, MlaSpec
from kvferry.protocol.transfer_messages import LayerStep
from tests.devices import DEVICE
from tests.region_bytes import fill_region, read_region, write_region
from tests.transfer.peer_harness import PeerHarness
from tests.transfer.transfer_harness import TransferHarness

pytestmark = pytest.mark.any_device

UNTOUCHED: Final = 0x5A
LOGICAL_PAGES: Final = 12
POOL_PAGES: Final = 40
Way = Literal["one daemon", "ipc", "tcp"]
Spec = MhaSpec | MlaSpec
Logical = tuple[int, ...]
Listed = list[tuple[PageList, PageIds]]


class Case(NamedTuple):
    """One request.

    Attributes:
        spec: of both pools.
        wanted: by group, the logical pages that the destination wants.
        sent: by group, those that the source has.
        cut: whether the source sends what it can in a chunk before its last one.
        stepped: whether the source's layers are ready one by one, from the last one on.
        says_tokens: whether both sides say where the prompt ends.
        way: whether both are in one daemon.
        receive_first: who speaks first.
        fault: what is wrong.
        seed: of the page numbers, and of lists that are cut further.
    """

    spec: Spec
    wanted: tuple[Logical, ...]
    sent: tuple[Logical, ...]
    cut: bool
    stepped: bool
    says_tokens: bool
    way: Way
    receive_first: bool
    fault: str
    seed: int

    @property
    def components(self) -> list[str]:
        """Return the names of the groups' components."""
        return ["main", "group1", "group2"][: len(self.wanted)]


@st.composite
def specs(draw: st.DrawFn) -> Spec:
    """Draw a pool of either kind, its layers in one to three groups."""
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
    """Draw a request; in some of the cases with a fault."""
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
        draw(st.sampled_from(["one daemon", "one daemon", "ipc", "tcp"])), draw(st.booleans()), fault,
        draw(st.integers(0, 99)),
    )  # fmt: skip


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


class Side:
    """One side: its pool, and the page that holds each logical page of each group."""

    def __init__(self, harness: TransferHarness, name: str, case: Case, held: Sequence[Logical]) -> None:
        self.case = case
        self.harness = harness
        self.session = harness.session()
        self.pool = harness.pool_of(name, manifest_of(case.spec))
        self.chance = random.Random(f"{case.seed} {name}")  # noqa: S311  page maps, no secrets
        ids = self.pool.allocator.allocate(self.session, POOL_PAGES).tolist()
        self.chance.shuffle(ids)
        self.pages = [{logical: ids.pop() for logical in of_group} for of_group in held]

    def memory(self, background: npt.NDArray[np.uint8], logical: Sequence[Logical]) -> npt.NDArray[np.uint8]:
        """Return the pool's memory with the content of these logical pages of each group."""
        memory = background.copy()
        for entry in self.pool.manifest.entries:
            draft = entry.component == "draft"
            group = 0 if draft else next(n for n, layers in enumerate(self.case.spec.groups) if entry.layer in layers)
            assert draft or entry.component == self.case.components[group]
            for one in logical[group]:
                start = entry.base + self.pages[group][one] * entry.page_bytes
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
                ids = np.array([self.pages[group][page] for page in one])
                found.append(
                    (
                        PageList(
                            component=self.case.components[group], first_page=one[0], pages=len(one), tokens=tokens
                        ),
                        ids,
                    )
                )
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
    """Return how many tokens a side says its last pages hold."""
    if not case.says_tokens:
        return None
    return 1 if receiving or case.fault != "tokens" or case.spec.page_size == 1 else case.spec.page_size


class Run:
    """Both sides in their daemons."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.peers = None if case.way == "one daemon" else PeerHarness("source", "home")
        one = TransferHarness()
        source, home = (one, one) if self.peers is None else tuple(self.peers.nodes.values())
        self.source, self.destination = (
            Side(source, "prefill", case, case.sent),
            Side(home, "decode", case, case.wanted),
        )
        noise = np.random.default_rng(case.seed).integers(0, 256, self.source.pool.region.size_bytes, np.uint8)
        write_region(self.source.pool.region, self.source.memory(noise, case.sent))
        fill_region(self.destination.pool.region, UNTOUCHED)
        if case.fault == "twice":
            of_main, of_other = self.destination.pages[:2]
            of_other[case.wanted[1][-1]] = of_main[case.wanted[0][0]]

    @property
    def source_daemons(self) -> tuple[str, ...]:
        """Return where the home finds the source."""
        if self.peers is None:
            return ()
        node = self.peers.nodes["source"]
        return (node.ipc if self.case.way == "ipc" else node.tcp,)

    def send(self) -> None:
        """Let the source speak."""
        chunks = chunks_of(self.case)
        for number, logical in enumerate(chunks):
            last = number == len(chunks) - 1
            end = end_of(self.case, receiving=False) if last else None
            lists = self.source.lists(logical, end)
            steps = self.steps if self.case.stepped else ()
            self.source.harness.send(self.source.session, self.source.pool, lists, last=last, steps=steps)

    @property
    def steps(self) -> tuple[LayerStep, ...]:
        """Return a step for each layer, the last one first."""
        spec = self.case.spec
        layers = range(spec.first_layer, spec.first_layer + spec.layers)
        return tuple(
            LayerStep(first_layer=layer, layers=1, event=event, value=1) for event, layer in enumerate(reversed(layers))
        )

    def fill_layers(self) -> None:
        """Let the events of the source's layers come, one after another."""
        for ready in range(1, len(self.steps) + 1):
            values = [1] * ready + [0] * (len(self.steps) - ready)
            self.source.harness.events(self.source.session, *values)

    def receive(self) -> None:
        """Let the destination speak."""
        lists = self.destination.lists(self.case.wanted, end_of(self.case, receiving=True))
        self.destination.harness.receive(
            self.destination.session, self.destination.pool, lists, source_daemons=self.source_daemons
        )

    def until_refused(self) -> str:
        """Let both speak and all copies end; return the first error's code, or an empty string."""
        try:
            for one in (self.receive, self.send) if self.case.receive_first else (self.send, self.receive):
                one()
                if self.peers is not None:
                    self.peers.deliver_all()
        except KvferryError as error:
            return error.code
        self.fill_layers()
        if self.peers is None:
            self.source.harness.transport.finish_all()
        else:
            self.peers.run()
        told = self.destination.harness.outcomes(self.destination.session)
        if self.peers is not None and not told:  # the home tells the source, and waits for another one
            return self.source.harness.outcomes(self.source.session)[0]
        return "" if told == ["OK", "settled"] else told[0]


REFUSED: Final = {
    "missing": {"INCOMPLETE", "UNCOVERED_ENTRY"},
    "long": {"LENGTH_MISMATCH"},
    "twice": {"DUPLICATE_PAGE"},
}


@DEVICE.examples(300)
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
    background = np.full(run.destination.pool.region.size_bytes, UNTOUCHED, np.uint8)
    expected = run.destination.memory(background, case.wanted)
    assert (read_region(run.destination.pool.region) == expected).all()
    skipped = sum(len(sent) - len(wanted) for sent, wanted in zip(case.sent, case.wanted, strict=True))
    skipped += (len(case.sent[0]) - len(case.wanted[0])) if case.spec.draft else 0  # draft lies on main's pages
    assert run.destination.harness.finished(run.destination.session).skipped_source_pages == skipped


def test_as_many_lists_as_a_message_may_have_reach_another_daemon() -> None:
    spec = MhaSpec(
        layers=1, tokens=400, page_size=4, kv_heads=1, head_dim=1, dtype="float32", draft=DraftSpec(layers=1)
    )
    peers = PeerHarness("source", "home")
    source, home = peers.nodes.values()
    sessions = [source.session(), home.session()]
    pools = [node.pool_of("pool", manifest_of(spec)) for node in (source, home)]
    lists = []
    for session, pool in zip(sessions, pools, strict=True):
        ids = pool.allocator.allocate(session, MAX_PAGE_LISTS)
        lists.append([named("main", page, first_page=2 * page) for page in ids.tolist()])
    home.receive(sessions[1], pools[1], lists[1], source_daemons=(source.tcp,))
    peers.deliver_all()
    source.send(sessions[0], pools[0], lists[0])
    peers.deliver_all()
    peers.run()
    assert home.outcomes(sessions[1]) == ["OK", "settled"]


GROUPED: Final = MhaSpec(
    layers=4, tokens=64, page_size=4, kv_heads=1, head_dim=2, dtype="float32", groups=((0, 2), (1, 3))
)


def one_side(spec: MhaSpec = GROUPED) -> tuple[TransferHarness, int, Pool]:
    harness = TransferHarness()
    session = harness.session()
    pool = harness.pool_of("pool", manifest_of(spec))
    pool.allocator.allocate(session, 16)
    return harness, session, pool


def named(component: str, *ids: int, first_page: int = 0) -> tuple[PageList, PageIds]:
    return PageList(component=component, first_page=first_page, pages=len(ids)), np.array(ids)


@pytest.mark.parametrize("direction", ["send", "receive"])
def test_a_group_has_a_list_of_its_own(direction: str) -> None:
    harness, session, pool = one_side()
    say = harness.send if direction == "send" else harness.receive
    with pytest.raises(UnknownComponentError, match="no list for component 'group1'"):
        say(session, pool, [named("main", 1, 2)])
    optional = one_side(msgspec.structs.replace(GROUPED, optional_components=("group1",)))
    say = optional[0].send if direction == "send" else optional[0].receive
    say(*optional[1:], [named("main", 1, 2)])


@pytest.mark.parametrize("ids", [(1, 2), (2, 3)], ids=["the same list", "one page"])
def test_no_page_is_of_two_groups(ids: tuple[int, ...]) -> None:
    harness, session, pool = one_side()
    with pytest.raises(DuplicatePageError, match="named more than once") as refused:
        harness.receive(session, pool, [named("group1", 1, 2), named("main", *ids)])
    assert refused.value.field == "lists[1].pages"
    harness.receive(session, pool, [named("group1", 1, 2), named("main", 3, 4)])


def test_a_page_is_in_one_list_of_its_component() -> None:
    harness, session, pool = one_side()
    lists = [named("main", 1, 2), named("main", 2, first_page=5), named("group1", 4)]
    with pytest.raises(DuplicatePageError):
        harness.receive(session, pool, lists)


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
