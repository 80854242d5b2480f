"""Unequal tensor parallelism: slices of pages, against whole pages of as many bytes, and writes by token.

The transport is the daemon's own, as in ``local_transfer``; pages are random. The writes are made by one thread, from a
list that is ready.
"""

from __future__ import annotations

import ctypes
from functools import partial

import numpy as np

from benchmarks.bare_copies import TRANSFER_THREADS, limit_of
from benchmarks.local_transfer import Copier, between
from benchmarks.measure import (
    GIGABYTES_A_SECOND,
    SETTLE,
    Contender,
    Effort,
    Row,
    Target,
    gigabytes_a_second,
    interleave,
    row_of,
)
from benchmarks.pools import PAGE_SIZE
from kvferry.daemon.process.host import keep_freed_memory
from kvferry.pools import copy_kernel
from kvferry.pools.planning.copies import total_segments
from kvferry.pools.planning.geometry import rank_heads
from kvferry.pools.planning.manifest import lay_out
from kvferry.pools.planning.pairing import pair_entries
from kvferry.pools.planning.plan import Plan, make_plan
from kvferry.protocol.codec import PageIds
from kvferry.protocol.manifests import Entry

LAYERS = 8
HEADS = 8
HEAD_BYTES = {"k": 256, "v": 128}  # 16-bit elements; V half as wide
SPLITS = {(1, 2): Target(0.7), (2, 1): Target(0.7), (1, 8): None, (4, 2): None, (8, 1): None}
WRITES = "one memmove for each token of each page, from a list made before, one thread"
EQUAL = "equal TP of the same bytes: whole pages, the same transport"


def measure(effort: Effort) -> list[Row]:
    """Measure splits in both directions, rank 0 to rank 0, random pages."""
    keep_freed_memory()
    rows, pages = [], effort.pick(128, 8)
    rng = np.random.default_rng(0)
    ids = rng.permutation(np.arange(1, pages + 1)), rng.permutation(np.arange(1, pages + 1))
    for split, target in SPLITS.items():
        whole = lay_out(entries_of(max(split), pages))
        with (
            between(*(lay_out(entries_of(size, pages)) for size in split)) as sliced,
            between(whole, whole) as equal,
        ):
            rows += _rows("unequal_tp/{}_to_{}".format(*split), sliced, equal, ids, target, effort)
    return rows


def entries_of(size: int, pages: int) -> list[Entry]:
    """Return k and v of all layers as rank 0 of ``size`` holds them."""
    held = rank_heads(HEADS, size, 0)
    return [
        Entry(
            component="main",
            role=role,
            layer=layer,
            base=0,
            pages=pages + 1,
            page_bytes=PAGE_SIZE * held.count * head_bytes,
            page_tokens=PAGE_SIZE,
            head_start=held.start,
            heads=held.count,
            total_heads=HEADS,
        )
        for role, head_bytes in HEAD_BYTES.items()
        for layer in range(LAYERS)
    ]


def _rows(
    name: str, sliced: Copier, equal: Copier, ids: tuple[PageIds, PageIds], target: Target | None, effort: Effort
) -> list[Row]:
    plan, whole = (
        make_plan(pair_entries(one.source.manifest.entries, one.destination.manifest.entries), *ids)
        for one in (sliced, equal)
    )
    assert plan.total_bytes == whole.total_bytes
    copies = plan.listed(0, total_segments(plan.source), sliced.addresses)
    in_unit = partial(gigabytes_a_second, size_bytes=plan.total_bytes)
    limit = limit_of(partial(copy_kernel.copy, copies), TRANSFER_THREADS, in_unit)
    ours, written, in_whole_pages, *limits = interleave(
        effort.pick(11, 2),
        lambda: sliced.copied_gigabytes_a_second(plan),
        _written_by_token(sliced, plan),
        lambda: equal.copied_gigabytes_a_second(whole),
        *limit.ways,
        settle=effort.pick(SETTLE, 1),
    )
    sliced.check(*ids)
    count = len(plan.blocks())
    note = f"{plan.total_bytes >> 20} MiB, {count} slices of {plan.total_bytes // count} bytes on average"
    return [
        row_of(
            f"{name}/against_equal",
            GIGABYTES_A_SECOND,
            ours,
            in_whole_pages,
            peer_is=EQUAL,
            target=target,
            note=note,
            limits=limits,
            limit_is=limit.limit_is,
        ),
        row_of(name, GIGABYTES_A_SECOND, ours, written, peer_is=WRITES, target=Target(2), note=note),
    ]


def _written_by_token(copier: Copier, plan: Plan) -> Contender:
    blocks = plan.blocks()
    starts = blocks[:, :2] + np.array(copier.addresses, np.uint64)
    writes = list(zip(starts[:, 0].tolist(), starts[:, 1].tolist(), blocks[:, 2].tolist(), strict=True))

    def written() -> None:
        memmove = ctypes.memmove
        for start, to, size in writes:
            memmove(to, start, size)

    return gigabytes_a_second(written, plan.total_bytes)
