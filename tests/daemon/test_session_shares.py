"""What engines say on the session socket: shares in good order, too many, junk; and that no handle is ever shown."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from kvferry.clients import Client, MhaSpec, calls
from kvferry.daemon.control.session_socket import MAX_MESSAGES_SHARED
from kvferry.daemon.daemon import Tuning
from kvferry.protocol.errors import KvferryError, MalformedError
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import RegisteredArrays, RegisterPool
from kvferry.protocol.session_stream import (
    MAX_SHARED_EVENTS,
    MAX_SHARES,
    SessionOpen,
    SharedEvents,
    ShareFollows,
    TorchShare,
    VmmShare,
    pack,
    unpack_attachment,
)
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.raw_engine import RawEngine, raw_engine

SPEC = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")
WAIT_S = 20.0
SECRET = b"a-bearer-secret-of-64-bytes"
SHARE = TorchShare(
    handle=SECRET, storage_bytes=1 << 20, storage_offset_bytes=0, ref_counter=SECRET, ref_counter_offset=0,
    event=SECRET, event_sync=False,
)  # fmt: skip
DRIVER_HANDLE = 0x5EC12E7C0DE
VMM_SHARE = VmmShare(handle=DRIVER_HANDLE, size_bytes=2 << 20)
ARRAYS = tuple(
    RegisteredArrays(component="main", role=role, shape=(2, 5, 16, 1, 8), strides=(640, 128, 8, 8, 1), dtype="float16")
    for role in ("k", "v")
)


@contextmanager
def session(daemon: Daemon) -> Iterator[socket.socket]:
    """Yield the socket of a session, to say on it what the client library would not."""
    with raw_engine(daemon.runtime_dir, "rude") as engine:
        engine.channel.socket.settimeout(WAIT_S)
        yield engine.channel.socket


def is_ended(channel: socket.socket) -> bool:
    try:
        return channel.recv(4096) == b""
    except ConnectionResetError:
        return True


def shared(number: int, *shares: TorchShare | VmmShare) -> bytes:
    return pack(ShareFollows(message_id=number, shares=shares or (SHARE,)))


def is_served(daemon: Daemon) -> bool:
    with Client.connect(daemon.runtime_dir) as client:
        return "rude" in [one.name for one in client.status().sessions]


@pytest.mark.parametrize(
    "junk",
    [
        pack(SessionOpen(protocol_min=4, protocol_max=4)),
        b"\x05\x00\x00\x00junk!",
        (1 << 31).to_bytes(4, "little"),
        (4).to_bytes(4, "little") + msgspec.msgpack.encode([1, 2, 3]),
    ],
    ids=["opened twice", "no message", "a frame too large", "no share"],
)
def test_junk_after_opening_ends_that_session_only(daemon: Daemon, junk: bytes) -> None:
    with session(daemon) as rude, session(daemon) as other:
        rude.sendall(junk)
        assert is_ended(rude)
        other.sendall(shared(1))
        assert is_served(daemon)


def test_shares_of_messages_that_never_come_have_a_bound(daemon: Daemon) -> None:
    with session(daemon) as rude:
        for number in range(MAX_MESSAGES_SHARED):
            rude.sendall(shared(number))
        assert is_served(daemon)
        rude.sendall(shared(1 << 40))
        assert is_ended(rude)


def test_shares_of_one_message_have_a_bound(daemon: Daemon) -> None:
    frame = shared(1, *(VmmShare(handle=1, size_bytes=1),) * MAX_SHARES)
    with session(daemon) as rude, pytest.raises((BrokenPipeError, ConnectionResetError)):  # noqa: PT012  it ends meanwhile
        for _ in range(1 << 14):
            rude.sendall(frame)
        assert is_ended(rude)
        rude.sendall(frame)


def test_shares_count_to_what_sessions_may_keep_in_all() -> None:
    tuning = Tuning(limits=Limits(max_kept_request_bytes=1 << 20))
    frame = shared(1, *(VmmShare(handle=1, size_bytes=1),) * MAX_SHARES)
    with kit.daemon(tuning=tuning) as daemon:
        with session(daemon) as polite:
            polite.sendall(frame)
            with session(daemon) as rude:
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it ends meanwhile
                    rude.sendall(frame * ((1 << 19) // len(frame)))
                assert is_ended(rude)
            assert is_served(daemon)
        assert "bytes of all sessions are kept" in daemon.log.read_text()


VMM = {"kind": "vmm", "handle": 1, "size_bytes": 1}


@pytest.mark.parametrize(
    "said",
    [
        {"shares": [VMM] * (MAX_SHARES + 1)},
        *({"shares": [VMM | {field: -1}]} for field in ("handle", "size_bytes")),
        {"shares": [VMM | {"kind": "dma"}]},
        {"shares": [VMM | {"handle": SECRET}]},
        {"events": {"handles": [b"x"] * (MAX_SHARED_EVENTS + 1)}},
        {"events": {"handles": [SECRET * 100]}},
    ],
)
def test_a_share_that_makes_no_sense_is_refused_without_its_handle(said: dict[str, object]) -> None:
    with pytest.raises(MalformedError) as refused:
        unpack_attachment(msgspec.msgpack.encode({"type": "SHARE", "message_id": 1, **said}))
    assert SECRET.decode() not in str(refused.value)


def refusal(engine: RawEngine, *shares: TorchShare | VmmShare) -> KvferryError:
    """Return the error of a REGISTER_POOL with these shares said before."""
    pool = RegisterPool(pool="registered", spec=SPEC, device="npu:0", arrays=ARRAYS)
    with pytest.raises(KvferryError) as refused:
        engine.call(calls.asked(pool), lambda number: [ShareFollows(message_id=number, shares=shares)])
    return refused.value


def shows_a_handle(text: str) -> bool:
    return SECRET.decode() in text or str(DRIVER_HANDLE) in text


def test_no_log_and_no_text_shows_a_handle() -> None:
    events = SharedEvents(handles=(SECRET,))
    texts = [repr(one) for one in (SHARE, VMM_SHARE, events)]
    texts.append(repr(ShareFollows(message_id=1, shares=(SHARE, VMM_SHARE), events=events)))
    with kit.daemon('[logging]\nlevel = "debug"\n') as daemon:
        with raw_engine(daemon.runtime_dir) as engine:
            two, too_few = ((SHARE, SHARE), (VMM_SHARE, VMM_SHARE)), ((), (VMM_SHARE,))
            refusals = [refusal(engine, *shares) for shares in (*two, *too_few)]
        assert {(one.code, one.field) for one in refusals[-2:]} == {("INVALID_FIELD", "arrays")}
        texts += map(str, refusals)
        with session(daemon) as rude:
            rude.sendall(shared(1, SHARE, VMM_SHARE))
            rude.sendall(b"\x01\x00\x00\x00\xc1")
            assert is_ended(rude)
        daemon.end()
        texts.append(daemon.log.read_text())
    assert "session ended" in texts[-1]
    assert not [one for one in texts if shows_a_handle(one)]
