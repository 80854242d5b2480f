"""An engine that dies between any two of its messages: nothing of it is left, and everybody else is served."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil
import zmq

from kvferry.clients import Client, MhaSpec, SharedMemory, calls, new_request_id
from kvferry.clients.core.client_core import ClientCore
from kvferry.clients.daemon_socket import open_control_socket
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.base import PageList
from kvferry.protocol.ids import BootId
from kvferry.protocol.pool_messages import Allocate, AttachPool, CreatePool, RegisteredArrays, RegisterPool
from kvferry.protocol.session_messages import OpenEvents
from kvferry.protocol.session_stream import FrameSplitter, MemoryFollows, SessionOpened, pack, unpack_frame
from kvferry.protocol.table_messages import CreateTables
from kvferry.protocol.transfer_messages import Receive, Send
from tests.kit.daemons import Daemon, soon
from tests.kit.raw_engine import RawEngine
from tests.kit.started import started

SPEC: Final = MhaSpec(layers=1, tokens=64, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
NAME: Final = "dying"
SEND_MS: Final = 300
"""What was sent outlives its engine: until it is received, or for so long."""
STEPS: Final = 18


def test_after_each_of_its_messages(daemon: Daemon, client: Client) -> None:
    client.create_pool("shared", SPEC)
    process = psutil.Process(daemon.process.pid)
    files = process.num_fds()
    before = client.status()

    def nothing_is_left() -> bool:
        report = client.status()
        return (
            [(one.pool, one.free, one.busy) for one in report.pools] == [("shared", SPEC.tokens // SPEC.page_size, 0)]
            and not any(one.name == NAME for one in report.sessions)
            and not report.transfers
            and not report.tables
            and report.descriptors is not None
            and before.descriptors is not None
            and report.descriptors.promised == before.descriptors.promised
            and process.num_fds() <= files
        )

    with started([__file__, str(daemon.runtime_dir), "shared"]) as engine:
        assert engine.stdin is not None
        assert engine.stdout is not None
        for number in range(1, STEPS + 1):
            assert engine.stdout.readline() == f"{number} {signal.SIGKILL.value}\n"
            assert soon(nothing_is_left), (number, client.status(), process.num_fds() - files)
            engine.stdin.write("\n")
            engine.stdin.flush()
        assert engine.stdout.readline() == "", "more steps than these"
        assert engine.wait(20) == 0
    assert "Traceback" not in daemon.log.read_text()


def life(runtime_dir: Path, pool: str) -> Iterator[Callable[[], object]]:
    """Yield an engine's steps, in order."""
    opening = pack(calls.session_open(NAME))
    channel = socket.socket(socket.AF_UNIX)
    yield lambda: channel.connect(str(runtime_dir / "session.sock"))
    yield lambda: channel.send(opening[:7])
    yield lambda: channel.send(opening[7:])
    frames: list[bytes] = []
    yield lambda: frames.extend(FrameSplitter().feed(channel.recv(4096)))
    opened = unpack_frame(frames[0])
    assert isinstance(opened, SessionOpened)
    controls: list[zmq.Socket[bytes]] = []
    yield lambda: controls.append(open_control_socket(zmq.Context(), runtime_dir))
    core = ClientCore(BootId(opened.boot_id), opened.secret)
    engine = RawEngine(SessionChannel(channel, opened), controls[0], core)
    channel.setblocking(False)  # noqa: FBT003  socket's own signature
    yield lambda: engine.call(calls.hello(NAME))
    yield lambda: engine.ask(CreatePool(pool=f"{pool}-own", spec=SPEC, lifetime="instance"))
    ids: list[int] = []
    yield lambda: ids.extend(engine.ask(Allocate(pool=pool, count=8)).ids[0])
    yield lambda: engine.ask(AttachPool(pool=pool))
    yield lambda: engine.ask(OpenEvents())
    yield lambda: engine.ask(CreateTables(tables="t", pool=pool, max_batch=2, max_context_tokens=8))
    memory = SharedMemory(1 << 16)
    shape, strides = (1, 17, 4, 1, 4), (68, 16, 4, 4, 1)
    arrays = tuple(
        RegisteredArrays(component="main", role=role, shape=shape, strides=strides, dtype="float32", offset_bytes=at)
        for role, at in (("k", 0), ("v", 4096))
    )
    register = core.request(RegisterPool(pool=f"{pool}-registered", spec=SPEC, device="host", arrays=arrays), ())
    follows = pack(MemoryFollows(message_id=register.message_id))
    yield lambda: socket.send_fds(channel, [follows[:5]], [memory.region.fd])  # a descriptor that no frame explains
    yield lambda: channel.send(follows[5:])
    yield lambda: controls[0].send_multipart(core.frames(register))
    lists = (PageList(pages=2),)
    yield lambda: engine.ask(Receive(pool=pool, request_id=new_request_id(), lists=lists), ids[:2])
    yield lambda: engine.ask(Send(pool=pool, request_id=new_request_id(), lists=lists), ids[2:4], deadline_ms=SEND_MS)
    both = new_request_id()
    yield lambda: engine.ask(Receive(pool=pool, request_id=both, lists=lists), ids[4:6])
    yield lambda: engine.ask(Send(pool=pool, request_id=both, lists=lists), ids[6:8], deadline_ms=SEND_MS)


def main(runtime_dir: Path, pool: str) -> None:
    """Die after the first step, after two, and so on, until all were done: a child for each.

    Print the last step's name each time, and go on at the next line of the standard input.
    """
    number, went_on = 0, True
    while went_on:
        number += 1
        read, write = os.pipe()
        if os.fork() == 0:
            for done, step in enumerate(life(runtime_dir, pool)):
                if done == number:
                    os.write(write, b"more")
                    break
                step()
            os.kill(os.getpid(), signal.SIGKILL)
        os.close(write)
        _, status = os.wait()
        went_on = os.read(read, 4) == b"more"
        os.close(read)
        sys.stdout.write(f"{number} {-os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()
        sys.stdin.readline()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
