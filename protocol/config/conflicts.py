"""Checks across keys: values that are valid by themselves and exclude each other. Each error names both keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kvferry.protocol.addresses import canonical, is_loopback, is_numeric, unreachable_host
from kvferry.protocol.config.schema import MIN_SIZE_BYTES, STAGING_BUFFERS, Config
from kvferry.protocol.config.tenants import number_of, wrong_members
from kvferry.protocol.ids import HOST
from kvferry.protocol.settings import size_text

_MAX_PORT = 65_535
_ROUNDING = 1e-9


class HostOffer(NamedTuple):
    """What a host offers, as far as a key may ask for more: memory, and the NUMA nodes that have some, where known.

    ``whose`` says for an error who sets the limit on memory.
    """

    memory_bytes: int
    whose: str
    nodes: frozenset[int]


class Conflict(NamedTuple):
    """A conflict, and the key that most likely has to be changed."""

    key: str
    what: str


def conflicts(config: Config, offer: HostOffer) -> Iterator[Conflict]:
    """Yield what no key shows by itself: keys that exclude each other, or that this host cannot grant."""
    yield from _addresses(config)
    yield from _keys(config)
    yield from _memory(config, offer)
    yield from _network(config, offer)
    yield from _tiers(config, offer)
    yield from _tenants(config)
    yield from _remote(config)


def _addresses(config: Config) -> Iterator[Conflict]:
    if HOST in config.devices.open:
        yield Conflict("devices.open", 'devices.open = ["host"]: the host is not a device; use npu:N or cuda:N')
    listen = config.peers.listen
    if listen and not is_numeric(listen):
        spelt = canonical(listen)
        fix = 'give a numeric address of this host, as in "tcp://10.0.0.3:7801" or "tcp://[fd00::3]:7801"'
        fix = f"write it as {spelt}" if spelt != listen else fix
        yield Conflict("peers.listen", f'peers.listen = "{listen}": {fix}')
    elif listen and (wrong := unreachable_host(listen.removeprefix("tcp://").rpartition(":")[0])):
        yield Conflict("peers.listen", f'peers.listen = "{listen}" {wrong}')
    for key, host in (
        ("network.address", config.network.address),
        ("tiers.remote.address", config.tiers.remote.address),
    ):
        if host and (wrong := unreachable_host(host)):
            yield Conflict(key, f'{key} = "{host}" {wrong}')
    metrics = config.metrics.listen
    if metrics and not is_numeric(metrics, or_all=True):
        yield Conflict(
            "metrics.listen",
            f'metrics.listen = "{metrics}": give a numeric address of this host, as in "tcp://127.0.0.1:9464", or '
            '"tcp://0.0.0.0:9464" for all of them',
        )
    for key, address in (
        ("peers.listen", listen),
        ("metrics.listen", metrics),
        ("tiers.remote.master", config.tiers.remote.master),
    ):
        port = address.rpartition(":")[2] if address else ""
        if port.isdecimal() and not 0 < int(port) <= _MAX_PORT:
            yield Conflict(key, f'{key} = "{address}": the port must be from 1 to {_MAX_PORT}')


def _keys(config: Config) -> Iterator[Conflict]:
    peers = config.peers
    if peers.listen and is_numeric(peers.listen) and not (is_loopback(peers.listen) or peers.keys or peers.insecure):
        yield Conflict(
            "peers.listen",
            f'peers.listen = "{peers.listen}" without peers.keys: any process that reaches it could act as a daemon; '
            "make keys (kvferry keys make), or set peers.insecure = true where the network is yours alone",
        )
    if peers.insecure and peers.keys:
        yield Conflict("peers.insecure", "peers.insecure = true with peers.keys: choose one of them")
    if peers.keys and peers.listen is None:
        yield Conflict("peers.keys", "peers.keys without peers.listen: daemons of this host need no keys")


def _memory(config: Config, offer: HostOffer) -> Iterator[Conflict]:
    wanted, known = config.memory.numa_node, offer.nodes
    if wanted is not None and known and wanted not in known:
        numbers = ", ".join(map(str, sorted(known)))
        yield Conflict("memory.numa_node", f"memory.numa_node = {wanted}: this host has memory at the nodes {numbers}")


def _network(config: Config, offer: HostOffer) -> Iterator[Conflict]:
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
    if config.network_address is None:
        yield Conflict(
            "network.address",
            f'network.transport = "{network.transport}" without peers.listen or network.address: set the address by '
            'which others reach this host, peers.listen = "tcp://ADDRESS:PORT"',
        )
    if (network.bounce_buffers + STAGING_BUFFERS) * network.bounce_buffer_bytes > offer.memory_bytes:
        yield Conflict(
            "network.bounce_buffers",
            f"network.bounce_buffers = {network.bounce_buffers} with network.bounce_buffer_bytes = "
            f"{size_text(network.bounce_buffer_bytes)}: these, and {STAGING_BUFFERS} more for sending, are more than "
            f"{offer.whose} allows: {offer.memory_bytes >> 20}MiB",
        )


def _tiers(config: Config, offer: HostOffer) -> Iterator[Conflict]:
    tiers = config.tiers
    for key, size in (
        ("tiers.host_bytes", tiers.host_bytes),
        ("tiers.remote.segment_bytes", tiers.remote.segment_bytes),
        *((f"tenants.{name}.tier_bytes", one.tier_bytes) for name, one in config.tenants.items()),
    ):
        if size and size < MIN_SIZE_BYTES:
            yield Conflict(key, f'{key} = {size}: 0, or at least "4KiB"; did you mean "{size}GiB"?')
    segment_bytes = tiers.remote.segment_bytes if tiers.remote.transport != "none" else 0
    for key, size in (("host_bytes", tiers.host_bytes), ("remote.segment_bytes", segment_bytes)):
        if size and size > offer.memory_bytes:
            yield Conflict(
                f"tiers.{key}",
                f"tiers.{key} = {size_text(size)}: more than {offer.whose} allows, {offer.memory_bytes >> 20}MiB; give "
                "the tier a part of it",
            )
    if tiers.host_bytes == 0:
        for key, configured in (
            ("tiers.disk.path", tiers.disk.path is not None),
            ("tiers.remote.transport", tiers.remote.transport != "none"),
            *((f"tenants.{name}.tier_bytes", bool(one.tier_bytes)) for name, one in config.tenants.items()),
        ):
            if configured:
                yield Conflict(key, f"{key} with tiers.host_bytes = 0: it needs the host tier; raise tiers.host_bytes")


def _tenants(config: Config) -> Iterator[Conflict]:
    tier_bytes, names, together = config.tiers.host_bytes, dict[int, str](), 0.0
    for name, one in config.tenants.items():
        if not (one.users or one.groups):
            yield Conflict(f"tenants.{name}", f"tenants.{name} without users and groups: nobody would be in it")
        other = names.setdefault(number_of(name), name)
        if other != name:
            yield Conflict(f"tenants.{name}", f"tenants.{name} and tenants.{other} have one number: rename one of them")
        together += one.share or 0.0
        if one.share and together > 1 + _ROUNDING:
            yield Conflict(
                f"tenants.{name}.share",
                f"tenants.{name}.share = {one.share}: the shares of all tenants together are {together:g}, more than 1",
            )
        if tier_bytes and one.tier_bytes and one.tier_bytes > tier_bytes:
            yield Conflict(
                f"tenants.{name}.tier_bytes",
                f"tenants.{name}.tier_bytes = {size_text(one.tier_bytes)} with tiers.host_bytes = "
                f"{size_text(tier_bytes)}: one tenant cannot have more than the tier; at most {size_text(tier_bytes)}",
            )
    yield from (Conflict(*one) for one in wrong_members(config.tenants))


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
    if config.store_address is None:
        yield Conflict(
            "tiers.remote.address",
            f'tiers.remote.transport = "{remote.transport}" without tiers.remote.address, network.address or '
            "peers.listen: set the address by which other nodes reach this one",
        )
