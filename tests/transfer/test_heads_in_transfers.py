"""Transfers between ranks of unequal tensor parallelism: all heads arrive, each once, and what is wrong is named."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
import numpy as np
import pytest

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.models import model_spec
from kvferry.pools.planning.geometry import rank_heads
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    GeometryMismatchError,
    HeadsIndivisibleError,
    IncompleteError,
    PageOverlapError,
    UncoveredEntryError,
)
from kvferry.protocol.manifests import Manifest, MhaSpec
from kvferry.protocol.transfer_messages import Accepted
from tests.region_bytes import fill_region, read_region, write_region
from tests.transfer.tagged_transfers import UNTOUCHED, Array, Key, Rank, put_pages
from tests.transfer.transfer_harness import TransferHarness

pytestmark = pytest.mark.any_device

PAGES = 3
TOKENS = 2
WIDTHS = {"k": 3, "v": 5}
LAYERS = 2
ENTRIES = LAYERS * len(WIDTHS)


class Party(NamedTuple):
    """One rank of one side: its session, its pool, and the pages it names."""

    session: int
    pool: Pool
    pages: PageIds
    rank: Rank


class Ranks:
    """A model of some heads; ranks of both sides join as a test says."""

    def __init__(self, heads: int, view: Literal["paged", "fia", "nz"] = "paged", width: int = 1) -> None:
        self.harness = TransferHarness()
        self.heads = heads
        self.view: Literal["paged", "fia", "nz"] = view
        self.widths = {role: its * width for role, its in WIDTHS.items()}
        self.arrays: dict[Key, Array] = {
            ("main", role, layer): Array(TOKENS, heads, its)
            for role, its in self.widths.items()
            for layer in range(LAYERS)
        }
        self._numbers = itertools.count()

    def manifest(self, rank: Rank) -> Manifest:
        """Return the manifest of one rank's pool."""
        held = rank_heads(self.heads, *rank)
        return manifest_of(
            MhaSpec(
                layers=LAYERS, tokens=8 * TOKENS, page_size=TOKENS, kv_heads=held.count, head_start=held.start,
                total_heads=self.heads, head_dim=self.widths["k"], v_head_dim=self.widths["v"], dtype="int8",
                replicas=held.replicas, view=self.view,
            )
        )  # fmt: skip

    def party(self, size: int, number: int, manifest: Manifest | None = None) -> Party:
        """Add a rank with some pages, in an order of its own."""
        rank, session, count = Rank(size, number), self.harness.session(), next(self._numbers)
        pool = self.harness.pool_of(f"pool{count}", manifest or self.manifest(rank))
        pages = np.roll(pool.allocator.allocate(session, 7), count)[:PAGES]
        return Party(session, pool, pages, rank)

    def source(self, size: int, number: int, manifest: Manifest | None = None) -> Party:
        """Add a rank of the sending side, with its heads in its pages."""
        one = self.party(size, number, manifest)
        memory = read_region(one.pool.region)
        put_pages(memory, one.pool.manifest, self.arrays, one.rank, self.held(one))
        write_region(one.pool.region, memory)
        return one

    def receive_request(self, size: int, number: int) -> Party:
        """Add a rank of the receiving side."""
        one = self.party(size, number)
        fill_region(one.pool.region, UNTOUCHED)
        return one

    def held(self, one: Party) -> dict[str, dict[int, int]]:
        """Return which logical page each of a party's pages is."""
        return {"main": {page: number for number, page in enumerate(one.pages.tolist())}}

    def send(self, one: Party, destinations: int = 1) -> Accepted:
        """SEND all pages of a rank."""
        return self.harness.send(one.session, one.pool, one.pages, destinations=destinations)

    def receive(self, one: Party, sources: int = 1) -> Accepted:
        """RECEIVE all pages of a rank."""
        return self.harness.receive(one.session, one.pool, one.pages, sources=sources)

    def check(self, *parties: Party) -> None:
        """Check that all succeeded, and that the receive requests have each their heads and nothing else."""
        for one in parties:
            assert self.harness.outcomes(one.session) == ["OK", "settled"]
        for one in parties:
            if self.harness.finished(one.session).direction == "receive":
                expected = np.full(one.pool.manifest.region_bytes, UNTOUCHED, np.uint8)
                put_pages(expected, one.pool.manifest, self.arrays, one.rank, self.held(one))
                assert (read_region(one.pool.region) == expected).all()


RECEIVE_FIRST = pytest.mark.parametrize("receive_first", [False, True])


@RECEIVE_FIRST
@pytest.mark.parametrize("view", ["paged", "fia"])
@pytest.mark.parametrize(
    ("heads", "sizes"),
    [
        (2, (1, 2)),
        (2, (2, 1)),
        (2, (2, 4)),
        (2, (4, 2)),
        (4, (1, 4)),
        (4, (4, 2)),
        (6, (2, 3)),
        (6, (3, 2)),
        (1, (2, 4)),
    ],
)
def test_each_rank_gets_its_heads_each_once(
    heads: int, sizes: tuple[int, int], view: Literal["paged", "fia"], *, receive_first: bool
) -> None:
    ranks = Ranks(heads, view)
    sources = [ranks.source(sizes[0], number) for number in range(sizes[0])]
    receive_requests = [ranks.receive_request(sizes[1], number) for number in range(sizes[1])]
    if receive_first:
        for receive_request in receive_requests:
            ranks.receive(receive_request, sources=len(sources))
    for source in sources:
        ranks.send(source, destinations=len(receive_requests))
    if not receive_first:
        for receive_request in receive_requests:
            ranks.receive(receive_request, sources=len(sources))
    ranks.harness.transport.finish_all()
    ranks.check(*sources, *receive_requests)
    for receive_request in receive_requests:
        bytes_of_a_token = sum(WIDTHS.values()) * LAYERS * len(receive_request.rank.heads(heads))
        assert ranks.harness.finished(receive_request.session).moved_bytes == PAGES * TOKENS * bytes_of_a_token


def test_a_source_without_a_common_head_is_one_of_the_sources_still() -> None:
    ranks = Ranks(2)
    near, far, receive_request = ranks.source(2, 0), ranks.source(2, 1), ranks.receive_request(4, 1)
    ranks.receive(receive_request, sources=2)
    assert ranks.send(far).skipped_source_entries == ENTRIES
    assert not ranks.harness.transport.under_way
    assert ranks.send(near).skipped_source_entries == 0
    ranks.harness.transport.finish_all()
    ranks.check(near, far, receive_request)


@RECEIVE_FIRST
def test_of_replicas_one_sends_and_the_others_are_covered(*, receive_first: bool) -> None:
    ranks = Ranks(2)
    sources = [ranks.source(4, number) for number in range(4)]
    receive_request = ranks.receive_request(1, 0)
    if receive_first:
        ranks.receive(receive_request, sources=4)
        assert [ranks.send(one).covered_source_entries for one in sources] == [0, ENTRIES, 0, ENTRIES]
    else:
        for one in sources:
            ranks.send(one)
        assert ranks.receive(receive_request, sources=4).covered_source_entries == ENTRIES
    senders = [op.source.name for op in ranks.harness.transport.under_way.values()]
    assert senders == [sources[0].pool.name, sources[2].pool.name]
    ranks.harness.transport.finish_all()
    ranks.check(*sources, receive_request)


@pytest.mark.parametrize(("heads", "size"), [(3, 2), (2, 3), (8, 3), (6, 4)])
def test_heads_that_do_not_divide_are_refused_with_the_reason(heads: int, size: int) -> None:
    for number in range(size):
        with pytest.raises(HeadsIndivisibleError) as caught:
            rank_heads(heads, size, number)
        assert f"{heads} KV heads over {size} ranks: neither is a multiple" in caught.value.detail


def test_a_models_spec_is_refused_alike() -> None:
    with pytest.raises(HeadsIndivisibleError, match="8 KV heads over 3 ranks"):
        model_spec("qwen3-32b", tokens=1 << 12, tp_size=3)


def last_message(
    ranks: Ranks, source: Party, receive_request: Party | None, sources: int = 2
) -> Callable[[], Accepted]:
    """Return how the last one of a receive request speaks: the source, or, after it, the receive request."""
    if receive_request is None:
        return lambda: ranks.send(source)
    ranks.send(source)
    return lambda: ranks.receive(receive_request, sources=sources)


@RECEIVE_FIRST
def test_a_missing_head_is_named(*, receive_first: bool) -> None:
    ranks = Ranks(4)
    sources, receive_request = [ranks.source(2, 0), ranks.source(4, 3)], ranks.receive_request(1, 0)
    if receive_first:
        ranks.receive(receive_request, sources=2)
    ranks.send(sources[0])
    say = last_message(ranks, sources[1], None if receive_first else receive_request)
    with pytest.raises(IncompleteError, match=r"main/k/0: transfer page 0, heads 2\.\.2, has no sender") as caught:
        say()
    assert f"({ENTRIES * PAGES} cells missing)" in caught.value.detail


def test_a_missing_entry_is_named_with_heads_apart() -> None:
    ranks = Ranks(2)
    one, other, receive_request = (
        ranks.source(2, 0),
        ranks.source(2, 1, without_layer(ranks, 1)),
        ranks.receive_request(1, 0),
    )
    ranks.receive(receive_request, sources=2)
    ranks.send(one)
    with pytest.raises(IncompleteError, match=r"main/k/1: transfer page 0, heads 1\.\.1, has no sender"):
        ranks.send(other)


def test_one_source_of_part_of_the_heads_does_not_do() -> None:
    ranks = Ranks(4)
    source, receive_request = ranks.source(2, 1), ranks.receive_request(1, 0)
    ranks.receive(receive_request)
    with pytest.raises(IncompleteError, match=r"main/k/0: transfer page 0, heads 0\.\.1, has no sender"):
        ranks.send(source)


def test_a_source_of_other_heads_only_does_not_do() -> None:
    ranks = Ranks(4)
    source, receive_request = ranks.source(2, 1), ranks.receive_request(2, 0)
    ranks.receive(receive_request)
    with pytest.raises(UncoveredEntryError, match="main/k/0"):
        ranks.send(source)


def without_layer(ranks: Ranks, layer: int) -> Manifest:
    """Return the manifest of rank 1 of 2 without a layer."""
    whole = ranks.manifest(Rank(2, 1))
    return msgspec.structs.replace(whole, entries=tuple(one for one in whole.entries if one.layer != layer))


@RECEIVE_FIRST
@pytest.mark.parametrize(
    ("splits", "heads"), [(((2, 0), (4, 1)), "1..1"), (((4, 1), (2, 0)), "1..1"), (((2, 1), (2, 1)), "2..3")]
)
def test_a_doubled_head_is_named(
    splits: tuple[tuple[int, int], tuple[int, int]], heads: str, *, receive_first: bool
) -> None:
    ranks = Ranks(4)
    one, other = (ranks.source(*split) for split in splits)
    receive_request = ranks.receive_request(1, 0)
    if receive_first:
        ranks.receive(receive_request, sources=3)
    ranks.send(one)
    say = last_message(ranks, other, None if receive_first else receive_request, sources=3)
    with pytest.raises(PageOverlapError) as caught:
        say()
    assert f"main/k/0: transfer page 0, heads {heads}, has a sender already" in caught.value.detail


def test_after_a_doubled_head_the_receive_goes_on() -> None:
    ranks = Ranks(4)
    one, wrong, other = ranks.source(2, 0), ranks.source(4, 1), ranks.source(2, 1)
    receive_request = ranks.receive_request(1, 0)
    ranks.receive(receive_request, sources=2)
    ranks.send(one)
    with pytest.raises(PageOverlapError):
        ranks.send(wrong)
    ranks.send(other)
    ranks.harness.transport.finish_all()
    ranks.check(one, other, receive_request)


@RECEIVE_FIRST
def test_replicas_may_cut_their_chunks_apart(*, receive_first: bool) -> None:
    ranks = Ranks(1)
    one, other, receive_request = ranks.source(2, 0), ranks.source(2, 1), ranks.receive_request(1, 0)
    if receive_first:
        ranks.receive(receive_request, sources=2)
    ranks.harness.send(one.session, one.pool, one.pages[:2], last=False)
    last_message(ranks, other, None if receive_first else receive_request)()
    last = ranks.harness.send(one.session, one.pool, one.pages[2:], first_page=2)
    assert last.covered_source_entries == ENTRIES
    ranks.harness.transport.finish_all()
    ranks.check(one, other, receive_request)
    page_bytes = TOKENS * sum(WIDTHS.values()) * LAYERS
    moved = [ranks.harness.finished(party.session).moved_bytes for party in (one, other)]
    assert moved == [2 * page_bytes, (PAGES - 2) * page_bytes]


@RECEIVE_FIRST
def test_a_replica_sends_what_is_left_of_each_layer(*, receive_first: bool) -> None:
    """Stages of one side share layers with a rank of the other, and are not equally far."""
    ranks = Ranks(1)
    whole = ranks.manifest(Rank(2, 0))
    stages = [tuple(one for one in whole.entries if one.layer == layer) for layer in range(LAYERS)]
    first, second = (ranks.source(2, 0, msgspec.structs.replace(whole, entries=one)) for one in stages[:2])
    other, receive_request = ranks.source(2, 1), ranks.receive_request(1, 0)
    if receive_first:
        ranks.receive(receive_request, sources=3)
    ranks.harness.send(first.session, first.pool, first.pages[:1], last=False)
    ranks.harness.send(second.session, second.pool, second.pages)
    ranks.send(other)
    ranks.harness.send(first.session, first.pool, first.pages[1:], first_page=1)
    if not receive_first:
        ranks.receive(receive_request, sources=3)
    ranks.harness.transport.finish_all()
    ranks.check(first, second, other, receive_request)


@RECEIVE_FIRST
def test_what_is_left_of_a_replica_is_in_one_extent(*, receive_first: bool) -> None:
    ranks = Ranks(1)
    one, other, receive_request = ranks.source(2, 0), ranks.source(2, 1), ranks.receive_request(1, 0)
    if receive_first:
        ranks.receive(receive_request, sources=2)
    ranks.harness.send(one.session, one.pool, one.pages[1:2], first_page=1, last=False)
    with pytest.raises(PageOverlapError, match="main/k/0: transfer page 1 has a sender already"):
        last_message(ranks, other, None if receive_first else receive_request)()


def test_fractals_cannot_be_cut_by_heads() -> None:
    ranks = Ranks(2, "nz", width=32)
    source, receive_request = ranks.source(1, 0), ranks.receive_request(2, 0)
    ranks.receive(receive_request)
    with pytest.raises(GeometryMismatchError, match="FIA_NZ cannot be cut by heads"):
        ranks.send(source)


def test_pages_of_unknown_tokens_cannot_be_cut_by_heads() -> None:
    ranks = Ranks(2)
    whole = ranks.manifest(Rank(1, 0))
    vague = tuple(msgspec.structs.replace(one, page_tokens=None) for one in whole.entries)
    source, receive_request = (
        ranks.source(1, 0, msgspec.structs.replace(whole, entries=vague)),
        ranks.receive_request(2, 0),
    )
    ranks.receive(receive_request)
    with pytest.raises(GeometryMismatchError) as caught:
        ranks.send(source)
    assert caught.value.field == "destination.entries[0].page_tokens"
