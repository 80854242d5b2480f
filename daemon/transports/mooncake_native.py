"""Mooncake's native engine: import, configure and create it, and destroy it without stalling this process for a second.

The only module that imports ``mooncake``. All functions may block and are for a worker thread.
"""

from __future__ import annotations

import importlib.metadata
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from kvferry.protocol.errors import ConfigError, InternalError, TransferFailedError

ASCEND_WHEEL: Final = "mooncake-transfer-engine-npu"
INSTALL: Final = (
    "install kvferry[mooncake] (on NPUs: mooncake-transfer-engine-npu) and Debian's libibverbs1, libnuma1 and libcurl4"
)
P2P: Final = "P2PHANDSHAKE"
ALL_DEVICES: Final = ""
SLICE_BYTES: Final = 60 << 10
"""What Mooncake hands to a socket at a time, and must move within the progress timeout. Its default, 64 KiB, is 53
bytes longer than a loopback's largest segment, so that each makes two; with 1 MiB transfers take a tenth longer."""

_ACCEPT_TIMEOUT_US = 2000
_WAKE_TIMEOUT_S = 1.0
log = structlog.get_logger(__name__)


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to create the engine, and its limits.

    Attributes:
        address: an address of this host, without a port, by which peers reach it.
        protocol: ``tcp``, or ``ascend`` on NPUs.
        max_bytes_in_flight_per_peer: further writes wait, in order. A single larger write goes alone. Best are two
            bounce buffers, fewer than Mooncake's connections to a peer, so that the writes to a hanging peer fail
            together and not one progress timeout after the other.
        contact_timeout_s: how long the first contact with a peer may take.
        progress_timeout_s: a write without progress for so long fails.
    """

    address: str
    protocol: str = "tcp"
    max_bytes_in_flight_per_peer: int = 32 << 20
    contact_timeout_s: float = 2.0
    progress_timeout_s: int = 5

    def environment(self) -> dict[str, str]:
        """Return the environment variables for Mooncake; they apply where the operator has not set them."""
        variables = {
            "MC_LOG_LEVEL": "ERROR",  # else it warns of every connection attempt
            "MC_HANDSHAKE_CONNECT_TIMEOUT": str(max(1, round(self.contact_timeout_s))),
            "MC_TRANSFER_TIMEOUT": str(max(5, self.progress_timeout_s)),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(self.progress_timeout_s),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(self.progress_timeout_s),
            # The default is one connection per write, made while the submission blocks.
            "MC_TCP_ENABLE_CONNECTION_POOL": "true",
            "MC_TCP_LANES_PER_PEER": "4",
            "MC_TCP_SLICE_SIZE": str(SLICE_BYTES),
        }
        # Else a host with RDMA devices would use those, whatever the requested protocol.
        return variables | {"MC_FORCE_TCP": "1"} if self.protocol == "tcp" else variables


class NativeEngine(Protocol):
    """The part of ``mooncake.engine.TransferEngine`` that is used. No call raises."""

    def initialize(self, hostname: str, metadata: str, protocol: str, devices: str, /) -> int:
        """Start listening; return 0 on success."""

    def get_rpc_port(self) -> int:
        """Return the port that peers connect to first."""

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """Allow peers to access this memory; return 0 on success."""

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """Refuse further writes; those in flight may still land. Return 0 on success."""

    def batch_transfer_async_write(
        self, target: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        """Start writes; return an id, or 0 where nothing was started. Opens the connection on first use."""

    def transfer_check_status(self, batch_id: int, /) -> int:
        """Return 1 for done, -1 for failed (either ends the id: asking again aborts the process), 0 or -2 in flight."""


def create(settings: MooncakeSettings) -> NativeEngine:
    """Return a new engine, listening.

    Raises:
        ConfigError: Mooncake is not installed, or the address does not belong to this host.
        TransferFailedError: Mooncake could not start.
    """
    check_address(settings.address)
    check_protocol(settings.protocol)
    for name, value in settings.environment().items():
        os.environ.setdefault(name, value)
    try:
        # An optional dependency that maps 40 MB: imported only where it is used.
        from mooncake.engine import TransferEngine  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"Mooncake cannot be loaded: {error}; {INSTALL}", field="transport") from error
    engine: NativeEngine = TransferEngine()
    status = engine.initialize(settings.address, P2P, settings.protocol, ALL_DEVICES)
    if status:
        raise TransferFailedError(
            f"Mooncake did not start at {settings.address} with protocol {settings.protocol!r}: {status}"
        )
    return engine


def register(holder: list[NativeEngine], address: int, size_bytes: int) -> None:
    """Allow peers to read and write memory.

    Raises:
        TransferFailedError: Mooncake refuses it.
    """
    status = holder[0].register_memory(address, size_bytes)
    if status:
        raise TransferFailedError(f"Mooncake did not register {size_bytes} bytes at {address:#x}: {status}")


def destroy(holder: list[NativeEngine]) -> None:
    """Destroy the engine, whose only reference is in ``holder``: afterwards it accesses no memory.

    Its destructor holds the GIL while it joins a thread whose ``accept`` times out once a second. So that thread's
    socket gets a shorter timeout first, and the process stalls for milliseconds only.

    Raises:
        InternalError: another reference exists, so the engine still lives.
    """
    port = holder[0].get_rpc_port()
    _shorten_accept_timeout(port)
    holder.clear()
    for listener in _listeners(port):
        listener.close()
        raise InternalError(f"the engine at port {port} was not destroyed: something still refers to it")


def check_protocol(protocol: str) -> None:
    """Check that the installed wheel supports a protocol: all but the NPU wheel accept ``ascend`` but silently use TCP.

    Raises:
        ConfigError: it does not.
    """
    if protocol == "ascend":
        try:
            importlib.metadata.version(ASCEND_WHEEL)
        except importlib.metadata.PackageNotFoundError as cause:
            raise ConfigError(f"protocol {protocol!r} needs the package {ASCEND_WHEEL}", field="protocol") from cause


def check_address(address: str) -> None:
    """Check an address: Mooncake would advertise any text, and peers would fail to connect without a diagnosis.

    Raises:
        ConfigError: it does not belong to this host.
    """
    try:
        family, kind, protocol, _, sockaddr = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(sockaddr)
    except OSError as error:
        raise ConfigError(f"{address!r} is not an address of this host: {error}", field="address") from error


def _shorten_accept_timeout(port: int) -> None:
    for listener in _listeners(port):
        with listener:
            timeout = struct.pack("@ll", 0, _ACCEPT_TIMEOUT_US)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            # The accept in progress still has the old timeout: wake it by a connection.
            host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
            try:
                socket.create_connection((host, port), _WAKE_TIMEOUT_S).close()
            except OSError as error:
                log.warning("destroying Mooncake's engine stalls this process for a second", cause=str(error))


def _listeners(port: int) -> Iterator[socket.socket]:
    """Yield a duplicate of each socket of this process that listens on the port; the caller closes it."""
    for link in Path("/proc/self/fd").iterdir():
        try:
            if not str(link.readlink()).startswith("socket:"):
                continue
            candidate = socket.socket(fileno=os.dup(int(link.name)))
        except OSError:  # closed meanwhile
            continue
        if _listens_on(candidate, port):
            yield candidate
        else:
            candidate.close()


def _listens_on(candidate: socket.socket, port: int) -> bool:
    try:
        return (
            candidate.family in (socket.AF_INET, socket.AF_INET6)
            and bool(candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            and candidate.getsockname()[1] == port
        )
    except OSError:
        return False
