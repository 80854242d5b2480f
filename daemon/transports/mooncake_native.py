"""Mooncake's own engine object: import it, tune it, make it, and end it without stopping this process for a second.

The only module that imports ``mooncake``. Every function here may block and belongs on a worker thread.
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
_ACCEPT_TIMEOUT_US = 2000
_WAKE_TIMEOUT_S = 1.0
log = structlog.get_logger(__name__)


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to make the engine and how much to ask of it.

    Attributes:
        address: an address of this host, without a port, that peers reach it by.
        protocol: ``tcp``, or ``ascend`` on NPUs.
        device_names: which devices to use, separated by commas; empty for all.
        max_bytes_in_flight_per_peer: writes beyond it wait, in the order in which they came. A single larger write
            goes alone. Two bounce buffers, fewer than Mooncake's connections to a peer: so that the
            writes to a peer that hangs fail together, and not one progress timeout after the other.
        contact_timeout_s: how long the first contact with a peer may take.
        progress_timeout_s: a write of which nothing moves for so long fails.
    """

    address: str
    protocol: str = "tcp"
    device_names: str = ""
    max_bytes_in_flight_per_peer: int = 16 << 20
    contact_timeout_s: float = 2.0
    progress_timeout_s: int = 5

    def environment(self) -> dict[str, str]:
        """Return what Mooncake reads from the environment, as it is set where the operator has not set it."""
        variables = {
            "MC_LOG_LEVEL": "ERROR",  # it warns of each connection that is merely tried
            "MC_HANDSHAKE_CONNECT_TIMEOUT": str(max(1, round(self.contact_timeout_s))),
            "MC_TRANSFER_TIMEOUT": str(max(5, self.progress_timeout_s)),
            "MC_TCP_PROGRESS_TIMEOUT_SEC": str(self.progress_timeout_s),
            "MC_TCP_STATUS_TIMEOUT_SEC": str(self.progress_timeout_s),
            # One connection for each write, made while the submission blocks, is its default.
            "MC_TCP_ENABLE_CONNECTION_POOL": "true",
            "MC_TCP_LANES_PER_PEER": "4",
        }
        # Else a host with RDMA devices would use those, whatever the protocol that was asked for.
        return variables | {"MC_FORCE_TCP": "1"} if self.protocol == "tcp" else variables


class NativeEngine(Protocol):
    """The part of ``mooncake.engine.TransferEngine`` that is used. None of it raises; -1 or 0 says that it failed."""

    def initialize(self, hostname: str, metadata: str, protocol: str, devices: str, /) -> int:
        """Begin to listen; 0 where that worked."""

    def get_rpc_port(self) -> int:
        """Return the port that peers connect to first."""

    def register_memory(self, buffer_addr: int, capacity: int) -> int:
        """Let peers write this memory; 0 where that worked."""

    def unregister_memory(self, buffer_addr: int, /) -> int:
        """Refuse further writes; what is under way may still land."""

    def batch_transfer_async_write(
        self, target: str, buffers: list[int], peer_buffer_addresses: list[int], lengths: list[int]
    ) -> int:
        """Begin to write; return an id, or 0 where nothing began. Opens the connection when it is the first."""

    def transfer_check_status(self, batch_id: int, /) -> int:
        """Return 1 done, -1 failed (either ends the id: asking again aborts the process), 0 or -2 under way."""


def create(settings: MooncakeSettings) -> NativeEngine:
    """Return an engine that listens.

    Raises:
        ConfigError: Mooncake is not installed, or the address is none of this host's.
        TransferFailedError: Mooncake could not begin.
    """
    check_address(settings.address)
    check_protocol(settings.protocol)
    for name, value in settings.environment().items():
        os.environ.setdefault(name, value)
    try:
        # An optional dependency that maps 40 MB: only for who uses it.
        from mooncake.engine import TransferEngine  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(f"Mooncake cannot be loaded: {error}; {INSTALL}", field="transport") from error
    engine: NativeEngine = TransferEngine()
    status = engine.initialize(settings.address, P2P, settings.protocol, settings.device_names)
    if status:
        raise TransferFailedError(
            f"Mooncake did not start at {settings.address} with protocol {settings.protocol!r}: {status}"
        )
    return engine


def register(holder: list[NativeEngine], address: int, size_bytes: int) -> None:
    """Let peers read and write memory.

    Raises:
        TransferFailedError: Mooncake refuses it.
    """
    status = holder[0].register_memory(address, size_bytes)
    if status:
        raise TransferFailedError(f"Mooncake did not register {size_bytes} bytes at {address:#x}: {status}")


def destroy(holder: list[NativeEngine]) -> None:
    """Destroy the engine of which ``holder`` has the only reference: afterwards it neither reads nor writes memory.

    Its destructor holds the GIL while it joins a thread that looks up from ``accept`` once a second, so that thread's
    socket gets a shorter timeout first: then the process stands still for milliseconds.

    Raises:
        InternalError: somebody else holds a reference, so the engine still lives.
    """
    port = holder[0].get_rpc_port()
    _hasten(port)
    holder.clear()
    for listener in _listeners(port):
        listener.close()
        raise InternalError(f"the engine at port {port} was not destroyed: something still refers to it")


def check_protocol(protocol: str) -> None:
    """Check that this wheel has it. They have one Python API: others take ``ascend`` and use TCP, saying nothing.

    Raises:
        ConfigError: it has not.
    """
    if protocol == "ascend":
        try:
            importlib.metadata.version(ASCEND_WHEEL)
        except importlib.metadata.PackageNotFoundError as cause:
            raise ConfigError(f"protocol {protocol!r} needs the package {ASCEND_WHEEL}", field="protocol") from cause


def check_address(address: str) -> None:
    """Check an address. Mooncake would advertise any text; peers could then not connect, and nothing would say why.

    Raises:
        ConfigError: it is none of this host's.
    """
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(where)
    except OSError as error:
        raise ConfigError(f"{address!r} is no address of this host: {error}", field="address") from error


def _hasten(port: int) -> None:
    for listener in _listeners(port):
        with listener:
            timeout = struct.pack("@ll", 0, _ACCEPT_TIMEOUT_US)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            # The accept that waits now still has the old timeout: wake it.
            host = "::1" if listener.family == socket.AF_INET6 else "127.0.0.1"
            try:
                socket.create_connection((host, port), _WAKE_TIMEOUT_S).close()
            except OSError as error:
                log.warning("ending Mooncake's engine stops this process for a second", cause=str(error))


def _listeners(port: int) -> Iterator[socket.socket]:
    """Yield a duplicate of each socket of this process that listens on the port; close it."""
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
