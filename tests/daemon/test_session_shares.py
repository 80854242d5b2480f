"""What engines say on the session socket: shares in good order, too many, junk; and that no handle is ever shown."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from kvferry.clients import Client, MhaSpec, calls
from kvferry.daemon.control.session_socket import MAX_MESSAGES_SHARED
from kvferry.protocol.errors import InvalidFieldError, KvferryError, MalformedError
from kvferry.protocol.pool_messages import RegisteredArrays, RegisterPool
from kvferry.protocol.session_stream import (
    MAX_SHARED_EVENTS,
    MAX_SHARES,
    FrameSplitter,
    SessionOpen,
    SessionOpened,
    SharedEvents,
    ShareFollows,
    TablesFollow,
    TorchShare,
    VmmShare,
    pack,
    unpack_attachment,
    unpack_frame,
)
from kvferry.protocol.settings import SESSION_SOCKET
from tests.daemons import DaemonProcess, running_daemon
from tests.raw_engine import RawEngine, raw_engine

SPEC = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")
WAIT_S = 20.0
SECRET = b"a-bearer-secret-of-64-bytes"
SHARE = TorchShare(
    handle=SECRET,
    storage_bytes=1 << 20,
    storage_offset_bytes=0,
    ref_counter=SECRET,
    ref_counter_offset=0,
    event=SECRET,
    event_sync=False,
)
DRIVER_HANDLE = 0x5EC12E7C0DE
ARRAYS = tuple(
    RegisteredArrays(component="main", role=role, shape=(2, 5, 16, 1, 8), strides=(640, 128, 8, 8, 1), dtype="float16")
    for role in ("k", "v")
)


@contextmanager
def session(daemon: DaemonProcess) -> Iterator[socket.socket]:
    """Open a session without the client library's good manners."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as channel:
        channel.settimeout(WAIT_S)
        channel.connect(os.fspath(daemon.runtime_dir / SESSION_SOCKET))
        channel.sendall(pack(SessionOpen(protocol_min=2, protocol_max=2, name="rude")))
        (frame,) = FrameSplitter().feed(channel.recv(4096))
        assert isinstance(unpack_frame(frame), SessionOpened)
        yield channel


def is_ended(channel: socket.socket) -> bool:
    """Return whether the daemon has closed a session."""
    try:
        return channel.recv(4096) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "junk",
    [
        pack(SessionOpen(protocol_min=2, protocol_max=2)),
        b"\x05\x00\x00\x00junk!",
        (1 << 31).to_bytes(4, "little"),
        (4).to_bytes(4, "little") + msgspec.msgpack.encode([1, 2, 3]),
    ],
    ids=["opened twice", "no message", "a frame too large", "no share"],
)
def test_junk_after_opening_ends_that_session_only(daemon: DaemonProcess, junk: bytes) -> None:
    with session(daemon) as rude, session(daemon) as other:
        rude.sendall(junk)
        assert is_ended(rude)
        other.sendall(pack(ShareFollows(message_id=1, shares=(SHARE,))))
        with Client.connect(daemon.runtime_dir) as client:
            assert "rude" in [one.name for one in client.status().sessions]


def test_shares_of_messages_that_never_come_have_a_bound(daemon: DaemonProcess) -> None:
    with session(daemon) as rude:
        for number in range(MAX_MESSAGES_SHARED):
            rude.sendall(pack(ShareFollows(message_id=number, shares=(SHARE,))))
        with Client.connect(daemon.runtime_dir) as client:
            assert "rude" in [one.name for one in client.status().sessions]
        rude.sendall(pack(ShareFollows(message_id=1 << 40, shares=(SHARE,))))
        assert is_ended(rude)


def test_shares_of_one_message_have_a_bound(daemon: DaemonProcess) -> None:
    frame = pack(ShareFollows(message_id=1, shares=(VmmShare(handle=1, size_bytes=1),) * MAX_SHARES))
    with session(daemon) as rude, pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012  it ends meanwhile
        for _ in range(1 << 14):
            rude.sendall(frame)
        assert is_ended(rude)
        rude.sendall(frame)


@pytest.mark.parametrize(
    "frame",
    [
        {
            "type": "SHARE",
            "message_id": 1,
            "shares": [{"kind": "vmm", "handle": 1, "size_bytes": 1}] * (MAX_SHARES + 1),
        },
        {"type": "SHARE", "message_id": 1, "events": {"handles": [b"x"] * (MAX_SHARED_EVENTS + 1)}},
        {"type": "SHARE", "message_id": 1, "shares": [{"kind": "vmm", "handle": -1, "size_bytes": 1}]},
        {"type": "SHARE", "message_id": 1, "shares": [{"kind": "dma", "handle": 1, "size_bytes": 1}]},
        {"type": "SHARE", "message_id": 1, "shares": [{"kind": "vmm", "handle": SECRET, "size_bytes": 1}]},
        {"type": "SHARE", "message_id": 1, "events": {"handles": [SECRET * 100]}},
    ],
)
def test_a_share_that_makes_no_sense_is_refused_without_its_handle(frame: dict[str, object]) -> None:
    with pytest.raises(MalformedError) as refused:
        unpack_attachment(msgspec.msgpack.encode(frame))
    assert SECRET.decode() not in str(refused.value)


@pytest.mark.parametrize("given", [0, 1, 3])
def test_as_many_shares_as_arrays(daemon: DaemonProcess, given: int) -> None:
    with raw_engine(daemon.runtime_dir) as engine:
        frames = [ShareFollows(message_id=0, shares=(SHARE,) * given)]
        with pytest.raises(InvalidFieldError, match=f"{given} shares came over the session socket") as refused:
            register(engine, ARRAYS, frames)
        assert refused.value.field == "arrays"


def register(engine: RawEngine, arrays: tuple[RegisteredArrays, ...], frames: list[ShareFollows]) -> None:
    """REGISTER_POOL, with these shares said before."""

    def said(message_id: int) -> list[ShareFollows]:
        return [msgspec.structs.replace(one, message_id=message_id) for one in frames]

    engine.call(calls.asked(RegisterPool(pool="registered", spec=SPEC, device="npu:0", arrays=arrays)), said)


# -- handles are secrets


def test_no_text_form_shows_a_handle() -> None:
    events = SharedEvents(handles=(SECRET,))
    vmm = VmmShare(handle=DRIVER_HANDLE, size_bytes=2 << 20)
    values = [
        SHARE,
        vmm,
        events,
        ShareFollows(message_id=1, shares=(SHARE, vmm), events=events),
        TablesFollow(message_id=1, share=SHARE, events=events),
        TablesFollow(message_id=1, share=vmm),
    ]
    for value in values:
        for text in (repr(value), str(value), f"{value!r:>10}"):
            assert SECRET.decode() not in text
            assert str(DRIVER_HANDLE) not in text


def test_no_log_shows_a_handle(tmp_path: Path) -> None:
    with running_daemon(tmp_path, '[logging]\nlevel = "debug"\n') as daemon:
        vmm = VmmShare(handle=DRIVER_HANDLE, size_bytes=2 << 20)
        with raw_engine(daemon.runtime_dir) as engine:
            for shares in ((SHARE, SHARE), (vmm, vmm), (vmm,)):
                with pytest.raises(KvferryError) as refused:
                    register(engine, ARRAYS, [ShareFollows(message_id=0, shares=shares)])
                assert SECRET.decode() not in str(refused.value)
                assert str(DRIVER_HANDLE) not in str(refused.value)
        with session(daemon) as rude:
            rude.sendall(pack(ShareFollows(message_id=1, shares=(SHARE, vmm))))
            rude.sendall(b"\x01\x00\x00\x00\xc1")
            assert is_ended(rude)
    log = daemon.log.read_bytes()
    assert b"session ended" in log
    assert SECRET not in log
    assert str(DRIVER_HANDLE).encode() not in log
