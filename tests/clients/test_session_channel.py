"""The session's socket while an engine says more than the daemon reads at once."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import pytest

from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.errors import MalformedError
from kvferry.protocol.session_stream import (
    FrameSplitter,
    SessionOpened,
    SharedEvents,
    ShareFollows,
    TablesFollow,
    pack,
    unpack_frame,
)

SOON_S = 2.0
READ_BYTES = 1 << 16


class Ends(NamedTuple):
    """A session's two ends."""

    client: SessionChannel
    daemon: socket.socket


@pytest.fixture
def ends() -> Iterator[Ends]:
    """Return both ends, joined."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0)
    with ours, theirs:
        theirs.settimeout(SOON_S)
        yield Ends(SessionChannel(ours, SessionOpened(session=1, secret=b"", boot_id="0" * 32)), theirs)


def much(message_id: int) -> list[ShareFollows]:
    """Return more frames than a socket's buffer holds."""
    return [ShareFollows(message_id=message_id, events=SharedEvents(handles=(b"h" * 64,) * 64))] * 200


def read(daemon: socket.socket, count: int) -> list[int]:
    """Return the messages that so many frames are of, as the daemon reads them."""
    splitter = FrameSplitter()
    found: list[int] = []
    while len(found) < count:
        for frame in splitter.feed(daemon.recv(READ_BYTES)):
            message = unpack_frame(frame)
            assert isinstance(message, ShareFollows)
            found.append(message.message_id)
    return found


def test_what_arrives_is_taken_at_once_while_another_thread_says_much(ends: Ends) -> None:
    ends.daemon.sendall(pack(ShareFollows(message_id=7)))
    with ThreadPoolExecutor(1) as other:
        saying = other.submit(ends.client.send, much(1))
        assert ends.daemon.recv(1, socket.MSG_PEEK), "it has begun"
        started = time.monotonic()
        ends.client.receive()
        took_s = time.monotonic() - started
        assert not saying.done()
        assert read(ends.daemon, 200) == [1] * 200
        saying.result(SOON_S)
    assert took_s < SOON_S / 2
    assert ends.client.take(7, ShareFollows)[0].message_id == 7


def test_what_two_threads_say_at_a_time_does_not_mix(ends: Ends) -> None:
    with ThreadPoolExecutor(2) as others:
        saying = [others.submit(ends.client.send, much(number)) for number in (1, 2)]
        assert sorted(read(ends.daemon, 400)) == [1] * 200 + [2] * 200
        for one in saying:
            one.result(SOON_S)


def test_what_did_not_come_is_named(ends: Ends) -> None:
    ends.daemon.sendall(pack(ShareFollows(message_id=7)))
    ends.client.receive()
    with pytest.raises(MalformedError, match="no ShareFollows came with the reply to message 8"):
        ends.client.take(8, ShareFollows)
    with pytest.raises(MalformedError, match="no TablesFollow came with the reply to message 7"):
        ends.client.take(7, TablesFollow)
