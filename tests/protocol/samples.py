"""One fixed message of every type, and the bytes it has on the wire: ``golden_v2.json``.

The golden bytes change only with the protocol: when a type or a field is added (at the tail, with a default), write
them anew with ``python -m tests.protocol.samples`` and look at the difference; old lines must not change, unless
PROTOCOL_MAX is raised and a new file begun.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, TypeAlias

import msgspec
import numpy as np

from kvferry.protocol.base import Busy, DeviceEvent, ErrorReply, PageList, ReplyBody, RequestBody
from kvferry.protocol.codec import PageIds, encode
from kvferry.protocol.envelope import Batch, Batched, Event, Reply, Request
from kvferry.protocol.errors import ErrorInfo
from kvferry.protocol.events import Finished, Matched, Settled
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.limits import Limits
from kvferry.protocol.manifests import (
    Component,
    DraftSpec,
    Entry,
    HybridSwaSpec,
    MambaSpec,
    Manifest,
    MhaSpec,
    MlaSpec,
    PoolSpec,
)
from kvferry.protocol.pool_messages import (
    Allocate,
    Allocated,
    AttachPool,
    CreatePool,
    DeletePool,
    Free,
    Freed,
    PoolAttached,
    PoolCreated,
    PoolDeleted,
    PoolRegistered,
    RegisteredArrays,
    RegisterPool,
)
from kvferry.protocol.session_messages import (
    EventsOpened,
    Hello,
    OpenEvents,
    Ping,
    Pong,
    PoolStatus,
    SessionStatus,
    Status,
    StatusReport,
    TransferStatus,
    Welcome,
)
from kvferry.protocol.session_stream import (
    EventsFollow,
    MemoryFollows,
    RegionFollows,
    SessionOpen,
    SessionOpened,
    SessionRefused,
    SharedEvents,
    ShareFollows,
    TablesFollow,
    TorchShare,
    VmmShare,
    pack,
)
from kvferry.protocol.table_messages import (
    CreateTables,
    DeleteTables,
    TablesCreated,
    TablesDeleted,
    TablesUpdated,
    UpdateTables,
)
from kvferry.protocol.transfer_messages import (
    Abandon,
    Abandoned,
    Accepted,
    Cancel,
    Cancelled,
    LayerStep,
    Receive,
    Result,
    Send,
    TransferResult,
)
from tests.protocol import tier_samples

GOLDEN: Final = Path(__file__).with_name("golden_v2.json")
BOOT: Final = "00112233445566778899aabbccddeeff"
REQUEST: Final = "ffeeddccbbaa99887766554433221100"
ERROR: Final = ErrorInfo(code="PEER_LOST", detail="the engine died", retryable=True, field="lists[0]", remedy="again")
SPEC: Final = MhaSpec(layers=2, first_layer=4, tokens=256, page_size=128, kv_heads=2, head_dim=8, dtype="float16")
ENTRY: Final = Entry(
    component="main",
    role="k",
    layer=4,
    base=0,
    pages=3,
    page_bytes=4096,
    page_tokens=128,
    head_start=0,
    heads=2,
    total_heads=2,
    dtype="float16",
    shape=(3, 128, 2, 8),
    format="ND",
    scales=(0.5, 0.25),
)
MANIFEST: Final = Manifest(
    pages=3,
    region_bytes=12288,
    layout_digest="0" * 32,
    entries=(ENTRY,),
    components=(Component(name="main", space="main", pages=3),),
)
MODEL: Final = ModelIdentity(name="Qwen/Qwen3-8B", revision="9c925d6", adapter="sql", salt="pepper")
DRAFT: Final = DraftSpec(
    layers=1,
    kv_heads=2,
    head_start=2,
    total_heads=8,
    head_dim=16,
    v_head_dim=8,
    kv_lora_rank=32,
    qk_rope_head_dim=4,
    index_head_dim=16,
    replicas=2,
    dtype="float16",
    k_scale=0.5,
    v_scale="page_head",
)
SPECS: Final[dict[str, PoolSpec]] = {
    "mha": MhaSpec(
        layers=2,
        first_layer=4,
        tokens=256,
        page_size=128,
        kv_heads=2,
        head_start=2,
        total_heads=8,
        head_dim=16,
        v_head_dim=8,
        dtype="float16",
        view="fia",
        replicas=2,
        draft=DRAFT,
        optional_components=("draft", "main"),
        k_scale=(0.5, (0.25, 0.125)),
        v_scale="page",
        groups=((3,), (4, 5)),
    ),
    "mla": MlaSpec(
        layers=3,
        first_layer=4,
        tokens=256,
        page_size=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        index_head_dim=128,
        index_layers=(4, 6),
        index_scale=True,
        index_dtype="int8",
        dtype="float8_e4m3fn",
        packed="ascend",
        joined=True,
        view="nz",
        replicas=8,
        draft=DRAFT,
        optional_components=("draft", "main"),
        k_scale=(0.5, 0.25, 0.125),
        groups=((4, 6), (5,)),
    ),
    "hybrid_swa": HybridSwaSpec(
        full_layers=(5, 11),
        window_layers=(4, 6),
        tokens=256,
        window_tokens=512,
        window=100,
        page_size=128,
        kv_heads=2,
        head_start=2,
        total_heads=8,
        head_dim=16,
        v_head_dim=8,
        window_kv_heads=1,
        window_head_start=1,
        window_total_heads=4,
        window_head_dim=32,
        window_v_head_dim=16,
        window_replicas=3,
        dtype="float16",
        view="nz",
        replicas=2,
        draft=DRAFT,
        optional_components=("draft", "swa"),
        k_scale=0.5,
        v_scale=(0.5, 0.25),
        window_k_scale="page_head",
        window_v_scale=((0.5,), (0.25,)),
    ),
    "mamba": MambaSpec(
        state_layers=(0, 1),
        slots=9,
        conv_window=3,
        conv_channels=64,
        conv_dtype="float16",
        ssm_shape=(4, 8, 16),
        ssm_dtype="bfloat16",
        state_head_start=4,
        state_total_heads=8,
        attention_layers=(2,),
        tokens=256,
        page_size=128,
        kv_heads=2,
        head_start=2,
        total_heads=8,
        head_dim=16,
        v_head_dim=8,
        dtype="bfloat16",
        view="fia",
        replicas=2,
        draft=DRAFT,
        optional_components=("draft", "mamba"),
        k_scale="page",
        v_scale=((0.5, 0.25),),
    ),
}
"""A spec of every kind with every field. What they say is nonsense: it is their bytes that count."""

FINISHED: Final = Finished(
    request_id=REQUEST,
    pool="decode",
    direction="receive",
    generation=2,
    error=None,
    first_token=17,
    payload=b"\x00\xff",
    pages=3,
    moved_bytes=12288,
    skipped_source_entries=1,
    skipped_source_pages=2,
    waited_us=1000,
    moved_us=250,
)
SETTLED: Final = Settled(request_id=REQUEST, pool="decode", direction="receive", generation=2)
REPORT: Final = StatusReport(
    daemon_version="0.1.0",
    pid=4242,
    uptime_ms=1500,
    draining=False,
    pools=(
        PoolStatus(
            pool="decode",
            tenant=1000,
            layout_digest="0" * 32,
            region_bytes=12288,
            page_bytes=4096,
            pages=2,
            free=1,
            busy=1,
            model=MODEL.public,
        ),
    ),
    sessions=(
        SessionStatus(
            session=1,
            name="decode-0",
            tenant=1000,
            pid=4243,
            pages=1,
            transfers=1,
            unacknowledged_events=0,
            connected=True,
        ),
    ),
    transfers=(
        TransferStatus(
            request=REQUEST,
            direction="receive",
            pool="decode",
            state="open",
            age_ms=3,
            pages=1,
            arrived=0,
            waits_for="1 of 1 sources: no SEND yet",
            request_id=REQUEST,
        ),
    ),
    counters={"messages.received": 9},
)
LISTS: Final = (PageList(component="main", first_page=1, pages=2, tokens=200), PageList(component="draft", pages=1))
IDS: Final = (np.array([5, 1 << 40], np.int64), np.array([-1], np.int64))

Message: TypeAlias = tuple[Request | Reply | Event, tuple[PageIds, ...]]


def _request(body: RequestBody, *ids: PageIds) -> Message:
    return Request(7, BOOT, b"0123456789abcdef", 30_000, 12, body), ids


def _reply(body: ReplyBody, *ids: PageIds) -> Message:
    return Reply(7, BOOT, body), ids


MESSAGES: Final[dict[str, Message]] = {
    "HELLO": _request(Hello(protocol_min=2, protocol_max=2, client="prefill-0")),
    "PING": _request(Ping()),
    "OPEN_EVENTS": _request(OpenEvents()),
    "STATUS": _request(Status()),
    "CREATE_POOL": _request(CreatePool(pool="decode", spec=SPEC, model=MODEL)),
    "ATTACH_POOL": _request(AttachPool(pool="decode", layout_digest="0" * 32)),
    "REGISTER_POOL": _request(
        RegisterPool(
            pool="decode",
            spec=SPEC,
            device="npu:0",
            arrays=(
                RegisteredArrays(component="main", role="k"),
                RegisteredArrays(component="main", role="v", layer=4, offset_bytes=1 << 40),
            ),
            model=MODEL,
        )
    ),
    "DELETE_POOL": _request(DeletePool(pool="decode")),
    "ALLOCATE": _request(Allocate(pool="decode", count=3)),
    "FREE": _request(Free(pool="decode", pages=2), IDS[0]),
    "CREATE_TABLES": _request(
        CreateTables(
            tables="graph",
            pool="decode",
            max_batch=8,
            max_context_tokens=32_768,
            draft_tokens=16,
            request_row_tokens=33_000,
            captured=(1, 4, 8),
            component="full",
            window=1024,
            window_component="window",
            device_pid=4243,
        )
    ),
    "UPDATE_TABLES": _request(
        UpdateTables(
            tables="graph",
            batch=2,
            extra_tokens=3,
            entries=1,
            rows=1,
            pages=2,
            released=1,
            bound=1,
            after=DeviceEvent(event=2, value=5),
        ),
        np.array([129, 257, 0, 1, 9, 1, 2, 5, 6, 7, 4, 8], np.int64),
    ),
    "DELETE_TABLES": _request(DeleteTables(tables="graph")),
    "SEND": _request(
        Send(
            request_id=REQUEST,
            pool="prefill",
            lists=LISTS,
            last=False,
            destinations=2,
            first_token=17,
            payload=b"\x00\xff",
            steps=(LayerStep(first_layer=4, layers=2, event=1, value=9),),
        ),
        *IDS,
    ),
    "RECEIVE": _request(Receive(request_id=REQUEST, pool="decode", lists=LISTS, sources=2, any_model=True), *IDS),
    "CANCEL": _request(Cancel(request_id=REQUEST, pool="decode", direction="receive")),
    "ABANDON": _request(
        Abandon(request_id=REQUEST, direction="send", daemons=("tcp://192.0.2.7:7801",), reason="aborted")
    ),
    "RESULT": _request(Result(request_id=REQUEST, pool="decode", direction="receive")),
    "WELCOME": _reply(Welcome(protocol=1, daemon_version="0.1.0", features=("transfers.local",), limits=Limits())),
    "PONG": _reply(Pong()),
    "EVENTS_OPENED": _reply(EventsOpened(slots=1024)),
    "STATUS_REPORT": _reply(REPORT),
    "POOL_CREATED": _reply(PoolCreated(pool="decode", created=True, manifest=MANIFEST)),
    "POOL_ATTACHED": _reply(PoolAttached(pool="decode", manifest=MANIFEST, model=MODEL.public)),
    "POOL_REGISTERED": _reply(PoolRegistered(pool="decode", manifest=MANIFEST)),
    "POOL_DELETED": _reply(PoolDeleted(pool="decode")),
    "TABLES_CREATED": _reply(
        TablesCreated(
            tables="graph",
            device="npu:0",
            columns=258,
            page_size=128,
            block_tables=0,
            block_tables_swa=8704,
            seq_lens=17408,
            region_bytes=17920,
            host_bytes=64,
        )
    ),
    "TABLES_UPDATED": _reply(TablesUpdated(sequence=6, replayed_rows=4)),
    "TABLES_DELETED": _reply(TablesDeleted(tables="graph")),
    "BATCH": _request(
        Batch(requests=(Free(pool="decode", pages=2), Allocate(pool="decode", count=1)), deadlines_ms=(0, 1000)),
        IDS[0],
    ),
    "BATCHED": _reply(
        Batched(results=(Freed(freed=2, deferred=0), ErrorReply(error=ERROR), Allocated(pages=2))), IDS[0]
    ),
    "ALLOCATED": _reply(Allocated(pages=2), IDS[0]),
    "FREED": _reply(Freed(freed=2, deferred=1)),
    "ACCEPTED": _reply(Accepted(generation=2, skipped_source_entries=1, skipped_source_pages=2)),
    "ABANDONED": _reply(Abandoned(failed=2)),
    "CANCELLED": _reply(Cancelled(was_finished=True)),
    "TRANSFER_RESULT": _reply(TransferResult(state="settled", finished=FINISHED, settled=SETTLED)),
    "ERROR": _reply(ErrorReply(error=ERROR)),
    "BUSY": _reply(Busy(retry_after_ms=50, detail="256 requests of the session are in flight")),
    "FINISHED": (Event(3, BOOT, FINISHED), ()),
    "MATCHED": (
        Event(2, BOOT, Matched(request_id=REQUEST, pool="prefill", direction="send", matched=1, destinations=2)),
        (),
    ),
    "SETTLED": (Event(4, BOOT, SETTLED), ()),
    **{name: _request(body, *IDS[: len(body.page_counts())]) for name, body in tier_samples.REQUESTS.items()},
    **{name: _reply(body) for name, body in tier_samples.REPLIES.items()},
    "TIER_DONE": (Event(5, BOOT, tier_samples.TIER_DONE), IDS),
}

SESSION_FRAMES: Final[
    dict[
        str,
        SessionOpen
        | SessionOpened
        | SessionRefused
        | RegionFollows
        | EventsFollow
        | ShareFollows
        | MemoryFollows
        | TablesFollow,
    ]
] = {
    "OPEN": SessionOpen(
        protocol_min=2, protocol_max=2, name="prefill-0", instance="engine-0", keep=True, resume=b"0123456789abcdef"
    ),
    "OPENED": SessionOpened(session=1, secret=b"0123456789abcdef", boot_id=BOOT, resumed=True, last_message=9),
    "REFUSED": SessionRefused(error=ERROR),
    "REGION": RegionFollows(message_id=7, pool="decode"),
    "EVENTS": EventsFollow(message_id=7),
    "SHARE": ShareFollows(
        message_id=7,
        shares=(
            VmmShare(handle=1 << 40, size_bytes=2 << 20),
            TorchShare(
                handle=b"handle",
                storage_bytes=2 << 20,
                storage_offset_bytes=512,
                ref_counter=b"/torch_1",
                ref_counter_offset=3,
                event=b"event",
                event_sync=True,
                offset_bytes=64,
            ),
        ),
        events=SharedEvents(handles=(b"first", b"second")),
    ),
    "MEMORY": MemoryFollows(message_id=7),
    "TABLES": TablesFollow(
        message_id=7,
        share=VmmShare(handle=1 << 40, size_bytes=2 << 20),
        events=SharedEvents(handles=(b"updated",)),
    ),
}


def as_hex() -> dict[str, list[str]]:
    """Return the frames of every sample, in hexadecimal digits."""
    messages = {name: [bytes(one).hex() for one in encode(*message)] for name, message in MESSAGES.items()}
    frames = {f"session {name}": [pack(frame).hex()] for name, frame in SESSION_FRAMES.items()}
    return messages | frames | {f"spec {kind}": [msgspec.msgpack.encode(spec).hex()] for kind, spec in SPECS.items()}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(as_hex(), indent=1) + "\n")
