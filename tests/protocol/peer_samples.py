"""One fixed message between daemons of every type, and the bytes it has on the wire: ``golden_peer_v2.json``.

Written anew with ``python -m tests.protocol.peer_samples``; see ``samples`` for when.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, TypeAlias

from kvferry.protocol.codec import PageIds
from kvferry.protocol.ids import NO_BOOT
from kvferry.protocol.peer_messages import (
    Announce,
    Confirm,
    Confirmed,
    Grant,
    HalfAbandoned,
    OpEnded,
    OpRequest,
    PeerBody,
    PeerEnvelope,
    PeerHello,
    PeerSend,
    PoolGone,
    ReceiveClosed,
    ReceiveName,
    Segment,
    SendRefused,
    SendWithdrawn,
    StepReady,
    Written,
    encode_peer,
)
from tests.protocol.samples import BOOT, ERROR, IDS, LISTS, MANIFEST, MODEL, REQUEST

GOLDEN: Final = Path(__file__).with_name("golden_peer_v2.json")
ADDRESS: Final = "tcp://192.0.2.7:7801"
TO_BOOT: Final = "ffeeddccbbaa99887766554433221100"
RECEIVE_REQUEST: Final = ReceiveName(REQUEST, "decode", 7, 2)

PeerMessage: TypeAlias = tuple[PeerEnvelope, tuple[PageIds, ...]]


def _said(body: PeerBody, *ids: PageIds, to_boot_id: str = TO_BOOT) -> PeerMessage:
    return PeerEnvelope(ADDRESS, BOOT, to_boot_id, body), ids


MESSAGES: Final[dict[str, PeerMessage]] = {
    "PEER_HELLO": _said(
        PeerHello(protocol_min=2, protocol_max=2, dialled="ipc:///run/kvferry/peer.sock", answers=True),
        to_boot_id=NO_BOOT,
    ),
    "ANNOUNCE": _said(Announce(receive_request=RECEIVE_REQUEST, deadline_ms=30_000)),
    "SEND_REQUEST": _said(
        PeerSend(
            receive_request=RECEIVE_REQUEST,
            send_request=3,
            chunk=1,
            pool="prefill",
            manifest=MANIFEST,
            region=1 << 40,
            lists=LISTS,
            last=False,
            first_token=17,
            payload=b"\x00\xff",
            steps=((4, 2), (6, 1)),
            ready=2,
            model=MODEL.public,
        ),
        *IDS,
    ),
    "STEP_READY": _said(StepReady(receive_request=RECEIVE_REQUEST, send_request=3, chunk=1, ready=2)),
    "SEND_REFUSED": _said(SendRefused(receive_request=RECEIVE_REQUEST, send_request=3, error=ERROR)),
    "SEND_WITHDRAWN": _said(SendWithdrawn(receive_request=RECEIVE_REQUEST, send_request=3, error=ERROR)),
    "RECEIVE_CLOSED": _said(
        ReceiveClosed(receive_request=RECEIVE_REQUEST, error=ERROR, moved=((3, 4096, 2), (4, 0, 0)), unmet=1)
    ),
    "OP_REQUEST": _said(
        OpRequest(
            receive_request=RECEIVE_REQUEST,
            send_request=3,
            op=9,
            chunk=1,
            segments=(Segment("main", 1, 2, (0, 3), ((0, 0), (1, 2))),),
        ),
    ),
    "GRANT": _said(
        Grant(
            op=9,
            grant=11,
            segment=1,
            first=2,
            stop=4,
            session="192.0.2.7:15001",
            address=1 << 46,
            size_bytes=1 << 22,
            runs=((1 << 46, 1 << 21), ((1 << 46) + (1 << 22), 1 << 21)),
        )
    ),
    "WRITTEN": _said(Written(grant=11, checksum=(1 << 64) - 1, error=ERROR, may_still_land=True)),
    "OP_ENDED": _said(OpEnded(op=9)),
    "CONFIRM": _said(Confirm(receive_request=RECEIVE_REQUEST, send_request=3, op=9)),
    "CONFIRMED": _said(Confirmed(op=9, error=ERROR)),
    "HALF_ABANDONED": _said(HalfAbandoned(tenant=7, request_id=REQUEST, direction="send", error=ERROR)),
    "POOL_GONE": _said(PoolGone(tenant=7, pool="prefill", region=5)),
}


def as_hex() -> dict[str, list[str]]:
    """Return the frames of every sample, in hexadecimal digits."""
    return {name: [bytes(one).hex() for one in encode_peer(*message)] for name, message in MESSAGES.items()}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(as_hex(), indent=1) + "\n")
