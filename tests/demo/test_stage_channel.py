"""What two pipeline stages tell each other arrives as it was said; everything else is refused with the reason."""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from examples.demo import stage_channel
from examples.demo.errors import DemoError
from examples.demo.stage_channel import (
    MAX_HEADER_BYTES,
    MAX_TOKENS,
    Proposal,
    StageChannel,
    States,
    accept,
    connect,
    listen,
    parsed,
)

REQUEST = "0123456789abcdef" * 2
LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def both_ends() -> Iterator[tuple[StageChannel, StageChannel]]:
    left, right = socket.socketpair()
    with StageChannel(left) as before, StageChannel(right) as after:
        yield before, after


@contextlib.contextmanager
def fed(data: bytes) -> Iterator[StageChannel]:
    """Return a channel whose other end says these bytes and closes."""
    left, right = socket.socketpair()
    with StageChannel(right) as channel:
        left.sendall(data)
        left.close()
        yield channel


def message(header: msgspec.Struct | object, values: bytes = b"") -> bytes:
    encoded = msgspec.msgpack.encode(header)
    return struct.pack("!I", len(encoded)) + encoded + values


def states_of(**changes: object) -> bytes:
    """Return a message that a receiver of 2 tokens from 6 on takes, but for the changes."""
    fields = {"type": "States", "request_id": REQUEST, "first_position": 6, "tokens": 2, "width": 3, **changes}
    return message(fields, bytes(24))


@given(st.integers(1, 40), st.integers(1, 64), st.integers(0, 1 << 20), st.integers(0, 1 << 32))
def test_hidden_states_arrive_to_the_bit(tokens: int, width: int, position: int, seed: int) -> None:
    states = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))
    with both_ends() as (before, after):
        before.send(REQUEST, position, states)
        before.send(REQUEST, position + tokens, -states)
        assert torch.equal(after.receive(REQUEST, position, tokens), states)
        assert torch.equal(after.receive(REQUEST, position + tokens, tokens), -states)


def test_states_larger_than_any_buffer_arrive() -> None:
    states = torch.randn(2048, 576)
    with both_ends() as (before, after), ThreadPoolExecutor(1) as executor:
        sent = executor.submit(before.send, REQUEST, 0, states)
        assert torch.equal(after.receive(REQUEST, 0, 2048), states)
        sent.result()


def test_stages_agree_on_what_they_reuse() -> None:
    with both_ends() as (before, after), ThreadPoolExecutor(1) as executor:
        proposed = executor.submit(before.propose, REQUEST, 5)
        assert after.proposed(REQUEST) == 5
        after.agree(REQUEST, 3)
        assert proposed.result() == 3


def test_the_empty_change_is_what_a_receiver_takes() -> None:
    with fed(states_of()) as channel:
        assert torch.equal(channel.receive(REQUEST, 6, 2), torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "gone"),
        (b"\0\0", "gone"),
        (states_of()[:-1], "gone"),
        (struct.pack("!I", MAX_HEADER_BYTES + 1), f"a header of {MAX_HEADER_BYTES + 1} bytes"),
        (b"\xff" * 64, "a header of 4294967295 bytes"),
        (message(7), "no header"),
        (message({"type": "States"}), "no header"),
        (message(Proposal(request_id=REQUEST, reusable_pages=1)), "not States"),
        (states_of(request_id="another"), "not States of request"),
        (states_of(first_position=7), "not 2 tokens from 6"),
        (states_of(tokens=3), "not 2 tokens from 6"),
        (states_of(tokens=0), "no header"),
        (states_of(tokens=MAX_TOKENS + 1), "no header"),
        (states_of(width=1 << 20), "no header"),
        (states_of(tokens=-1), "no header"),
        (states_of(more=1), "no header"),
    ],
)
def test_anything_else_is_refused_with_the_reason(data: bytes, reason: str) -> None:
    with fed(data) as channel, pytest.raises(DemoError, match=reason):
        channel.receive(REQUEST, 6, 2)


def test_a_stage_that_has_gone_is_noticed_when_sending() -> None:
    with both_ends() as (before, after):
        after.__exit__(None, None, None)
        with pytest.raises(DemoError, match="gone"):
            before.send(REQUEST, 0, torch.zeros(2048, 576))


def test_a_header_is_never_longer_than_it_may_be() -> None:
    header = States(request_id="x" * 64, first_position=1 << 30, tokens=MAX_TOKENS, width=stage_channel.MAX_WIDTH)
    assert len(msgspec.msgpack.encode(header)) <= MAX_HEADER_BYTES


def test_over_tcp() -> None:
    listener = listen(LOOPBACK, 0)
    endpoint = parsed(f"{LOOPBACK}:{listener.getsockname()[1]}")
    with ThreadPoolExecutor(1) as executor:
        accepted = executor.submit(accept, listener)
        with connect(*endpoint) as before, accepted.result() as after:
            before.send(REQUEST, 0, torch.ones(1, 4))
            assert torch.equal(after.receive(REQUEST, 0, 1), torch.ones(1, 4))
            with pytest.raises(DemoError, match=f"no stage listens at {LOOPBACK}"):
                connect(*endpoint, timeout_s=0.1)


def test_nobody_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage_channel, "PATIENCE_S", 0.05)
    with pytest.raises(DemoError, match=r"no stage connected within 0\.05 s"):
        accept(listen(LOOPBACK, 0))
