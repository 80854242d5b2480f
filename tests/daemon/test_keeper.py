"""The keeper as a real process: who may write, and what it refuses. It has no device here; see tests/npu for those."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.daemon.process import detached, keeper
from kvferry.daemon.process.access import KEEPER_SOCKET
from kvferry.daemon.process.device_keeper import DeviceKeeper, DriverRefusedError, Fence, KeeperError, Kept, open_keeper
from kvferry.daemon.process.fd_store import NoStore
from tests.kit import faults

KEY = "0123456789abcdef" * 2
ANSWER_S = 20.0


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Return a runtime directory whose keeper, if any, ends with the test."""
    yield tmp_path
    open_keeper(tmp_path, NoStore(), 1)


def started(directory: Path, grace_s: str = "300") -> Path:
    path = directory / KEEPER_SOCKET
    detached.start(path, keeper.__file__, grace_s, keeper.ENDS, timeout_s=ANSWER_S)
    return path


class Line:
    """A connection that says what a test wants."""

    def __init__(self, path: Path) -> None:
        channel = detached.connected(path, ANSWER_S)
        assert channel is not None
        self.channel = channel
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = int.from_bytes(credentials[:4], sys.byteorder)

    def say(self, request: str | bytes) -> str:
        self.channel.send(request.encode() if isinstance(request, str) else request)
        return self.channel.recv(keeper.MAX_ANSWER_BYTES).decode()

    def ended(self) -> bool:
        return self.channel.recv(1) == b""


@contextlib.contextmanager
def line(path: Path, generation: int = 0) -> Iterator[Line]:
    one = Line(path)
    with one.channel:
        if generation:
            assert one.say(f"HELLO {keeper.VERSION} {generation}").startswith(f"OK {keeper.VERSION} ")
        yield one


def test_the_newest_daemon_writes(directory: Path) -> None:
    path = started(directory)
    with line(path, generation=5) as first, line(path, generation=7) as second:
        for request in ("LIST", "FENCE", f"DROP {KEY}", "LEAVE 1", "END"):
            assert first.say(request) == "NO a newer daemon writes"
        assert second.say("LIST") == "OK"
        for late in (5, 6, 7):
            with line(path) as older:
                assert older.say(f"HELLO {keeper.VERSION} {late}") == "NO a newer daemon writes"
                assert older.say("LIST") == "NO the first request is HELLO"
        assert second.say("HELLO 1 9") == "NO a newer daemon writes", "a daemon has one generation"
        assert second.say("LIST") == "OK"


def test_what_is_malformed_is_refused_and_it_serves_on(directory: Path) -> None:
    path = started(directory)
    with line(path) as early:
        assert early.say("LIST") == "NO the first request is HELLO"
        for greeting in (
            "HELLO",
            "HELLO 1",
            "HELLO 1 1 1",
            "HELLO x 1",
            "HELLO 1 0",
            "HELLO 1 -1",
            f"HELLO 1 {1 << 64}",
        ):
            assert early.say(greeting).startswith("NO "), greeting
        assert early.say("HELLO 2 1") == "NO this keeper speaks version 1"
    with line(path, generation=1) as one:
        for request in (
            b"\xff\x00", b" ", b"list", b"LIST 1", b"MAKE",
            f"MAKE {KEY} 0 0", f"MAKE {KEY} 0 {keeper.PAGE_BYTES + 1}", f"MAKE {KEY} 0 {1 << 51}",
            f"MAKE {KEY} 1000 {keeper.PAGE_BYTES}", f"MAKE {KEY[1:]} 0 {keeper.PAGE_BYTES}",
            f"MAKE {KEY.upper()} 0 {keeper.PAGE_BYTES}", f"MAKE ../../{KEY[6:]} 0 {keeper.PAGE_BYTES}",
            f"SHARE {KEY} 1", f"SHARE {KEY} -1", "DROP", "DROP x", "WHO -1", "WHO 0x1", "WHO \u0661".encode(),
            "CANARY 0 0", f"CANARY 0 {1 << 64}", "LEAVE", "LEAVE -1", "LEAVE nan", "LEAVE 1e9",
        ):  # fmt: skip
            assert one.say(request).startswith("NO "), request
        assert one.say(b"LIST" + bytes(keeper.MAX_PACKET_BYTES)) == "NO it is too long"
        assert one.say(f"DROP {KEY}") == "OK", "it is not there"
        assert one.say("LIST") == "OK"


PACKETS: Final = st.binary(min_size=1, max_size=300) | st.text("MAKELISTDROP 0123456789abcdef", min_size=1)


@given(packets=st.lists(PACKETS.filter(lambda one: one[:3] not in (b"END", b"LEA"))))
def test_no_packet_ends_it(running: tuple[Path, Iterator[int]], packets: list[bytes | str]) -> None:
    path, generations = running
    with line(path) as one:
        assert all(one.say(packet).startswith("NO ") for packet in packets)
    with line(path, generation=next(generations)) as one:
        for packet in packets:
            one.say(packet)
        assert one.say("LIST") == "OK"


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Path, Iterator[int]]]:
    """Return the socket of a keeper that serves all examples, and their daemons' generations."""
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
        yield started(Path(folder)), itertools.count(1)
        open_keeper(Path(folder), NoStore(), 1)


def test_connections_are_bounded_and_the_daemons_stays(directory: Path) -> None:
    path = started(directory)
    with line(path, generation=1) as daemon, contextlib.ExitStack() as silent:
        others = [silent.enter_context(line(path)) for _ in range(3 * keeper.MAX_CONNECTIONS)]
        assert daemon.say("LIST") == "OK"
        assert all(one.ended() for one in others[: -keeper.MAX_CONNECTIONS])
        assert others[-1].say("LIST") == "NO the first request is HELLO"


def test_another_user_is_not_served(require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be another user")
    code = (
        "import os, socket, sys\nos.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])\n"
        "try: s.send(b'HELLO 1 9'); print(s.recv(100))\nexcept OSError: print(b'')\n"
    )
    with tempfile.TemporaryDirectory(prefix="kvferry-test-") as folder:
        path = started(Path(folder))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        Path(folder).chmod(0o755)
        path.chmod(0o777)  # the file's mode alone would keep it out
        done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=False)
        assert done.stdout == "b''\n", done.stderr
        with line(path, generation=1) as one:
            assert one.say("LIST") == "OK", "it serves on"
            assert one.say("END") == "OK"


def test_it_ends_when_no_daemon_comes_in_time(directory: Path) -> None:
    path = started(directory, grace_s="1")
    with line(path, generation=1) as daemon:
        assert os.getsid(daemon.pid) != os.getsid(0), "a signal to the daemon's group does not reach it"
        with faults.ending(daemon.pid):
            daemon.channel.close()


def test_it_waits_as_long_as_the_daemon_said(directory: Path) -> None:
    path = started(directory)
    with line(path, generation=1) as first, line(path, generation=2) as second, line(path):
        assert second.say("LEAVE 0") == "OK"
        with faults.ending(second.pid):
            first.channel.close()
            second.channel.close()


# -- the command


def test_the_command_stays_whatever_daemons_say_and_is_alone(tmp_path: Path) -> None:
    directory = tmp_path / "run" / "one"
    config = tmp_path / "daemon.toml"
    config.write_text("[keeper]\ngrace_s = 1\n")
    command = [sys.executable, "-m", "kvferry.clients.cli.main", "keeper", "--config", str(config)]
    command += ["--runtime-dir", str(directory)]
    notify = tmp_path / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(os.fspath(notify))
        manager.settimeout(ANSWER_S)
        with subprocess.Popen(command, env=os.environ | {"NOTIFY_SOCKET": os.fspath(notify)}) as running:
            assert manager.recv(100).startswith(b"READY=1")
            with line(directory / KEEPER_SOCKET, generation=1) as one:
                assert one.pid == running.pid
                assert one.say("END") == "OK"
                assert one.say("LIST") == "OK"
            second = subprocess.run(command, capture_output=True, text=True, check=False)
            assert (second.returncode, "has a keeper already" in second.stderr) == (1, True)
            found = DeviceKeeper(directory, 1, may_start=False)
            assert found.pid == running.pid
            found.close()
            running.terminate()
    config.write_text("[keeper]\ngrace_s = 0\n")
    wrong = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (wrong.returncode, "keeper.grace_s" in wrong.stderr) == (2, True)


# -- the daemon's side


def test_a_keeper_is_started_when_it_is_needed_and_found_again(directory: Path) -> None:
    first = DeviceKeeper(directory, 300, may_start=True)
    assert not (directory / KEEPER_SOCKET).exists()
    assert (first.open(), first.open()) == (True, True)
    second = DeviceKeeper(directory, 300, may_start=False)
    assert (second.pid, second.found, second.is_passed()) == (first.pid, {}, True)
    with pytest.raises(KeeperError, match="a newer daemon writes"):
        first.is_passed()
    first.close()
    with faults.ending(second.pid):
        second.leave(None)
    assert not DeviceKeeper(directory, 300, may_start=False).open()


def test_devices_that_are_counted_otherwise_are_others(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started(directory)
    monkeypatch.setenv(keeper.VISIBLE_DEVICES, "4,5")
    with pytest.raises(KeeperError, match="ASCEND_RT_VISIBLE_DEVICES=''"):
        DeviceKeeper(directory, 300, may_start=True)
    monkeypatch.delenv(keeper.VISIBLE_DEVICES)


class SimulatedDriver(keeper.Driver):
    """Allocates nothing, and imports what has not ``gone``."""

    def __init__(self) -> None:
        super().__init__()
        self.gone = False
        self.error = 0
        self.freed = 0

    def make(self, device: int, size_bytes: int) -> keeper.Memory:
        if self.error:
            raise keeper.Refused(f"FAILED aclrtMallocPhysical {self.error}")
        return keeper.Memory(device, size_bytes, 1, 2)

    def free(self, memory: keeper.Memory) -> None:
        self.freed += memory.size_bytes == keeper.MAX_BYTES

    def is_gone(self, device: int, shareable: int) -> bool:
        return self.gone or (device, shareable) == (0, 7)


@contextlib.contextmanager
def kept_in_a_thread(directory: Path) -> Iterator[SimulatedDriver]:
    driver = SimulatedDriver()
    with detached.bound(directory / KEEPER_SOCKET) as listener:
        listener.listen()
        serving = threading.Thread(target=keeper.Keeper(listener, 300, stays=False, driver=driver).serve)
        serving.start()
        yield driver
        serving.join(ANSWER_S)
        assert not serving.is_alive()


def test_what_it_keeps_is_bounded_and_the_next_daemon_is_told_of_all(directory: Path) -> None:
    with kept_in_a_thread(directory) as driver:
        first = DeviceKeeper(directory, 300, may_start=False)
        driver.error = 207001
        with pytest.raises(DriverRefusedError, match="aclrtMallocPhysical") as refused:
            first.make(0, keeper.PAGE_BYTES)
        driver.error = 0
        keys = [first.make(999, keeper.MAX_BYTES) for _ in range(keeper.MAX_KEPT)]
        with pytest.raises(KeeperError, match=f"it keeps {keeper.MAX_KEPT}"):
            first.make(0, keeper.PAGE_BYTES)
        first.close()
        second = DeviceKeeper(directory, 300, may_start=False)
        assert second.found == dict.fromkeys(keys, Kept(999, keeper.MAX_BYTES))
        second.drop(keys.pop())
        second.leave(None)
    assert (refused.value.error, driver.freed) == (207001, keeper.MAX_KEPT)


def test_the_fence_is_passed_once_all_older_canaries_are_gone(directory: Path) -> None:
    with kept_in_a_thread(directory) as driver:
        first = DeviceKeeper(directory, 300, may_start=False)
        for number in range(1, keeper.MAX_CANARIES + 1):
            first.watch(0, number)
        first.watch(0, 1)
        with pytest.raises(KeeperError, match="canaries"):
            first.watch(1, 1)
        assert first.is_passed(), "they are its own"
        first.close()
        second = DeviceKeeper(directory, 300, may_start=False)
        assert not second.is_passed()
        second.watch(1, 1)  # one was gone
        second.watch(0, 2)  # its number is somebody else's by now
        assert not second.is_passed()
        driver.gone = True
        assert second.is_passed()
        driver.gone = False
        assert second.is_passed(), "it is not asked again"
        second.leave(None)


@pytest.mark.anyio
async def test_a_keeper_that_ends_is_noticed_once_and_missed(directory: Path) -> None:
    lost: list[bool] = []
    one = await asyncio.to_thread(DeviceKeeper, directory, 300, may_start=True)
    assert await asyncio.to_thread(one.open)
    one.when_lost = lambda: lost.append(True)
    fence = Fence(one, lambda _name, _count: None)
    one.check()
    assert lost == []
    await asyncio.to_thread(faults.kill, one.pid)
    one.check()
    one.check()
    assert (lost, one.pid, one.lost) == ([True], 0, "the keeper has ended")
    assert not await asyncio.to_thread(one.open), "another one has none of the pools"
    with pytest.raises(KeeperError, match="the keeper has ended"):
        one.make(0, keeper.PAGE_BYTES)
    assert not await fence.passed()


@pytest.mark.anyio
async def test_without_a_keeper_nobody_is_waited_for() -> None:
    assert await Fence(None, lambda _name, _count: None).passed()
