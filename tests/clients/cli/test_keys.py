"""``kvferry keys``: what is written, by whom it can be read, and what is refused."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import zmq.auth

from kvferry.clients.cli.doctor import ports
from kvferry.clients.cli.doctor.host import Host
from kvferry.clients.cli.doctor.needs import read_needs
from kvferry.clients.cli.main import main
from kvferry.protocol.node_keys import ALLOWED, NEXT, OWN, read_keys

ADDRESSES = {"node-a": "tcp://10.0.0.3:7801", "node-b": "tcp://10.0.0.4:7801"}


class Nodes:
    """Folders of keys of some nodes, and the command on each."""

    def __init__(self, path: Path, output: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._path = path
        self._output = output
        self._monkeypatch = monkeypatch

    def folder(self, name: str) -> Path:
        return self._path / name

    def run(self, name: str, action: str, *more: str, text: str = "") -> tuple[int, str]:
        """Run an action on a node; return its status, and what it printed, or what it said is wrong."""
        self._monkeypatch.setattr("sys.stdin", io.StringIO(text))
        self._output.readouterr()
        status = main(["keys", action, "--keys", str(self.folder(name)), *more])
        said = self._output.readouterr()
        return status, said.out if status == 0 else said.err

    def make(self, name: str) -> None:
        assert self.run(name, "make", "--name", name, "--address", ADDRESSES[name])[0] == 0

    def introduce(self, name: str, to: str) -> tuple[int, str]:
        """Let a node allow the newest key of another."""
        return self.run(to, "allow", "-", text=self.run(name, "show", "--public")[1])

    def rows(self, name: str) -> list[dict[str, str]]:
        found: list[dict[str, str]] = json.loads(self.run(name, "show", "--json")[1])["keys"]
        return found

    def uses(self, name: str) -> list[tuple[str, str]]:
        return [(one["use"], one["node"]) for one in self.rows(name)]


@pytest.fixture
def nodes(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Nodes:
    made = Nodes(tmp_path, capsys, monkeypatch)
    for name in ADDRESSES:
        made.make(name)
    return made


def test_a_key_is_its_owners_alone_and_in_zmqs_own_form(nodes: Nodes) -> None:
    file = nodes.folder("node-a") / OWN
    assert file.stat().st_mode & 0o777 == 0o600
    assert nodes.folder("node-a").stat().st_mode & 0o777 == 0o700
    public, secret = zmq.auth.load_certificate(file)
    assert secret is not None
    assert zmq.curve_public(secret) == public
    certificate = nodes.run("node-a", "show", "--public")[1]
    assert public.decode() in certificate
    assert secret.decode() not in certificate
    assert secret.decode() not in nodes.run("node-a", "show")[1] + nodes.run("node-a", "show", "--json")[1]


def test_who_is_allowed_is_shown_with_its_address(nodes: Nodes) -> None:
    assert nodes.introduce("node-b", to="node-a")[0] == 0
    rows = nodes.rows("node-a")
    assert [(one["use"], one["node"], one["address"]) for one in rows] == [
        ("own", "node-a", ADDRESSES["node-a"]),
        ("allowed", "node-b", ADDRESSES["node-b"]),
    ]
    revoked = json.loads(nodes.run("node-a", "revoke", "node-b", "--json")[1])
    assert [one["address"] for one in revoked["keys"]] == [ADDRESSES["node-b"]]
    assert nodes.uses("node-a") == [("own", "node-a")]


def test_a_rotation_has_two_keys_of_a_node_for_a_while(nodes: Nodes) -> None:
    nodes.introduce("node-a", to="node-b")
    (old,) = read_keys(nodes.folder("node-a")).own
    status, said = nodes.run("node-a", "make", "--name", "another")
    assert (status, "kvferry keys revoke node-a" in said) == (0, True)
    assert nodes.run("node-a", "make")[0] == 2
    assert nodes.introduce("node-a", to="node-b")[0] == 0
    assert nodes.uses("node-b") == [("own", "node-b"), ("allowed", "node-a"), ("allowed", "node-a")]
    assert nodes.run("node-a", "revoke", "node-a")[0] == 0
    assert not (nodes.folder("node-a") / NEXT).exists()
    assert (nodes.folder("node-a") / OWN).stat().st_mode & 0o777 == 0o600
    (new,) = read_keys(nodes.folder("node-a")).own
    assert (new.public != old.public, new.name, new.address) == (True, "node-a", ADDRESSES["node-a"])
    assert nodes.run("node-b", "revoke", "node-a", old.short)[0] == 0
    assert [one["key"] for one in nodes.rows("node-b") if one["use"] == "allowed"] == [new.public]


def test_no_key_begins_like_an_option(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [(half * 40, half * 40) for half in (b"-", b"a")]
    monkeypatch.setattr(zmq, "curve_keypair", lambda: pairs.pop(0))
    (nodes.folder("node-a") / OWN).unlink()
    assert nodes.run("node-a", "make", "--address", ADDRESSES["node-a"])[0] == 0
    assert read_keys(nodes.folder("node-a")).own[0].public == "a" * 40


@pytest.mark.parametrize(
    ("action", "more", "says"),
    [
        ("revoke", ("node-a",), "this node would have no key"),
        ("revoke", ("nobody",), "no such key of nobody"),
        ("allow", ("/nowhere",), "No such file"),
        ("make", ("--keys", "{tmp}/new"), "where does the daemon listen?"),
        ("make", ("--keys", "{tmp}/new", "--address", "tcp://node:1"), "numeric address"),
        ("make", ("--keys", "{tmp}/new", "--address", "tcp://10.0.0.9:1", "--name", "a b"), "name is missing or wrong"),
        ("show", ("--keys", "{tmp}/none"), "kvferry keys make"),
    ],
)
def test_what_contradicts_what_there_is_is_refused(nodes: Nodes, action: str, more: tuple[Any, ...], says: str) -> None:
    root = nodes.folder("x").parent
    status, said = nodes.run("node-a", action, *(one.format(tmp=root) for one in more))
    assert (status, says in said) == (2, True), said
    assert [one["use"] for one in nodes.rows("node-a")] == ["own"]


def test_certificates_that_must_not_be_allowed_are_refused(nodes: Nodes) -> None:
    certificate = nodes.run("node-b", "show", "--public")[1]
    secret = (nodes.folder("node-b") / OWN).read_text()
    for text, says in (
        (secret, "secret certificate"),
        (certificate.replace(ADDRESSES["node-b"], ADDRESSES["node-a"]), "contradict each other"),
        (certificate.replace("name = node-b", "name = node-a"), "contradict each other"),
        ("nothing", "no certificate of a node"),
    ):
        status, said = nodes.run("node-a", "allow", "-", text=text)
        assert (status, says in said) == (2, True), said
    nodes.introduce("node-b", to="node-a")
    status, said = nodes.run("node-a", "allow", "-", text=certificate.replace("name = node-b", "name = node-c"))
    assert (status, "is allowed" in said) == (2, True), said
    for _ in range(2):
        (nodes.folder("node-b") / NEXT).unlink(missing_ok=True)
        nodes.run("node-b", "make")
        status, said = nodes.introduce("node-b", to="node-a")
    assert (status, "has 2 keys here already" in said) == (2, True), said


def test_a_file_that_others_may_read_or_that_contradicts_another_is_named(nodes: Nodes) -> None:
    nodes.introduce("node-b", to="node-a")
    (file,) = (nodes.folder("node-a") / ALLOWED).glob("*.key")
    other = file.read_text().replace(ADDRESSES["node-b"], "tcp://10.0.0.5:7801")
    file.with_name("zz.key").write_text(other)
    found = read_keys(nodes.folder("node-a"))
    assert [one.address for one in found.allowed.values()] == [ADDRESSES["node-b"]]
    assert "zz.key: another file says otherwise" in found.problems[0]
    (nodes.folder("node-a") / OWN).chmod(0o640)
    status, said = nodes.run("node-a", "show")
    assert (status, "chmod 600" in said) == (2, True), said


@pytest.mark.parametrize(
    ("listen", "spoilt", "state", "says"),
    [
        (ADDRESSES["node-a"], False, "ok", "and allows 1 other nodes"),
        (ADDRESSES["node-b"], False, "missing", f"this node's key is for {ADDRESSES['node-a']}"),
        (ADDRESSES["node-a"], True, "warning", "bad.key is no certificate of a node"),
    ],
)
def test_doctor_names_what_is_wrong_with_keys(
    nodes: Nodes, listen: str, *, spoilt: bool, state: str, says: str
) -> None:
    nodes.introduce("node-b", to="node-a")
    folder = nodes.folder("node-a")
    if spoilt:
        (folder / ALLOWED / "bad.key").write_text("nothing")
    file = folder / "daemon.toml"
    file.write_text(f'[peers]\nlisten = "{listen}"\nkeys = "{folder}"\n')
    host = Host.this_one()
    needs, _ = read_needs(host, file, npu=False)
    found = ports.check_keys(host, needs)
    assert found is not None
    assert (found.state, says in found.found, bool(found.fix)) == (state, True, state != "ok"), found
