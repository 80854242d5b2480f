"""The protocol between two pipeline stages: a TCP connection for prompts' starts and hidden states, not the KV cache.

A message is the header's length, 4 bytes big-endian, the header in msgpack, and for hidden states their float32 values,
little-endian. Each length is checked before that many bytes are read. There is no authentication: it is only for the
demo's own network.
"""

from __future__ import annotations

import socket
import struct
import time
from types import TracebackType
from typing import Annotated, Final, Self, TypeVar

import msgspec
import numpy as np
import torch
from msgspec import Meta

from examples.demo.errors import DemoError

PATIENCE_S: Final = 600.0
"""Longer than any computation of the other stage."""
CONNECT_S: Final = 120.0
RETRY_S: Final = 0.05
MAX_HEADER_BYTES: Final = 512
MAX_TOKENS: Final = 4096
MAX_WIDTH: Final = 16384

RequestId = Annotated[str, Meta(max_length=64)]
PageCount = Annotated[int, Meta(ge=0, le=1 << 20)]


class _Header(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The common fields of all headers."""

    request_id: RequestId


class Proposal(_Header, frozen=True, kw_only=True):
    """To the next stage: the next prompt, and how many of its first pages this stage can reuse."""

    reusable_pages: PageCount


class Agreement(_Header, frozen=True, kw_only=True):
    """The answer: how many of them all later stages can reuse, too."""

    reused_pages: PageCount


class States(_Header, frozen=True, kw_only=True):
    """To the next stage: ``tokens * width`` values follow, for the tokens from ``first_position`` on."""

    first_position: Annotated[int, Meta(ge=0, le=1 << 30)]
    tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)]
    width: Annotated[int, Meta(ge=1, le=MAX_WIDTH)]


HeaderT = TypeVar("HeaderT", Proposal, Agreement, States)
_length = struct.Struct("!I")
_decoder = msgspec.msgpack.Decoder(Proposal | Agreement | States)


class StageChannel:
    """One connection, to the next or the previous stage."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self._connection = connection

    def __repr__(self) -> str:
        """Show the connection."""
        return f"<StageChannel {self._connection}>"

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the connection."""
        self._connection.close()

    def propose(self, request_id: str, reusable_pages: int) -> int:
        """Begin a prompt with the next stage; return how many of its first pages all stages reuse.

        Raises:
            DemoError: as in all methods: the other stage is gone, does not answer, or sent something unexpected.
        """
        self._send(Proposal(request_id=request_id, reusable_pages=reusable_pages))
        return self._take(Agreement, request_id).reused_pages

    def proposed(self, request_id: str) -> int:
        """Wait until the previous stage begins this prompt; return how many of its first pages can be reused there."""
        return self._take(Proposal, request_id).reusable_pages

    def agree(self, request_id: str, reused_pages: int) -> None:
        """Answer the previous stage."""
        self._send(Agreement(request_id=request_id, reused_pages=reused_pages))

    def send(self, request_id: str, first_position: int, states: torch.Tensor) -> None:
        """Send the hidden states ``(tokens, width)`` float32 of tokens from ``first_position`` on."""
        tokens, width = states.shape
        header = States(request_id=request_id, first_position=first_position, tokens=tokens, width=width)
        self._send(header, states.numpy().astype("<f4", copy=False).tobytes())

    def receive(self, request_id: str, first_position: int, tokens: int) -> torch.Tensor:
        """Wait for the hidden states of these tokens, ``(tokens, width)`` float32."""
        header = self._take(States, request_id)
        if (header.first_position, header.tokens) != (first_position, tokens):
            raise DemoError(f"the previous stage sent {header}, not {tokens} tokens from {first_position}")
        values = np.frombuffer(self._read(tokens * header.width * 4), "<f4")
        return torch.from_numpy(values.astype(np.float32, copy=False)).view(tokens, header.width)

    def _send(self, header: Proposal | Agreement | States, values: bytes = b"") -> None:
        encoded = msgspec.msgpack.encode(header)
        try:
            self._connection.sendall(_length.pack(len(encoded)) + encoded + values)
        except OSError as cause:
            raise DemoError(f"the other stage has gone: {cause}") from cause

    def _take(self, kind: type[HeaderT], request_id: str) -> HeaderT:
        (length,) = _length.unpack(self._read(_length.size))
        if length > MAX_HEADER_BYTES:
            raise DemoError(f"the other stage sent a header of {length} bytes; at most {MAX_HEADER_BYTES} are possible")
        try:
            header = _decoder.decode(self._read(length))
        except msgspec.MsgspecError as cause:
            raise DemoError(f"the other stage sent no header: {cause}") from cause
        if not isinstance(header, kind) or header.request_id != request_id:
            raise DemoError(f"the other stage sent {header}, not {kind.__name__} of request {request_id}")
        return header

    def _read(self, size_bytes: int) -> bytearray:
        """Return exactly so many bytes."""
        data = bytearray(size_bytes)
        rest = memoryview(data)
        while rest:
            try:
                count = self._connection.recv_into(rest)
            except OSError as cause:
                raise DemoError(f"the other stage has gone: {cause}") from cause
            if not count:
                raise DemoError("the other stage has gone")
            rest = rest[count:]
        return data


def parsed(endpoint: str) -> tuple[str, int]:
    """Return address and port of ``ADDRESS:PORT``."""
    address, _, port = endpoint.rpartition(":")
    return address, int(port)


def listen(address: str, port: int) -> socket.socket:
    """Return a listening socket for the previous stage."""
    return socket.create_server((address, port), backlog=1)


def accept(listener: socket.socket) -> StageChannel:
    """Wait for the previous stage to connect, then stop listening.

    Raises:
        DemoError: it does not connect in time.
    """
    listener.settimeout(PATIENCE_S)
    with listener:
        try:
            connection, _ = listener.accept()
        except TimeoutError as cause:
            raise DemoError(f"no stage connected within {PATIENCE_S:g} s") from cause
    return _channel(connection)


def connect(address: str, port: int, timeout_s: float = CONNECT_S) -> StageChannel:
    """Return a channel to the next stage, waiting until it listens.

    Raises:
        DemoError: it does not listen in time.
    """
    ends_at = time.monotonic() + timeout_s
    while True:
        try:
            return _channel(socket.create_connection((address, port), timeout=max(RETRY_S, ends_at - time.monotonic())))
        except OSError as cause:
            if time.monotonic() >= ends_at:
                raise DemoError(f"no stage listens at {address}:{port} within {timeout_s:g} s: {cause}") from cause
            time.sleep(RETRY_S)


def _channel(connection: socket.socket) -> StageChannel:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return StageChannel(connection)
