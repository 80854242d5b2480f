"""Engines that fork: the child has neither session nor pools, and whatever it does, the parent's stay whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.clients import Client
from kvferry.protocol.errors import PoolFullError
from tests.daemons import DaemonProcess, running_daemon, said_by_another_user, soon

ENGINE = Path(__file__).with_name("forking_engine.py")
SOON_S = 60.0


def scene(which: str, daemon: DaemonProcess, pool: str) -> list[str]:
    """Return the lines that the forking engine prints."""
    command = [sys.executable, "-P", str(ENGINE), which, str(daemon.runtime_dir), pool]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=SOON_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "Error" not in ended.stderr, ended.stderr
    return ended.stdout.splitlines()


def test_every_call_in_a_child_is_refused_at_once(daemon: DaemonProcess, name: str) -> None:
    *codes, ended, parent = scene("calls", daemon, name)
    assert codes == ["FORKED"] * 14
    assert ended == "exit 0"
    assert parent == "[3] 1 TablesUpdated(sequence=1, replayed_rows=0)", "the parent's session is as it was"


def test_every_call_of_an_async_client_in_a_child_is_refused_at_once(daemon: DaemonProcess, name: str) -> None:
    assert scene("async_calls", daemon, name) == ["FORKED"] * 3 + ["exit 0", "[2]"]


def test_a_child_that_touches_a_pool_is_killed(daemon: DaemonProcess, name: str) -> None:
    assert scene("touches", daemon, name) == ["SIGSEGV SIGSEGV", "5.0"]


def test_a_child_that_gives_its_parents_pool_up_keeps_its_own_memory(daemon: DaemonProcess, name: str) -> None:
    assert scene("leaves", daemon, name) == ["0", "exit 0"]


def test_a_child_that_wants_a_pool_attaches(daemon: DaemonProcess, name: str) -> None:
    assert scene("attaches", daemon, name) == ["exit 0", "3.0"]


def test_children_that_inherit_keep_a_dead_engines_pages_from_others(daemon: DaemonProcess, name: str) -> None:
    command = [sys.executable, "-P", str(ENGINE), "inherits", str(daemon.runtime_dir), name]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as engine,
        Client.connect(daemon.runtime_dir) as client,
    ):
        assert engine.stdin is not None
        assert engine.stdout is not None
        child = int(engine.stdout.readline())

        def quarantined() -> list[int]:
            return [one.quarantined for one in client.status().pools if one.pool == name]

        assert soon(lambda: not any(one.name == "engine" for one in client.status().sessions))
        assert quarantined() == [1]
        tensor = client.attach_pool(name).tensor("main", "k")
        ids = client.allocate(name, 15)
        tensor[0, ids] = 2.0
        with pytest.raises(PoolFullError, match="1 held by children of process") as refused:
            client.allocate(name, 1)
        assert "pages quarantined" in daemon.log.read_text(), refused
        engine.stdin.write("write\n")
        engine.stdin.flush()
        page = int(engine.stdout.readline())
        assert page not in ids
        assert bool((tensor[0, ids] == 2.0).all()), "what was given to others is theirs"
        os.kill(child, signal.SIGKILL)
        assert soon(lambda: quarantined() == [0])
        assert client.allocate(name, 1).tolist() == [page]
        assert engine.wait(SOON_S) == 0


@pytest.mark.parametrize("kib", [300, 550])
def test_what_is_quarantined_has_a_bound_for_a_user_and_for_all(tmp_path: Path, kib: int) -> None:
    """Of 1 MiB: 256 KiB of a user, 512 KiB of all. Who lets no children inherit may go on."""
    pages_owned = 2 * kib  # of 512 bytes
    with (
        running_daemon(tmp_path, f"[pools]\nmax_bytes = {1 << 20}\n") as daemon,
        subprocess.Popen(
            [sys.executable, "-P", str(ENGINE), "inherits", str(daemon.runtime_dir), "held", str(pages_owned)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as engine,
        Client.connect(daemon.runtime_dir) as plain,
    ):
        assert engine.stdout is not None
        child = int(engine.stdout.readline())
        assert soon(lambda: [one.quarantined for one in plain.status().pools] == [pages_owned])
        with Client.connect(daemon.runtime_dir, reconnect=False) as mine:
            mine.let_children_inherit()
            with pytest.raises(
                PoolFullError, match=f"{kib << 10} bytes of user {os.geteuid()} .* at most {1 << 18} .*children of"
            ):
                mine.allocate("held", 1)
            assert len(plain.allocate("held", 1)) == 1
            asks = """
with Client.connect(sys.argv[1], reconnect=False) as client:
    client.let_children_inherit()
    client.create_pool("theirs", MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32"))
    try:
        print(len(client.allocate("theirs", 1)))
    except KvferryError as error:
        print(error.code, error.detail)
"""
            said = said_by_another_user(daemon, asks)
            if kib << 10 <= 1 << 19:
                assert said == "1"
            else:
                assert said.startswith(f"POOL_FULL {kib << 10} bytes of all users are quarantined")
                assert said.endswith("held by others' children"), "nobody is named to another user"
            os.kill(child, signal.SIGKILL)
            assert soon(lambda: plain.status().pools[0].quarantined == 0)
            assert len(mine.allocate("held", 1)) == 1


def test_children_inherit_until_the_client_is_closed(daemon: DaemonProcess, name: str) -> None:
    assert scene("closes", daemon, name) == ["5.0", "exit 0", "SIGSEGV", "MISUSE"]


def test_closing_gives_pages_back_though_a_child_holds_the_session_open(daemon: DaemonProcess, name: str) -> None:
    command = [sys.executable, "-P", str(ENGINE), "holds", str(daemon.runtime_dir), name]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine,
        Client.connect(daemon.runtime_dir) as client,
    ):
        assert engine.stdout is not None
        assert engine.stdout.readline() == b"closed\n"
        while any(one.name == "holder" for one in client.status().sessions):
            assert engine.poll() is None, "the child was to be alive"
        assert len(client.allocate(name, 16)) == 16
        assert engine.poll() is None, "the child was to be alive"
        engine.communicate(timeout=SOON_S)
    assert engine.returncode == 0
