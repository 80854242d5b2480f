"""``kvferry probe``: any message by hand."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from kvferry.clients import Client, MhaSpec
from kvferry.clients.cli.main import main
from kvferry.protocol.model_identity import ModelIdentity
from kvferry.protocol.requests import REQUEST_TYPES
from tests.daemons import DaemonProcess
from tests.kvferry_command import run_kvferry

REQUEST_ID = "0123456789abcdef0123456789abcdef"
HASH = base64.b64encode(bytes(16)).decode()
SPEC = {"kind": "mha", "layers": 1, "tokens": 8, "page_size": 4, "kv_heads": 1, "head_dim": 1, "dtype": "int8"}


class Probe:
    """Runs the command in this process."""

    def __init__(self, daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
        self._arguments = ["--runtime-dir", str(daemon.runtime_dir)]
        self._capsys = capsys

    def __call__(self, kind: str, message: object = None) -> tuple[int, dict[str, Any]]:
        """Return the exit status and the reply."""
        text = [] if message is None else [message if isinstance(message, str) else json.dumps(message)]
        status = main(["probe", kind, *text, *self._arguments])
        printed = self._capsys.readouterr()
        assert printed.err == ""
        assert printed.out.count("\n") == 1
        reply: dict[str, Any] = json.loads(printed.out)
        assert (reply["type"] == "ERROR") == (status == 2)
        return status, reply


@pytest.fixture
def probe(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> Probe:
    """Return the command."""
    return Probe(daemon, capsys)


def test_the_real_command(daemon: DaemonProcess) -> None:
    done = run_kvferry("probe", "PING", "--runtime-dir", daemon.runtime_dir)
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"type":"PONG"}\n', "")
    done = run_kvferry("probe", "PINGG", "--runtime-dir", daemon.runtime_dir)
    assert (done.returncode, done.stderr) == (2, "")
    assert json.loads(done.stdout)["error"]["code"] == "UNKNOWN_TYPE"


def test_every_type_is_answered_with_its_reply(probe: Probe, daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    with Client.connect(daemon.runtime_dir) as client:
        client.create_pool(name, spec, model=ModelIdentity(name="some/model"))
    messages: dict[str, object] = {
        "HELLO": {"protocol_min": 1, "protocol_max": 1},
        "CREATE_POOL": {"pool": name + "-new", "spec": SPEC, "model": {"name": "m", "revision": "1"}},
        "ATTACH_POOL": {"pool": name},
        "DELETE_POOL": {"pool": name + "-new"},
        "ALLOCATE": {"pool": name, "count": 2},
        "CREATE_TABLES": {"tables": "t", "pool": name, "max_batch": 2, "max_context_tokens": 256},
        "LOOKUP": {"pool": name, "hashes": HASH},
        "CACHE_PIN": {"hashes": HASH},
        "CACHE_EVICT": {"hashes": HASH},
        "CACHE_EVENTS": {"cursor": 1 << 40},
    }
    hand_off = {"request_id": REQUEST_ID, "pool": name}
    k = {"component": "main", "role": "k"}
    refused: dict[str, tuple[str, dict[str, object]]] = {
        "LEND_POOL": ("INVALID_FIELD", {"pool": name + "-lent", "spec": SPEC, "device": "npu:0", "arrays": [k]}),
        "FREE": ("NOT_OWNER", {"pool": name, "pages": [1]}),
        "OFFLOAD": ("NOT_OWNER", {"pool": name, "lists": [{"pages": [1]}]}),
        "RESTORE": ("UNKNOWN_SNAPSHOT", {"pool": name, "snapshot": REQUEST_ID, "lists": [{"pages": [1]}]}),
        "DROP_SNAPSHOT": ("UNKNOWN_SNAPSHOT", {"snapshot": REQUEST_ID}),
        "CANCEL_WORK": ("UNKNOWN_WORK", {"work": 1}),
        "LOAD": ("UNKNOWN_LEASE", {"lease": 1, "pool": name, "pages": [1]}),
        "STORE": ("NOT_OWNER", {"pool": name, "hashes": HASH, "pages": [1]}),
        "UNPIN": ("UNKNOWN_LEASE", {"lease": 1}),
        "SEND": ("NOT_OWNER", {**hand_off, "lists": [{"pages": [1]}]}),
        "RECEIVE": ("NOT_OWNER", {**hand_off, "lists": [{"pages": [1]}]}),
        "CANCEL": ("UNKNOWN_ROOM", {**hand_off, "side": "send"}),
        "RESULT": ("UNKNOWN_ROOM", {**hand_off, "side": "send"}),
        "UPDATE_TABLES": ("UNKNOWN_TABLES", {"tables": "t", "batch": 1, "ids": [5]}),
        "DELETE_TABLES": ("UNKNOWN_TABLES", {"tables": "t"}),
    }
    for kind, row in REQUEST_TYPES.items():
        code, message = refused.get(kind, ("", messages.get(kind)))
        status, reply = probe(kind, message)
        if code:
            assert (status, reply["error"]["code"]) == (2, code)
        else:
            assert (status, reply["type"]) == (0, row.reply.__struct_config__.tag)


def test_page_ids_stand_in_the_reply(probe: Probe, daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    with Client.connect(daemon.runtime_dir) as client:
        client.create_pool(name, spec)
    assert probe("allocate", {"pool": name, "count": 3}) == (0, {"type": "ALLOCATED", "pages": [1, 2, 3]})
    assert probe("ALLOCATE", {"pool": name, "count": 2})[1]["pages"] == [1, 2], "a probe's session ends with it"


@pytest.mark.parametrize(
    ("kind", "message", "code", "field"),
    [
        ("NONSENSE", "{}", "UNKNOWN_TYPE", "type"),
        ("ALLOCATE", "{", "INVALID_FIELD", ""),
        ("ALLOCATE", "{}", "INVALID_FIELD", "pool"),
        ("ALLOCATE", '{"pool": "a", "count": 0}', "INVALID_FIELD", "count"),
        ("ALLOCATE", '{"pool": "a", "count": 1, "colour": 2}', "INVALID_FIELD", "colour"),
        ("ALLOCATE", '{"pool": "nobodys", "count": 1}', "UNKNOWN_POOL", "pool"),
        ("FREE", '{"pool": "a", "pages": 3}', "INVALID_FIELD", "pages"),
        ("FREE", '{"pool": "a", "pages": []}', "UNKNOWN_POOL", "pool"),
        ("HELLO", '{"protocol_min": 7, "protocol_max": 9}', "VERSION_MISMATCH", "protocol_min"),
        ("CREATE_POOL", '{"pool": "a", "spec": {"kind": "mha", "layers": 0}}', "INVALID_FIELD", "spec.layers"),
    ],
)
def test_refusals_are_json_and_exit_2(probe: Probe, kind: str, message: str, code: str, field: str) -> None:
    status, reply = probe(kind, message)
    assert (status, reply["error"]["code"], reply["error"].get("field", "")) == (2, code, field)
    assert reply["error"]["detail"]
    assert reply["error"]["remedy"]
