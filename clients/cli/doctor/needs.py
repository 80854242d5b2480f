"""What this host is used for, so that a check can distinguish what is missing from what is merely absent.

Reads the few keys of the daemon's configuration that the checks need. The file is validated by the daemon's own code in
a child process, since clients do not import the daemon.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Final

import msgspec

from kvferry.clients.cli.doctor.children import run_child
from kvferry.clients.cli.doctor.findings import Finding
from kvferry.clients.cli.doctor.host import Host
from kvferry.protocol.settings import with_sizes

LOAD: Final = (
    "import pathlib, sys; from kvferry.daemon.config.load import load_config; load_config(pathlib.Path(sys.argv[1]))"
)
_TIMEOUT_S: Final = 20.0
_SHARE_OF_MEMORY: Final = (4, 5)
_HOST_TIER_SHARE: Final = 10


class Pools(msgspec.Struct, frozen=True):
    """``[pools]``."""

    max_bytes: int | None = None


class Peers(msgspec.Struct, frozen=True):
    """``[peers]``."""

    listen: str | None = None


class Network(msgspec.Struct, frozen=True):
    """``[network]``."""

    transport: str = "none"
    protocol: str = "tcp"
    address: str | None = None


class DiskTier(msgspec.Struct, frozen=True):
    """``[tiers.disk]``."""

    path: str | None = None
    max_bytes: int = 64 << 30


class RemoteTier(msgspec.Struct, frozen=True):
    """``[tiers.remote]``."""

    transport: str = "none"
    protocol: str = "tcp"
    master: str = "127.0.0.1:50051"
    address: str | None = None
    segment_bytes: int = 4 << 30


class Tiers(msgspec.Struct, frozen=True):
    """``[tiers]``."""

    host_bytes: int | None = None
    disk: DiskTier = DiskTier()
    remote: RemoteTier = RemoteTier()


class Needs(msgspec.Struct, frozen=True):
    """What the configuration requires, and whether ``--npu`` requires an NPU."""

    runtime_dir: str | None = None
    pools: Pools = Pools()
    peers: Peers = Peers()
    network: Network = Network()
    tiers: Tiers = Tiers()
    npu_asked: bool = False

    @property
    def mooncake(self) -> bool:
        """Return whether bytes go between hosts over Mooncake."""
        return self.network.transport == "mooncake"

    @property
    def store(self) -> bool:
        """Return whether cached blocks go to a Mooncake Store."""
        return self.tiers.remote.transport == "mooncake_store"

    @property
    def store_address(self) -> str | None:
        """Return the address at which other nodes of the store reach this one."""
        return self.tiers.remote.address or self.network.address

    @property
    def ascend(self) -> bool:
        """Return whether Mooncake is configured to use NPUs."""
        network = self.mooncake and self.network.protocol == "ascend"
        return network or (self.store and self.tiers.remote.protocol == "ascend")

    @property
    def asks_for_npu(self) -> bool:
        """Return whether an NPU is needed even if none is visible."""
        return self.npu_asked or self.ascend

    def host_tier_bytes(self, host: Host) -> int:
        """Return the size of the host tier; 0 if there is none, or if it is unknown."""
        if self.tiers.host_bytes is not None:
            return self.tiers.host_bytes
        return memory_bytes(host, "MemTotal") // _HOST_TIER_SHARE

    def pool_bytes(self, host: Host) -> int:
        """Return how much host memory pools may take; 0 if that is unknown."""
        if self.pools.max_bytes is not None:
            return self.pools.max_bytes
        share, of = _SHARE_OF_MEMORY
        return memory_bytes(host, "MemTotal") * share // of


def read_needs(host: Host, config: Path | None, *, npu: bool) -> tuple[Needs, Finding]:
    """Return the needs, and a finding about the file; a file that cannot be read counts as empty."""
    if config is None:
        others = [name for name in host.names("/etc/kvferry") if name.endswith(".toml")]
        hint = f"; there is /etc/kvferry/{others[0]}: give it with --config" if others else ""
        return Needs(npu_asked=npu), Finding("configuration", "ok", f"none given, defaults{hint}")
    problem = _problem(host, config)
    try:
        table = tomllib.loads(host.path(config.absolute()).read_text(encoding="utf-8"))
        needs = msgspec.convert(with_sizes(table), Needs)
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        return Needs(npu_asked=npu), _refused(config, problem or str(error))
    needs = msgspec.structs.replace(needs, npu_asked=npu)
    return needs, _refused(config, problem) if problem else Finding("configuration", "ok", str(config))


def memory_bytes(host: Host, name: str) -> int:
    """Return a value of /proc/meminfo in bytes; 0 if there is none."""
    for line in host.text("/proc/meminfo").splitlines():
        key, _, value = line.partition(":")
        if key == name:
            return int(value.split()[0]) << 10
    return 0


def _problem(host: Host, config: Path) -> str:
    """Return why the daemon would refuse the file; empty if it would not."""
    command = [*host.python, "-P", "-c", LOAD, str(host.path(config.absolute()))]
    done = run_child(command, host.environ, _TIMEOUT_S)
    if done.status is None:
        return f"reading it took longer than {_TIMEOUT_S:g} s"
    return done.last_error.rpartition("ConfigError: ")[2] if done.status else ""


def _refused(config: Path, problem: str) -> Finding:
    fix = "correct the file; systemd/kvferry.toml shows every key"
    return Finding("configuration", "missing", f"{config}: the daemon refuses it: {problem}", fix)
