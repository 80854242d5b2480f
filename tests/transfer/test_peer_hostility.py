"""A peer that says anything at all: it is refused with a typed error or taken at its word, and nothing else breaks.

What a peer can spoil is its own transfers. The daemon goes on: pages are held as they must, and all of it ends.
"""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.transfer.peer_transfers import check_manifest
from kvferry.pools.layouts import manifest_of
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import AccessDeniedError, GeometryMismatchError, InvalidFieldError, KvferryError
from kvferry.protocol.manifests import Manifest, MhaSpec
from kvferry.protocol.peer_messages import PeerBody, PeerHeartbeat, PeerHello, PeerSend, Segment
from kvferry.protocol.session_stream import RegionRequest
from tests.kit.devices import DEVICE
from tests.kit.peers import MEETING_PAGES, Meeting, Transfer
from tests.protocol.bodies import ids_for, structs_of

BODIES: Final = tuple(kind for kind in get_args(PeerBody) if kind not in {PeerHello, PeerHeartbeat})
NEAR: Final = st.integers(0, 3)


@st.composite
def manifests(draw: st.DrawFn, known: Manifest) -> Manifest:
    """Draw a manifest like one that is known, with one number of one entry changed, or none."""
    entries = list(known.entries)
    at = draw(st.integers(0, len(entries) - 1))
    field = draw(
        st.sampled_from(["base", "pages", "page_bytes", "page_tokens", "heads", "layer", "dtype", "component"])
    )
    value = draw(st.sampled_from(["uint8", "main", "draft"]) if field in {"dtype", "component"} else st.integers(1, 99))
    if draw(st.booleans()):
        entries[at] = msgspec.structs.replace(entries[at], **{field: value})
    return msgspec.structs.replace(known, entries=tuple(entries))


LISTS: Final = st.lists(
    st.builds(
        PageList,
        component=st.sampled_from(["main", "main", "main", "draft"]),
        first_page=st.sampled_from([0, 0, 0, 1, None, (1 << 62)]),
        pages=st.integers(0, MEETING_PAGES + 1),
        tokens=st.sampled_from([None, None, 0, 5, 8]),
    ),
    min_size=1,
    max_size=2,
).map(tuple)
PARTS: Final = st.lists(
    st.builds(
        Segment,
        component=st.sampled_from(["main", "draft"]),
        start=NEAR,
        pages=NEAR,
        entries=st.lists(st.integers(0, 4), max_size=3).map(tuple),
        heads=st.lists(st.tuples(NEAR, NEAR), max_size=3).map(tuple),
    ),
    min_size=1,
    max_size=2,
).map(tuple)


@st.composite
def sayings(draw: st.DrawFn, meeting: Meeting) -> tuple[PeerBody, tuple[PageIds, ...]]:
    """Draw a message; mostly about what there is."""
    kind = draw(st.sampled_from([*BODIES, PeerSend]))
    body: Any = draw(structs_of(kind))
    fields = set(body.__struct_fields__)
    near: dict[str, Any] = {name: draw(NEAR) for name in fields & {"send_request", "chunk", "op", "credit", "ready"}}
    near |= {name: draw(st.sampled_from(meeting.names)) for name in fields & {"receive_request"}}
    near |= {name: draw(st.integers(0, 1 << 20)) for name in fields & {"deadline_ms"}}
    near |= {name: draw(LISTS) for name in fields & {"lists"}}
    near |= {name: draw(PARTS) for name in fields & {"segments"}}
    if kind is PeerSend:
        near["manifest"] = draw(st.none() | manifests(meeting.manifest))
        near["pool"] = draw(st.sampled_from(["prefill", "decode", "other"]))
        near["steps"] = draw(st.lists(st.tuples(NEAR, NEAR), max_size=2).map(tuple))
    if draw(st.integers(0, 9)) or "deadline_ms" in near:
        body = msgspec.structs.replace(body, **near)
    ids = draw(ids_for(body))
    if draw(st.integers(0, 3)):
        ids = tuple(np.arange(1, 1 + len(one)) for one in ids)
    return body, ids


@DEVICE.examples(40)
@given(data=st.data(), way=st.sampled_from(["ipc", "tcp"]), sent=st.booleans())
def test_whatever_a_peer_says_the_daemon_goes_on(
    data: st.DataObject, way: Literal["ipc", "tcp"], *, sent: bool
) -> None:
    meeting = Meeting(way, sent=sent)
    for _ in range(data.draw(st.integers(4, 12))):
        body, ids = data.draw(sayings(meeting))
        try:
            meeting.node.links.told.on_message(meeting.speaker, body, ids)
        except KvferryError:
            continue
        finally:
            meeting.node.check()
    meeting.harness.run()
    meeting.harness.pass_time(1e12)
    meeting.harness.run()
    meeting.harness.check_nothing_left()


MANIFEST: Final = manifest_of(MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=2, head_dim=8, dtype="float16"))


@pytest.mark.parametrize(
    ("error", "field", "changes"),
    [
        (GeometryMismatchError, ".page_bytes", {"dtype": "float32"}),
        (InvalidFieldError, ".heads", {"head_start": 1}),
        (InvalidFieldError, ".scales", {"scales": (0.5, 0.5, 0.5)}),
        (InvalidFieldError, ".scales", {"scales": (float("inf"), 0.5)}),
        (InvalidFieldError, "", {"base": MANIFEST.region_bytes}),
        (InvalidFieldError, "", {"component": "draft"}),
    ],
)
def test_an_entry_that_contradicts_itself_or_its_manifest(
    error: type[KvferryError], field: str, changes: dict[str, Any]
) -> None:
    check_manifest(MANIFEST)
    first, *others = MANIFEST.entries
    wrong = msgspec.structs.replace(first, **changes)
    with pytest.raises(error) as refused:
        check_manifest(msgspec.structs.replace(MANIFEST, entries=(*others, wrong)))
    assert refused.value.field == f"manifest.entries[{len(others)}]{field}"


def region_asked_for(transfer: Transfer) -> RegionRequest:
    (send_request,) = transfer.home.state_machine.endpoints.remote_sends.values()
    assert send_request.origin is not None
    (pool,) = transfer.source.pools
    return RegionRequest(
        tenant=pool.tenant,
        pool=pool.name,
        region=pool.region.identity,
        send_request=send_request.origin.send_request,
        key=send_request.region_key,
    )


def test_memory_is_for_a_home_of_this_host_by_the_key_of_an_open_send_request() -> None:
    mapped, by_slots = Transfer("ipc"), Transfer("tcp")
    for transfer in (mapped, by_slots):
        transfer.meet()
    asked, elsewhere = region_asked_for(mapped), region_asked_for(by_slots)
    assert not elsewhere.key, "a home on another host is told none"
    peers = mapped.source.state_machine.peers
    others: list[dict[str, object]] = [
        {"key": ""}, {"key": "0" * 32}, {"send_request": 99}, {"region": 1}, {"pool": "other"}, {"tenant": 99}
    ]  # fmt: skip
    wrong = [(peers, msgspec.structs.replace(asked, **other)) for other in others]
    for source, one in [*wrong, (by_slots.source.state_machine.peers, elsewhere)]:
        with pytest.raises(AccessDeniedError) as refused:
            source.redeem(one)
        assert refused.value.field == "key"
        peers.redeem(asked)  # as often as it likes: it may have dropped what it has mapped
    mapped.succeeds()
    with pytest.raises(AccessDeniedError):
        peers.redeem(asked)
