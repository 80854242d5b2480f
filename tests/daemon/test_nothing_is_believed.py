"""What an engine says of its memory, of pages and of what others hold is checked, each time: a row a claim.

``claims.txt`` has the rows; after each the daemon holds what it held before. What an engine registers from a device has
its rows in ``tests/npu``; what peers, the disk and a remote store say is in ``tests/transfer``, ``tests/pools/tiers``
and ``tests/daemon/tiers``.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from kvferry.clients import Client
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.ids import new_request_id
from kvferry.protocol.session_stream import SharedEvents, ShareFollows
from kvferry.protocol.tier_messages import Found, Offloading, SnapshotReport
from tests import kit
from tests.kit.raw_engine import RawEngine, raw_engine

MHA: Final = {
    "kind": "mha", "layers": 2, "first_layer": 4, "tokens": 192, "page_size": 16, "kv_heads": 2, "head_dim": 16,
    "dtype": "float16",
}  # fmt: skip
STATES: Final = {"kind": "mamba", "state_layers": [0], "slots": 12, "dtype": "float16"}
SPECS: Final[dict[str, dict[str, Any]]] = {
    "paged": MHA,
    "bf16": MHA | {"dtype": "bfloat16"},
    "nz": MHA | {"view": "nz"},
    "short-pages": MHA | {"tokens": 96, "page_size": 8, "kv_heads": 4},
    "one-head": MHA | {"kv_heads": 1, "head_dim": 32},
    "one-layer": MHA | {"layers": 1},
    "hybrid": {
        "kind": "hybrid_swa", "full_layers": [0], "window_layers": [1], "tokens": 192, "window_tokens": 192,
        "window": 32, "page_size": 16, "kv_heads": 1, "head_dim": 8, "dtype": "float16",
    },
    "turned": STATES | {"conv_window": 8, "conv_channels": 3},
    "mamba": STATES | {"conv_window": 3, "conv_channels": 8},
}  # fmt: skip
EVENTS: Final = ShareFollows(message_id=0, events=SharedEvents(handles=(b"x",)))


class Row(NamedTuple):
    """What is claimed, which error comes, and the message."""

    claim: str
    code: str
    field: str
    kind: str
    fields: str

    @classmethod
    def of(cls, line: str) -> Row:
        claim, error, message = line.split(" | ")
        return cls(claim, *error.split(), *message.split(" ", 1))


LINES: Final = Path(__file__).with_name("claims.txt").read_text().splitlines()
ROWS: Final = [Row.of(line) for line in LINES if not line.startswith("#")]


class Harness(NamedTuple):
    """A daemon on which two engines have pools, pages, tables, a ring, a snapshot and a lease; and their names."""

    engine: RawEngine
    watcher: Client
    names: dict[str, str | int]

    def filled(self, fields: str) -> dict[str, Any]:
        """Return a message's fields with what names stand for."""
        for name, value in {**self.names, "$new": new_request_id()}.items():
            fields = fields.replace(f'"{name}"', json.dumps(value))
        return dict(json.loads(fields))


@pytest.fixture(scope="module")
def harness() -> Iterator[Harness]:
    """Return a harness in which no row leaves anything."""
    with (
        kit.daemon("[tiers]\nhost_bytes = 4194304\n") as daemon,
        raw_engine(daemon.runtime_dir, "engine") as engine,
        raw_engine(daemon.runtime_dir, "other") as other,
        Client.connect(daemon.runtime_dir, session=False) as watcher,
    ):
        for pool, spec in SPECS.items():
            engine.say("CREATE_POOL", pool=pool, spec=spec, model={"name": "believed"})
            for space in {"mha": ["main"], "hybrid_swa": ["main", "swa"], "mamba": ["mamba"]}[spec["kind"]]:
                for one in (engine, other):
                    one.say("ALLOCATE", pool=pool, count=4, space=space)
        tables: dict[str, Any] = {"max_batch": 4, "max_context_tokens": 64}
        engine.say("CREATE_TABLES", tables="tables", pool="paged", draft_tokens=2, **tables)
        engine.say("UPDATE_TABLES", tables="tables", batch=1, rows=1, pages=1, ids=[1, 0, 1, 1])
        engine.say("CREATE_TABLES", tables="window", pool="hybrid", window=32, **tables)
        engine.say("OPEN_EVENTS")
        names: dict[str, str | int] = {name: new_request_id() for name in ("$transfer", "$hybrid", "$slots")}
        two, window, slot = {"pages": [5, 6]}, {"component": "swa", "first_page": 0, "pages": [5, 6]}, "mamba"
        other.say("RECEIVE", request_id=names["$transfer"], pool="paged", lists=[two | {"tokens": 32}])
        other.say("RECEIVE", request_id=names["$hybrid"], pool="hybrid", lists=[two, window])
        other.say("RECEIVE", request_id=names["$slots"], pool=slot, lists=[{"component": slot, "pages": [5]}])
        of_pages = engine.say("OFFLOAD", pool="paged", lists=[{"pages": [1, 2]}])
        of_state = engine.say("OFFLOAD", pool=slot, lists=[{"component": slot, "pages": [1]}])
        assert isinstance(of_pages, Offloading)
        assert isinstance(of_state, Offloading)
        hashes = base64.b64encode(bytes(range(32))).decode()
        engine.say("STORE", pool="paged", hashes=hashes, pages=[1, 2])
        found = None
        while not isinstance(found, Found) or found.blocks < 2:  # each look is a round trip
            found = engine.say("LOOKUP", pool="paged", hashes=hashes)
        while watcher.status().operations:
            pass
        names |= {"$snapshot": of_pages.snapshot, "$state": of_state.snapshot, "$lease": found.lease, "$hashes": hashes}
        yield Harness(engine, watcher, names)


def held(harness: Harness) -> object:
    """Return all that the daemon holds for engines."""
    status = harness.watcher.status()
    snapshots = harness.engine.say("SNAPSHOTS")
    assert isinstance(snapshots, SnapshotReport)
    return (
        [(one.snapshot, one.state, one.restores) for one in snapshots.snapshots],
        [(one.pool, one.free, one.busy, one.spaces) for one in status.pools],
        [(one.request, one.direction, one.pool) for one in status.transfers],
        [(one.tables, one.updates) for one in status.tables],
        status.operations,
    )


@pytest.mark.parametrize("row", ROWS, ids=[row.claim for row in ROWS])
def test_a_claim_is_checked(harness: Harness, row: Row) -> None:
    before = held(harness)
    said = EVENTS if row.claim.startswith("events of a device") else None
    with pytest.raises(KvferryError) as refused:
        harness.engine.say(row.kind, registered=said, **harness.filled(row.fields))
    assert (refused.value.code, refused.value.field) == (row.code, row.field), refused.value
    assert held(harness) == before
