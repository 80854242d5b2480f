"""Tenants of this host: of whom the kernel says that they are at the other end of a Unix socket.

Nothing that a client says counts. A process is of the tenant that names its user; else of the one that names the group
that it acts as; else of the first one in the configuration that names another group of it; else its user is a tenant.
Root and the daemon's own user are tenants by themselves, whatever their groups are.
"""

from __future__ import annotations

import array
import socket
import struct
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from kvferry.daemon.process.access import may_see_all
from kvferry.daemon.process.shares import Shares
from kvferry.pools.host.members import members_of
from kvferry.protocol.config.schema import TenantConfig
from kvferry.protocol.config.tenants import number_of
from kvferry.protocol.errors import ConfigError

CREDENTIALS: Final = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid."""

_SO_PEERGROUPS: Final = 59
_MOST_GROUPS: Final = 256
_NOBODY: Final[Mapping[str, TenantConfig]] = MappingProxyType({})


class Tenants:
    """The configured tenants, and all others.

    Attributes:
        configured: by name.
        names: by number.
        shares: what is kept for each.
    """

    def __init__(self, configured: Mapping[str, TenantConfig] = _NOBODY) -> None:
        """Look up the names.

        Raises:
            ConfigError: there is no such user or group, somebody is in two tenants, or is root or the daemon's own
                user.
        """
        self.configured = configured
        self.names = {number_of(name): name for name in configured}
        self.shares = Shares({number_of(name): one.share for name, one in configured.items() if one.share})
        members = members_of(configured)
        self._users = {number: number_of(one.tenant) for one, number in members.items() if one.kind == "users"}
        self._groups = {number: number_of(one.tenant) for one, number in members.items() if one.kind == "groups"}
        for one, number in members.items():
            if one.kind == "users" and may_see_all(number):
                raise ConfigError(
                    f"{one.key} has {one.member!r}, who sees what everybody has and is a tenant by itself",
                    field=one.key,
                    remedy="leave it out; run engines as other users",
                )

    def __repr__(self) -> str:
        """Show the names."""
        return f"<Tenants {', '.join(self.names.values()) or 'by user'}>"

    @property
    def tier_bytes(self) -> dict[int, int]:
        """Return the most that a tenant may have of the host tier, for those that have a bound."""
        return {number_of(name): one.tier_bytes for name, one in self.configured.items() if one.tier_bytes is not None}

    def of(self, channel: socket.socket) -> int:
        """Return the tenant of whoever has connected to a Unix socket."""
        credentials: tuple[int, int, int] = CREDENTIALS.unpack(
            channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        )
        _, user, group = credentials
        if may_see_all(user):
            return user
        found = self._users.get(user)
        if found is None and self._groups:
            found = next(self._by_groups(channel, group), None)
        return user if found is None else found

    def _by_groups(self, channel: socket.socket, group: int) -> Iterator[int]:
        if group in self._groups:
            yield self._groups[group]
        its = _groups_of(channel)
        yield from (tenant for one, tenant in self._groups.items() if one in its)


def _groups_of(channel: socket.socket) -> frozenset[int]:
    """Return the groups of whoever has connected; none where there are more than the kernel says at once."""
    try:
        found = channel.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _MOST_GROUPS * 4)
    except OSError:
        return frozenset()
    return frozenset(array.array("I", found))
