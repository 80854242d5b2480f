"""``kvferry probe``: any message by hand."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvferry.clients import Client, MhaSpec, pages
from kvferry.clients.cli.main import main
from kvferry.protocol.envelope import REQUEST_TYPES
from kvferry.protocol.ids import ModelIdentity
from tests.daemons import DaemonProcess, running_daemon
from tests.kvferry_command import COMMAND, run_kvferry

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
        assert reply.pop("message") == "1"
        assert (reply["type"] == "ERROR") == (status in {1, 2})
        return status, reply


@pytest.fixture
def probe(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> Probe:
    """Return the command."""
    return Probe(daemon, capsys)


class Probes:
    """Runs the command in this process, on several messages."""

    def __init__(self, daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> None:
        self._arguments = ["--runtime-dir", str(daemon.runtime_dir)]
        self._capsys = capsys

    def __call__(self, *words: object) -> tuple[int, list[dict[str, Any]]]:
        """Return the exit status and what was printed."""
        status = main(["probe", *self._arguments, *(one if isinstance(one, str) else json.dumps(one) for one in words)])
        printed = self._capsys.readouterr()
        assert printed.err == ""
        return status, [json.loads(line) for line in printed.out.splitlines()]


@pytest.fixture
def probes(daemon: DaemonProcess, capsys: pytest.CaptureFixture[str]) -> Probes:
    """Return the command."""
    return Probes(daemon, capsys)


def types(said: list[dict[str, Any]]) -> list[str]:
    """Return the types of what was printed."""
    return [one["type"] for one in said]


def test_the_real_command(daemon: DaemonProcess) -> None:
    done = run_kvferry("probe", "PING", "--runtime-dir", daemon.runtime_dir)
    assert (done.returncode, done.stdout, done.stderr) == (0, '{"message":"1","type":"PONG"}\n', "")
    done = run_kvferry("probe", "PINGG", "--runtime-dir", daemon.runtime_dir)
    assert (done.returncode, done.stderr) == (2, "")
    assert json.loads(done.stdout)["error"]["code"] == "UNKNOWN_TYPE"


def test_every_type_is_answered_with_its_reply(probe: Probe, daemon: DaemonProcess, name: str, spec: MhaSpec) -> None:
    with Client.connect(daemon.runtime_dir) as client:
        client.create_pool(name, spec, model=ModelIdentity(name="some/model"))
    messages: dict[str, object] = {
        "HELLO": {"protocol_min": 2, "protocol_max": 2},
        "CREATE_POOL": {"pool": name + "-new", "spec": SPEC, "model": {"name": "m", "revision": "1"}},
        "ATTACH_POOL": {"pool": name},
        "DELETE_POOL": {"pool": name + "-new"},
        "ABANDON": {"request_id": REQUEST_ID[::-1], "direction": "send"},
        "ALLOCATE": {"pool": name, "count": 2},
        "CREATE_TABLES": {"tables": "t", "pool": name, "max_batch": 2, "max_context_tokens": 256},
        "LOOKUP": {"pool": name, "hashes": HASH},
        "CACHE_PIN": {"hashes": HASH},
        "CACHE_EVICT": {"hashes": HASH},
        "CACHE_EVENTS": {"cursor": 1 << 40},
        "BATCH": {"requests": [{"type": "ALLOCATE", "pool": name, "count": 1}, {"type": "SNAPSHOTS"}]},
    }
    transfer = {"request_id": REQUEST_ID, "pool": name}
    k = {"component": "main", "role": "k"}
    refused: dict[str, tuple[str, dict[str, object]]] = {
        "REGISTER_POOL": (
            "INVALID_FIELD",
            {"pool": name + "-registered", "spec": SPEC, "device": "npu:0", "arrays": [k]},
        ),
        "FREE": ("NOT_OWNER", {"pool": name, "pages": [1]}),
        "OFFLOAD": ("NOT_OWNER", {"pool": name, "lists": [{"pages": [1]}]}),
        "RESTORE": ("UNKNOWN_SNAPSHOT", {"pool": name, "snapshot": REQUEST_ID, "lists": [{"pages": [1]}]}),
        "DROP_SNAPSHOT": ("UNKNOWN_SNAPSHOT", {"snapshot": REQUEST_ID}),
        "CANCEL_OPERATION": ("UNKNOWN_OPERATION", {"operation": 1}),
        "LOAD": ("UNKNOWN_LEASE", {"lease": 1, "pool": name, "pages": [1]}),
        "STORE": ("NOT_OWNER", {"pool": name, "hashes": HASH, "pages": [1]}),
        "UNPIN": ("UNKNOWN_LEASE", {"lease": 1}),
        "SEND": ("NOT_OWNER", {**transfer, "lists": [{"pages": [1]}]}),
        "RECEIVE": ("NOT_OWNER", {**transfer, "lists": [{"pages": [1]}]}),
        "CANCEL": ("UNKNOWN_TRANSFER", {**transfer, "direction": "send"}),
        "RESULT": ("UNKNOWN_TRANSFER", {**transfer, "direction": "send"}),
        "UPDATE_TABLES": ("UNKNOWN_TABLES", {"tables": "t", "batch": 1, "ids": [5]}),
        "DELETE_TABLES": ("UNKNOWN_TABLES", {"tables": "t"}),
    }
    for kind, row in REQUEST_TYPES.items():
        code, message = refused.get(kind, ("", messages.get(kind)))
        status, reply = probe(kind, message)
        if code:
            assert (status, reply["error"]["code"]) == (1, code)
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
        ("FREE", '{"pool": "a", "pages": 3}', "INVALID_FIELD", "pages"),
        ("CREATE_POOL", '{"pool": "a", "spec": {"kind": "mha"}}', "INVALID_FIELD", "spec"),
        ("CREATE_POOL", '{"pool": "a", "spec": {"kind": "mha", "layers": 0}}', "INVALID_FIELD", "spec.layers"),
    ],
)
def test_bad_input_is_json_and_exit_2(probe: Probe, kind: str, message: str, code: str, field: str) -> None:
    _check_refusal(probe(kind, message), 2, code, field)


@pytest.mark.parametrize(
    ("kind", "message", "code", "field"),
    [
        ("ALLOCATE", '{"pool": "nobodys", "count": 1}', "UNKNOWN_POOL", "pool"),
        ("FREE", '{"pool": "a", "pages": []}', "UNKNOWN_POOL", "pool"),
        ("HELLO", '{"protocol_min": 7, "protocol_max": 9}', "VERSION_MISMATCH", "protocol_min"),
    ],
)
def test_refusals_are_json_and_exit_1(probe: Probe, kind: str, message: str, code: str, field: str) -> None:
    _check_refusal(probe(kind, message), 1, code, field)


def _check_refusal(answer: tuple[int, dict[str, Any]], status: int, code: str, field: str) -> None:
    error = answer[1]["error"]
    assert (answer[0], error["code"], error.get("field", "")) == (status, code, field)
    assert error["detail"]
    assert error["remedy"]


def test_messages_share_a_session_and_refer_to_replies(probes: Probes, name: str) -> None:
    status, said = probes(
        "CREATE_POOL", {"pool": name, "spec": SPEC},
        "ALLOCATE", {"as": "mine", "pool": name, "count": 2},
        "FREE", {"pool": name, "pages": "$mine.pages.1:"},
        "FREE", {"pool": name, "pages": ["$mine.pages.0"]},
        "FREE", {"pool": name, "pages": "$mine.pages"},
    )  # fmt: skip
    assert (status, types(said)) == (1, ["POOL_CREATED", "ALLOCATED", "FREED", "FREED", "ERROR"])
    assert [one["message"] for one in said] == ["1", "mine", "3", "4", "5"]
    assert said[4]["error"]["code"] == "NOT_OWNER"


def test_what_a_batch_begins_is_followed_to_its_end(probes: Probes, name: str) -> None:
    transfer = {"request_id": REQUEST_ID, "pool": name}
    status, said = probes(
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
    ended = [one for one in said if one["type"] in {"SETTLED", "TIER_DONE"}]
    assert [one["message"] for one in ended] == ["step"] * 3


def test_a_batch_of_what_cannot_be_in_one(probes: Probes) -> None:
    status, [error] = probes("BATCH", {"requests": [{"type": "SNAPSHOTS"}, {"type": "STATUS"}]})
    assert (status, error["error"]["field"]) == (2, "requests[1].type")


def test_nothing_is_sent_after_a_failure_unless_asked(probes: Probes) -> None:
    unknown = {"pool": "nobodys", "count": 1}
    assert probes("ALLOCATE", unknown, "PING")[0] == 1
    assert types(probes("ALLOCATE", unknown, "PING")[1]) == ["ERROR"]
    status, said = probes("--keep-going", "ALLOCATE", unknown, "PING")
    assert (status, types(said)) == (1, ["ERROR", "PONG"])


def test_nothing_is_sent_where_a_later_message_is_wrong(probes: Probes) -> None:
    status, [error] = probes("PING", "ALLOCATE", {"pool": "p", "count": 0}, "PING")
    assert (status, error["message"], error["error"]["field"]) == (2, "2", "count")


def test_a_transfer_is_followed_to_its_end(probes: Probes, name: str) -> None:
    ids = {"request_id": REQUEST_ID, "pool": name}
    status, said = probes(
        "CREATE_POOL", {"pool": name, "spec": SPEC},
        "CREATE_POOL", {"pool": f"{name}-to", "spec": SPEC},
        "ALLOCATE", {"as": "from", "pool": name, "count": 1},
        "ALLOCATE", {"as": "to", "pool": f"{name}-to", "count": 1},
        "RECEIVE", {**ids, "pool": f"{name}-to", "lists": [{"pages": "$to.pages"}]},
        "SEND", {"as": "sent", **ids, "lists": [{"pages": "$from.pages"}], "first_token": 7},
        "WAIT",
        "RESULT", {**ids, "direction": "$sent.FINISHED.direction"},
    )  # fmt: skip
    assert status == 0
    assert sorted(types(said[6:10])) == ["FINISHED", "FINISHED", "SETTLED", "SETTLED"]
    assert {one["message"] for one in said[6:10]} == {"5", "sent"}
    assert [
        one["first_token"] for one in said[6:10] if one["type"] == "FINISHED" and one["direction"] == "receive"
    ] == [7]
    assert (said[10]["message"], said[10]["state"]) == ("8", "settled")


def test_what_ends_badly_is_a_failure_and_what_was_cancelled_is_none(probes: Probes, name: str) -> None:
    send = {"request_id": REQUEST_ID, "pool": name, "lists": [{"pages": "$2.pages"}]}
    begin = ("CREATE_POOL", {"pool": name, "spec": SPEC}, "ALLOCATE", {"pool": name, "count": 1}, "SEND", send)
    status, said = probes("--timeout", "0.2", *begin)
    assert (status, types(said[2:])) == (1, ["ACCEPTED", "FINISHED", "SETTLED"])
    assert said[3]["error"]["code"] == "DEADLINE"
    status, said = probes(*begin, "CANCEL", {"request_id": REQUEST_ID, "pool": name, "direction": "send"})
    assert (status, sorted(types(said[2:]))) == (0, ["ACCEPTED", "CANCELLED", "FINISHED", "SETTLED"])


def test_what_stands_behind_a_wait_is_sent_when_all_before_has_settled(probes: Probes, name: str) -> None:
    transfer = {"request_id": REQUEST_ID, "pool": name}
    status, said = probes(
        "--timeout", "0.2", "--keep-going",
        "CREATE_POOL", {"pool": name, "spec": SPEC},
        "ALLOCATE", {"pool": name, "count": 1},
        "SEND", {**transfer, "lists": [{"pages": "$2.pages"}]},
        "WAIT",
        "RESULT", {**transfer, "direction": "send"},
    )  # fmt: skip
    assert (status, types(said[2:])) == (1, ["ACCEPTED", "FINISHED", "SETTLED", "TRANSFER_RESULT"])
    assert said[5]["state"] == "settled"


def test_operations_of_the_tiers_are_followed_to_their_end(probes: Probes, name: str) -> None:
    status, said = probes(
        "CREATE_POOL", {"pool": name, "spec": SPEC},
        "ALLOCATE", {"as": "mine", "pool": name, "count": 2},
        "OFFLOAD", {"as": "away", "pool": name, "lists": [{"pages": "$mine.pages"}], "release": True},
        "RESTORE", {"as": "back", "pool": name, "snapshot": "$away.TIER_DONE.snapshot", "allocate": True, "drop": True},
        "FREE", {"pool": name, "pages": "$back.TIER_DONE.lists.0.pages"},
        "CANCEL_OPERATION", {"operation": "$away.operation"},
    )  # fmt: skip
    assert types(said[2:7]) == ["OFFLOADING", "TIER_DONE", "OPERATION_STARTED", "TIER_DONE", "FREED"]
    assert (status, said[7]) == (0, {"message": "6", "type": "OPERATION_CANCELLED", "was_done": True})


def test_graph_tables_are_updated_in_their_session(probes: Probes, name: str) -> None:
    status, said = probes(
        "CREATE_POOL", {"pool": name, "spec": SPEC},
        "CREATE_TABLES", {"tables": "t", "pool": name, "max_batch": 2, "max_context_tokens": 8},
        "UPDATE_TABLES", {"tables": "$2.tables", "batch": 1, "entries": 1, "ids": [4, 0, 0, 1]},
        "DELETE_TABLES", {"tables": "t"},
    )  # fmt: skip
    assert (status, types(said[1:])) == (0, ["TABLES_CREATED", "TABLES_UPDATED", "TABLES_DELETED"])


def test_an_event_that_will_not_come_is_not_waited_for(probes: Probes, name: str) -> None:
    status, said = probes("PING", "FREE", {"pool": name, "pages": "$1.FINISHED.pages"})
    assert (status, said[1]["message"], said[1]["error"]["field"]) == (2, "2", "$1.FINISHED.pages")


def test_a_file_of_messages(probes: Probes, tmp_path: Path) -> None:
    file = tmp_path / "messages"
    file.write_text('# two\nPING\n\n{"type": "STATUS"}\n')
    assert types(probes("PING", "--file", str(file))[1]) == ["PONG", "PONG", "STATUS_REPORT"]
    file.write_bytes(b"\xff")
    for name in (file, tmp_path / "none"):
        status, [error] = probes("--file", str(name))
        assert (status, error["error"]["code"], error["error"]["field"]) == (2, "INVALID_FIELD", "FILE")


def test_events_are_followed_for_as_long_as_asked(probes: Probes) -> None:
    assert probes("PING", "--events", "--timeout", "0.1") == (0, [{"message": "1", "type": "PONG"}])


class Typed:
    """The command in a process of its own, with a pipe as standard input."""

    def __init__(self, daemon: DaemonProcess, *options: str) -> None:
        command: list[str | Path] = [COMMAND, "probe", "--runtime-dir", daemon.runtime_dir, "--file", "-", *options]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(self, text: str) -> None:
        """Type something."""
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the next line that it prints."""
        assert self._process.stdout is not None
        line: dict[str, Any] = json.loads(self._process.stdout.readline())
        return line

    def end(self) -> tuple[int, str]:
        """Close its input; return its status and what else it prints."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        with self._process.stdout as printed:  # not communicate(), which would miss what has been read ahead of a line
            text = printed.read()
        return self._process.wait(60), text


def test_lines_are_answered_as_they_are_typed(daemon: DaemonProcess, name: str) -> None:
    typed = Typed(daemon)
    typed.say(f"CREATE_POOL {json.dumps({'pool': name, 'spec': SPEC})}\n")
    assert typed.hear()["type"] == "POOL_CREATED"
    typed.say(f"ALLOCATE {json.dumps({'pool': name, 'count': 1})}\n")
    assert typed.hear()["pages"] == [1]
    typed.say(f"SEND {json.dumps({'request_id': REQUEST_ID, 'pool': name, 'lists': [{'pages': '$2.pages'}]})}\n")
    assert typed.hear()["type"] == "ACCEPTED"
    with Client.connect(daemon.runtime_dir) as other:
        other.create_pool(f"{name}-to", msgspec.convert(SPEC, MhaSpec))
        other.wait_settled(other.receive(f"{name}-to", REQUEST_ID, [pages(other.allocate(f"{name}-to", 1))]))
    heard = [typed.hear()["type"] for _ in range(3)]
    assert heard == ["MATCHED", "FINISHED", "SETTLED"], "while nothing is typed"
    typed.say("PING")
    assert typed.end() == (0, '{"message":"4","type":"PONG"}\n')


@pytest.mark.parametrize(("options", "status", "said"), [((), 2, 1), (("--keep-going",), 2, 2)])
def test_a_wrong_line_ends_it_unless_it_is_to_go_on(
    daemon: DaemonProcess, options: tuple[str, ...], status: int, said: int
) -> None:
    typed = Typed(daemon, *options)
    typed.say("PINGG\nPING\n")
    ended, text = typed.end()
    assert (ended, text.count("\n")) == (status, said)


def test_a_daemon_that_goes_ends_it(tmp_path: Path) -> None:
    with running_daemon(tmp_path) as own:
        typed = Typed(own)
        typed.say("PING\n")
        assert typed.hear()["type"] == "PONG"
        own.kill()
        assert typed.end()[0] == 1
