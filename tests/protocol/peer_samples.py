"""One fixed message between daemons of every type, and the bytes it has on the wire: ``golden_peer_v1.json``.

Written anew with ``python -m tests.protocol.peer_samples``; see ``samples`` for when.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, TypeAlias

from kvferry.protocol.codec import PageIds
from kvferry.protocol.ids import NO_BOOT
from kvferry.protocol.peer_codec import encode_peer
from kvferry.protocol.peer_messages import (
    Announce,
    Confirm,
    Confirmed,
    Grant,
    Landed,
    OfferRefused,
    OfferWithdrawn,
    Part,
    PeerBody,
    PeerEnvelope,
    PeerHello,
    PeerOffer,
    Piece,
    PieceOver,
    PoolGone,
    RoomClosed,
    RoomName,
    StepReady,
)
from tests.protocol.samples import BOOT, ERROR, IDS, LISTS, MANIFEST, REQUEST

GOLDEN: Final = Path(__file__).with_name("golden_peer_v1.json")
ADDRESS: Final = "tcp://192.0.2.7:7801"
TO_BOOT: Final = "ffeeddccbbaa99887766554433221100"
ROOM: Final = RoomName(REQUEST, "decode", 7, 2)

PeerMessage: TypeAlias = tuple[PeerEnvelope, tuple[PageIds, ...]]


def _said(body: PeerBody, *ids: PageIds, to_boot_id: str = TO_BOOT) -> PeerMessage:
    return PeerEnvelope(ADDRESS, BOOT, to_boot_id, body), ids


MESSAGES: Final[dict[str, PeerMessage]] = {
    "PEER_HELLO": _said(
        PeerHello(protocol_min=1, protocol_max=1, dialled="ipc:///run/kvferry/peer.sock", answers=True),
        to_boot_id=NO_BOOT,
    ),
    "ANNOUNCE": _said(Announce(room=ROOM, deadline_ms=30_000)),
    "OFFER": _said(
        PeerOffer(
            room=ROOM,
            offer=3,
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
        ),
        *IDS,
    ),
    "STEP_READY": _said(StepReady(room=ROOM, offer=3, chunk=1, ready=2)),
    "OFFER_REFUSED": _said(OfferRefused(room=ROOM, offer=3, error=ERROR)),
    "OFFER_WITHDRAWN": _said(OfferWithdrawn(room=ROOM, offer=3, error=ERROR)),
    "ROOM_CLOSED": _said(RoomClosed(room=ROOM, error=ERROR, moved=((3, 4096, 2), (4, 0, 0)), unmet=1)),
    "PIECE": _said(
        Piece(room=ROOM, offer=3, piece=9, chunk=1, parts=(Part("main", 1, 2, (0, 3), ((0, 0), (1, 2))),)),
    ),
    "GRANT": _said(
        Grant(
            piece=9,
            grant=11,
            part=1,
            first=2,
            stop=4,
            session="192.0.2.7:15001",
            address=1 << 46,
            size_bytes=1 << 22,
            runs=((1 << 46, 1 << 21), ((1 << 46) + (1 << 22), 1 << 21)),
        )
    ),
    "LANDED": _said(Landed(grant=11, checksum=(1 << 64) - 1, error=ERROR, may_still_land=True)),
    "PIECE_OVER": _said(PieceOver(piece=9)),
    "CONFIRM": _said(Confirm(room=ROOM, offer=3, piece=9)),
    "CONFIRMED": _said(Confirmed(piece=9, error=ERROR)),
    "POOL_GONE": _said(PoolGone(tenant=7, pool="prefill", region=5)),
}


def as_hex() -> dict[str, list[str]]:
    """Return the frames of every sample, in hexadecimal digits."""
    return {name: [bytes(one).hex() for one in encode_peer(*message)] for name, message in MESSAGES.items()}


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(as_hex(), indent=1) + "\n")
