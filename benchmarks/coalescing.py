"""Coalescing two page lists into runs, against the way that is common (split by numpy, runs as lists) and SGLang's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from benchmarks.measure import MILLISECONDS, Effort, Row, Target, compare, milliseconds
from benchmarks.peers import sglang
from benchmarks.peers.sglang import SGLang
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.pools.planning.page_ids import coalesce
from kvferry.protocol.codec import PageIds

PAGES = 100_000
MIXED_RUN = 16
SPLIT = "numpy.split at the cuts, each run a pair of Python lists"


class PageLists(NamedTuple):
    """A source and a destination list of one length."""

    source: PageIds
    destination: PageIds


def measure(effort: Effort) -> list[Row]:
    """Measure random, mixed and contiguous lists."""
    count = effort.pick(PAGES, 2000)
    rng = np.random.default_rng(0)
    random = PageLists(rng.permutation(2 * count)[:count], rng.permutation(2 * count)[:count])
    in_order = np.arange(1, count + 1)
    contiguous = PageLists(in_order, in_order + 7)
    mixed = PageLists(shuffled_runs(rng, count), in_order)
    rows = [
        _compare("coalesce/random_plain_malloc", random, effort, note="before the allocator is set as a daemon does")
    ]
    keep_freed_memory()
    rows += [
        _compare("coalesce/random", random, effort, Target(0.5, "ours"), "every page is a run of its own"),
        _compare("coalesce/mixed", mixed, effort, note=f"runs of {MIXED_RUN} pages"),
        _compare("coalesce/contiguous", contiguous, effort, note="one run"),
    ]
    if (peer := sglang.find()) is not None:
        rows.append(against_sglang(peer, random, effort))
    return rows


def against_sglang(peer: SGLang, lists: PageLists, effort: Effort) -> Row:
    """Compare with SGLang's function, after looking that it finds the same runs."""
    indices = [ids.astype(np.int32) for ids in lists]
    ours, groups = coalesce(*lists), peer.group(*indices)
    for firsts, found in zip((ours.source, ours.destination), groups, strict=True):
        assert firsts.tolist() == [run[0] for run in found]
        assert ours.pages.tolist() == [len(run) for run in found]
    return compare(
        "coalesce/against_sglang",
        MILLISECONDS,
        ours=milliseconds(lambda: coalesce(*lists), effort.pick(20, 1)),
        peer=milliseconds(lambda: peer.group(*indices)),
        peer_is=f"SGLang {peer.version}: group_concurrent_contiguous",
        rounds=effort.pick(15, 2),
        note=f"{len(lists.source)} pages, the lists of coalesce/random",
    )


def shuffled_runs(rng: np.random.Generator, count: int) -> PageIds:
    """Return ``count`` page ids from 1 on, in runs of ``MIXED_RUN`` that are shuffled."""
    runs = rng.permutation(count // MIXED_RUN)
    ids: PageIds = (runs[:, None] * MIXED_RUN + np.arange(MIXED_RUN) + 1).reshape(-1)
    return ids


def split_by_numpy(lists: PageLists) -> list[tuple[list[int], list[int]]]:
    """Return the runs as the common implementations do; the peer."""
    cuts = np.flatnonzero((np.diff(lists.source) != 1) | (np.diff(lists.destination) != 1)) + 1
    sources = [run.tolist() for run in np.split(lists.source, cuts)]
    destinations = [run.tolist() for run in np.split(lists.destination, cuts)]
    return list(zip(sources, destinations, strict=True))


def _compare(name: str, lists: PageLists, effort: Effort, target: Target | None = None, note: str = "") -> Row:
    ours = coalesce(*lists)
    peers = split_by_numpy(lists)
    assert ours.source.tolist() == [run[0] for run, _ in peers]
    assert ours.pages.tolist() == [len(run) for run, _ in peers]
    peer: Callable[[], object] = lambda: split_by_numpy(lists)  # noqa: E731  one line says it
    return compare(
        name,
        MILLISECONDS,
        ours=milliseconds(lambda: coalesce(*lists), effort.pick(20, 1)),
        peer=milliseconds(peer),
        peer_is=SPLIT,
        rounds=effort.pick(15, 2),
        target=target,
        note=f"{len(lists.source)} pages, {note}",
    )
