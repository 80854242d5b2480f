"""Somebody who reaches Mooncake's ports, and knows nothing else: what its TCP protocol gives to anyone who connects.

The protocol is that of Mooncake 0.3.13: ``transfer_metadata_plugin.cpp`` (the handshake port: a message's length, its
kind, JSON) and ``tcp_transport_session_impl.h`` (the data port: size, address and operation, then bytes).
"""

from __future__ import annotations

import contextlib
import enum
import json
import socket
import struct
from typing import Any, Final, NamedTuple

TIMEOUT_S: Final = 5.0
_LENGTH: Final = struct.Struct("<Q")
_HEADER: Final = struct.Struct("<QQB7x")
_METADATA: Final = b"\x01"
_ANSWERED: Final = 0x80
_STATUS: Final = 0x4D435456 << 32


class Operation(enum.IntEnum):
    """What is asked of the data port."""

    READ = 0
    WRITE = 1


class Segment(NamedTuple):
    """What an engine tells anyone: where its data port is, and the memory that may be read and written there."""

    host: str
    port: int
    buffers: list[tuple[int, int]]
    """Address and size of each."""


class RefusedError(Exception):
    """The engine has refused an address."""


def look_up(host: str, port: int, timeout_s: float = TIMEOUT_S) -> Segment:
    """Ask an engine's handshake port, as a peer does at first contact."""
    with socket.create_connection((host, port), timeout_s) as channel:
        message = _METADATA + b"{}"
        channel.sendall(_LENGTH.pack(len(message)) + message)
        (size,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
        said: dict[str, Any] = json.loads(_exactly(channel, size)[1:])
    return Segment(host, said["tcp_data_port"], [(one["addr"], one["length"]) for one in said["buffers"]])


def read(segment: Segment, address: int, size_bytes: int) -> bytes:
    """Read memory of the engine's process."""
    with contextlib.closing(_asked(segment, Operation.READ, address, size_bytes)) as channel:
        _check_status(channel)
        return _exactly(channel, size_bytes)


def write(segment: Segment, address: int, data: bytes) -> None:
    """Write memory of the engine's process."""
    with contextlib.closing(_asked(segment, Operation.WRITE, address, len(data))) as channel:
        channel.sendall(data)
        _check_status(channel)


def _asked(segment: Segment, operation: Operation, address: int, size_bytes: int) -> socket.socket:
    channel = socket.create_connection((segment.host, segment.port), TIMEOUT_S)
    channel.sendall(_HEADER.pack(size_bytes, address, operation | _ANSWERED))
    return channel


def _check_status(channel: socket.socket) -> None:
    (status,) = _LENGTH.unpack(_exactly(channel, _LENGTH.size))
    if status != _STATUS:
        raise RefusedError(hex(status))


def _exactly(channel: socket.socket, size_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < size_bytes:
        more = channel.recv(size_bytes - len(data))
        if not more:
            raise ConnectionError(f"the end after {len(data)} of {size_bytes} bytes")
        data += more
    return bytes(data)
