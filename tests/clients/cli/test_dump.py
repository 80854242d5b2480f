"""``kvferry dump``: one file has what a bug report needs, and nothing that the asking user may not see."""

from __future__ import annotations

import json
import os
import tarfile
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import msgspec
import pytest

from kvferry.clients import Client, new_request_id, pages
from kvferry.clients.cli.main import main
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol import VERSION
from kvferry.protocol.config.values import keys_of
from kvferry.protocol.limits import PROTOCOL_MAX, PROTOCOL_MIN
from kvferry.protocol.session_stream import SessionOpen
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.pools import MODEL, SPEC

CONFIG: Final = "[tiers]\nhost_bytes = 4194304\n"
NOBODY: Final = 12345
PARTS: Final = {
    "versions.json", "status.json", "metrics.txt", "configuration.json", "doctor.json", "events.txt", "log.txt",
}  # fmt: skip
PAYLOAD, TENSOR, SALT, TOKEN = b"payload-7b1e", b"tensor-5c2d", "salt-90ff", "token-31aa"


def parts_of(file: Path) -> dict[str, str]:
    with tarfile.open(file) as archive:
        members = archive.getmembers()
        assert len({Path(one.name).parent for one in members}) == 1, "one folder"
        return {Path(one.name).name: archive.extractfile(one).read().decode() for one in members}  # type: ignore[union-attr]


def dumped(daemon: Daemon, file: Path, *more: object) -> dict[str, str]:
    assert main(["dump", str(file), "--runtime-dir", str(daemon.runtime_dir), *map(str, more)]) == 0
    return parts_of(file)


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Return what puts a journalctl into the path that has a daemon's whole log, and says what it was asked for."""

    def have(log: Path) -> None:
        program = tmp_path / "bin" / "journalctl"
        program.parent.mkdir()
        program.write_text(f'#!/bin/sh\necho "$@"\n/bin/cat {log}\n')
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")

    return have


def test_the_file_has_what_a_report_needs_and_no_secret(
    tmp_path: Path, journal: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("KVFERRY_TIERS_POLICY", "lru")
    file = tmp_path / "kv7.toml"
    file.write_text(CONFIG)
    opening = SessionOpen(protocol_min=PROTOCOL_MIN, protocol_max=PROTOCOL_MAX, name="raw")
    with kit.daemon(CONFIG) as daemon, kit.engine(daemon, "prefill-3") as client:
        channel = SessionChannel.open(str(daemon.runtime_dir), opening, 60.0)
        journal(daemon.log)
        request_id = work(client)
        parts = dumped(daemon, tmp_path / "dump.tar.gz", "--config", file)
        secret = channel.opened.secret
        channel.close()
    assert (tmp_path / "dump.tar.gz").stat().st_mode & 0o777 == 0o600
    assert parts.keys() == PARTS
    status, versions = json.loads(parts["status.json"]), json.loads(parts["versions.json"])
    assert [one["owner"] for one in status["pools"][0]["holders"]] != []
    assert {one["request_id"] for one in status["recent"]} == {request_id}
    assert [one["waits_for"] for one in status["transfers"]] == ["1 of 1 destinations: no RECEIVE yet"]
    assert {one["name"] for one in status["sessions"]} >= {"prefill-3", "raw"}
    assert versions["kvferry"] == status["daemon_version"] == VERSION
    assert versions["packages"]["msgspec"] == msgspec.__version__
    assert 'kvferry_pool_pages{device="host",pool="pool"' in parts["metrics.txt"]
    values = json.loads(parts["configuration.json"])["values"]
    assert list(values) == [key for key, _ in keys_of()]
    assert values["tiers.host_bytes"] == {"value": 4 << 20, "source": str(file)}
    assert values["tiers.policy"] == {"value": "lru", "source": "$KVFERRY_TIERS_POLICY"}
    running = json.loads(parts["configuration.json"])["running"]
    assert running["boot_id"] == status["boot_id"]
    assert running["values"]["tiers.host_bytes"]["value"] == 4 << 20
    assert running["values"]["tiers.host_bytes"]["source"] not in {str(file), "default"}, "it is the daemon's own file"
    findings = json.loads(parts["doctor.json"])
    assert findings["configuration"]["found"] == str(file)
    assert str(status["pid"]) in findings["daemon"]["found"]
    assert parts["log.txt"].startswith("--unit kvferry@kv7.service --lines 1000 ")
    assert "prefill-3" in parts["log.txt"]
    happened = [json.loads(one)["event"] for one in parts["events.txt"].splitlines()]
    assert {"serving", "pool created", "transfer finished"} <= set(happened)
    whole = "".join(parts.values())
    planted = (PAYLOAD, TENSOR, SALT.encode(), TOKEN.encode(), secret)
    as_text = {form(one) for one in planted for form in (bytes.hex, lambda one: repr(one)[2:-1], encoded)}
    assert [one for one in as_text if one in whole] == []


def encoded(data: bytes) -> str:
    return b64encode(data).decode().rstrip("=")


def work(client: Client) -> str:
    """Exchange bytes of the pool that has the salt, with a payload; leave a transfer that waits."""
    pool = client.create_pool("pool", SPEC, model=msgspec.structs.replace(MODEL, salt=SALT))
    memory: Any = pool.tensor("main", "k").numpy().view("uint8").reshape(-1)
    memory[: len(TENSOR)] = list(TENSOR)
    ids, request_id = client.allocate("pool", 4), new_request_id()
    receiving = client.receive("pool", request_id, [pages(ids[:1])])
    client.wait_settled(client.send("pool", request_id, [pages(ids[1:2])], payload=PAYLOAD))
    client.wait_settled(receiving)
    client.send("pool", new_request_id(), [pages(ids[2:])], payload=PAYLOAD, deadline_s=600)
    client.ping()
    return request_id


def test_another_users_file_names_nothing_of_ours(tmp_path: Path, require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be another user")
    with kit.daemon() as daemon, kit.engine(daemon, "hidden-engine") as client, TemporaryDirectory() as folder:
        client.create_pool("hidden-pool", SPEC)
        client.send("hidden-pool", new_request_id(), [pages(client.allocate("hidden-pool", 2))], deadline_s=600)
        client.ping()
        ours = dumped(daemon, tmp_path / "dump.tar.gz")  # also imports what another user cannot
        Path(folder).chmod(0o777)
        daemon.runtime_dir.parent.chmod(0o755)
        os.seteuid(NOBODY)  # the group stays, and with it the way to the sockets
        try:
            theirs = dumped(daemon, Path(folder, "dump.tar.gz"))
        finally:
            os.seteuid(0)
    for part in ("status.json", "metrics.txt", "events.txt"):
        assert "hidden" in ours[part]
    assert theirs["events.txt"].startswith("ACCESS_DENIED")
    assert json.loads(theirs["status.json"])["others"]["transfers"] == 1
    assert "kvferry_pool_pages{" in theirs["metrics.txt"]
    assert "ACCESS_DENIED" in json.loads(theirs["configuration.json"])["running"]["missing"]
    assert "hidden" not in "".join(theirs.values())


def test_without_a_daemon_each_part_says_why_it_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, lost = tmp_path / "dump.tar.gz", f"DAEMON_LOST: no daemon at {tmp_path}"
    assert main(["dump", str(file), "--runtime-dir", str(tmp_path)]) == 0
    parts, printed = parts_of(file), capsys.readouterr().out
    assert parts["status.json"].startswith(lost)
    assert parts["metrics.txt"].startswith(lost)
    assert parts["events.txt"].startswith(lost)
    assert "no unit kvferry@NAME" in parts["log.txt"]
    assert json.loads(parts["doctor.json"])["daemon"]["state"] == "warning"
    assert f"{lost}" in printed
    assert f"{file}: read it before you send it" in printed
    assert main(["dump", str(file), "--runtime-dir", str(tmp_path)]) == 2
    assert f"[FILE]: {file}: File exists" in capsys.readouterr().err
