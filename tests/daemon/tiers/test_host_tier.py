"""The host tier's memory: who gets it, who goes for it, and what is said where nobody can."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import pytest

from kvferry.daemon.control.metrics import Counters
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.process.tenants import Tenants
from kvferry.daemon.tiers import host_tier
from kvferry.daemon.tiers.host_tier import AHEAD_BYTES, GROW_AGAIN_S, HostTier, SpaceRequest
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.host.memory import MACHINE, MAX_KEPT_BYTES, MAX_RESERVE_BYTES
from kvferry.pools.tiers.cached_block import CachedBlock, Namespace, Tier
from kvferry.pools.tiers.index import OPERATOR
from kvferry.protocol.config.schema import TenantConfig, TiersConfig
from kvferry.protocol.config.tenants import number_of
from kvferry.protocol.errors import OutOfMemoryError, OverloadedError
from tests.kit.tiers import UNIT, names, tiers_config

NAMES = ("mine", "theirs")
MINE, THEIRS, ROOT = *map(number_of, NAMES), 0


def namespace(tenant: int = MINE, block_pages: int = 1) -> Namespace:
    return Namespace(tenant, "0" * 32, "i" * 32, "main", block_pages)


@pytest.fixture
def counters() -> Counters:
    """Return what the tier counts with."""
    return Counters()


@pytest.fixture
def host(counters: Counters) -> Iterator[HostTier]:
    """Return a tier of eight allocation units; a tenant may have six of them."""
    bounded = {name: TenantConfig(users=(user,), tier_bytes=6 * UNIT) for user, name in enumerate(NAMES, 1)}
    one = HostTier(tiers_config(8), counters, HostMemory(), tenants=Tenants(bounded))
    yield one
    one.arena.check_integrity()
    one.index.check_integrity()
    one.close()


def cache(host: HostTier, *numbers: int, tenant: int = MINE, block_pages: int = 1) -> list[CachedBlock]:
    """Put blocks of so many allocation units into the tier."""
    begun = host.index.begin(namespace(tenant, block_pages), names(*numbers), None, block_pages * UNIT)
    blocks = [one.block for one in begun]
    host.awaits(tenant, SpaceRequest(len(blocks) * block_pages, UNIT))
    offsets = host.reserve(tenant, len(blocks) * block_pages, UNIT, counted=True)
    host.index.commit(blocks, offsets.reshape(len(blocks), block_pages))
    return blocks


def cached(host: HostTier, tenant: int = MINE) -> list[int]:
    return [n for n in range(1, 20) if host.index.get(namespace(tenant), names(n)[0])]


def test_a_tier_does_not_grow_into_memory_that_the_host_has_not(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a host of 1 TiB, beside the reserve and what sessions may make a daemon keep."""
    monkeypatch.setattr(HostRegion, "populate", lambda *_: None)
    left_bytes, large, now_s = AHEAD_BYTES, 4 * AHEAD_BYTES, 0.0

    def read(path: str) -> str:
        left_kib = left_bytes + MAX_RESERVE_BYTES + MAX_KEPT_BYTES >> 10
        return f"MemTotal: {1 << 30} kB\nMemAvailable: {left_kib} kB\n" if path == MACHINE else ""

    host = HostTier(TiersConfig(host_bytes=large), counters, HostMemory(read), lambda: now_s)
    with contextlib.closing(host):
        assert host.status(0).total_bytes == large
        first = host.reserve(ROOT, 1, AHEAD_BYTES)
        left_bytes = 2 * AHEAD_BYTES
        with pytest.raises(OverloadedError, match=f"cannot grow to its {large} .* this host has {AHEAD_BYTES} left"):
            host.reserve(ROOT, 1, UNIT)  # nobody looks again so soon
        now_s += GROW_AGAIN_S
        assert len(host.reserve(ROOT, 1, UNIT)) == 1
        with pytest.raises(OverloadedError, match="cannot grow"):
            host.reserve(ROOT, 1, 2 * AHEAD_BYTES)  # the first bytes are promised, though not taken yet
        host.release(ROOT, first, AHEAD_BYTES)
        assert len(host.reserve(ROOT, 1, AHEAD_BYTES)) == 1


Evict = Callable[[HostTier, int, int], object]


def reserve(host: HostTier, tenant: int, blocks: int) -> None:
    """Have blocks evicted by ``reserve``."""
    host.reserve(tenant, blocks, UNIT)


def make_room(host: HostTier, tenant: int, blocks: int) -> None:
    """Have them evicted ahead."""
    for _ in host.making_room(tenant, [SpaceRequest(blocks, UNIT)]):
        host.index.check_integrity()


@pytest.fixture(params=[reserve, make_room])
def evict(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Evict:
    """Return either way in which blocks go for others; ahead one after another."""
    monkeypatch.setattr(host_tier, "EVICTED_AT_ONCE", 1)
    way: Evict = request.param
    return way


def test_a_tenants_own_blocks_go_for_its_bound_and_no_more_than_needed(host: HostTier, evict: Evict) -> None:
    cache(host, 1, 2, 3, 4)
    cache(host, 5, tenant=THEIRS)
    host.index.touch([host.index.longest_prefix(namespace(), names(4))[0]])
    evict(host, MINE, 4)
    assert cached(host) == [1, 2]  # the last ones of a chain go first
    assert cached(host, THEIRS) == [5]


def test_where_the_tier_is_full_the_tenant_goes_first_that_has_most(host: HostTier, evict: Evict) -> None:
    cache(host, 1, 2, 3, 4, 5)
    cache(host, 6, 7, tenant=THEIRS)
    evict(host, THEIRS, 3)
    assert cached(host) == [1, 2, 3]
    assert cached(host, THEIRS) == [6, 7]


@pytest.mark.parametrize(
    ("shares", "units"), [((None, None), (32, 32)), ((0.75, None), (48, 16)), ((0.5, 0.25), (43, 21))]
)
def test_tenants_that_all_store_come_to_have_their_shares(
    counters: Counters, shares: tuple[float | None, float | None], units: tuple[int, int]
) -> None:
    pairs = zip(NAMES, shares, strict=True)
    both = {name: TenantConfig(users=(user,), share=one) for user, (name, one) in enumerate(pairs, 1)}
    tenants = Tenants(both)
    with contextlib.closing(HostTier(tiers_config(64), counters, HostMemory(), tenants=tenants)) as host:
        for number in range(64):
            cache(host, number)
        assert host.index.accounts[MINE].taken_bytes == 64 * UNIT, "one alone has all"
        for number in range(100, 300):
            cache(host, number, tenant=(MINE, THEIRS)[number % 2])
        has = [host.index.accounts[one].taken_bytes // UNIT for one in (MINE, THEIRS)]
        assert abs(has[0] - units[0]) <= 1
        assert sum(has) == 64


def test_several_that_cannot_all_be_there_evict_nothing(host: HostTier) -> None:
    cache(host, 1, 2, 3, 4, 5, 6)
    pins = host.index.longest_prefix(namespace(), names(1, 2))
    space_requests = [SpaceRequest(2, UNIT), SpaceRequest(2, 2 * UNIT)]
    with pytest.raises(OutOfMemoryError, match=r"28672 bytes are needed"):
        next(host.making_room(MINE, [*space_requests, SpaceRequest(1, UNIT)]))
    host.index.pin(pins[:1], 7)
    with pytest.raises(OverloadedError, match=r"24576 bytes are needed"):
        next(host.making_room(MINE, space_requests))
    assert cached(host) == [1, 2, 3, 4, 5, 6]
    host.index.unpin(pins[:1], 7)
    assert not [*host.making_room(MINE, space_requests)]
    assert cached(host) == []


def test_nobody_goes_where_that_could_not_help(host: HostTier, evict: Evict) -> None:
    held = host.reserve(THEIRS, 5, UNIT)
    cache(host, 1, 2)
    with pytest.raises(OverloadedError, match=r"16384 bytes are needed, 4096 of 32768 .* use: 20480 of other tenants;"):
        evict(host, MINE, 4)
    assert cached(host) == [1, 2]
    host.release(THEIRS, held, UNIT)
    with pytest.raises(AssertionError, match="discharged"):
        host.discharge(THEIRS, 1, UNIT)


def test_what_a_user_has_pinned_leaves_the_next_one_its_part(counters: Counters) -> None:
    with contextlib.closing(HostTier(tiers_config(64), counters, HostMemory())) as host:
        held = host.reserve(MINE, 59, UNIT)
        host.index.pin(cache(host, 1), 7)
        may = rf"tenant {MINE} may have {60 * UNIT} bytes that stay, and has {60 * UNIT}"
        with pytest.raises(OverloadedError, match=may):
            host.reserve(MINE, 1, UNIT)
        with pytest.raises(OverloadedError, match=may):
            next(host.making_room(MINE, [SpaceRequest(1, UNIT)]))
        assert len(host.reserve(THEIRS, 3, UNIT)) == 3
        with pytest.raises(OverloadedError, match=f"tenant {THEIRS} may have {3 * UNIT + UNIT * 3 // 4} bytes"):
            host.reserve(THEIRS, 1, UNIT)
        assert len(host.reserve(ROOT, 1, UNIT)) == 1
        host.release(MINE, held, UNIT)
        assert len(host.reserve(MINE, 50, UNIT)) == 50


def test_who_pins_what_is_said(host: HostTier, evict: Evict) -> None:
    blocks = cache(host, 1, 2, 3, 4, 5)
    host.index.pin(blocks[:3], 7)
    host.index.pin(blocks[3:], OPERATOR)
    host.index.unpin(blocks[:1], 7)
    with pytest.raises(OverloadedError):
        evict(host, MINE, 3)
    host.index.pin(blocks[:1], 7)
    with pytest.raises(OverloadedError) as error:
        evict(host, MINE, 2)
    assert f"tenant {MINE} has 20480 of its 24576 bytes in use" in error.value.detail
    assert error.value.detail.endswith("12288 by instance 7, 8192 by an operator (kvferry cache)")
    assert cached(host) == [1, 2, 3, 4, 5]
    assert host.status(0).pinned_bytes == 5 * UNIT


def test_what_others_have_is_named_to_root_alone(host: HostTier) -> None:
    cache(host, 1)
    host.index.pin(cache(host, 2, 3, tenant=THEIRS), 9)
    theirs = host.reserve(THEIRS, 4, UNIT)
    said = {}
    for asks in (MINE, 0):
        with pytest.raises(OverloadedError) as error:
            host.reserve(asks, 3, UNIT)
        said[asks] = error.value.detail.partition("; ")[2]
        assert error.value.retry_after_ms == 250
    host.release(THEIRS, theirs, UNIT)
    begins, pinned = "snapshots and running operations use: 16384 ", "cached blocks are pinned: 8192 "
    assert said[MINE] == f"{begins}of other tenants; {pinned}of other tenants"
    assert said[0] == f"{begins}of tenant {THEIRS}; {pinned}by instance 9"


def test_small_blocks_go_until_a_large_one_has_a_hole(host: HostTier) -> None:
    cache(host, *range(1, 7))
    kept = cache(host, 7, tenant=THEIRS)
    host.index.pin(kept, 9)
    [at] = host.reserve(THEIRS, 1, 4 * UNIT).tolist()
    assert at % UNIT == 0
    assert cached(host, THEIRS) == [7]
    assert 1 <= len(cached(host)) <= 3


def test_a_block_that_is_on_disk_is_evicted_but_not_lost(host: HostTier, counters: Counters) -> None:
    first, second = cache(host, 1, 2)
    host.index.set_tier(first, Tier.DISK, present=True)
    host.reserve(MINE, 6, UNIT)
    counted = counters.snapshot()
    assert (counted["tiers.host.evicted_blocks"], counted["tiers.host.lost_blocks"]) == (2, 1)
    assert [one.in_host for one in (first, second)] == [False, False]
    assert [host.index.get(namespace(), one) for one in names(1, 2)] == [first, None]
    assert host.index.adopt(namespace(), names(1)[0], None, UNIT, tier=Tier.DISK) is first
