"""What an engine says of its memory, of pages and of what others hold is checked, each time: a row a claim.

Each row says what is claimed, by which message, and which error comes, by code and field; afterwards the daemon holds
what it held before. What an engine registers from a device has its rows in ``tests/npu``; what peers, the disk and a
remote store say is in ``tests/transfer``, ``tests/pools/tiers`` and ``tests/daemon/tiers``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import numpy.typing as npt
import pytest

from kvferry.clients import Client
from kvferry.protocol.base import PageList, RequestBody
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.ids import ModelIdentity, new_request_id
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec, PoolSpec
from kvferry.protocol.pool_messages import Allocate, AttachPool, CreatePool, Free, RegisteredArrays, RegisterPool
from kvferry.protocol.session_messages import OpenEvents
from kvferry.protocol.session_stream import SharedEvents, ShareFollows
from kvferry.protocol.table_messages import CreateTables, UpdateTables
from kvferry.protocol.tier_messages import Load, Lookup, Offload, Offloading, Restore, SnapshotReport, Snapshots, Store
from kvferry.protocol.transfer_messages import LayerStep, Receive, Send
from tests.daemons import running_daemon
from tests.raw_engine import RawEngine, raw_engine

OURS, THEIRS, FREE = [1, 2, 3, 4], [5, 6, 7, 8], [9, 10]
"""Pages of each space: 1 to 4 are the engine's that speaks, 5 to 8 another one's, 9 to 12 nobody's."""

MHA = MhaSpec(layers=2, first_layer=4, tokens=192, page_size=16, kv_heads=2, head_dim=16, dtype="float16")
SPECS: Final[dict[str, PoolSpec]] = {
    "paged": MHA,
    "bf16": MhaSpec(layers=2, first_layer=4, tokens=192, page_size=16, kv_heads=2, head_dim=16, dtype="bfloat16"),
    "nz": MhaSpec(
        layers=2, first_layer=4, tokens=192, page_size=16, kv_heads=2, head_dim=16, dtype="float16", view="nz"
    ),
    "short-pages": MhaSpec(layers=2, first_layer=4, tokens=96, page_size=8, kv_heads=4, head_dim=16, dtype="float16"),
    "one-head": MhaSpec(layers=2, first_layer=4, tokens=192, page_size=16, kv_heads=1, head_dim=32, dtype="float16"),
    "one-layer": MhaSpec(layers=1, first_layer=4, tokens=192, page_size=16, kv_heads=2, head_dim=16, dtype="float16"),
    "hybrid": HybridSwaSpec(
        full_layers=(0,),
        window_layers=(1,),
        tokens=192,
        window_tokens=192,
        window=32,
        page_size=16,
        kv_heads=1,
        head_dim=8,
        dtype="float16",
    ),
    "turned": MambaSpec(state_layers=(0,), slots=12, conv_window=8, conv_channels=3, dtype="float16"),
    "mamba": MambaSpec(state_layers=(0,), slots=12, conv_window=3, conv_channels=8, dtype="float16"),
}
MODEL: Final = ModelIdentity(name="believed")
TRANSFER, HYBRID_TRANSFER, STATE_TRANSFER = new_request_id(), new_request_id(), new_request_id()
STATE: Final = (PageList(component="mamba", pages=1),)
HASHES: Final = bytes(range(32))


class Harness(NamedTuple):
    """A daemon on which two engines have pools, pages, tables, a ring, a snapshot and a lease."""

    engine: RawEngine
    watcher: Client
    snapshot: str
    state: str
    lease: int


class Row(NamedTuple):
    """What is claimed, by which message and page lists, and what comes."""

    claim: str
    body: Callable[[Harness], RequestBody] | RequestBody
    ids: tuple[npt.ArrayLike, ...]
    code: str
    field: str
    registered: ShareFollows | None = None


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harness]:
    """Return a harness in which no row leaves anything."""
    config = "[tiers]\nhost_bytes = 4194304\n"
    with (
        running_daemon(tmp_path_factory.mktemp("believed"), config) as daemon,
        raw_engine(daemon.runtime_dir, "engine") as engine,
        raw_engine(daemon.runtime_dir, "other") as other,
        Client.connect(daemon.runtime_dir, session=False) as watcher,
    ):
        for pool, spec in SPECS.items():
            engine.ask(CreatePool(pool=pool, spec=spec, model=MODEL))
            for space in ("main", "swa") if pool == "hybrid" else ("main" if isinstance(spec, MhaSpec) else "mamba",):
                for one in (engine, other):
                    one.ask(Allocate(pool=pool, count=4, space=space))
        engine.ask(CreateTables(tables="tables", pool="paged", max_batch=4, max_context_tokens=64, draft_tokens=2))
        engine.ask(UpdateTables(tables="tables", batch=1, rows=1, pages=1), [1, 0, 1, 1])
        engine.ask(CreateTables(tables="window", pool="hybrid", max_batch=4, max_context_tokens=64, window=32))
        engine.ask(OpenEvents())
        other.ask(Receive(request_id=TRANSFER, pool="paged", lists=(PageList(pages=2, tokens=32),)), THEIRS[:2])
        other.ask(
            Receive(
                request_id=HYBRID_TRANSFER,
                pool="hybrid",
                lists=(*main(2), PageList(component="swa", first_page=0, pages=2)),
            ),
            THEIRS[:2],
            THEIRS[:2],
        )
        other.ask(Receive(request_id=STATE_TRANSFER, pool="mamba", lists=STATE), THEIRS[:1])
        snapshots = [
            engine.ask(Offload(pool="paged", lists=(PageList(pages=2),)), OURS[:2]).body,
            engine.ask(Offload(pool="mamba", lists=STATE), OURS[:1]).body,
        ]
        engine.ask(Store(pool="paged", hashes=HASHES, pages=2), OURS[:2])
        found: Any = None
        while found is None or found.blocks < 2:  # each look is a round trip
            found = engine.ask(Lookup(pool="paged", hashes=HASHES)).body
        while watcher.status().operations:
            pass
        names = [one.snapshot for one in snapshots if isinstance(one, Offloading)]
        yield Harness(engine, watcher, names[0], names[1], found.lease)


def held(harness: Harness) -> object:
    """Return all that the daemon holds for engines."""
    status = harness.watcher.status()
    snapshots = harness.engine.ask(Snapshots()).body
    assert isinstance(snapshots, SnapshotReport)
    return (
        [(one.snapshot, one.state, one.restores) for one in snapshots.snapshots],
        [(one.pool, one.free, one.busy, one.spaces) for one in status.pools],
        [(one.request, one.direction, one.pool) for one in status.transfers],
        [(one.tables, one.updates) for one in status.tables],
        status.operations,
    )


def main(count: int, **more: Any) -> tuple[PageList, ...]:  # noqa: ANN401  a page list's fields
    """Return a list of main's pages."""
    return (PageList(pages=count, **more),)


def send(pool: str, lists: tuple[PageList, ...], **more: Any) -> Send:  # noqa: ANN401  a SEND's fields
    """Return a SEND for the transfer that waits."""
    return Send(request_id=TRANSFER, pool=pool, lists=lists, **more)


def hybrid(window_pages: int, **more: Any) -> Send:  # noqa: ANN401  a page list's fields
    """Return a SEND for the hybrid transfer that waits, of two full pages."""
    lists = (*main(2), PageList(component="swa", pages=window_pages, **more))
    return Send(request_id=HYBRID_TRANSFER, pool="hybrid", lists=lists)


def receive(pool: str, lists: tuple[PageList, ...], **more: Any) -> Receive:  # noqa: ANN401  a RECEIVE's fields
    """Return a RECEIVE for a new transfer."""
    return Receive(request_id=new_request_id(), pool=pool, lists=lists, **more)


def tables(**more: Any) -> CreateTables:  # noqa: ANN401  its fields
    """Return a CREATE_TABLES."""
    usual: dict[str, Any] = {"tables": "new", "pool": "paged", "max_batch": 4, "max_context_tokens": 64}
    return CreateTables(**usual | more)


def update(name: str = "tables", **counts: Any) -> UpdateTables:  # noqa: ANN401  its counts
    """Return an UPDATE_TABLES."""
    usual: dict[str, Any] = {"tables": name, "batch": 1}
    return UpdateTables(**usual | counts)


def step(first: int, layers: int, event: int = 0) -> LayerStep:
    """Return a step."""
    return LayerStep(first_layer=first, layers=layers, event=event, value=1)


def create(spec: PoolSpec, pool: str = "new") -> CreatePool:
    """Return a CREATE_POOL."""
    return CreatePool(pool=pool, spec=spec)


BASE: Final[dict[str, Any]] = {"layers": 2, "tokens": 64, "page_size": 16, "dtype": "float16"}
LATENT: Final[dict[str, Any]] = {"layers": 2, "tokens": 64, "page_size": 16, "kv_lora_rank": 128, "qk_rope_head_dim": 8}
SLOTS: Final[dict[str, Any]] = {"state_layers": (0,), "slots": 4, "dtype": "float16"}

SPEC_ROWS: Final = [
    Row(
        "a dtype that is none",
        create(MhaSpec(**BASE | {"dtype": "int7"}, kv_heads=1, head_dim=8)),
        (),
        "INVALID_FIELD",
        "dtype",
    ),
    Row(
        "less than a page of tokens",
        create(MhaSpec(**BASE | {"tokens": 8}, kv_heads=1, head_dim=8)),
        (),
        "INVALID_FIELD",
        "tokens",
    ),
    Row(
        "more heads than the model",
        create(MhaSpec(**BASE, kv_heads=4, total_heads=2, head_dim=8)),
        (),
        "INVALID_FIELD",
        "total_heads",
    ),
    Row(
        "NZ of no whole fractals",
        create(MhaSpec(**BASE, kv_heads=1, head_dim=8, view="nz")),
        (),
        "INVALID_FIELD",
        "view",
    ),
    Row(
        "packed tokens of another dtype",
        create(MlaSpec(**LATENT, dtype="float16", packed="ds_mla")),
        (),
        "INVALID_FIELD",
        "dtype",
    ),
    Row(
        "packed tokens in NZ",
        create(MlaSpec(**LATENT, dtype="float8_e4m3fn", packed="ascend", view="nz")),
        (),
        "INVALID_FIELD",
        "view",
    ),
    Row(
        "an indexer in a layer that is none",
        create(MlaSpec(**LATENT, dtype="float16", index_head_dim=8, index_layers=(7,))),
        (),
        "INVALID_FIELD",
        "index_layers[0]",
    ),
    Row(
        "scales of no indexer",
        create(MlaSpec(**LATENT, dtype="float16", index_scale=True)),
        (),
        "INVALID_FIELD",
        "index_scale",
    ),
    Row(
        "a window larger than its pages",
        create(
            HybridSwaSpec(
                full_layers=(0,),
                window_layers=(1,),
                tokens=64,
                window_tokens=16,
                window=32,
                page_size=16,
                kv_heads=1,
                head_dim=8,
                dtype="float16",
            )
        ),
        (),
        "INVALID_FIELD",
        "window_tokens",
    ),
    Row("half a conv state", create(MambaSpec(**SLOTS, conv_window=3)), (), "INVALID_FIELD", "conv_channels"),
    Row(
        "state heads of no even share",
        create(
            MambaSpec(
                **SLOTS, conv_window=3, conv_channels=8, ssm_shape=(2, 4), state_head_start=1, state_total_heads=4
            )
        ),
        (),
        "INVALID_FIELD",
        "state_head_start",
    ),
    Row(
        "a latent draft beside heads",
        create(MhaSpec(**BASE, kv_heads=1, head_dim=8, draft=DraftSpec(layers=1, kv_lora_rank=8))),
        (),
        "INVALID_FIELD",
        "draft.kv_lora_rank",
    ),
    Row(
        "more than the host has",
        create(MhaSpec(**BASE | {"tokens": 1 << 40, "page_size": 1 << 20}, kv_heads=1, head_dim=8)),
        (),
        "OUT_OF_MEMORY",
        "spec",
    ),
    Row("another layout of a pool that is there", create(SPECS["nz"], "paged"), (), "POOL_EXISTS", "spec"),
    Row(
        "another size of a pool that is there",
        create(MhaSpec(**BASE, first_layer=4, kv_heads=2, head_dim=16), "paged"),
        (),
        "POOL_EXISTS",
        "spec",
    ),
    Row("another form of a state of as many bytes", create(SPECS["turned"], "mamba"), (), "POOL_EXISTS", "spec"),
    Row(
        "a digest that is not the pool's",
        AttachPool(pool="paged", layout_digest="0" * 32),
        (),
        "LAYOUT_MISMATCH",
        "layout_digest",
    ),
    Row(
        "host memory that did not come",
        RegisterPool(pool="new", spec=MHA, device="host", arrays=(RegisteredArrays(component="main", role="k"),)),
        (),
        "INVALID_FIELD",
        "memory",
    ),
]

PAGE_ROWS: Final = [
    Row("another's pages, to be freed", Free(pool="paged", pages=1), (THEIRS[:1],), "NOT_OWNER", "pages"),
    Row("nobody's pages, to be freed", Free(pool="paged", pages=1), (FREE[:1],), "NOT_OWNER", "pages"),
    Row("the padding page, to be freed", Free(pool="paged", pages=1), ([0],), "PAGE_OUT_OF_RANGE", "pages"),
    Row("a page twice, to be freed", Free(pool="paged", pages=2), ([1, 1],), "DUPLICATE_PAGE", "pages"),
    Row("a page space that is none", Free(pool="paged", pages=1, space="swa"), ([1],), "UNKNOWN_COMPONENT", "space"),
    Row("another's pages, to be sent", send("paged", main(2)), (THEIRS[2:],), "NOT_OWNER", "lists[0].pages"),
    Row("nobody's pages, to be sent", send("paged", main(2)), (FREE,), "NOT_OWNER", "lists[0].pages"),
    Row("a page behind the pool's end", send("paged", main(2)), ([1, 13],), "PAGE_OUT_OF_RANGE", "lists[0].pages"),
    Row("a page before its begin", send("paged", main(2)), ([1, -1],), "PAGE_OUT_OF_RANGE", "lists[0].pages"),
    Row(
        "more tokens than its pages hold",
        send("paged", main(2, tokens=33)),
        (OURS[:2],),
        "LENGTH_MISMATCH",
        "lists[0].tokens",
    ),
    Row(
        "a whole chunk that ends in a page",
        send("paged", main(2, tokens=31), last=False),
        (OURS[:2],),
        "PAGE_GAP",
        "lists[0].tokens",
    ),
    Row(
        "a component that is none",
        send("paged", (PageList(component="swa", pages=1),)),
        ([1],),
        "UNKNOWN_COMPONENT",
        "lists[0].component",
    ),
    Row("a logical page twice", send("paged", (*main(1), *main(1))), ([1], [2]), "PAGE_OVERLAP", "lists[1].first_page"),
    Row("no list of a window", send("hybrid", main(1)), ([1],), "UNKNOWN_COMPONENT", "lists"),
    Row(
        "tokens of a state",
        send("mamba", (PageList(component="mamba", pages=1, tokens=5),)),
        ([1],),
        "INVALID_FIELD",
        "lists[0].tokens",
    ),
    Row("paged tokens that nobody wants", send("paged", main(0, none=True)), ([],), "INVALID_FIELD", "lists[0].none"),
    Row(
        "a state that nobody wants, with slots",
        send("mamba", (PageList(component="mamba", pages=1, none=True),)),
        ([1],),
        "INVALID_FIELD",
        "lists[0].pages",
    ),
    Row(
        "more slots than there are",
        send("mamba", (PageList(component="mamba", pages=1),)),
        ([13],),
        "PAGE_OUT_OF_RANGE",
        "lists[0].pages",
    ),
    Row(
        "no page of one of two components",
        Send(request_id=HYBRID_TRANSFER, pool="hybrid", lists=(*main(0), PageList(component="swa", pages=1))),
        ([], [1]),
        "EMPTY_PAGES",
        "lists[0].pages",
    ),
    Row("another's pages, to be filled", receive("paged", main(1)), (THEIRS[3:],), "NOT_OWNER", "lists[0].pages"),
    Row("a page twice, to be filled", receive("paged", main(2)), ([1, 1],), "DUPLICATE_PAGE", "lists[0].pages"),
    Row(
        "a transfer as large as no host, to land in",
        receive("paged", main((1 << 31) - 1), into="host"),
        (),
        "OUT_OF_MEMORY",
        "lists[0].pages",
    ),
]

PAIR_ROWS: Final = [
    Row(
        "slots of as many bytes, another form, fit",
        Send(request_id=STATE_TRANSFER, pool="turned", lists=STATE),
        (OURS[:1],),
        "GEOMETRY_MISMATCH",
        "destination.entries[0].shape",
    ),
    Row(
        "pages of another dtype fit",
        send("bf16", main(2)),
        (OURS[:2],),
        "GEOMETRY_MISMATCH",
        "destination.entries[0].dtype",
    ),
    Row(
        "NZ pages fit row-major ones",
        send("nz", main(2)),
        (OURS[:2],),
        "GEOMETRY_MISMATCH",
        "destination.entries[0].format",
    ),
    Row(
        "pages of as many bytes, half the tokens, fit",
        send("short-pages", main(2)),
        (OURS[:2],),
        "GEOMETRY_MISMATCH",
        "destination.entries[0].page_tokens",
    ),
    Row(
        "pages of as many bytes, other heads, fit",
        send("one-head", main(2)),
        (OURS[:2],),
        "GEOMETRY_MISMATCH",
        "destination.entries[0].total_heads",
    ),
    Row("fewer layers are all", send("one-layer", main(2)), (OURS[:2],), "UNCOVERED_ENTRY", "destination.entries"),
    Row("fewer pages are all", send("paged", main(1)), (OURS[:1],), "INCOMPLETE", "lists"),
    Row("more pages than the transfer has", send("paged", main(3)), (OURS[:3],), "LENGTH_MISMATCH", "lists[0]"),
    Row(
        "the pages end elsewhere", send("paged", main(2, tokens=31)), (OURS[:2],), "LENGTH_MISMATCH", "lists[0].tokens"
    ),
    Row("the pages begin elsewhere", send("paged", main(2, first_page=1)), (OURS[:2],), "LENGTH_MISMATCH", "lists[0]"),
    Row("a window elsewhere", hybrid(2, first_page=5), (OURS[:2], OURS[:2]), "WINDOW_MISMATCH", "first_page"),
    Row("no window where the transfer wants one", hybrid(0), (OURS[:2], []), "EMPTY_STATE", "lists"),
    Row(
        "a pool without such components fits",
        send("mamba", (PageList(component="mamba", pages=1),)),
        ([1],),
        "UNCOVERED_ENTRY",
        "lists",
    ),
]

EVENT_ROWS: Final = [
    Row("a layer in no step", send("paged", main(2), steps=(step(4, 1),)), (OURS[:2],), "INVALID_FIELD", "steps"),
    Row(
        "a layer in two steps",
        send("paged", main(2), steps=(step(4, 2), step(5, 1))),
        (OURS[:2],),
        "INVALID_FIELD",
        "steps",
    ),
    Row("a second ring, on a device", OpenEvents(device="npu:0"), (), "INVALID_FIELD", "device"),
    Row(
        "events of a device, for a ring of the host",
        OpenEvents(device="npu:0"),
        (),
        "INVALID_FIELD",
        "device",
        ShareFollows(message_id=0, events=SharedEvents(handles=(b"x",))),
    ),
]

TABLE_ROWS: Final = [
    Row("tables of a component that is none", tables(component="swa"), (), "UNKNOWN_COMPONENT", "component"),
    Row("tables of states", tables(pool="mamba", component="mamba"), (), "UNKNOWN_COMPONENT", "component"),
    Row("a window that the pool has not", tables(window=32), (), "UNKNOWN_COMPONENT", "window_component"),
    Row(
        "a window of what is none",
        tables(pool="hybrid", window=32, window_component="main"),
        (),
        "UNKNOWN_COMPONENT",
        "window_component",
    ),
    Row("no window where the pool has one", tables(pool="hybrid"), (), "INVALID_FIELD", "window"),
    Row("captured batches above the largest", tables(captured=(8,)), (), "INVALID_FIELD", "captured"),
    Row(
        "more columns than int32 numbers",
        tables(max_context_tokens=(1 << 31) - 1, draft_tokens=16),
        (),
        "INVALID_FIELD",
        "max_context_tokens",
    ),
    Row("more rows than memory", tables(max_batch=65_536, max_context_tokens=1 << 15), (), "TOO_LARGE", "max_batch"),
    Row("tables of that name", tables(tables="tables"), (), "TABLES_EXIST", "tables"),
    Row("more rows than the tables have", update(batch=5), ([1] * 5,), "TOO_LARGE", "lengths"),
    Row(
        "a row longer than the tables are wide", update(rows=1, pages=1), ([82, 0, 1, 1],), "TABLE_OVERFLOW", "lengths"
    ),
    Row(
        "a row of more pages than columns",
        update(rows=1, pages=6),
        ([1, 0, 6, *OURS, 5, 6],),
        "INVALID_FIELD",
        "row_pages",
    ),
    Row("a length below zero", update(), ([-1],), "INVALID_FIELD", "lengths"),
    Row("a length without end", update(), ([(1 << 63) - 1],), "TABLE_OVERFLOW", "lengths"),
    Row("a length that has no pages", update(), ([17],), "TABLE_HOLE", "lengths"),
    Row(
        "draft tokens that the tables were not made for",
        update(extra_tokens=3),
        ([1],),
        "INVALID_FIELD",
        "extra_tokens",
    ),
    Row("an entry in a row beyond the batch", update(entries=1), ([1, 1, 0, 1],), "INVALID_FIELD", "entry_rows"),
    Row("an entry in a column that is none", update(entries=1), ([1, 0, 5, 1],), "INVALID_FIELD", "entry_columns"),
    Row("an entry of the padding page", update(entries=1), ([1, 0, 1, 0],), "PAGE_OUT_OF_RANGE", "entry_pages"),
    Row(
        "an entry of a page behind the pool's end",
        update(entries=1),
        ([1, 0, 1, 13],),
        "PAGE_OUT_OF_RANGE",
        "entry_pages",
    ),
    Row("an entry twice", update(entries=2), ([1, 0, 0, 1, 1, 2, 3],), "INVALID_FIELD", "entry_rows"),
    Row(
        "a row of a page behind the pool's end", update(rows=1, pages=1), ([1, 0, 1, 13],), "PAGE_OUT_OF_RANGE", "pages"
    ),
    Row("counts of other pages than come", update(rows=1, pages=2), ([1, 0, 1, 1, 2],), "LENGTH_MISMATCH", "pages"),
    Row("window pages of tables without a window", update(released=1), ([1, 1],), "INVALID_FIELD", "bound_full"),
    Row(
        "a window page behind its pool's end",
        update("window", bound=1),
        ([0, 1, 13],),
        "PAGE_OUT_OF_RANGE",
        "window_ids",
    ),
    Row("a full page behind its pool's end", update("window", bound=1), ([0, 13, 1],), "PAGE_OUT_OF_RANGE", "full_ids"),
]

TIER_ROWS: Final = [
    Row(
        "a state's snapshot fits a slot of as many bytes",
        lambda w: Restore(snapshot=w.state, pool="turned", lists=STATE),
        (OURS[:1],),
        "LAYOUT_MISMATCH",
        "pool",
    ),
    Row(
        "another's pages, to leave", Offload(pool="paged", lists=main(1)), (THEIRS[3:],), "NOT_OWNER", "lists[0].pages"
    ),
    Row(
        "tokens beyond the pages that leave",
        Offload(pool="paged", lists=main(1, tokens=17)),
        ([3],),
        "LENGTH_MISMATCH",
        "lists[0].tokens",
    ),
    Row(
        "a page twice, to be freed when it has left",
        Offload(pool="paged", lists=main(2), release=True),
        ([3, 3],),
        "DUPLICATE_PAGE",
        "lists[0]",
    ),
    Row(
        "a snapshot fits another dtype",
        lambda w: Restore(snapshot=w.snapshot, pool="bf16", lists=main(2)),
        (OURS[:2],),
        "LAYOUT_MISMATCH",
        "pool",
    ),
    Row(
        "a snapshot fits another order of bytes",
        lambda w: Restore(snapshot=w.snapshot, pool="nz", lists=main(2)),
        (OURS[:2],),
        "LAYOUT_MISMATCH",
        "pool",
    ),
    Row(
        "a snapshot fits other heads",
        lambda w: Restore(snapshot=w.snapshot, pool="one-head", allocate=True),
        (),
        "LAYOUT_MISMATCH",
        "pool",
    ),
    Row(
        "a snapshot has fewer pages",
        lambda w: Restore(snapshot=w.snapshot, pool="paged", lists=main(1)),
        (OURS[:1],),
        "LENGTH_MISMATCH",
        "lists[0]",
    ),
    Row(
        "a snapshot has more pages",
        lambda w: Restore(snapshot=w.snapshot, pool="paged", lists=main(3)),
        (OURS[:3],),
        "LENGTH_MISMATCH",
        "lists[0]",
    ),
    Row(
        "a snapshot's pages are another's",
        lambda w: Restore(snapshot=w.snapshot, pool="paged", lists=main(2)),
        (THEIRS[2:],),
        "NOT_OWNER",
        "lists[0].pages",
    ),
    Row(
        "a snapshot has another component",
        lambda w: Restore(snapshot=w.snapshot, pool="paged", lists=(PageList(component="swa", pages=2),)),
        (OURS[:2],),
        "UNKNOWN_COMPONENT",
        "lists[0].component",
    ),
    Row(
        "pages and none for a snapshot",
        lambda w: Restore(snapshot=w.snapshot, pool="paged", lists=main(2), allocate=True),
        (OURS[:2],),
        "INVALID_FIELD",
        "lists",
    ),
    Row(
        "a snapshot that is none",
        Restore(snapshot="0" * 32, pool="paged", lists=main(2)),
        (OURS[:2],),
        "UNKNOWN_SNAPSHOT",
        "snapshot",
    ),
    Row("another's pages are blocks", Store(pool="paged", hashes=HASHES, pages=2), (THEIRS[2:],), "NOT_OWNER", "pages"),
    Row("fewer pages than blocks", Store(pool="paged", hashes=HASHES, pages=1), ([1],), "LENGTH_MISMATCH", "pages"),
    Row("half a hash", Store(pool="paged", hashes=HASHES[:24], pages=2), (OURS[:2],), "INVALID_FIELD", "hashes"),
    Row(
        "one hash of two blocks",
        Store(pool="paged", hashes=HASHES[:16] * 2, pages=2),
        (OURS[:2],),
        "INVALID_FIELD",
        "hashes",
    ),
    Row(
        "half a parent",
        Store(pool="paged", hashes=HASHES, parent=b"x", pages=2),
        (OURS[:2],),
        "INVALID_FIELD",
        "parent",
    ),
    Row(
        "blocks of a space that is none",
        Store(pool="paged", hashes=HASHES, space="swa", pages=2),
        (OURS[:2],),
        "UNKNOWN_COMPONENT",
        "space",
    ),
    Row(
        "blocks fit another dtype",
        lambda w: Load(lease=w.lease, pool="bf16", pages=2),
        (OURS[:2],),
        "LAYOUT_MISMATCH",
        "pool",
    ),
    Row(
        "blocks fit another order of bytes",
        lambda w: Load(lease=w.lease, pool="nz", pages=2),
        (OURS[:2],),
        "LAYOUT_MISMATCH",
        "pool",
    ),
    Row(
        "a lease of more blocks",
        lambda w: Load(lease=w.lease, pool="paged", pages=3),
        (OURS[:3],),
        "LENGTH_MISMATCH",
        "pages",
    ),
    Row(
        "a lease of later blocks",
        lambda w: Load(lease=w.lease, pool="paged", pages=1, first_block=2),
        ([3],),
        "LENGTH_MISMATCH",
        "pages",
    ),
    Row(
        "blocks go to another's pages",
        lambda w: Load(lease=w.lease, pool="paged", pages=2),
        (THEIRS[2:],),
        "NOT_OWNER",
        "pages",
    ),
    Row(
        "blocks go to one page twice",
        lambda w: Load(lease=w.lease, pool="paged", pages=2),
        ([3, 3],),
        "DUPLICATE_PAGE",
        "pages",
    ),
    Row("a lease that is none", Load(lease=99, pool="paged", pages=2), (OURS[:2],), "UNKNOWN_LEASE", "lease"),
    Row(
        "a lease goes on in another pool",
        lambda w: Lookup(pool="bf16", hashes=HASHES, lease=w.lease),
        (),
        "INVALID_FIELD",
        "lease",
    ),
]

ROWS: Final = list(itertools.chain(SPEC_ROWS, PAGE_ROWS, PAIR_ROWS, EVENT_ROWS, TABLE_ROWS, TIER_ROWS))


@pytest.mark.parametrize("row", ROWS, ids=[row.claim for row in ROWS])
def test_a_claim_is_checked(harness: Harness, row: Row) -> None:
    before = held(harness)
    body = row.body(harness) if callable(row.body) else row.body
    with pytest.raises(KvferryError) as refused:
        harness.engine.ask(body, *row.ids, registered=row.registered)
    assert (refused.value.code, refused.value.field) == (row.code, row.field), refused.value
    assert held(harness) == before


def test_no_claim_is_there_twice() -> None:
    assert len({row.claim for row in ROWS}) == len(ROWS)
