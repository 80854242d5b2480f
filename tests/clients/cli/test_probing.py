"""``kvferry probe``: any message by hand."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.clients import Client, MhaSpec, pages
from kvferry.clients.cli.main import main
from kvferry.protocol.envelope import REQUEST_TYPES
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.limits import PROTOCOL_MAX, PROTOCOL_MIN
from tests.kit.daemons import Daemon
from tests.kit.kvferry_command import COMMAND
from tests.kit.pools import SPEC as POOL

REQUEST_ID = "0123456789abcdef0123456789abcdef"
HASH = base64.b64encode(bytes(16)).decode()
SPEC = {"kind": "mha", "layers": 1, "tokens": 8, "page_size": 4, "kv_heads": 1, "head_dim": 1, "dtype": "int8"}


Said = list[dict[str, Any]]
Probe = Callable[..., tuple[int, Said]]


@pytest.fixture
def probe(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> Probe:
    """Return what runs the command in this process on some words: its status, and the lines that it prints, read."""

    def run(*words: object) -> tuple[int, Said]:
        texts = (one if isinstance(one, str) else json.dumps(one) for one in words)
        status = main(["probe", "--runtime-dir", str(daemon.runtime_dir), *texts])
        printed = capsys.readouterr()
        assert printed.err == ""
        return status, [json.loads(line) for line in printed.out.splitlines()]

    return run


def types(said: Said) -> list[str]:
    return [one["type"] for one in said]


OWN = "pool-of-the-probe"
BATCH = {"requests": [{"type": "ALLOCATE", "pool": OWN, "count": 1}, {"type": "SNAPSHOTS"}]}
TRANSFER = {"request_id": REQUEST_ID, "pool": OWN}
REGISTERED = {"pool": "b", "spec": SPEC, "device": "npu:0", "arrays": [{"component": "main", "role": "k"}]}
PAGE = {"lists": [{"pages": [1]}]}
ANSWERS: dict[str, tuple[str, object]] = {
    "HELLO": ("", {"protocol_min": PROTOCOL_MIN, "protocol_max": PROTOCOL_MAX}),
    "CREATE_POOL": ("", {"pool": f"{OWN}-new", "spec": SPEC, "model": {"name": "m", "revision": "1"}}),
    "ATTACH_POOL": ("", {"pool": OWN}),
    "DELETE_POOL": ("", {"pool": f"{OWN}-new"}),
    "ABANDON": ("", {"request_id": REQUEST_ID[::-1], "direction": "send"}),
    "ALLOCATE": ("", {"pool": OWN, "count": 2}),
    "LIST_OWNED": ("", {"pool": OWN}),
    "CREATE_TABLES": ("", {"tables": "t", "pool": OWN, "max_batch": 2, "max_context_tokens": 256}),
    "LOOKUP": ("", {"pool": OWN, "hashes": HASH}),
    "CACHE_PIN": ("", {"hashes": HASH, "pool": OWN}),
    "CACHE_EVICT": ("", {"hashes": HASH, "pool": OWN}),
    "CACHE_EVENTS": ("", {"cursor": 1 << 40}),
    "BATCH": ("", BATCH),
    "REGISTER_POOL": ("INVALID_FIELD", REGISTERED),
    "FREE": ("NOT_OWNER", {"pool": OWN, "pages": [1]}),
    "OFFLOAD": ("NOT_OWNER", {"pool": OWN, **PAGE}),
    "RESTORE": ("UNKNOWN_SNAPSHOT", {"pool": OWN, "snapshot": REQUEST_ID, **PAGE}),
    "DROP_SNAPSHOT": ("UNKNOWN_SNAPSHOT", {"snapshot": REQUEST_ID}),
    "CANCEL_OPERATION": ("UNKNOWN_OPERATION", {"operation": 1}),
    "LOAD": ("UNKNOWN_LEASE", {"lease": 1, "pool": OWN, "pages": [1]}),
    "STORE": ("NOT_OWNER", {"pool": OWN, "hashes": HASH, "pages": [1]}),
    "UNPIN": ("UNKNOWN_LEASE", {"lease": 1}),
    "SEND": ("NOT_OWNER", {**TRANSFER, **PAGE}),
    "RECEIVE": ("NOT_OWNER", {**TRANSFER, **PAGE}),
    "CANCEL": ("UNKNOWN_TRANSFER", {**TRANSFER, "direction": "send"}),
    "RESULT": ("UNKNOWN_TRANSFER", {**TRANSFER, "direction": "send"}),
    "UPDATE_TABLES": ("UNKNOWN_TABLES", {"tables": "t", "batch": 1, "ids": [5]}),
    "DELETE_TABLES": ("UNKNOWN_TABLES", {"tables": "t"}),
    "UPGRADE": ("UPGRADE_REFUSED", {}),
    "DRAIN": ("", {"drain": False}),
}


def test_every_type_is_answered_with_its_reply(probe: Probe, daemon: Daemon) -> None:
    with Client.connect(daemon.runtime_dir) as client:
        client.create_pool(OWN, POOL, model=ModelIdentity(name="some/model"))
    for kind, row in REQUEST_TYPES.items():
        code, message = ANSWERS.get(kind, ("", {}))
        status, (reply,) = probe(kind, message)
        if code:
            assert (status, reply["error"]["code"]) == (1, code)
        else:
            assert (status, reply["type"]) == (0, row.reply.__struct_config__.tag)
    assert probe("allocate", {"pool": OWN, "count": 3})[1] == [
        {"message": "1", "type": "ALLOCATED", "pages": [1, 2, 3]}
    ]
    assert probe("ALLOCATE", {"pool": OWN, "count": 2})[1][0]["pages"] == [1, 2], "a probe's session ends with it"


@pytest.mark.parametrize(
    ("words", "status", "message", "code", "field"),
    [
        (("NONSENSE", "{}"), 2, "1", "UNKNOWN_TYPE", "type"),
        (("ALLOCATE", {"pool": "nobodys", "count": 1}), 1, "1", "UNKNOWN_POOL", "pool"),
        (("HELLO", {"protocol_min": 7, "protocol_max": 9}), 1, "1", "VERSION_MISMATCH", "protocol_min"),
        (
            ("BATCH", {"requests": [{"type": "SNAPSHOTS"}, {"type": "PING"}]}),
            2,
            "1",
            "INVALID_FIELD",
            "requests[1].type",
        ),
        (("PING", "ALLOCATE", {"pool": "p", "count": 0}, "PING"), 2, "2", "INVALID_FIELD", "count"),
    ],
)
def test_bad_input_sends_nothing_and_is_exit_2_and_a_refusal_exit_1(
    probe: Probe, words: tuple[object, ...], status: int, message: str, code: str, field: str
) -> None:
    ended, [answer] = probe(*words)
    error = answer["error"]
    assert (ended, answer["type"], error["code"], error.get("field", "")) == (status, "ERROR", code, field)
    assert answer.get("message", "1") == message
    assert error["detail"]
    assert error["remedy"]


def test_what_a_batch_begins_is_followed_to_its_end(probe: Probe, name: str) -> None:
    transfer = {"request_id": REQUEST_ID, "pool": name}
    status, said = probe(
        "--keep-going",
        "CREATE_POOL", {"pool": name, "spec": SPEC},
        "ALLOCATE", {"as": "mine", "pool": name, "count": 2},
        "BATCH", {"as": "step", "requests": [
            {"type": "RECEIVE", **transfer, "lists": [{"pages": ["$mine.pages.0"]}]},
            {"type": "SEND", **transfer, "lists": [{"pages": ["$mine.pages.1"]}]},
            {"type": "OFFLOAD", "pool": name, "lists": [{"pages": ["$mine.pages.1"]}]},
            {"type": "ALLOCATE", "pool": name, "count": 1},
        ]},
        "DROP_SNAPSHOT", {"snapshot": "$step.results.2.snapshot"},
    )  # fmt: skip
    assert status == 1, "the pool is full by then"
    results = next(one["results"] for one in said if one["type"] == "BATCHED")
    assert types(results) == ["ACCEPTED", "ACCEPTED", "OFFLOADING", "ERROR"]
    ended = [one for one in said if one["type"] in {"SETTLED", "TIER_DONE"} or one.get("settled")]
    assert [one["message"] for one in ended] == ["step"] * 3


def test_what_ends_badly_is_a_failure_and_what_was_cancelled_is_none(probe: Probe, name: str) -> None:
    send = {"request_id": REQUEST_ID, "pool": name, "lists": [{"pages": "$2.pages"}]}
    begin = ("CREATE_POOL", {"pool": name, "spec": SPEC}, "ALLOCATE", {"pool": name, "count": 1}, "SEND", send)
    result = "RESULT", {"request_id": REQUEST_ID, "pool": name, "direction": "send"}
    status, said = probe("--timeout", "0.2", "--keep-going", *begin, "WAIT", *result)
    assert (status, types(said[2:])) == (1, ["ACCEPTED", "FINISHED", "TRANSFER_RESULT"])
    assert (said[3]["error"]["code"], said[3]["settled"], said[4]["state"]) == ("DEADLINE", True, "settled")
    status, said = probe(*begin, "CANCEL", {"request_id": REQUEST_ID, "pool": name, "direction": "send"})
    assert (status, sorted(types(said[2:]))) == (0, ["ACCEPTED", "CANCELLED", "FINISHED"])


def test_an_event_that_will_not_come_is_not_waited_for(probe: Probe, name: str) -> None:
    status, said = probe("PING", "FREE", {"pool": name, "pages": "$1.FINISHED.pages"})
    assert (status, said[1]["message"], said[1]["error"]["field"]) == (2, "2", "$1.FINISHED.pages")


def test_a_file_of_messages(probe: Probe, tmp_path: Path) -> None:
    file = tmp_path / "messages"
    file.write_text('# two\nPING\n\n{"type": "STATUS"}\n')
    assert types(probe("PING", "--file", str(file))[1]) == ["PONG", "PONG", "STATUS_REPORT"]
    file.write_bytes(b"\xff")
    for name in (file, tmp_path / "none"):
        status, [error] = probe("--file", str(name))
        assert (status, error["error"]["code"], error["error"]["field"]) == (2, "INVALID_FIELD", "FILE")


class Typed:
    """The command in a process of its own, with a pipe as standard input."""

    def __init__(self, daemon: Daemon) -> None:
        command: list[str | Path] = [COMMAND, "probe", "--runtime-dir", daemon.runtime_dir, "--file", "-"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def say(self, text: str, fields: object = None) -> None:
        self._stdin.write(f"{text} {json.dumps(fields)}\n" if fields else text)
        self._stdin.flush()

    def hear(self) -> dict[str, Any]:
        line: dict[str, Any] = json.loads(self._stdout.readline())
        return line

    def end(self) -> tuple[int, str]:
        """Close its input; return its status and what else it prints."""
        self._stdin.close()
        with self._stdout as printed:  # not communicate(), which would miss what has been read ahead of a line
            text = printed.read()
        return self._process.wait(60), text


def test_lines_are_answered_as_they_are_typed(daemon: Daemon, name: str) -> None:
    typed = Typed(daemon)
    typed.say("CREATE_POOL", {"pool": name, "spec": SPEC})
    assert typed.hear()["type"] == "POOL_CREATED"
    typed.say("ALLOCATE", {"pool": name, "count": 1})
    assert typed.hear()["pages"] == [1]
    typed.say("SEND", {"request_id": REQUEST_ID, "pool": name, "lists": [{"pages": "$2.pages"}]})
    assert typed.hear()["type"] == "ACCEPTED"
    with Client.connect(daemon.runtime_dir) as other:
        other.create_pool(f"{name}-to", msgspec.convert(SPEC, MhaSpec))
        other.wait_settled(other.receive(f"{name}-to", REQUEST_ID, [pages(other.allocate(f"{name}-to", 1))]))
    heard = typed.hear()
    assert (heard["type"], heard["settled"]) == ("FINISHED", True), "while nothing is typed"
    typed.say("PING")
    assert typed.end() == (0, '{"message":"4","type":"PONG"}\n')
