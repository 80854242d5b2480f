"""Mooncake's native engine: import, configure and create it, and destroy it without stalling this process for a second.

The only module that imports ``mooncake.engine``. All functions may block and are for a worker thread.

Mooncake listens and connects over one address family, IPv4 unless ``MC_USE_IPV6`` is set (to whatever), and reads that
once in a process. With the wrong one it starts all the same, and every transfer fails.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Protocol

import msgspec
import structlog

from kvferry.protocol.addresses import unreachable_host
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

DONE: Final = 1
FAILED: Final = -1
"""Statuses of a write that has ended."""

_OF_THE_CONFIGURATION: Final = ("MC_USE_IPV6", "MC_FORCE_TCP")
"""Variables that follow from the configuration alone: with another value it would not be what is done."""

_applied: dict[str, str] = {}
"""What this process has set for its own engine: another one that it starts is not to inherit it."""

_ACCEPT_TIMEOUT_US = 2000
_WAKE_TIMEOUT_S = 1.0
_PROBE_BYTES: Final = mmap.PAGESIZE
_LOOK_AGAIN_S: Final = 0.0002
log = structlog.get_logger(__name__)


class MooncakeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How to create the engine, and its limits.

    Attributes:
        section: the configuration's section that names address and protocol, for errors.
        address: an address of this host, without a port or brackets, by which peers reach it.
        protocol: ``tcp``, or ``ascend`` on NPUs.
        max_bytes_in_flight_per_peer: further writes wait, in order. A single larger write goes alone. Best are two
            bounce buffers, fewer than Mooncake's connections to a peer, so that the writes to a hanging peer fail
            together and not one progress timeout after the other.
        contact_timeout_s: how long the first contact with a peer may take.
        progress_timeout_s: a write without progress for so long fails.
    """

    section: str = "network"
    address: str
    protocol: str = "tcp"
    max_bytes_in_flight_per_peer: int = 32 << 20
    contact_timeout_s: float = 2.0
    progress_timeout_s: int = 5

    @property
    def host(self) -> str:
        """Return the address as it is written before a port."""
        return f"[{self.address}]" if ":" in self.address else self.address

    def environment(self, family: socket.AddressFamily, more: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the whole environment for Mooncake, in this process or one that it starts.

        What the operator has set applies, except where the configuration decides.

        Args:
            family: of the address; see ``check_address``.
            more: further variables.
        """
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
        if self.protocol == "tcp":  # else a host with RDMA devices would use those, whatever the requested protocol
            variables["MC_FORCE_TCP"] = "1"
        if family == socket.AF_INET6:
            variables["MC_USE_IPV6"] = "1"
        given = {
            name: value
            for name, value in os.environ.items()
            if name not in _OF_THE_CONFIGURATION and _applied.get(name) != value
        }
        return variables | dict(more or {}) | given


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
    environment = settings.environment(check_address(settings))
    check_protocol(settings)
    _apply(environment)
    try:
        # An optional dependency that maps 40 MB: imported only where it is used.
        from mooncake.engine import TransferEngine  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"Mooncake cannot be loaded: {error}; {INSTALL}", field=f"{settings.section}.transport"
        ) from error
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


def check_protocol(settings: MooncakeSettings) -> None:
    """Check that the installed wheel supports a protocol: all but the NPU wheel accept ``ascend`` but silently use TCP.

    Raises:
        ConfigError: it does not.
    """
    if settings.protocol == "ascend":
        import importlib.metadata  # noqa: PLC0415  hosts without NPUs would pay for it at each start

        try:
            importlib.metadata.version(ASCEND_WHEEL)
        except importlib.metadata.PackageNotFoundError as cause:
            raise ConfigError(
                f"protocol {settings.protocol!r} needs the package {ASCEND_WHEEL}", field=f"{settings.section}.protocol"
            ) from cause


def check_address(settings: MooncakeSettings) -> socket.AddressFamily:
    """Check an address: Mooncake would advertise any text, and peers would fail to connect without a diagnosis.

    Returns:
        The family to use: IPv4 where a name has both, since all hosts must agree.

    Raises:
        ConfigError: it does not belong to this host (yet: retryable), or no other host could reach it.
    """
    field = f"{settings.section}.address"
    try:
        found = socket.getaddrinfo(settings.address, 0, type=socket.SOCK_STREAM)
        family, kind, protocol, _, sockaddr = min(found, key=lambda one: one[0] != socket.AF_INET)
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(sockaddr)
    except (OSError, UnicodeError) as error:
        said = f"{settings.address!r} is not an address of this host: {error}"
        raise ConfigError(said, field=field, retryable=True) from error
    if wrong := unreachable_host(str(sockaddr[0])):
        raise ConfigError(f"{settings.address!r} {wrong}", field=field)
    return family


def check_delivery(settings: MooncakeSettings) -> None:
    """Move bytes from one engine of this process to another by the configured address, and compare them.

    That an engine has started is no proof: see the module. Not with ``ascend``, where two engines would share a device.

    Raises:
        ConfigError: as ``create`` does; or the bytes did not arrive (retryable).
        TransferFailedError: Mooncake could not start.
    """
    if settings.protocol != "tcp":
        check_address(settings)
        check_protocol(settings)
        return
    memory = mmap.mmap(-1, 2 * _PROBE_BYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    memory[:_PROBE_BYTES] = os.urandom(_PROBE_BYTES)
    with ExitStack() as engines:
        target, source = [create(settings)], list[NativeEngine]()
        engines.callback(destroy, target)  # afterwards no byte lands any more
        source.append(create(settings))
        engines.callback(destroy, source)
        place = f"{settings.host}:{target[0].get_rpc_port()}"
        register(target, address + _PROBE_BYTES, _PROBE_BYTES)
        why = _accepts_connections(settings, target[0].get_rpc_port()) or _written(source[0], place, address, settings)
    if not why and memory[:_PROBE_BYTES] != memory[_PROBE_BYTES:]:
        why = "other bytes arrived than were sent"
    if why:
        raise ConfigError(
            f"{settings.section}.address = {settings.address!r}: bytes that this host sends itself through Mooncake at "
            f"{place} do not arrive: {why}",
            field=f"{settings.section}.address",
            retryable=True,
            remedy="let this host reach itself there (firewall, routes), or name another address of this host; "
            "kvferry doctor tries the same",
        )


def _accepts_connections(settings: MooncakeSettings, port: int) -> str:
    """Return why there is no connection to a port at the address; empty if there is. Mooncake would try for longer."""
    try:
        socket.create_connection((settings.address, port), settings.contact_timeout_s).close()
    except OSError as error:
        return str(error)
    return ""


def _written(engine: NativeEngine, place: str, address: int, settings: MooncakeSettings) -> str:
    """Write the first of two probes' bytes over the second one, at ``place``; return why not, empty if it is done."""
    batch = engine.batch_transfer_async_write(place, [address], [address + _PROBE_BYTES], [_PROBE_BYTES])
    if not batch:
        return "the engine there did not answer"
    ends_at = time.monotonic() + settings.progress_timeout_s
    while (status := engine.transfer_check_status(batch)) not in {DONE, FAILED}:
        if time.monotonic() > ends_at:
            return f"nothing moved for {settings.progress_timeout_s} s"
        time.sleep(_LOOK_AGAIN_S)
    return "" if status == DONE else "the write failed"


def family() -> socket.AddressFamily:
    """Return the address family that this process's engine uses, for its peers too."""
    return socket.AF_INET6 if "MC_USE_IPV6" in os.environ else socket.AF_INET


def _apply(environment: Mapping[str, str]) -> None:
    """Give this process an environment for Mooncake, and remember what is not the operator's."""
    for name in _OF_THE_CONFIGURATION:
        if name not in environment:
            os.environ.pop(name, None)
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = _applied[name] = value


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
