"""Pools as their service makes and removes them: on the daemon's own threads, in memory that is counted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, cast

import msgspec
import pytest
from structlog.testing import capture_logs

from kvferry.daemon.control import first_step
from kvferry.daemon.control.dispatch import Answer, AsyncHandler, Call, Dispatcher
from kvferry.daemon.control.session_socket import SessionSocket
from kvferry.daemon.control.sessions import Peer, Session, SessionRegistry
from kvferry.daemon.process.descriptors import Descriptors
from kvferry.daemon.process.devices import Devices
from kvferry.daemon.process.memory import HostMemory
from kvferry.daemon.services.event_rings import EventRings
from kvferry.daemon.services.pool_checks import PoolTraits, check_same
from kvferry.daemon.services.pool_registry import LostPools, PoolRegistry
from kvferry.daemon.services.pools import HostResources, PoolService
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.host.memory import MACHINE, MAX_KEPT_BYTES, MAX_RESERVE_BYTES
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.manifest import total_bytes
from kvferry.protocol.base import Body
from kvferry.protocol.config.schema import DevicesConfig, MemoryConfig
from kvferry.protocol.errors import OutOfMemoryError, OverloadedError, PoolExistsError, UnknownPoolError
from kvferry.protocol.ids import HOST, ModelIdentity
from kvferry.protocol.limits import Limits
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MhaSpec
from kvferry.protocol.pool_messages import (
    Allocate,
    CreatePool,
    DeletePool,
    PoolCreated,
    PoolDeleted,
    RegisteredArrays,
    RegisterPool,
)
from kvferry.protocol.session_stream import ShareFollows, TorchShare
from tests.kit.reserved_pages import ReservedPages

SPEC = MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=1, head_dim=8, dtype="float16")
POOL_BYTES = total_bytes(manifest_of(SPEC))
ARRAYS: Final = tuple(
    RegisteredArrays(component="main", role=role, shape=(2, 5, 16, 1, 8), strides=(640, 128, 8, 8, 1), dtype="float16")
    for role in ("k", "v")
)
WAIT_S = 20.0
STEP_S = 0.01


class Pools:
    """The service, and what is around it in a daemon, which it takes for its dispatcher.

    Attributes:
        may_populate: memory is populated once this is set.
        available_kib: of 1 TiB, what the host has left.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *,
        max_bytes: int = POOL_BYTES,
        huge: ReservedPages | None = None,
        spec: MhaSpec = SPEC,
    ) -> None:
        self.available_kib = 1 << 30
        self._spec, self._huge = spec, huge
        self.sessions = SessionRegistry(Limits())
        self.may_populate = threading.Event()
        monkeypatch.setattr(HostRegion, "populate", self._populate)
        self._handlers: dict[str, AsyncHandler] = {}
        self._answering: dict[asyncio.Future[Answer | None], Session] = {}
        self._replies: asyncio.Queue[Answer | BaseException | None] = asyncio.Queue()
        self.registry = PoolRegistry(LostPools(None), self.sessions, lambda _pool: None)
        self.service = PoolService(
            cast("Dispatcher", self),
            cast("SessionSocket", self),
            Devices(DevicesConfig(), lambda _name, _error: None),
            self.registry,
            cast("EventRings", self),
            HostResources(
                HostMemory(self._read, MemoryConfig(huge_pages="reserved" if huge else "auto")), Descriptors()
            ),
            max_bytes=max_bytes,
            populate=huge is None,
        )

    def take_share(self, _session: Session, message_id: int) -> ShareFollows:
        """Return the memory of SPEC's two arrays."""
        share = TorchShare(
            handle=b"h", storage_bytes=POOL_BYTES, storage_offset_bytes=0, ref_counter=b"r", ref_counter_offset=0,
            event=b"e", event_sync=True,
        )  # fmt: skip
        return ShareFollows(message_id=message_id, shares=(share, share))

    def _read(self, path: str) -> str:
        huge = self._huge.meminfo if self._huge else ""
        return f"MemTotal: {1 << 30} kB\nMemAvailable: {self.available_kib} kB\n{huge}" if path == MACHINE else ""

    def _populate(self, go_on: Callable[[int], bool], _start: int, _stop: int | None) -> None:
        while go_on(1) and not self.may_populate.wait(STEP_S):
            pass

    def after(self, handle: AsyncHandler) -> AsyncHandler:
        return handle

    def handle(self, kind: str, handler: AsyncHandler) -> None:
        self._handlers[kind] = handler

    def engine(self, instance: str, user: int = 0) -> Session:
        return self.sessions.open("engine", Peer(1, user, 3), instance)

    def end(self, session: Session) -> None:
        self.sessions.close(session)
        self.give_up(session)
        self.service.instance_lost(session.owner_id)

    def give_up(self, session: Session) -> None:
        """Cancel what answers a session's requests, as their deadlines do."""
        for answering in [one for one, whose in self._answering.items() if whose is session]:
            answering.cancel()

    def ask(self, session: Session, kind: str, body: Body) -> Answer | None:
        """Return the reply, or None where it comes later."""
        handled = self._handlers[kind](Call(1, session, body, (), WAIT_S))
        if handled is None or isinstance(handled, Answer):
            return handled
        answering = first_step.begin(handled)
        if answering.done():
            return answering.result()
        self._answering[answering] = session
        answering.add_done_callback(self._answered)
        return None

    def _answered(self, answering: asyncio.Future[Answer | None]) -> None:
        del self._answering[answering]
        if not answering.cancelled():
            self._replies.put_nowait(answering.exception() or answering.result())

    def create(self, session: Session, name: str = "decode") -> None:
        """Ask for a pool that ends with the session's instance."""
        assert self.ask(session, "CREATE_POOL", CreatePool(pool=name, spec=self._spec, lifetime="instance")) is None

    async def reply(self) -> Any:  # noqa: ANN401  the test knows which one
        reply = await asyncio.wait_for(self._replies.get(), WAIT_S)
        return reply.body if isinstance(reply, Answer) else reply


@asynccontextmanager
async def serving(one: Pools) -> AsyncIterator[Pools]:
    yield one
    one.may_populate.set()
    await one.service.close()


@pytest.fixture
async def pools(monkeypatch: pytest.MonkeyPatch, anyio_backend: object) -> AsyncIterator[Pools]:  # noqa: ARG001  runs on the test's loop
    async with serving(Pools(monkeypatch)) as one:
        yield one


@pytest.fixture
async def roomy(monkeypatch: pytest.MonkeyPatch, anyio_backend: object) -> AsyncIterator[Pools]:  # noqa: ARG001  runs on the test's loop
    async with serving(Pools(monkeypatch, max_bytes=20 * POOL_BYTES)) as one:
        yield one


@pytest.mark.anyio
async def test_a_name_whose_instance_ended_while_it_was_populated_is_busy_and_then_free(pools: Pools) -> None:
    gone, successor = pools.engine("engine"), pools.engine("successor")
    pools.create(gone)
    pools.end(gone)
    with pytest.raises(OverloadedError, match="its instance ended, while it was made"):
        pools.create(successor)
    async with asyncio.timeout(WAIT_S):  # nothing is let through: the first one stops
        while True:
            with contextlib.suppress(OverloadedError):
                pools.create(successor)
                break
            await asyncio.sleep(0)
    pools.may_populate.set()
    created = await pools.reply()
    assert isinstance(created, PoolCreated)
    assert created.created
    assert [pool.ends_with for pool in pools.registry] == [successor.owner_id]


@pytest.mark.anyio
async def test_a_pool_is_made_for_those_who_still_wait_when_who_asked_first_does_not(pools: Pools) -> None:
    first, second = pools.engine("engine"), pools.engine("engine")
    pools.create(first)
    pools.create(second)
    pools.give_up(first)
    pools.may_populate.set()
    created = await pools.reply()
    assert isinstance(created, PoolCreated)
    assert not created.created
    answer = pools.ask(first, "ALLOCATE", Allocate(pool="decode", count=1))
    assert answer is not None


@pytest.mark.anyio
async def test_memory_that_is_imported_for_an_engine_that_has_left_is_given_back(
    pools: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    region, begun = HostRegion.create("registered", POOL_BYTES), threading.Event()

    def register(*_: object) -> HostRegion:
        begun.set()
        assert pools.may_populate.wait(WAIT_S)
        return region

    monkeypatch.setattr(Devices, "register", register)
    engine = pools.engine("engine")
    body = RegisterPool(pool="decode", spec=SPEC, device="npu:0", arrays=ARRAYS)
    assert pools.ask(engine, "REGISTER_POOL", body) is None
    assert await asyncio.to_thread(begun.wait, WAIT_S)
    pools.give_up(engine)
    await asyncio.sleep(0)
    with pytest.raises(PoolExistsError, match="is registered by"):
        pools.create(engine)
    pools.may_populate.set()
    async with asyncio.timeout(WAIT_S):
        while region.fd >= 0:  # noqa: ASYNC110  a thread closes it
            await asyncio.sleep(0)
    pools.create(engine)
    assert isinstance(await pools.reply(), PoolCreated)


@pytest.mark.anyio
async def test_a_removed_pool_is_counted_while_its_pages_are_in_flight(pools: Pools) -> None:
    gone, successor = pools.engine("engine"), pools.engine("successor")
    pools.may_populate.set()
    pools.create(gone)
    await pools.reply()
    (pool,) = pools.registry
    answer = pools.ask(gone, "ALLOCATE", Allocate(pool="decode", count=1))
    assert answer is not None
    pool.allocator.begin_read(gone.owner_id, answer.ids[0], "pages")
    pools.end(gone)
    assert list(pools.registry) == []
    with pytest.raises(OutOfMemoryError, match=f"{POOL_BYTES} of {POOL_BYTES} are taken"):
        pools.create(successor)
    pool.allocator.end_read(answer.ids[0])


@pytest.mark.anyio
async def test_what_a_user_leaves_is_enough_for_the_next_one_and_for_root(roomy: Pools) -> None:
    roomy.may_populate.set()
    made = dict.fromkeys((1001, 1002, 0), 0)
    for user in made:
        session = roomy.engine(f"of {user}", user)
        with pytest.raises(OutOfMemoryError):  # noqa: PT012  once there is no room
            while True:
                roomy.create(session, f"pool-{made[user]}")
                made[user] += 1
    assert [*made.values()] == [18, 1, 1]


# -- memory that there is not

RESERVED_KIB: Final = MAX_RESERVE_BYTES + MAX_KEPT_BYTES >> 10


@pytest.mark.anyio
async def test_what_a_pool_under_way_will_take_is_counted(roomy: Pools) -> None:
    engine = roomy.engine("engine")
    roomy.available_kib = RESERVED_KIB
    with pytest.raises(OutOfMemoryError, match=f"{POOL_BYTES} bytes .* this host has 0 left"):
        roomy.create(engine)
    roomy.available_kib = RESERVED_KIB + (2 * POOL_BYTES - 1 >> 10)
    roomy.create(engine)
    with pytest.raises(OutOfMemoryError, match=f"{POOL_BYTES} of which pools and tiers will still take"):
        roomy.create(engine, "another")


@pytest.mark.anyio
async def test_memory_that_runs_out_while_a_pool_is_populated_is_given_back(pools: Pools) -> None:
    engine = pools.engine("engine")
    pools.create(engine)
    pools.available_kib = 0
    failed = await pools.reply()
    assert isinstance(failed, OutOfMemoryError)
    assert "this host has 0 left" in failed.detail
    assert list(pools.registry) == []
    pools.available_kib = 1 << 30
    pools.may_populate.set()
    pools.create(engine)
    assert isinstance(await pools.reply(), PoolCreated)


@pytest.mark.anyio
async def test_a_pool_that_is_being_populated_can_be_deleted_which_stops_that(pools: Pools) -> None:
    engine = pools.engine("engine")
    pools.create(engine)
    assert pools.ask(engine, "DELETE_POOL", DeletePool(pool="decode")) is None
    with pytest.raises(OverloadedError, match="was deleted"):
        pools.create(engine)
    replies = [await pools.reply(), await pools.reply()]  # nothing was let through: it stopped at the next step
    assert isinstance(replies[0], UnknownPoolError)
    assert isinstance(replies[1], PoolDeleted)
    assert list(pools.registry) == []
    pools.create(engine)


# -- memory of reserved huge pages

LARGE: Final = MhaSpec(layers=2, tokens=1 << 15, page_size=16, kv_heads=1, head_dim=32, dtype="float16")
LARGE_BYTES: Final = total_bytes(manifest_of(LARGE))


@pytest.fixture
async def huge(monkeypatch: pytest.MonkeyPatch, anyio_backend: object) -> AsyncIterator[Pools]:  # noqa: ARG001  runs on the test's loop
    """Return pools whose memory is of them, on a host that has enough of them, and no other memory."""
    reserved = ReservedPages(monkeypatch, free=8)
    async with serving(Pools(monkeypatch, max_bytes=LARGE_BYTES, huge=reserved, spec=LARGE)) as one:
        one.available_kib = 0
        yield one


@pytest.mark.anyio
async def test_reserved_pages_are_populated_in_any_case_and_count_as_no_other_memory(huge: Pools) -> None:
    huge.create(huge.engine("engine"))
    assert list(huge.registry) == []
    huge.may_populate.set()
    assert isinstance(await huge.reply(), PoolCreated)
    (pool,) = huge.registry
    assert isinstance(pool.region, HostRegion)
    assert (pool.region.is_reserved, pool.region.size_bytes) == (True, LARGE_BYTES)


@pytest.mark.anyio
async def test_a_pool_whose_reserved_pages_are_not_to_be_had_is_of_others_if_there_are(
    huge: Pools, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[HostRegion] = []

    def populate(region: HostRegion, _go_on: object, _start: int, _stop: int | None) -> None:
        refused.append(region)
        raise OutOfMemoryError("cannot populate byte 0: no reserved huge page is to be had")

    monkeypatch.setattr(HostRegion, "populate", populate)
    with capture_logs() as logs:
        huge.create(huge.engine("engine"))
        failed = await huge.reply()
        assert isinstance(failed, OutOfMemoryError)
        assert "this host has 0 left" in failed.detail
        assert list(huge.registry) == []
        huge.available_kib = 1 << 30
        huge.create(huge.engine("engine"))
        assert isinstance(await huge.reply(), PoolCreated)
    (pool,) = huge.registry
    assert isinstance(pool.region, HostRegion)
    assert not pool.region.is_reserved
    assert [(one.is_reserved, one.fd) for one in refused] == [(True, -1)]
    (said,) = [one for one in logs if one["log_level"] == "warning"]
    assert "hugetlb.*.max" in said["remedy"]


# -- a pool that exists is the one that is asked for, or the answer says in what it is another one

DRAFTED: Final = MhaSpec(
    layers=2, tokens=8, page_size=4, kv_heads=1, head_dim=4, dtype="float8_e4m3fn", k_scale=0.5, v_scale=0.5,
    draft=DraftSpec(layers=1),
)  # fmt: skip


NAMED: Final = ModelIdentity(name="some/model", revision="1", salt="secret")
WINDOW: Final = HybridSwaSpec(
    full_layers=(0,), window_layers=(1,), tokens=8, window_tokens=8, window=4, page_size=4, kv_heads=1, head_dim=4,
    dtype="float16",
)  # fmt: skip


def traits(spec: MhaSpec | HybridSwaSpec, **changes: Any) -> PoolTraits:  # noqa: ANN401  any field
    return PoolTraits(manifest_of(msgspec.structs.replace(spec, **changes)), HOST)


def with_(**fields: Any) -> PoolTraits:  # noqa: ANN401  any field
    return traits(SPEC)._replace(**fields)


def named(**changes: str) -> PoolTraits:
    return with_(model=msgspec.structs.replace(NAMED, **changes))


@pytest.mark.parametrize(
    ("existing", "wanted", "field", "said"),
    [
        (traits(DRAFTED), traits(DRAFTED, layers=3), "spec", "main/k/2 is not in the pool"),
        (traits(DRAFTED), traits(DRAFTED, layers=1), "spec", "main/k/1 is only in the pool"),
        (traits(DRAFTED), traits(DRAFTED, dtype="float8_e5m2"), "spec", "dtype of main/k/0 .* asked for float8_e5m2"),
        (traits(DRAFTED), traits(DRAFTED, k_scale=0.25), "spec", r"scales of main/k/0 is \(0.5,\), asked for \(0.25,"),
        (traits(DRAFTED), traits(DRAFTED, tokens=12), "spec", "3 pages.*asked for 4"),
        (traits(DRAFTED), traits(DRAFTED, optional_components=()), "spec", "may leave out draft, .* leave out nothing"),
        (traits(WINDOW), traits(WINDOW, window=8), "spec", "window of 4 tokens in swa, asked for with a window of 8"),
        (with_(device="npu:0"), with_(), "device", "exists on npu:0, asked for on host; 3 pages held"),
        (named(), with_(), "model", "exists for model 'some/model.*', asked for no model"),
        (with_(), named(), "model", "exists for no model, asked for model 'some/model"),
        (named(), named(revision="2"), "model.revision", "asked for model"),
        (named(), named(salt="other"), "model.salt", "exists with another cache salt"),
        (with_(ends_with=7), with_(), "lifetime", "ends with its owner, asked for with lifetime 'daemon'"),
        (with_(ends_with=7), with_(ends_with=8), "lifetime", "asked for with lifetime 'instance'"),
        (with_(max_payload_bytes=5), with_(max_payload_bytes=6), "max_payload_bytes", "at most 5 bytes, asked for 6"),
    ],
)
def test_another_pool_is_refused(existing: PoolTraits, wanted: PoolTraits, field: str, said: str) -> None:
    with pytest.raises(PoolExistsError, match=said) as caught:
        check_same("decode", existing, wanted, held="3 pages held", end="its owner")
    assert caught.value.field == field
    assert "secret" not in caught.value.detail


@pytest.mark.parametrize(
    "changes", [{}, {"view": "fia"}, {"k_scale": ((0.5,), (0.5,))}, {"optional_components": ("draft",)}], ids=str
)
def test_what_makes_no_other_bytes_makes_no_other_pool(changes: dict[str, Any]) -> None:
    spec = msgspec.structs.replace(DRAFTED, draft=None, optional_components=())
    check_same("decode", traits(spec), traits(spec, **changes))
    no_window = msgspec.structs.replace(WINDOW, window_layers=())
    check_same("decode", traits(no_window), traits(no_window, window=8))
