"""Transfers between ranks of unequal tensor parallelism: who sends what, and what is wrong is named.

That all heads arrive, each once, is what the byte oracle shows.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.geometry import rank_heads
from kvferry.protocol.errors import GeometryMismatchError, IncompleteError, KvferryError, PageOverlapError
from kvferry.protocol.manifests import Entry, Manifest, MhaSpec
from tests.kit.transfers import FIRST, ORDERS, Engine, TransferHarness

PAGES = 3
LAYERS = 2
ENTRIES = LAYERS * 2


def manifest_of_rank(heads: int, size: int, number: int) -> Manifest:
    held = rank_heads(heads, size, number)
    return manifest_of(
        MhaSpec(
            layers=LAYERS, tokens=16, page_size=2, kv_heads=held.count, head_start=held.start, total_heads=heads,
            head_dim=3, dtype="int8", replicas=held.replicas,
        )
    )  # fmt: skip


class Ranks(TransferHarness):
    """A model of some heads; ranks of both sides join as a test says, each an engine with some pages."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def rank(self, size: int, number: int, manifest: Manifest | None = None) -> Engine:
        manifest = manifest or manifest_of_rank(self.heads, size, number)
        session, pool = self.session(), self.pool_of(f"pool{len(self.pools)}", manifest)
        return Engine(self, session, pool, pool.allocator.allocate(session, PAGES))

    def speak(self, first: str, sources: Sequence[Engine], receiver: Engine) -> None:
        """Let all ranks send and receive all of their pages; the last one of all may be refused."""
        for direction in ORDERS[first]:
            for one in sources if direction == "send" else [receiver]:
                one.come(direction, others=1 if direction == "send" else len(sources))


def test_a_source_without_a_common_head_is_one_of_the_sources_still() -> None:
    ranks = Ranks(2)
    near, far, receiver = ranks.rank(2, 0), ranks.rank(2, 1), ranks.rank(4, 1)
    receiver.receive(sources=2)
    assert far.send().skipped_source_entries == ENTRIES
    assert not ranks.transport.under_way
    assert near.send().skipped_source_entries == 0
    ranks.transport.finish_all()
    assert [one.told for one in (near, far, receiver)] == ["OK settled"] * 3


@FIRST
def test_of_replicas_one_sends_and_the_others_are_covered(first: str) -> None:
    ranks = Ranks(2)
    sources, receiver = [ranks.rank(4, number) for number in range(4)], ranks.rank(1, 0)
    if first == "receive":
        receiver.receive(sources=4)
    covered = [one.send().covered_source_entries for one in sources]
    if first == "receive":
        assert covered == [0, ENTRIES, 0, ENTRIES]
    else:
        assert receiver.receive(sources=4).covered_source_entries == ENTRIES
    senders = [op.source.name for op in ranks.transport.under_way.values()]
    assert senders == [sources[0].pool.name, sources[2].pool.name]
    ranks.transport.finish_all()
    assert receiver.told == "OK settled"


@FIRST
@pytest.mark.parametrize(
    ("splits", "error", "what"),
    [
        ([(2, 0), (4, 3)], IncompleteError, f"heads 2..2, has no sender ({ENTRIES * PAGES} cells missing)"),
        ([(2, 1)], IncompleteError, "heads 0..1, has no sender"),
        ([(2, 0), (4, 1)], PageOverlapError, "heads 1..1, has a sender already"),
        ([(2, 1), (2, 1)], PageOverlapError, "heads 2..3, has a sender already"),
    ],
)
def test_a_missing_or_doubled_head_is_named(
    splits: list[tuple[int, int]], error: type[KvferryError], what: str, first: str
) -> None:
    ranks = Ranks(4)
    with pytest.raises(error) as caught:
        ranks.speak(first, [ranks.rank(*one) for one in splits], ranks.rank(1, 0))
    assert f"main/k/0: transfer page 0, {what}" in caught.value.detail


def without(layer: int, manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, entries=tuple(one for one in manifest.entries if one.layer != layer))


def test_a_missing_entry_is_named_with_heads_apart() -> None:
    ranks = Ranks(2)
    other = ranks.rank(2, 1, without(1, manifest_of_rank(2, 2, 1)))
    with pytest.raises(IncompleteError, match=r"main/k/1: transfer page 0, heads 1\.\.1, has no sender"):
        ranks.speak("receive", [ranks.rank(2, 0), other], ranks.rank(1, 0))


@FIRST
def test_a_replica_sends_what_is_left_of_each_layer(first: str) -> None:
    ranks = Ranks(1)
    one, two = (ranks.rank(2, 0, without(layer, manifest_of_rank(1, 2, 0))) for layer in (1, 0))
    other, receiver = ranks.rank(2, 1), ranks.rank(1, 0)
    if first == "receive":
        receiver.receive(sources=3)
    one.send(0, 1, last=False)
    two.send()
    other.send()
    one.send(1)
    if first == "send":
        receiver.receive(sources=3)
    ranks.transport.finish_all()
    assert [party.told for party in (one, two, other, receiver)] == ["OK settled"] * 4


@FIRST
def test_what_is_left_of_a_replica_is_in_one_extent(first: str) -> None:
    ranks = Ranks(1)
    one, other, receiver = ranks.rank(2, 0), ranks.rank(2, 1), ranks.rank(1, 0)
    if first == "receive":
        receiver.receive(sources=2)
    one.send(1, 2, last=False)
    if first == "send":
        other.send()
    with pytest.raises(PageOverlapError, match="main/k/0: transfer page 1 has a sender already"):
        other.send() if first == "receive" else receiver.receive(sources=2)


def test_heads_are_not_cut_out_of_pages_of_unknown_tokens() -> None:
    ranks = Ranks(2)

    def vague(entry: Entry) -> Entry:
        return msgspec.structs.replace(entry, page_tokens=None)

    manifest = manifest_of_rank(2, 1, 0)
    manifest = msgspec.structs.replace(manifest, entries=tuple(map(vague, manifest.entries)))
    with pytest.raises(GeometryMismatchError) as caught:
        ranks.speak("receive", [ranks.rank(1, 0, manifest)], ranks.rank(2, 0))
    assert caught.value.field == "destination.entries[0].page_tokens"
