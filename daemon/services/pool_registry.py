"""The registry of pools, in which every other service looks them up: live and lost ones, and who holds their pages."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Final

import msgspec

from kvferry.daemon.control.sessions import Session, SessionRegistry
from kvferry.daemon.process.access import DEVICE_POOLS_FILE
from kvferry.pools.allocator import PageAllocator
from kvferry.pools.devices.base import Region
from kvferry.pools.planning.manifest import bytes_per_page
from kvferry.pools.pool import Pool
from kvferry.pools.tiers.own_folder import OwnFolder
from kvferry.protocol.errors import ConfigError, OverloadedError, PoolFullError, PoolLostError, UnknownPoolError
from kvferry.protocol.session_messages import PageHolder, PoolStatus, SpaceStatus
from kvferry.protocol.session_stream import RegionRequest

MAX_REMEMBERED: Final = 1024
"""How many lost pools are remembered."""

ADOPTION_LOOK_MS: Final = 500
"""How soon to ask again for a pool that is being adopted."""

NAMED: Final = 4
"""How many holders, or pools, a text names; the others are counted."""


class _Pool(msgspec.Struct, frozen=True):
    tenant: int
    name: str
    device: str


class LostPools:
    """The live device pools, and the lost ones with the reason, until a pool of that name is made again.

    A request for a lost pool fails with POOL_LOST, also after a restart. Kept in a small file in the runtime directory:
    names and reasons, nothing else. If the file is lost, such requests fail with UNKNOWN_POOL instead.
    """

    def __init__(self, folder: OwnFolder | None) -> None:
        """Read the previous daemon's file in ``folder``: its live pools are lost now. None: remember nothing."""
        self._folder = folder
        self._live: dict[tuple[int, str], str] = {}
        self._lost: dict[tuple[int, str], str] = {}
        self._before = {(one.tenant, one.name): one.device for one in self._read()}
        for (tenant, name), device in self._before.items():
            self._lost[tenant, name] = f"was on {device} and was lost when the daemon restarted"

    def __repr__(self) -> str:
        """Show how many pools are live and lost."""
        return f"<LostPools live={len(self._live)} lost={len(self._lost)}>"

    def why(self, tenant: int, name: str) -> str | None:
        """Return why a pool is lost, or None."""
        return self._lost.get((tenant, name))

    def made(self, tenant: int, name: str, device: str) -> None:
        """Record a new device pool; a lost one of that name is forgotten."""
        self._lost.pop((tenant, name), None)
        self._live[tenant, name] = device
        self._write()

    def deleted(self, tenant: int, name: str) -> None:
        """Forget a pool that was deleted on purpose."""
        known = (tenant, name) in self._live or (tenant, name) in self._lost
        self._live.pop((tenant, name), None)
        self._lost.pop((tenant, name), None)  # a pool of that name was lost, and then registered or made on the host
        if known:
            self._write()

    def lose(self, tenant: int, name: str, why: str) -> None:
        """Record that a pool's memory is gone, and why."""
        self._live.pop((tenant, name), None)
        while len(self._lost) >= MAX_REMEMBERED:
            del self._lost[next(iter(self._lost))]
        self._lost[tenant, name] = why
        self._write()

    def _read(self) -> list[_Pool]:
        try:
            return msgspec.json.decode(self._folder.read(DEVICE_POOLS_FILE), type=list[_Pool]) if self._folder else []
        except (OSError, ConfigError, msgspec.MsgspecError, ValueError):
            return []

    def _write(self) -> None:
        if self._folder is None:
            return
        still_lost = {key: device for key, device in self._before.items() if key in self._lost}
        pools = [_Pool(*key, device) for key, device in (still_lost | self._live).items()]
        with contextlib.suppress(OSError):  # see the class
            self._folder.replace(DEVICE_POOLS_FILE, msgspec.json.encode(pools))


class PoolRegistry:
    """The usable pools, by tenant and name.

    Attributes:
        lost: pools whose memory is gone, with the reason; kept across restarts.
    """

    def __init__(self, lost: LostPools, sessions: SessionRegistry, removed: Callable[[Pool], None]) -> None:
        """``removed`` is called with a pool before its memory is freed."""
        self.lost = lost
        self._sessions = sessions
        self._removed = removed
        self._pools: dict[tuple[int, str], Pool] = {}
        self._older: set[tuple[int, str]] = set()
        """Of which a session may have attached an earlier one."""
        self._coming: dict[tuple[int, str], asyncio.Future[None]] = {}

    def __iter__(self) -> Iterator[Pool]:
        """Yield the pools."""
        return iter(self._pools.values())

    def find(self, tenant: int, name: str) -> Pool | None:
        """Return a tenant's pool, or None."""
        return self._pools.get((tenant, name))

    def expect(self, tenant: int, name: str) -> None:
        """Record that a pool is being adopted: until ``came``, requests that name it wait or are told to come again."""
        self._coming[tenant, name] = asyncio.get_running_loop().create_future()

    def came(self, tenant: int, name: str) -> None:
        """End what ``expect`` began: the pool is there, or is lost."""
        self._coming.pop((tenant, name)).set_result(None)

    def coming(self, tenant: int, name: str) -> asyncio.Future[None] | None:
        """Return what ends when a pool that is being adopted is there or lost; None if it is not being adopted."""
        return self._coming.get((tenant, name))

    def get(self, tenant: int, name: str) -> Pool:
        """Return a tenant's pool.

        Raises:
            OverloadedError: it is being adopted.
            PoolLostError: its memory is gone, and the pool has not been made again since.
            UnknownPoolError: the tenant has no pool of that name.
        """
        pool = self._pools.get((tenant, name))
        if pool is None:
            if (tenant, name) in self._coming:
                raise OverloadedError(f"pool {name!r} of user {tenant} is being adopted").after(ADOPTION_LOOK_MS)
            why = self.lost.why(tenant, name)
            if why is not None:
                raise PoolLostError(f"pool {name!r} of user {tenant} {why}", field="pool")
            others = in_words(repr(one.name) for one in self if one.tenant == tenant)
            raise UnknownPoolError(f"no pool {name!r} of user {tenant}, who has {others or 'no pools'}", field="pool")
        return pool

    def named_by(self, session: Session, name: str) -> Pool:
        """Return the pool that a session's request names: the one that its instance has attached, if it has any.

        Raises:
            PoolLostError, UnknownPoolError: as ``get``; or a session of its instance has attached another pool of this
                name, which is no more: what that engine writes is not in this pool.
        """
        pool = self.get(session.tenant, name)
        if (pool.tenant, name) not in self._older:
            return pool
        for one in self._sessions.of_instance(session.owner_id):
            if one.attached.get(name, pool.region_id) != pool.region_id:
                holder = session_text(self._sessions, one.session_id, session.session_id)
                raise PoolLostError(
                    f"pool {name!r} was made again since {holder} attached it",
                    field="pool",
                    remedy="attach it again there, or end that session: its mapping no longer belongs to a pool",
                )
        return pool

    def attach(self, session: Session, name: str, region_id: int) -> None:
        """Record which memory of a pool a session's process has mapped."""
        session.attach(name, region_id)
        pool = self.find(session.tenant, name)
        if pool is not None:
            self._look_for_older(pool)

    def _look_for_older(self, pool: Pool) -> None:
        its = [one.attached for one in self._sessions if one.tenant == pool.tenant and pool.name in one.attached]
        is_older = any(one[pool.name] != pool.region_id for one in its)
        (self._older.add if is_older else self._older.discard)((pool.tenant, pool.name))

    def region_of(self, asked: RegionRequest) -> Region:
        """Return the pool memory that another daemon of this host asks to map for reading.

        Raises:
            UnknownPoolError: there is no such pool, or it was made again after its pages were sent.
        """
        region = self.get(asked.tenant, asked.pool).region
        if region.identity != asked.region:
            raise UnknownPoolError(f"pool {asked.pool!r} has been created again", field="region")
        return region

    def add(self, pool: Pool) -> None:
        """Add a pool, so that requests can name it."""
        self._pools[pool.tenant, pool.name] = pool
        self._look_for_older(pool)

    def remove(self, pool: Pool) -> None:
        """Remove a pool."""
        del self._pools[pool.tenant, pool.name]
        self._older.discard((pool.tenant, pool.name))
        self._removed(pool)

    def pages_by_owner(self) -> Counter[int]:
        """Return how many pages of all pools each instance owns."""
        owned: Counter[int] = Counter()
        for pool in self:
            for allocator in pool.allocators.values():
                owned.update(allocator.pages_by_owner())
        return owned


def status_of(pool: Pool) -> PoolStatus:
    """Return a pool as STATUS shows it."""
    spaces = tuple(
        SpaceStatus(
            space=space,
            page_bytes=bytes_per_page(pool.manifest, space),
            pages=allocator.capacity,
            free=allocator.free_count,
            busy=allocator.busy_count,
        )
        for space, allocator in pool.allocators.items()
    )
    return PoolStatus(
        pool=pool.name,
        tenant=pool.tenant,
        layout_digest=pool.manifest.layout_digest,
        region_bytes=pool.manifest.region_bytes,
        page_bytes=spaces[0].page_bytes,
        pages=spaces[0].pages,
        free=spaces[0].free,
        busy=spaces[0].busy,
        spaces=spaces if len(spaces) > 1 else (),
        device=pool.region.device,
        registered_by=pool.registered_by,
        lifetime="daemon" if pool.ends_with is None else "instance",
        ends_with=pool.ends_with,
        model=pool.model.public if pool.model else None,
        max_payload_bytes=pool.max_payload_bytes,
    )


def with_holders(status: PoolStatus, pool: Pool, sessions: SessionRegistry) -> PoolStatus:
    """Return a pool's status with the holders of its pages, the oldest first, and its runs of free pages."""
    runs = {space: allocator.counts().largest_free_run for space, allocator in pool.allocators.items()}
    holders = [
        PageHolder(
            space=space,
            owner=one.owner,
            pages=one.pages,
            busy=one.busy,
            age_ms=one.age_s * 1000,
            name=owner_text(sessions, one.owner),
        )
        for space, allocator in pool.allocators.items()
        for one in allocator.owned()
    ]
    return msgspec.structs.replace(
        status,
        largest_free_run=next(iter(runs.values())),
        spaces=tuple(msgspec.structs.replace(one, largest_free_run=runs[one.space]) for one in status.spaces),
        holders=tuple(sorted(holders, key=lambda one: -one.age_ms)),
    )


# -- texts that say who holds pages, for errors that are raised because of them


def in_words(parts: Iterable[str]) -> str:
    """Return the first ``NAMED`` parts, joined, and how many more there are."""
    every = list(parts)
    more = f" and {len(every) - NAMED} more" if len(every) > NAMED else ""
    return ", ".join(every[:NAMED]) + more


def session_text(sessions: SessionRegistry, session_id: int, asking: int) -> str:
    """Return a session's number, engine name and process; ``asking`` is the session whose request is refused."""
    session = sessions.get(session_id)
    known = _text_of(session) if session else "an engine that is gone"
    return f"{known}, the caller" if session_id == asking else known


def owner_text(sessions: SessionRegistry, owner_id: int, asking: int | None = None) -> str:
    """Return an instance's name, if any, and its sessions; ``asking`` is the instance whose request is refused."""
    its = sessions.of_instance(owner_id)
    known = in_words(map(_text_of, its)) or "an engine that is gone"
    if its and its[0].instance:
        known = f"instance {its[0].instance!r} ({known})"
    return f"{known}, the caller" if owner_id == asking else known


def _text_of(session: Session) -> str:
    return f"session {session.session_id} {session.name!r} of process {session.peer.pid}"


def holders_text(sessions: SessionRegistry, allocators: Iterable[PageAllocator], asking: int) -> str:
    """Return which instances hold how many pages, largest count first; empty where none holds any."""
    held: dict[int, int] = {}
    in_flight = 0
    for allocator in allocators:
        owned = allocator.pages_by_owner()
        for owner, count in owned.items():
            held[owner] = held.get(owner, 0) + count
        in_flight += allocator.capacity - allocator.free_count - sum(owned.values())
    parts = [
        f"{count} held by {owner_text(sessions, owner, asking)}"
        for owner, count in sorted(held.items(), key=lambda one: -one[1])
    ]
    if in_flight:
        parts.append(f"{in_flight} freed and still in flight")
    return in_words(parts)


def pool_full(error: PoolFullError, sessions: SessionRegistry, pool: Pool, space: str, asking: int) -> PoolFullError:
    """Return the error with the pool's name and the holders of its pages added."""
    holders = holders_text(sessions, (pool.space(space),), asking)
    return PoolFullError(f"pool {pool.name!r}: {error.detail}{holders and f'; {holders}'}", field=error.field)
