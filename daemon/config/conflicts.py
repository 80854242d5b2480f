"""Checks across keys: values that are valid by themselves and exclude each other. Each error names both keys."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvferry.daemon.config.addresses import is_numeric
from kvferry.daemon.config.schema import Config
from kvferry.daemon.config.sections import MIN_SIZE_BYTES
from kvferry.protocol.errors import ConfigError
from kvferry.protocol.ids import HOST
from kvferry.protocol.settings import size_text

_MAX_PORT = 65_535


class Conflict(NamedTuple):
    """A conflict, and the key that most likely has to be changed."""

    key: str
    what: str


def check_together(config: Config, path: Path) -> None:
    """Check what no key shows by itself.

    Raises:
        ConfigError: two keys exclude each other.
    """
    for checks in (_times, _limits, _addresses, _network, _tiers, _quotas, _remote):
        for key, what in checks(config):
            raise ConfigError(f"{path}: {what}", field=key)


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _times(config: Config) -> Iterator[Conflict]:
    peers = config.peers
    if peers.timeout_ms <= peers.heartbeat_ms:
        yield Conflict(
            "peers.timeout_ms",
            f"peers.timeout_ms = {peers.timeout_ms} with peers.heartbeat_ms = {peers.heartbeat_ms}: a peer would be "
            "lost before its heartbeat could arrive; set the timeout to several heartbeats",
        )


def _limits(config: Config) -> Iterator[Conflict]:
    limits = config.limits
    if limits.max_frame_bytes > limits.max_message_bytes:
        yield Conflict(
            "limits.max_message_bytes",
            f"limits.max_message_bytes = {limits.max_message_bytes} with limits.max_frame_bytes = "
            f"{limits.max_frame_bytes}: a message of one such frame would be refused; raise the former",
        )
    if limits.default_deadline_ms > limits.max_deadline_ms:
        yield Conflict(
            "limits.default_deadline_ms",
            f"limits.default_deadline_ms = {limits.default_deadline_ms} with limits.max_deadline_ms = "
            f"{limits.max_deadline_ms}: requests without a deadline would be refused; at most the latter",
        )


def _addresses(config: Config) -> Iterator[Conflict]:
    if HOST in config.devices.open:
        yield Conflict("devices.open", 'devices.open = ["host"]: the host is not a device; use npu:N or cuda:N')
    listen = config.peers.listen
    if listen and not is_numeric(listen):
        yield Conflict(
            "peers.listen",
            f'peers.listen = "{listen}": give a numeric address of this host, as in "tcp://10.0.0.3:7801" or '
            '"tcp://[fd00::3]:7801"',
        )
    for key, address in (("peers.listen", listen), ("tiers.remote.master", config.tiers.remote.master)):
        port = address.rpartition(":")[2] if address else ""
        if port.isdecimal() and not 0 < int(port) <= _MAX_PORT:
            yield Conflict(key, f'{key} = "{address}": the port must be from 1 to {_MAX_PORT}')


def _network(config: Config) -> Iterator[Conflict]:
    network = config.network
    if network.transport == "none":
        if network.direct:
            yield Conflict(
                "network.direct",
                'network.direct = true with network.transport = "none": there is no transport that could write pages '
                'directly; set network.transport = "mooncake"',
            )
        if network.protocol != "tcp":
            yield Conflict(
                "network.protocol",
                f'network.protocol = "{network.protocol}" with network.transport = "none": nothing would use it; '
                'set network.transport = "mooncake"',
            )
        return
    if network.address is None and config.peers.listen is None:
        yield Conflict(
            "network.address",
            f'network.transport = "{network.transport}" without peers.listen or network.address: set the address by '
            'which others reach this host, peers.listen = "tcp://ADDRESS:PORT"',
        )
    bounce_buffers_bytes = network.bounce_buffers * network.bounce_buffer_bytes
    memory_bytes = _memory_bytes()
    for key, count in (("bounce_buffers", network.bounce_buffers), ("staging", network.staging)):
        if count * network.bounce_buffer_bytes > memory_bytes:
            yield Conflict(
                f"network.{key}",
                f"network.{key} = {count} with network.bounce_buffer_bytes = "
                f"{size_text(network.bounce_buffer_bytes)}: their product is more than this host's memory of "
                f"{memory_bytes >> 20}MiB",
            )
    if (
        network.quarantined_bytes is not None
        and network.quarantined_bytes > bounce_buffers_bytes
        and not network.direct
    ):
        yield Conflict(
            "network.quarantined_bytes",
            f"network.quarantined_bytes = {size_text(network.quarantined_bytes)} with network.bounce_buffers = "
            f"{network.bounce_buffers} of network.bounce_buffer_bytes = {size_text(network.bounce_buffer_bytes)}: "
            f"so many bytes can never be quarantined; at most {size_text(bounce_buffers_bytes)}",
        )


def _tiers(config: Config) -> Iterator[Conflict]:
    tiers = config.tiers
    for key, size in (
        ("tiers.host_bytes", tiers.host_bytes),
        ("tiers.tenant_bytes", tiers.tenant_bytes),
        ("tiers.remote.segment_bytes", tiers.remote.segment_bytes),
        *((f"tiers.quotas.{user}", quota) for user, quota in tiers.quotas.items()),
    ):
        if size and size < MIN_SIZE_BYTES:
            yield Conflict(key, f'{key} = {size}: 0, or at least "4KiB"; did you mean "{size}GiB"?')
    for key, size in (("host_bytes", tiers.host_bytes), ("remote.segment_bytes", tiers.remote.segment_bytes)):
        if size and size > _memory_bytes():
            yield Conflict(
                f"tiers.{key}",
                f"tiers.{key} = {size_text(size)}: more than this host's memory of {_memory_bytes() >> 20}MiB; give "
                "the tier a part of it",
            )
    if tiers.host_bytes == 0:
        for key, configured in (
            ("tiers.disk.path", tiers.disk.path is not None),
            ("tiers.remote.transport", tiers.remote.transport != "none"),
            ("tiers.tenant_bytes", bool(tiers.tenant_bytes)),
            ("tiers.quotas", any(tiers.quotas.values())),
        ):
            if configured:
                yield Conflict(key, f"{key} with tiers.host_bytes = 0: it needs the host tier; raise tiers.host_bytes")


def _quotas(config: Config) -> Iterator[Conflict]:
    tiers = config.tiers
    if tiers.tenant_bytes == 0 and not any(tiers.quotas.values()) and tiers.host_bytes != 0:
        yield Conflict(
            "tiers.tenant_bytes",
            "tiers.tenant_bytes = 0 without tiers.quotas: no user could use the tiers; to disable them set "
            "tiers.host_bytes = 0",
        )
    if not tiers.host_bytes:
        return
    for key, quota in (
        ("tiers.tenant_bytes", tiers.tenant_bytes or 0),
        *((f"tiers.quotas.{user}", quota) for user, quota in tiers.quotas.items()),
    ):
        if quota > tiers.host_bytes:
            yield Conflict(
                key,
                f"{key} = {size_text(quota)} with tiers.host_bytes = {size_text(tiers.host_bytes)}: one user's quota "
                f"cannot be larger than the tier; at most {size_text(tiers.host_bytes)}",
            )


def _remote(config: Config) -> Iterator[Conflict]:
    remote = config.tiers.remote
    if remote.transport == "none":
        if remote.protocol != "tcp":
            yield Conflict(
                "tiers.remote.protocol",
                f'tiers.remote.protocol = "{remote.protocol}" with tiers.remote.transport = "none": nothing would use '
                'it; set tiers.remote.transport = "mooncake_store"',
            )
        return
    if remote.address is None and config.network.address is None:
        yield Conflict(
            "tiers.remote.address",
            f'tiers.remote.transport = "{remote.transport}" without tiers.remote.address or network.address: set the '
            "address by which other nodes reach this one",
        )
    if remote.timeout_s < remote.progress_timeout_s:
        yield Conflict(
            "tiers.remote.timeout_s",
            f"tiers.remote.timeout_s = {remote.timeout_s:g} with tiers.remote.progress_timeout_s = "
            f"{remote.progress_timeout_s}: every node that hangs would get the store process killed; at least "
            f"{remote.progress_timeout_s}",
        )
    if remote.retry_at_most_s < remote.retry_s:
        yield Conflict(
            "tiers.remote.retry_at_most_s",
            f"tiers.remote.retry_at_most_s = {remote.retry_at_most_s:g} with tiers.remote.retry_s = "
            f"{remote.retry_s:g}: the first pause would exceed the maximum; at least {remote.retry_s:g}",
        )
