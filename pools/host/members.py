"""Users and groups of this host, which ``tenants`` of the configuration names."""

from __future__ import annotations

import grp
import pwd
from collections.abc import Mapping

from kvferry.protocol.config.schema import TenantConfig
from kvferry.protocol.config.tenants import Listed, listed, wrong_members
from kvferry.protocol.errors import ConfigError


def members_of(tenants: Mapping[str, TenantConfig]) -> dict[Listed, int]:
    """Return the number of each user and group of the tenants.

    Raises:
        ConfigError: this host has none of that name, or one is in two tenants, by a name and a number say.
    """
    numbers = {one: _number(one) for one in listed(tenants)}
    for wrong in wrong_members(tenants, numbers.__getitem__):
        raise ConfigError(wrong.what, field=wrong.key)
    return numbers


def _number(one: Listed) -> int:
    if isinstance(one.member, int):
        return one.member
    try:
        return pwd.getpwnam(one.member).pw_uid if one.kind == "users" else grp.getgrnam(one.member).gr_gid
    except KeyError:
        raise ConfigError(
            f"{one.key} has {one.member!r}: this host has no such {one.kind[:-1]}",
            field=one.key,
            remedy="make it, or give its number",
        ) from None
