"""What this host is used for, so that a check can distinguish what is missing from what is merely absent."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvferry.clients.cli.doctor.host import Finding, Host
from kvferry.pools.host.memory import MACHINE, Limit, smallest_limit
from kvferry.pools.host.placement import offer
from kvferry.protocol.config.load import read_config
from kvferry.protocol.config.schema import Config
from kvferry.protocol.errors import ConfigError


class Needs(msgspec.Struct, frozen=True):
    """What the configuration requires, and what is known of the daemon.

    Attributes:
        config: the configuration; a key that is wrong has its default.
        npu_asked: ``--npu`` requires an NPU.
        daemon_pid: the daemon's process; None if none answers.
        path: the configuration's file; None if none was given.
        mistakes: why the daemon refuses the file.
    """

    config: Config = Config()
    npu_asked: bool = False
    daemon_pid: int | None = None
    path: Path | None = None
    mistakes: tuple[ConfigError, ...] = ()

    def refused(self, keys: Sequence[str]) -> Finding | None:
        """Return that the daemon refuses one of these keys, a table of theirs, or the whole file; None if it does not.

        So no check is content with the default of a key that is wrong.
        """
        for mistake in self.mistakes:
            wrong = f"{mistake.field or ''}"
            if any(not wrong or f"{key}.".startswith(f"{wrong}.") or wrong.startswith(f"{key}.") for key in keys):
                said = f"the daemon refuses {wrong or 'the file'}: see configuration"
                return Finding("missing", said, mistake.remedy)
        return None

    @property
    def mooncake(self) -> bool:
        """Return whether bytes go between hosts over Mooncake."""
        return self.config.network.transport == "mooncake"

    @property
    def store(self) -> bool:
        """Return whether cached blocks go to a Mooncake Store."""
        return self.config.tiers.remote.transport == "mooncake_store"

    @property
    def ascend(self) -> bool:
        """Return whether Mooncake is configured to use NPUs."""
        network = self.mooncake and self.config.network.protocol == "ascend"
        return network or (self.store and self.config.tiers.remote.protocol == "ascend")

    @property
    def asks_for_npu(self) -> bool:
        """Return whether an NPU is needed even if none is visible."""
        return self.npu_asked or self.ascend or any(name.startswith("npu:") for name in self.config.devices.open)

    def host_tier_bytes(self, host: Host) -> int:
        """Return the size of the host tier; 0 if there is none, or if it is unknown."""
        return self.config.tiers.size_bytes(memory_limit(host, self.daemon_pid).size_bytes)

    def pool_bytes(self, host: Host) -> int:
        """Return how much host memory pools may take; 0 if that is unknown."""
        return self.config.pools.size_bytes(memory_limit(host, self.daemon_pid).size_bytes)


def read_needs(host: Host, path: Path | None, *, npu: bool) -> tuple[Needs, Finding]:
    """Return the needs, and a finding about the file; a key that is wrong counts as not given."""
    if path is None:
        others = [one for one in host.names("/etc/kvferry") if one.endswith(".toml")]
        hint = f"; there is /etc/kvferry/{others[0]}: give it with --config" if others else ""
        return Needs(npu_asked=npu), Finding("ok", f"none given, defaults{hint}")
    try:
        config, mistakes, _ = read_config(host.path(path.absolute()), offer())
    except ConfigError as error:
        config, mistakes = Config(), [error]
    needs = Needs(config, npu, path=path.absolute(), mistakes=tuple(mistakes))
    if not mistakes:
        return needs, Finding("ok", str(path))
    said = f"{path}: the daemon refuses it: {'; '.join(str(one) for one in mistakes)}"
    fix = "correct the file; systemd/kvferry.toml shows every key"
    return needs, Finding("missing", said, fix)


def memory_limit(host: Host, daemon_pid: int | None) -> Limit:
    """Return the smallest limit on the daemon's memory, or on this shell's where none runs; of 0 bytes if unknown."""
    if not host.text(MACHINE):
        return Limit(0, 0, MACHINE)
    return smallest_limit(host.text, str(daemon_pid or "self"))
