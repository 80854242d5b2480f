"""What another tenant's request gets that names something of ours: the same answer as for what does not exist.

The tables have a row for each request and each event of the protocol: one that is added needs a row here.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple, get_args

import msgspec
import pytest

from kvferry.clients import Client
from kvferry.protocol.base import Body
from kvferry.protocol.envelope import REQUEST_TYPES
from kvferry.protocol.events import EventBody, Finished, Matched, Settled, TierDone, Together
from kvferry.protocol.limits import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.protocol.pool_messages import PoolCreated
from kvferry.protocol.requests import tag_of
from kvferry.protocol.session_messages import StatusReport
from kvferry.protocol.tier_messages import CacheChanges, CacheListed, Found, Offloading, OperationStarted
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.scraping import get
from tests.kit.users import SOMEBODY, Witness, as_user

CONFIG: Final = "[tiers]\nhost_bytes = 4194304\n"
PAGES: Final = 16
SPEC: Final = {
    "kind": "mha", "layers": 1, "tokens": 4 * PAGES, "page_size": 4, "kv_heads": 1, "head_dim": 4, "dtype": "float32",
}  # fmt: skip
MODEL: Final = {"name": "a-model", "revision": "1"}
SHARED: Final = "shared-name"
"""A pool of this name each of the two has."""


class Names(NamedTuple):
    """What a request may name: of ours, or of nobody's."""

    pool: str
    tables: str
    snapshot: str
    awaited: str
    sent: str
    blocks: str
    operation: int
    lease: int


def block(name: bytes) -> str:
    return base64.b64encode(name).decode()


NOBODYS: Final = Names(
    "nobodys-pool", "nobodys-tables", "0" * 32, "1" * 32, "2" * 32, block(b"nobodys block :)"), 7007, 9009
)


def transfer(request_id: str, page: int, **more: object) -> dict[str, Any]:
    return {"request_id": request_id, "pool": SHARED, "lists": [{"pages": [page]}], **more}


ROWS: Final[dict[str, Callable[[Names], dict[str, Any]]]] = {
    "HELLO": lambda _: {"protocol_min": PROTOCOL_MIN, "protocol_max": PROTOCOL_MAX},
    "PING": lambda _: {},
    "STATUS": lambda _: {"holders": True, "recent": True, "configuration": True},
    "VERIFY": lambda _: {},
    "UPGRADE": lambda _: {},
    "DRAIN": lambda _: {},
    "LOG": lambda _: {},
    "OPEN_EVENTS": lambda _: {},
    "ATTACH_POOL": lambda its: {"pool": its.pool},
    "REGISTER_POOL": lambda its: {
        "pool": its.pool, "spec": SPEC, "device": "npu:77", "arrays": [{"component": "main", "role": "k"}],
    },
    "ALLOCATE": lambda its: {"pool": its.pool, "count": 1},
    "FREE": lambda its: {"pool": its.pool, "pages": [1]},
    "LIST_OWNED": lambda its: {"pool": its.pool},
    "CREATE_TABLES": lambda its: {"tables": its.tables, "pool": its.pool, "max_batch": 1, "max_context_tokens": 4},
    "UPDATE_TABLES": lambda its: {"tables": its.tables, "batch": 1, "ids": [5]},
    "DELETE_TABLES": lambda its: {"tables": its.tables},
    "OFFLOAD": lambda its: {"pool": its.pool, "lists": [{"pages": [1]}]},
    "RESTORE": lambda its: {"pool": SHARED, "snapshot": its.snapshot, "lists": [{"pages": [1]}]},
    "DROP_SNAPSHOT": lambda its: {"snapshot": its.snapshot},
    "SNAPSHOTS": lambda _: {},
    "CANCEL_OPERATION": lambda its: {"operation": its.operation},
    "LOOKUP": lambda its: {"pool": SHARED, "hashes": its.blocks},
    "LOAD": lambda its: {"lease": its.lease, "pool": SHARED, "pages": [1]},
    "UNPIN": lambda its: {"lease": its.lease},
    "CACHE_LIST": lambda _: {},
    "CACHE_PIN": lambda its: {"hashes": its.blocks, "pool": SHARED},
    "CACHE_EVICT": lambda its: {"hashes": its.blocks, "pool": SHARED},
    "CACHE_EVENTS": lambda _: {"cursor": 1},
    "ABANDON": lambda its: {"request_id": its.awaited, "direction": "send"},
    "CANCEL": lambda its: {"request_id": its.sent, "pool": SHARED, "direction": "send"},
    "RESULT": lambda its: {"request_id": its.awaited, "pool": SHARED, "direction": "receive"},
    "BATCH": lambda its: {
        "requests": [
            {"type": "ALLOCATE", "pool": its.pool, "count": 1}, {"type": "DROP_SNAPSHOT", "snapshot": its.snapshot},
        ],
    },
    "SEND": lambda its: transfer(its.awaited, 2),
    "RECEIVE": lambda its: transfer(its.sent, 3 + 2 * (its is NOBODYS)),
    "STORE": lambda its: {"pool": SHARED, "hashes": its.blocks, "pages": [4]},
    "DELETE_POOL": lambda its: {"pool": its.pool},
    "CREATE_POOL": lambda its: {"pool": its.pool, "spec": SPEC},
}  # fmt: skip
"""What each request says of something that has these names; in an order in which none finds what one before has made.
"""

EVENT_ROWS: Final[dict[str, Callable[[list[Body]], bool]]] = {
    "MATCHED": lambda told: any(isinstance(one, Matched) for one in told),
    "FINISHED": lambda told: any(isinstance(one, Finished) for one in told),
    "SETTLED": lambda told: any(isinstance(one, Settled) or getattr(one, "settled", False) for one in told),
    "TIER_DONE": lambda told: any(isinstance(one, TierDone) for one in told),
    "EVENTS": lambda told: len(told) > 1,
}
"""Whether an event of each kind is among those that a session was told."""


class Ours(NamedTuple):
    """Our session, which has something of each kind."""

    session: Witness
    names: Names


@pytest.fixture
def daemon() -> Iterator[Daemon]:
    """Run a daemon for a test: what each of the two has outlives them."""
    with kit.daemon(CONFIG) as one:
        yield one


@pytest.fixture
def ours(daemon: Daemon) -> Iterator[Ours]:
    with Witness.of(daemon, SOMEBODY + 1, "our-session") as we:
        assert isinstance(we.say("CREATE_POOL", pool=SHARED, spec=SPEC, model=MODEL), PoolCreated)
        assert isinstance(we.say("CREATE_POOL", pool="our-pool", spec=SPEC), PoolCreated)
        we.say("ALLOCATE", pool=SHARED, count=PAGES)
        we.say("CREATE_TABLES", tables="our-tables", pool=SHARED, max_batch=1, max_context_tokens=4)
        offload = we.say("OFFLOAD", pool=SHARED, lists=[{"pages": [1]}])
        assert isinstance(offload, Offloading)
        blocks = block(b"our hashed block")
        we.say("STORE", pool=SHARED, hashes=blocks, pages=[2])
        we.until(TierDone, 2)
        found = we.say("LOOKUP", pool=SHARED, hashes=blocks)
        assert isinstance(found, Found)
        assert found.blocks == 1
        waits = we.say("RESTORE", pool=SHARED, snapshot=offload.snapshot, allocate=True)
        assert isinstance(waits, OperationStarted)
        of_transfers = ("a" * 32, "b" * 32)
        names = Names("our-pool", "our-tables", offload.snapshot, *of_transfers, blocks, waits.operation, found.lease)
        we.say("RECEIVE", **transfer(names.awaited, 3))
        we.say("SEND", **transfer(names.sent, 4, payload=block(b"our payload")))
        we.say("SEND", **transfer("c" * 32, 5))
        we.say("RECEIVE", **transfer("c" * 32, 6))
        yield Ours(we, names)


@pytest.fixture
def foreign(daemon: Daemon) -> Iterator[Witness]:
    """Return another tenant's session, with a pool like one of ours, and pages of the same numbers."""
    with Witness.of(daemon, SOMEBODY, "foreign") as one:
        one.say("CREATE_POOL", pool=SHARED, spec=SPEC, model=MODEL)
        one.say("ALLOCATE", pool=SHARED, count=8)
        yield one


def as_text(body: Body, names: Names) -> str:
    """Return a reply with a word for each name in place of the name, but for numbers that count everybody's."""
    if isinstance(body, OperationStarted):
        body = msgspec.structs.replace(body, operation=0)
    text = json.dumps(msgspec.to_builtins(body), sort_keys=True)
    for field, name in names._asdict().items():
        text = text.replace(str(name), f"<{field}>")
    return text


def what_is_ours(ours: Ours, report: StatusReport) -> object:
    """Return what we have, without times."""
    listed = ours.session.say("CACHE_LIST")
    assert isinstance(listed, CacheListed)
    return (
        {(one.pool, one.free, one.busy) for one in report.pools if one.tenant == SOMEBODY + 1},
        {(one.request, one.direction, one.state, one.waits_for) for one in report.transfers if one.tenant > SOMEBODY},
        {(one.operation, one.kind) for one in report.operations},
        {(one.tables, one.updates) for one in report.tables},
        listed.blocks,
    )


def test_there_is_a_row_for_each_request_and_each_event() -> None:
    assert ROWS.keys() == REQUEST_TYPES.keys()
    assert EVENT_ROWS.keys() == {tag_of(kind) for kind in get_args(EventBody)}


def test_what_is_ours_is_to_another_tenant_as_if_it_did_not_exist(client: Client, ours: Ours, foreign: Witness) -> None:
    secrets = (*(str(name) for name in ours.names), "our-session", "our payload", "c" * 32)
    before, wrong = what_is_ours(ours, client.status()), list[str]()
    for kind, row in ROWS.items():
        deadline_ms = 100 if kind == "CACHE_EVENTS" else 60_000
        of_ours = foreign.say(kind, deadline_ms, **row(ours.names))
        of_nobodys = foreign.say(kind, deadline_ms, **row(NOBODYS))
        said = as_text(of_ours, ours.names)
        if kind != "STATUS" and said != as_text(of_nobodys, NOBODYS):
            wrong.append(f"{kind} differs: {said} of ours, {as_text(of_nobodys, NOBODYS)} of nobody's")
        asked = json.dumps(row(ours.names))
        whole = json.dumps(msgspec.to_builtins(of_ours))
        wrong += [f"{kind} tells {one}: {whole}" for one in secrets if one in whole and one not in asked]
    assert wrong == []
    assert what_is_ours(ours, client.status()) == before


def test_nothing_that_happens_to_us_is_told_to_another_tenant(ours: Ours, foreign: Witness) -> None:
    """Though it has transfers of the same numbers, pools of the same names and blocks of the same contents."""
    we, names = ours.session, ours.names
    foreign.say("SEND", **transfer(names.awaited, 1))
    foreign.say("RECEIVE", **transfer(names.sent, 2))
    we.say("SEND", **transfer(names.awaited, 7))
    we.say("RECEIVE", **transfer(names.sent, 8))
    we.say("SEND", **transfer("d" * 32, 9))
    we.say("RECEIVE", **transfer("d" * 32, 10, destinations=2))
    we.say("CANCEL_OPERATION", operation=names.operation)
    we.say("STORE", pool=SHARED, hashes=block(b"another block :)"), pages=[11])
    we.until(TierDone, 4)
    told = [one for event in we.events for one in (event.events if isinstance(event, Together) else (event,))]
    assert [kind for kind, has_come in EVENT_ROWS.items() if not has_come(told)] == []
    foreign.say("PING")
    assert foreign.events == []


def test_blocks_of_ours_are_no_ones_but_ours(ours: Ours, foreign: Witness) -> None:
    """Who stores the same block stores it anew: that it is there already would tell that we have had that prompt."""
    foreign.say("STORE", pool=SHARED, hashes=ours.names.blocks, pages=[4])
    foreign.until(TierDone)
    (done,) = foreign.events
    assert isinstance(done, TierDone)
    assert (done.stored, done.present) == (1, 0)
    changes = foreign.say("CACHE_EVENTS", cursor=1)
    assert isinstance(changes, CacheChanges)
    assert [one.hashes for one in changes.changes] == [base64.b64decode(ours.names.blocks)]


def test_metrics_and_the_flight_recorder_name_nothing_of_ours(daemon: Daemon, ours: Ours, foreign: Witness) -> None:
    with as_user(SOMEBODY):
        text = get(daemon.runtime_dir).text
    assert "kvferry_pool_pages" in text
    assert not [name for name in (SHARED, *map(str, ours.names[:6])) if name in text]
    report = foreign.say("STATUS", recent=True)
    assert isinstance(report, StatusReport)
    assert report.recent == ()
