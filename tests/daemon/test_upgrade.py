"""The next daemon takes a running one's place: nothing is lost, and where it cannot, the running one goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvferry.clients import Client, MhaSpec, new_request_id, pages
from kvferry.clients.calls import asked
from kvferry.clients.cli.main import main
from kvferry.daemon.control.session_index import INDEX_BYTES
from kvferry.daemon.process import succession
from kvferry.daemon.process.succession import VARIABLE, Predecessor, Successor
from kvferry.daemon.services.adoption import INDEX
from kvferry.daemon.services.upgrade import check_kept
from kvferry.daemon.tiers import kept_tier
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol.errors import DaemonLostError, KvferryError, UpgradeRefusedError
from kvferry.protocol.session_messages import Upgrade
from tests import kit
from tests.kit.daemons import END_S, Daemon, Orphan, said_by_another_user, soon

SPEC = MhaSpec(layers=2, tokens=64, page_size=4, kv_heads=1, head_dim=8, dtype="float16")
CONFIG = "[service]\nresume_grace_s = 60.0\n"
BY_ITS_COMMAND = {"KVFERRY_TEST": "the daemon is started by the command that it starts its successor by"}


@pytest.fixture(scope="module")
def life() -> Iterator[Daemon]:
    with kit.daemon(CONFIG, keep=True, environment=BY_ITS_COMMAND) as one:
        yield one


def upgraded(life: Daemon, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the command's status and what it says."""
    status = main(["upgrade", "--runtime-dir", os.fspath(life.runtime_dir)])
    return status, capsys.readouterr().err


def test_engines_go_on_over_upgrades(life: Daemon) -> None:
    """Their pages stay, and pages that are filled meanwhile arrive or are said not to have; a killed one, too."""
    over, arrived, failed = threading.Event(), 0, set()

    def sends() -> None:
        nonlocal arrived
        with Client.connect(life.runtime_dir, name="sends") as client:
            pool = client.attach_pool("pool").array("main", "k")
            source, target = client.allocate("pool", 2), client.allocate("pool", 2)
            for turn in range(1 << 15):
                if over.is_set():
                    break
                pool[:, source], pool[:, target] = turn, -1
                try:
                    receiving = client.receive("pool", request := new_request_id(), [pages(target)])
                    client.send("pool", request, [pages(source)])
                    client.wait_finished(receiving)
                    assert (pool[:, target] == turn).all()
                    arrived += 1
                except KvferryError as error:
                    failed.add(error.code)
            client.free("pool", [*source, *target])

    with Client.connect(life.runtime_dir, name="keeps") as client:
        pool = client.create_pool("pool", SPEC)
        kept = client.allocate("pool", 5)
        pool.array("main", "k")[:, kept] = 7
        sending = threading.Thread(target=sends)
        sending.start()
        seen = arrived
        for turn in range(4):
            life.restart() if turn == 2 else life.upgrade()
            assert client.owned_pages("pool")["main"].tolist() == kept.tolist()
            assert soon(lambda: arrived > seen or not client.ping())  # noqa: B023
            seen = arrived
        over.set()
        sending.join()
        assert (pool.array("main", "k")[:, kept] == 7).all()
        assert failed <= {"SHUTTING_DOWN", "STALE_BOOT", "PEER_LOST", "CANCELLED", "UNKNOWN_TRANSFER", "INCOMPLETE"}
        assert client.free("pool", kept).freed == 5
        client.delete_pool("pool")


def test_with_a_wrong_configuration_the_running_one_goes_on(life: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    with Client.connect(life.runtime_dir, name="before") as client:
        pid, boot_id = client.status().pid, client.boot_id
        life.configure(CONFIG + "[pools]\nmax_byte = 1\n")
        status, said = upgraded(life, capsys)
        assert status == 1
        assert "UPGRADE_REFUSED" in said
        assert "pools.max_byte" in said
        assert (client.status().pid, client.boot_id) == (pid, boot_id)
        life.configure(CONFIG)
        life.upgrade()
        assert client.status().pid != pid


@contextlib.contextmanager
def handing_over(life: Daemon, name: str) -> Iterator[Orphan]:
    """Return the successor that is ready, while the running daemon waits for a SEND's step in a pool of that name."""
    with Client.connect(life.runtime_dir, name=name, reconnect=False) as client:
        client.create_pool(name, SPEC)
        sent, received = client.allocate(name, 2), client.allocate(name, 2)
        step = (ring := client.open_events()).step(0, 2)
        receiving = client.receive(name, request := new_request_id(), [pages(received)])
        client.send(name, request, [pages(sent)], steps=[step])
        yield Orphan(client.call(asked(Upgrade())).pid)
        with pytest.raises(KvferryError, match="another UPGRADE"):
            client.call(asked(Upgrade()))
        ring.record(step)
        assert client.wait_finished(receiving).error is None, "it was cut off"


def test_a_signal_to_end_during_the_hand_over_ends_the_successor_in_order(life: Daemon) -> None:
    with handing_over(life, "told") as successor:
        life.process.terminate()
        assert soon(lambda: '"SIGTERM"' in life.log.read_text())
    assert (life.process.wait(END_S), successor.wait(END_S)) == (0, 0)
    assert not list(life.runtime_dir.glob("[!h]*.sock")), "sockets of nobody; the holder's stays"
    said = life.log.read_text()
    assert said.count('"serving"') == said.count('"ended"')
    assert said.count('"asked to end"') == 2
    life.start()


def test_a_successor_that_dies_during_the_hand_over_is_named_and_the_next_start_has_everything(life: Daemon) -> None:
    with handing_over(life, "killed") as successor:
        with Client.connect(life.runtime_dir) as client:
            kept = client.attach_pool("killed").array("main", "k")
            kept[:, 1:] = 7
        successor.send_signal(signal.SIGKILL)
        successor.wait(END_S)
    assert life.process.wait(END_S) == 1
    assert f"process {successor.pid} has ended before it took this daemon's place" in life.log.read_text()
    life.start()
    with Client.connect(life.runtime_dir) as client:
        assert (client.attach_pool("killed").array("main", "k")[:, 1:] == 7).all()


def test_what_does_not_outlive_its_daemon_is_not_upgraded(daemon: Daemon, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = upgraded(daemon, capsys)
    assert status == 1
    assert "--keep" in said


def test_other_users_are_refused(life: Daemon) -> None:
    asks = """
from kvferry.clients.calls import asked
from kvferry.protocol.session_messages import Upgrade
with Client.connect(sys.argv[1]) as client:
    try: client.call(asked(Upgrade()))
    except KvferryError as error: print(error)
"""
    assert said_by_another_user(life, asks).startswith("ACCESS_DENIED")


@pytest.mark.parametrize(
    ("name", "content"),
    [(INDEX, "index.1"), ("kvferry.pool.77.record", "pool.1"), (kept_tier.RECORD, "tier.1")],
)
def test_a_record_of_another_format_is_refused(name: str, content: str) -> None:
    whole = zlib.decompress((Path(__file__).parents[1] / "formats" / f"{content}.zlib").read_bytes())
    with closing(HostRegion.create("record", INDEX_BYTES if name == INDEX else len(whole))) as region:
        region.buffer[: len(whole)] = whole
        check_kept({name: [region.fd]})
        region.buffer[8:9] = b"\xff"
        with pytest.raises(UpgradeRefusedError, match=f"{name}: .*format 255"):
            check_kept({name: [region.fd]})


@pytest.mark.parametrize("code", ["", "import time; time.sleep(60)", "import os; os.kill(os.getpid(), 9)"])
def test_a_successor_that_is_not_ready_is_ended(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(succession, "READY_S", 0.5)
    pids: list[int] = []
    monkeypatch.setattr(Successor, "__init__", _noting(pids))
    with pytest.raises(UpgradeRefusedError, match="ready"):
        asyncio.run(Successor.start({}, [sys.executable, "-S", "-c", code]))
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def _noting(pids: list[int]) -> object:
    original = Successor.__init__

    def noted(self: Successor, process: object, channel: socket.socket) -> None:
        original(self, process, channel)  # type: ignore[arg-type]
        pids.append(self.pid)

    return noted


def test_a_successor_ends_with_the_daemon_that_started_it() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        ours.send(b"LOOK")
    predecessor = Predecessor.find({VARIABLE: str(theirs.detach())})
    assert predecessor is not None
    with pytest.raises(DaemonLostError):
        predecessor.take_over("1")


def test_what_is_handed_over_is_the_successors() -> None:
    """Descriptors of one name arrive in order, and the successor owns them."""
    with open(os.devnull) as first, open("/dev/zero") as second:  # noqa: PTH123
        script = """
import os
from kvferry.daemon.process.succession import Predecessor
one = Predecessor.find()
assert sorted(one.kept) == ["a"], one.kept
got = one.take_over("9.9")
os.write(got["out"][0], repr([os.readlink(f"/proc/self/fd/{fd}") for fd in got["names"]]).encode())
"""
        read, write = os.pipe()

        async def run() -> Successor:
            successor = await Successor.start({"a": [first.fileno()]}, [sys.executable, "-c", script])
            successor.hand({"names": [first.fileno(), second.fileno()], "out": [write]})
            successor.go()
            return successor

        successor = asyncio.run(run())
        assert successor.version == "9.9"
        os.close(write)
        assert os.read(read, 100) == b"['/dev/null', '/dev/zero']"
        os.close(read)
        successor.end()
