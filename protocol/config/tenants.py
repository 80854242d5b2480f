"""Tenants: whose is what a process makes. By itself each user is one; the configuration names others. Pure.

A tenant has a number: a user's own, or one that follows from the configured name, so that it is the same at each daemon
and after each change of the configuration.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

from kvferry.protocol.config.schema import Member, TenantConfig

FIRST_NAMED: Final = 1 << 32
"""Numbers from here on are of configured tenants, those below are users."""

Kind = Literal["users", "groups"]


class Listed(NamedTuple):
    """A user or group of a configured tenant, and the key that names it."""

    tenant: str
    kind: Kind
    member: Member
    key: str


class Wrong(NamedTuple):
    """A key that is wrong, and why."""

    key: str
    what: str


def number_of(name: str) -> int:
    """Return the number of a configured tenant."""
    return FIRST_NAMED + zlib.crc32(name.encode())


def whose(tenant: int) -> str:
    """Return a tenant as texts name it."""
    return f"tenant {tenant}" if tenant >= FIRST_NAMED else f"user {tenant}"


def listed(tenants: Mapping[str, TenantConfig]) -> Iterator[Listed]:
    """Yield each user and group of each tenant."""
    for name, one in tenants.items():
        yield from (Listed(name, "users", member, f"tenants.{name}.users") for member in one.users)
        yield from (Listed(name, "groups", member, f"tenants.{name}.groups") for member in one.groups)


def wrong_members(
    tenants: Mapping[str, TenantConfig], number: Callable[[Listed], Member] = lambda one: one.member
) -> Iterator[Wrong]:
    """Yield who is in two tenants; ``number`` may know that two members are the same."""
    first: dict[tuple[Kind, Member], Listed] = {}
    for one in listed(tenants):
        before = first.setdefault((one.kind, number(one)), one)
        if before.tenant != one.tenant:
            yield Wrong(one.key, f"{one.key} has {one.member!r}, and {before.key} has {before.member!r}: choose one")
