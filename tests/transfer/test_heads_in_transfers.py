"""Transfers between ranks of unequal tensor parallelism: all heads arrive, each once, and what is wrong is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import msgspec
import numpy as np
import pytest

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.models import model_spec
from kvferry.pools.planning.geometry import rank_heads
from kvferry.protocol.errors import (
    GeometryMismatchError,
    HeadsIndivisibleError,
    IncompleteError,
    KvferryError,
    PageOverlapError,
    UncoveredEntryError,
)
from kvferry.protocol.manifests import Manifest, MhaSpec
from tests.kit.bytes import fill_region, read_region, write_region
from tests.kit.tagged_transfers import UNTOUCHED, Array, Key, Memory, Rank, put_pages
from tests.kit.transfers import Engine, TransferHarness

pytestmark = pytest.mark.any_device

PAGES = 3
TOKENS = 2
WIDTHS = {"k": 3, "v": 5}
LAYERS = 2
ENTRIES = LAYERS * len(WIDTHS)
View: TypeAlias = Literal["paged", "fia", "nz", "hnd"]


class Ranks:
    """A model of some heads; ranks of both sides join as a test says, each an engine with some pages."""

    def __init__(self, heads: int, view: View = "paged", width: int = 1, *, joined: bool = False) -> None:
        self.harness = TransferHarness()
        self.heads = heads
        self.view: View = view
        self.joined = joined
        self.widths = {role: its * width for role, its in WIDTHS.items()}
        rows = {"k": sum(self.widths.values())} if joined else self.widths
        self.arrays: dict[Key, Array] = {
            ("main", role, layer): Array(TOKENS, heads, its, heads_first=view == "hnd")
            for role, its in rows.items()
            for layer in range(LAYERS)
        }
        self.ranks: dict[Engine, Rank] = {}

    def manifest(self, rank: Rank) -> Manifest:
        """Return the manifest of one rank's pool."""
        held = rank_heads(self.heads, *rank)
        return manifest_of(
            MhaSpec(
                layers=LAYERS, tokens=8 * TOKENS, page_size=TOKENS, kv_heads=held.count, head_start=held.start,
                total_heads=self.heads, head_dim=self.widths["k"], v_head_dim=self.widths["v"], dtype="int8",
                replicas=held.replicas, view=self.view, joined=self.joined,
                packing="rows" if self.joined and self.view == "hnd" else None,
            )
        )  # fmt: skip

    def engine(self, size: int, number: int, manifest: Manifest | None = None) -> Engine:
        """Add a rank with some pages, in an order of its own; there is nothing in them."""
        rank, session, count = Rank(size, number), self.harness.session(), len(self.ranks)
        pool = self.harness.pool_of(f"pool{count}", manifest or self.manifest(rank))
        one = Engine(self.harness, session, pool, np.roll(pool.allocator.allocate(session, 7), count)[:PAGES])
        self.ranks[one] = rank
        fill_region(pool.region, UNTOUCHED)
        return one

    def source(self, size: int, number: int, manifest: Manifest | None = None) -> Engine:
        """Add a rank of the sending side, with its heads in its pages."""
        one = self.engine(size, number, manifest)
        write_region(one.pool.region, self.memory(one))
        return one

    def memory(self, one: Engine) -> Memory:
        """Return the memory of a rank that has its heads, and nothing else."""
        memory = np.full(one.pool.manifest.region_bytes, UNTOUCHED, np.uint8)
        held = {"main": {page: number for number, page in enumerate(one.pages.tolist())}}
        put_pages(memory, one.pool.manifest, self.arrays, self.ranks[one], held)
        return memory

    def speak(self, sources: Sequence[Engine], receivers: Sequence[Engine], *, receive_first: bool = True) -> None:
        """Let all ranks send and receive all of their pages; the last one of all may be refused."""
        for kind in ("receive", "send") if receive_first else ("send", "receive"):
            for one in sources if kind == "send" else receivers:
                if kind == "send":
                    one.send(destinations=len(receivers))
                else:
                    one.receive(sources=len(sources))

    def check(self) -> None:
        """Let all copies end; all succeed, and have their heads and nothing else."""
        self.harness.transport.finish_all()
        for one in self.ranks:
            assert one.told == "OK settled"
            assert (read_region(one.pool.region) == self.memory(one)).all()


RECEIVE_FIRST = pytest.mark.parametrize("receive_first", [False, True])
SIZES = [(2, 1, 2), (2, 2, 1), (2, 2, 4), (2, 4, 2), (4, 1, 4), (4, 4, 2), (6, 2, 3), (6, 3, 2), (1, 2, 4)]


@RECEIVE_FIRST
@pytest.mark.parametrize(
    ("view", "joined"), [("paged", False), ("fia", False), ("hnd", False), ("paged", True), ("hnd", True)]
)
@pytest.mark.parametrize(("heads", "sending", "receiving"), SIZES)
def test_each_rank_gets_its_heads_each_once(
    heads: int, sending: int, receiving: int, view: View, *, joined: bool, receive_first: bool
) -> None:
    ranks = Ranks(heads, view, joined=joined)
    sources = [ranks.source(sending, number) for number in range(sending)]
    receivers = [ranks.engine(receiving, number) for number in range(receiving)]
    ranks.speak(sources, receivers, receive_first=receive_first)
    ranks.check()
    for one in receivers:
        bytes_of_a_token = sum(WIDTHS.values()) * LAYERS * len(ranks.ranks[one].heads(heads))
        assert one.finished.moved_bytes == PAGES * TOKENS * bytes_of_a_token


def test_a_source_without_a_common_head_is_one_of_the_sources_still() -> None:
    ranks = Ranks(2)
    near, far = ranks.source(2, 0), ranks.source(2, 1)
    ranks.engine(4, 1).receive(sources=2)
    assert far.send().skipped_source_entries == ENTRIES
    assert not ranks.harness.transport.under_way
    assert near.send().skipped_source_entries == 0
    ranks.check()


@RECEIVE_FIRST
def test_of_replicas_one_sends_and_the_others_are_covered(*, receive_first: bool) -> None:
    ranks = Ranks(2)
    sources, receiver = [ranks.source(4, number) for number in range(4)], ranks.engine(1, 0)
    if receive_first:
        receiver.receive(sources=4)
    covered = [one.send().covered_source_entries for one in sources]
    if receive_first:
        assert covered == [0, ENTRIES, 0, ENTRIES]
    else:
        assert receiver.receive(sources=4).covered_source_entries == ENTRIES
    senders = [op.source.name for op in ranks.harness.transport.under_way.values()]
    assert senders == [sources[0].pool.name, sources[2].pool.name]
    ranks.check()


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (2, 3), (8, 3), (6, 4)])
def test_heads_that_do_not_divide_are_refused_with_the_reason(heads: int, size: int) -> None:
    for number in range(size):
        with pytest.raises(HeadsIndivisibleError) as caught:
            rank_heads(heads, size, number)
        assert f"{heads} KV heads over {size} ranks: neither is a multiple" in caught.value.detail


def test_a_models_spec_is_refused_alike() -> None:
    with pytest.raises(HeadsIndivisibleError, match="8 KV heads over 3 ranks"):
        model_spec("qwen3-32b", tokens=1 << 12, tp_size=3)


@RECEIVE_FIRST
@pytest.mark.parametrize(
    ("splits", "error", "what"),
    [
        ([(2, 0), (4, 3)], IncompleteError, f"heads 2..2, has no sender ({ENTRIES * PAGES} cells missing)"),
        ([(2, 1)], IncompleteError, "heads 0..1, has no sender"),
        ([(2, 0), (4, 1)], PageOverlapError, "heads 1..1, has a sender already"),
        ([(4, 1), (2, 0)], PageOverlapError, "heads 1..1, has a sender already"),
        ([(2, 1), (2, 1)], PageOverlapError, "heads 2..3, has a sender already"),
    ],
)
def test_a_missing_or_doubled_head_is_named(
    splits: list[tuple[int, int]], error: type[KvferryError], what: str, *, receive_first: bool
) -> None:
    ranks = Ranks(4)
    with pytest.raises(error) as caught:
        ranks.speak([ranks.source(*one) for one in splits], [ranks.engine(1, 0)], receive_first=receive_first)
    assert f"main/k/0: transfer page 0, {what}" in caught.value.detail


def test_a_missing_entry_is_named_with_heads_apart() -> None:
    ranks = Ranks(2)
    whole = ranks.manifest(Rank(2, 1))
    without = msgspec.structs.replace(whole, entries=tuple(one for one in whole.entries if one.layer != 1))
    with pytest.raises(IncompleteError, match=r"main/k/1: transfer page 0, heads 1\.\.1, has no sender"):
        ranks.speak([ranks.source(2, 0), ranks.source(2, 1, without)], [ranks.engine(1, 0)])


def test_after_a_doubled_head_the_receive_goes_on() -> None:
    ranks = Ranks(4)
    one, other = ranks.source(2, 0), ranks.source(2, 1)
    ranks.engine(1, 0).receive(sources=2)
    one.send()
    wrong = ranks.source(4, 1)
    with pytest.raises(PageOverlapError):
        wrong.send()
    del ranks.ranks[wrong]
    other.send()
    ranks.check()


@RECEIVE_FIRST
def test_replicas_may_cut_their_chunks_apart(*, receive_first: bool) -> None:
    ranks = Ranks(1)
    one, other, receiver = ranks.source(2, 0), ranks.source(2, 1), ranks.engine(1, 0)
    if receive_first:
        receiver.receive(sources=2)
    one.send(0, 2, last=False)
    other.send()
    if not receive_first:
        receiver.receive(sources=2)
    assert one.send(2).covered_source_entries == ENTRIES
    ranks.check()
    page_bytes = TOKENS * sum(WIDTHS.values()) * LAYERS
    assert [one.finished.moved_bytes, other.finished.moved_bytes] == [2 * page_bytes, (PAGES - 2) * page_bytes]


@RECEIVE_FIRST
def test_a_replica_sends_what_is_left_of_each_layer(*, receive_first: bool) -> None:
    """Stages of one side share layers with a rank of the other, and are not equally far."""
    ranks = Ranks(1)
    whole = ranks.manifest(Rank(2, 0))
    first, second = (
        ranks.source(2, 0, msgspec.structs.replace(whole, entries=tuple(e for e in whole.entries if e.layer == layer)))
        for layer in range(LAYERS)
    )
    other, receiver = ranks.source(2, 1), ranks.engine(1, 0)
    if receive_first:
        receiver.receive(sources=3)
    first.send(0, 1, last=False)
    second.send()
    other.send()
    first.send(1)
    if not receive_first:
        receiver.receive(sources=3)
    ranks.check()


@RECEIVE_FIRST
def test_what_is_left_of_a_replica_is_in_one_extent(*, receive_first: bool) -> None:
    ranks = Ranks(1)
    one, other, receiver = ranks.source(2, 0), ranks.source(2, 1), ranks.engine(1, 0)
    if receive_first:
        receiver.receive(sources=2)
    one.send(1, 2, last=False)
    if not receive_first:
        other.send()
    with pytest.raises(PageOverlapError, match="main/k/0: transfer page 1 has a sender already"):
        other.send() if receive_first else receiver.receive(sources=2)


@pytest.mark.parametrize(
    ("what", "split", "error", "said"),
    [
        ("other heads", (2, 1), UncoveredEntryError, "main/k/0"),
        ("fractals", (1, 0), GeometryMismatchError, "FIA_NZ cannot be cut by heads"),
        ("unknown tokens", (1, 0), GeometryMismatchError, "[destination.entries[0].page_tokens]"),
    ],
)
def test_a_source_that_does_not_do_for_a_rank(
    what: str, split: tuple[int, int], error: type[KvferryError], said: str
) -> None:
    ranks = Ranks(2, "nz", width=32) if what == "fractals" else Ranks(2)
    manifest = ranks.manifest(Rank(*split))
    if what == "unknown tokens":
        vague = tuple(msgspec.structs.replace(one, page_tokens=None) for one in manifest.entries)
        manifest = msgspec.structs.replace(manifest, entries=vague)
    with pytest.raises(error) as caught:
        ranks.speak([ranks.source(*split, manifest)], [ranks.engine(2, 0)])
    assert said in str(caught.value)
