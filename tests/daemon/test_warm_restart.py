"""Sessions that lose their socket, or their daemon, go on, with their pages and pools; what cannot is gone."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import struct
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import msgspec
import numpy.typing as npt
import pytest

from kvferry.clients import AsyncClient, Client, MhaSpec, calls, new_request_id, pages
from kvferry.clients.core.client_core import ClientCore
from kvferry.clients.session_channel import SessionChannel
from kvferry.daemon.control.session_index import INDEX_BYTES, SessionIndex
from kvferry.daemon.process.access import HOLDER_SOCKET
from kvferry.daemon.process.fd_store import ANSWER_S, HolderStore, open_store
from kvferry.daemon.process.inherited import Inherited
from kvferry.daemon.services.pool_registry import PoolRegistry
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.pool import Pool
from kvferry.protocol.base import ErrorReply
from kvferry.protocol.codec import decode_from_daemon
from kvferry.protocol.errors import NoSessionError, NotOwnerError, UnknownPoolError
from kvferry.protocol.ids import BootId
from kvferry.protocol.pool_messages import CreatePool, DeletePool
from kvferry.protocol.session_messages import Ping
from kvferry.protocol.transfer_messages import Accepted, Receive, Result
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user, soon
from tests.kit.faults import stopped
from tests.kit.in_process import serving
from tests.kit.raw_engine import RawEngine, raw_engine, resumed
from tests.kit.started import started

SPEC = MhaSpec(layers=2, tokens=64, page_size=4, kv_heads=1, head_dim=8, dtype="float16")
ALL = 16
SOON_MS = 20_000
T = TypeVar("T")
POOL = "pool"
CONFIG = "[service]\nresume_grace_s = 600.0\n"
TIER = ("kvferry.tier.memory", "kvferry.tier.record")
KEEPER = calls.session_open("keeper", keep=True)


@pytest.fixture
def life() -> Iterator[Daemon]:
    """Return a daemon that outlives its process."""
    with kit.daemon(CONFIG, keep=True) as one:
        yield one


@contextlib.contextmanager
def left_by(life: Daemon) -> Iterator[tuple[HolderStore, dict[str, int]]]:
    """Yield the store and what is in it, between two lives."""
    with life.store() as store:
        held = store.take()
        try:
            yield store, held
        finally:
            for fd in held.values():
                os.close(fd)


@contextlib.contextmanager
def index_of(held: Mapping[str, int]) -> Iterator[SessionIndex]:
    with HostRegion(os.dup(held["kvferry.index"]), INDEX_BYTES) as region:
        yield SessionIndex(region.buffer)


def free_pages(client: Client) -> int:
    return next(one.free for one in client.status().pools if one.pool == POOL)


def arrays_of(client: Client) -> list[npt.NDArray[Any]]:
    """Return the pool's pages, in the memory itself."""
    pool = client.attach_pool(POOL)
    return [pool.entry_array(entry) for entry in pool.manifest.entries]


def test_an_engine_goes_on_with_its_pages(life: Daemon) -> None:
    with raw_engine(life.runtime_dir, opening=KEEPER) as engine:
        engine.ask(CreatePool(pool=POOL, spec=SPEC))
        ids = engine.call(calls.allocate(POOL, 5, "main"))
        with Client.connect(life.runtime_dir) as writer:
            for array in arrays_of(writer):
                array[ids] = 7
        before = engine.channel.opened
        life.restart(signal.SIGKILL)
        with Client.connect(life.runtime_dir) as other:
            assert free_pages(other) == ALL - 5
            others = other.allocate(POOL, ALL - 5)
            assert not set(others) & set(ids)
            other.free(POOL, others)  # a daemon killed before it saw this session end would wait for it
            assert all((array[ids] == 7).all() for array in arrays_of(other))
            with resumed(life.runtime_dir, before, keep=True) as again:
                opened = again.channel.opened
                assert (opened.session, opened.secret, opened.resumed) == (before.session, before.secret, True)
                assert opened.boot_id != before.boot_id
                old = ClientCore(BootId(before.boot_id), before.secret)
                again.control.send_multipart(old.frames(old.request(calls.allocate(POOL, 1, "main").body)))
                assert again.control.poll(SOON_MS)
                refused = decode_from_daemon(again.control.recv_multipart()).message.body
                assert isinstance(refused, ErrorReply)
                assert refused.error.code == "STALE_BOOT"
                assert again.call(calls.free(POOL, ids[:2], "main", None)).freed == 2
                with pytest.raises(NotOwnerError):
                    again.call(calls.free(POOL, ids[:2], "main", None))
                last = again.channel.opened
        life.restart(signal.SIGTERM)
        with Client.connect(life.runtime_dir) as other, resumed(life.runtime_dir, last) as again:
            assert free_pages(other) == ALL - 3
            assert again.call(calls.free(POOL, ids[2:], "main", None)).freed == 3


def test_pages_of_who_died_meanwhile_are_free(life: Daemon, tmp_path: Path) -> None:
    program = tmp_path / "mortal.py"
    program.write_text(
        "import signal, sys\n"
        "from kvferry.clients import Client\n"
        "client = Client.connect(sys.argv[1], name='mortal', keep=True)\n"
        "client.allocate('pool', 3)\n"
        "print('there', flush=True)\n"
        "signal.pause()\n"
    )
    command = [str(program), str(life.runtime_dir)]
    with Client.connect(life.runtime_dir) as first:
        first.create_pool(POOL, SPEC)
    with started(command) as first_to_die, started(command) as early, started(command) as late:
        for one in (first_to_die, early, late):
            assert one.stdout is not None
            assert one.stdout.readline() == "there\n"
        first_to_die.kill()
        with Client.connect(life.runtime_dir) as other:
            assert soon(lambda: free_pages(other) == ALL - 6), "whoever is dead does not resume, whatever the grace"
        assert "its process ended" in life.log.read_text()
        os.kill(life.process.pid, signal.SIGSTOP)  # it sees nothing of the end
        early.kill()
        early.wait()
        life.restart()
        with Client.connect(life.runtime_dir) as other:
            assert free_pages(other) == ALL - 3
            late.kill()
            late.wait()
            assert soon(lambda: free_pages(other) == ALL)


def test_what_ends_with_an_instance_or_was_deleted(life: Daemon) -> None:
    with Client.connect(life.runtime_dir, instance="gone") as gone:
        gone.create_pool("its", SPEC, lifetime="instance")
    with raw_engine(life.runtime_dir, opening=calls.session_open("keeper", "stays", keep=True)) as engine:
        engine.ask(CreatePool(pool="mine", spec=SPEC, lifetime="instance"))
        engine.ask(CreatePool(pool="deleted", spec=SPEC))
        engine.ask(DeletePool(pool="deleted"))
        life.restart()
        with Client.connect(life.runtime_dir) as other:
            assert [one.pool for one in other.status().pools] == ["mine"]
            with pytest.raises(UnknownPoolError):
                other.allocate("deleted", 1)
            with resumed(life.runtime_dir, engine.channel.opened):
                assert [one.lifetime for one in other.status().pools] == ["instance"]
            assert soon(lambda: not other.status().pools)


# -- sessions that lose their socket


@pytest.fixture
def other(daemon: Daemon) -> Iterator[Client]:
    """Return a client that looks on."""
    with kit.engine(daemon, "other") as one:
        one.create_pool(POOL, SPEC)
        yield one


def connected(client: Client) -> dict[str, bool]:
    return {one.name: one.connected for one in client.status().sessions}


def lose_socket(engine: RawEngine, client: Client, name: str = "keeper") -> None:
    """Lose a session's socket, and wait until the daemon has seen it."""
    engine.channel.close()
    assert soon(lambda: not connected(client).get(name))


def test_pages_transfers_and_events_go_on(daemon: Daemon, other: Client) -> None:
    request_id = new_request_id()
    with raw_engine(daemon.runtime_dir, opening=KEEPER) as engine:
        ids = engine.call(calls.allocate(POOL, 4, "main"))
        heads, lists = calls.page_lists([pages(ids)])
        received = Receive(request_id=request_id, pool=POOL, lists=heads)
        assert isinstance(engine.ask(received, *lists).body, Accepted)
        lose_socket(engine, other)
        assert free_pages(other) == ALL - 4
        assert len(other.status().transfers) == 1
        sent = other.send(POOL, request_id, [pages(other.allocate(POOL, 4))], first_token=9)
        other.wait_settled(sent)
        with resumed(daemon.runtime_dir, engine.channel.opened) as again:
            assert connected(other)["keeper"]
            opened, before = again.channel.opened, engine.channel.opened
            assert (opened.session, opened.secret, opened.resumed) == (before.session, before.secret, True)
            assert opened.last_message == engine.core.request(Ping()).message_id - 1
            result = Result(request_id=request_id, pool=POOL, direction="receive")
            assert again.call(calls.asked(result)).state == "settled"
            assert again.call(calls.free(POOL, ids, "main", None)).freed == 4
        assert soon(lambda: "keeper" not in connected(other)), "it did not ask to be kept again"


def test_one_that_knows_the_secret_resumes_and_only_one_of_many_at_once(daemon: Daemon, other: Client) -> None:
    with raw_engine(daemon.runtime_dir, opening=KEEPER) as engine:
        secret = engine.channel.opened.secret
        opening = calls.session_open("", resume=secret)
        with pytest.raises(NoSessionError, match="has its socket") as refused:
            SessionChannel.open(daemon.runtime_dir, opening)
        assert refused.value.field == "resume"
        lose_socket(engine, other)
        for wrong in (b"x", bytes(len(secret)), secret[:-1]):
            with pytest.raises(NoSessionError):
                SessionChannel.open(daemon.runtime_dir, calls.session_open("", resume=wrong))
        outcomes: list[SessionChannel | NoSessionError] = []
        together = threading.Barrier(8)

        def attempt() -> None:
            together.wait()
            try:
                outcomes.append(SessionChannel.open(daemon.runtime_dir, opening))
            except NoSessionError as error:
                outcomes.append(error)

        with ThreadPoolExecutor(8) as threads:
            for _ in range(8):
                threads.submit(attempt)
        (winner,) = [one for one in outcomes if isinstance(one, SessionChannel)]
        assert len(outcomes) == 8
        winner.close()
        assert soon(lambda: "keeper" not in connected(other))


def test_after_the_grace() -> None:
    """The clock of the first loss ends no session that was resumed: one that is lost later shows that by its end."""
    with (
        kit.daemon("[service]\nresume_grace_s = 1.0\n") as daemon,
        kit.engine(daemon, "other") as other,
        raw_engine(daemon.runtime_dir, opening=calls.session_open("first", keep=True)) as first,
        raw_engine(daemon.runtime_dir, opening=calls.session_open("second", keep=True)) as second,
    ):
        assert other.welcome is not None
        assert other.welcome.limits.resume_grace_ms == 1000
        other.create_pool(POOL, SPEC)
        second.call(calls.allocate(POOL, 4, "main"))
        lose_socket(first, other, "first")
        with resumed(daemon.runtime_dir, first.channel.opened):
            lose_socket(second, other, "second")
            assert soon(lambda: "second" not in connected(other))
            assert connected(other)["first"]
            assert free_pages(other) == ALL
            with pytest.raises(NoSessionError), resumed(daemon.runtime_dir, second.channel.opened):
                pass


def test_another_user(daemon: Daemon, other: Client, require: Callable[[object, str], None]) -> None:
    require(os.geteuid() == 0, "root, to be another user")
    code = (
        "try: Client.connect(sys.argv[1], resume=bytes.fromhex(sys.argv[2]))\nexcept KvferryError as e: print(e.code)\n"
    )
    with raw_engine(daemon.runtime_dir, opening=KEEPER) as engine:
        lose_socket(engine, other)
        secret = engine.channel.opened.secret
        assert said_by_another_user(daemon, code, secret.hex()) == "NO_SESSION"
        with resumed(daemon.runtime_dir, engine.channel.opened) as again:
            assert again.channel.opened.resumed


# -- what is not believed


def counters(client: Client) -> dict[str, int]:
    """Return what was adopted, and what not, without the family's name."""
    every = client.status().counters
    return {name.removeprefix("adoption."): count for name, count in every.items() if name.startswith("adoption.")}


def new_memory(size: int, *, sealed: bool = True) -> int:
    fd = os.memfd_create("foreign", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    if sealed:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return fd


def test_foreign_descriptors_are_closed(life: Daemon) -> None:
    with Client.connect(life.runtime_dir) as client:
        client.create_pool(POOL, SPEC)
        client.create_pool("swapped", SPEC)
    life.kill()
    with left_by(life) as (store, held):
        records = {name: fd for name, fd in held.items() if name.endswith(".record") and name not in TIER}
        first, second = records
        foreign = {
            "kvferry.pool.1.record": os.dup(records[first]),  # another pool's
            "kvferry.pool.2.record": new_memory(0),
            "kvferry.pool.3.record": new_memory(4096),
            "kvferry.pool.4.record": new_memory(4096, sealed=False),
            "kvferry.pool.5.record": socket.socket().detach(),
            "kvferry.pool.6.memory": new_memory(4096),
            "kvferry.pool..record": os.open(os.devnull, os.O_RDWR),
            "what": os.open(os.devnull, os.O_RDWR),
        }
        memory, others = (one.replace(".record", ".memory") for one in (first, second))
        foreign[others] = new_memory(os.fstat(held[memory]).st_size)  # in place of its own
        store.remove([others])
        store.put(foreign)
        for fd in foreign.values():
            os.close(fd)
    life.start()
    with Client.connect(life.runtime_dir) as client:
        assert [one.pool for one in client.status().pools] == [POOL]
        assert counters(client)["pools"] == 1
        assert counters(client)["pools_dropped"] == 7
        assert len(client.allocate(POOL, ALL)) == ALL
    life.kill()
    with left_by(life) as (_, held):
        assert sorted(held) == sorted(["kvferry.index", first, memory, *TIER])


def test_another_format_drops_everything_and_says_so_once(life: Daemon) -> None:
    with Client.connect(life.runtime_dir) as client:
        client.create_pool(POOL, SPEC)
    life.kill()
    with left_by(life) as (_, held):
        os.pwrite(held["kvferry.index"], b"\x63", 8)
    life.start()
    assert life.log.read_text().count("has format 99, this daemon reads 1") == 1
    with Client.connect(life.runtime_dir) as client:
        assert not client.status().pools
        assert counters(client) == {"descriptors_dropped": 3 + len(TIER)}
        client.create_pool(POOL, SPEC)
    life.restart()
    with Client.connect(life.runtime_dir) as client:
        assert [one.pool for one in client.status().pools] == [POOL]


def test_another_process_with_the_same_pid_is_not_taken_for_the_engine(life: Daemon) -> None:
    with raw_engine(life.runtime_dir, opening=KEEPER) as engine:
        engine.ask(CreatePool(pool=POOL, spec=SPEC))
        engine.call(calls.allocate(POOL, 5, "main"))
        life.kill()
        with left_by(life) as (_, held), index_of(held) as index:
            (its,) = index.begin("0" * 32).records
            assert its.pid == os.getpid()
            index.put(msgspec.structs.replace(its, started=its.started + 1, turn=its.turn + 1))
        life.start()
        with Client.connect(life.runtime_dir) as client:
            assert free_pages(client) == ALL
            assert counters(client) == {"sessions_ended": 1, "pools": 1, "pages_dropped": 5}


def test_what_no_daemon_can_adopt_is_dropped_in_the_end(life: Daemon) -> None:
    """As if each one had ended in the middle of it: it begins with the index, and never says that it came up."""
    with Client.connect(life.runtime_dir) as client:
        client.create_pool(POOL, SPEC)
    life.kill()
    for is_there in (True, False):
        with left_by(life) as (_, held), index_of(held) as index:
            for _ in range(2 if is_there else 3):
                index.begin("0" * 32)
        life.start()
        with Client.connect(life.runtime_dir) as client:
            assert [one.pool for one in client.status().pools] == [POOL] * is_there
        life.kill()
    assert "3 daemons have ended while they adopted it" in life.log.read_text()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 4))])
def test_flipped_bits_give_nobody_what_is_not_theirs(life: Daemon, seed: int) -> None:
    random = Random(seed)  # noqa: S311  a test repeats what it did
    with (
        raw_engine(life.runtime_dir, opening=calls.session_open("one", keep=True)) as one,
        raw_engine(life.runtime_dir, opening=calls.session_open("two", keep=True)) as two,
    ):
        one.ask(CreatePool(pool=POOL, spec=SPEC))
        for engine in (one, two):
            engine.call(calls.allocate(POOL, 6, "main"))
        life.kill()
        with left_by(life) as (_, held):
            for name, fd in held.items():
                if not name.endswith(".memory"):
                    size = os.fstat(fd).st_size if name.endswith(".record") else 3 * 2048
                    for _ in range(random.randint(1, 4)):
                        at = random.randrange(16, size)
                        os.pwrite(fd, bytes([os.pread(fd, 1, at)[0] ^ 1 << random.randrange(8)]), at)
        life.start()
        owned: dict[int, set[int]] = {}
        with Client.connect(life.runtime_dir) as client:
            if not client.status().pools:
                return
            free = {int(page) for page in client.allocate(POOL, free_pages(client))}
        for number, engine in enumerate((one, two)):
            with contextlib.suppress(NoSessionError), resumed(life.runtime_dir, engine.channel.opened) as again:
                owned[number] = set()
                for page in range(1, ALL + 1):
                    with contextlib.suppress(NotOwnerError):
                        again.call(calls.free(POOL, [page], "main", None))
                        owned[number].add(page)
        assert sum(map(len, owned.values())) + len(free) == ALL
        assert len(free.union(*owned.values())) == ALL, "a page that two have"


def test_without_the_holder_it_goes_on_and_says_so(life: Daemon) -> None:
    with Client.connect(life.runtime_dir) as client:
        client.create_pool("before", SPEC)
        os.kill(holder_of(life), signal.SIGKILL)
        assert soon(lambda: counters(client).get("store_lost") == 1)
        client.create_pool("after", SPEC)
        client.delete_pool("before")
    assert "nothing outlives this daemon" in life.log.read_text()
    life.restart()
    with Client.connect(life.runtime_dir) as client:
        assert not client.status().pools


def holder_of(life: Daemon) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(os.fspath(life.runtime_dir / HOLDER_SOCKET))
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return int(struct.unpack("3i", credentials)[0])


class ScriptedStore:
    """A store of descriptors in this process."""

    where = "this test"
    pid = os.getpid()

    def __init__(self, silent_s: float = 0.0) -> None:
        self.kept: dict[str, int] = {}
        self.looks = 0
        self._silent_s = silent_s

    def take(self) -> dict[str, int]:
        return {name: os.dup(fd) for name, fd in self.kept.items()}

    def put(self, descriptors: Mapping[str, int]) -> None:
        self.kept |= {name: os.dup(fd) for name, fd in descriptors.items()}

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            os.close(self.kept.pop(name))

    def silent_s(self) -> float:
        self.looks += 1
        return self._silent_s

    def leave(self, grace_s: float | None) -> None:
        pass


def test_pools_are_made_and_deleted_while_the_holder_stands_still(life: Daemon) -> None:
    with Client.connect(life.runtime_dir) as client:
        client.create_pool("before", SPEC)
        with stopped(holder_of(life)):
            client.create_pool("after", SPEC)
            client.delete_pool("before")
            assert "not_kept" not in counters(client), "it is not waited for"
            life.kill()
    life.start()
    with Client.connect(life.runtime_dir) as client:
        assert [one.pool for one in client.status().pools] == ["after"]


@pytest.mark.full
def test_a_store_that_stands_still_is_counted_once() -> None:
    store = ScriptedStore(2 * ANSWER_S)

    async def looked_at() -> int:
        async with serving(store=store) as one, await AsyncClient.connect(one.path) as client:
            while store.looks < 3:
                await client.status()
            return (await client.status()).counters["adoption.store_silent"]

    assert asyncio.run(looked_at()) == 1
    store.remove(list(store.kept))


def test_what_an_earlier_daemon_left_ends_where_nobody_keeps_anything() -> None:
    with kit.daemon(keep=True) as life, Client.connect(life.runtime_dir) as client:
        client.create_pool(POOL, SPEC)
        life.end(signal.SIGTERM)
        open_store(life.runtime_dir, Inherited(), {})
        life.start()
        with Client.connect(life.runtime_dir) as again:
            assert not again.status().pools


def test_a_bug_that_one_pool_meets_costs_that_pool_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the next daemon does not meet it again."""
    store, add = ScriptedStore(), PoolRegistry.add

    def fails(self: PoolRegistry, pool: Pool) -> None:
        if pool.name == "bad":
            raise ZeroDivisionError("a bug")
        add(self, pool)

    async def makes(client: AsyncClient) -> None:
        for name in ("good", "bad", "better"):
            await client.create_pool(name, SPEC)

    async def finds(client: AsyncClient) -> tuple[set[str], int, int]:
        status = await client.status()
        counts = [status.counters.get(f"adoption.{name}", 0) for name in ("pools", "pools_dropped")]
        return {one.pool for one in status.pools}, counts[0], counts[1]

    async def life(does: Callable[[AsyncClient], Awaitable[T]]) -> T:
        async with serving(store=store) as one, await AsyncClient.connect(one.path) as client:
            return await does(client)

    asyncio.run(life(makes))
    monkeypatch.setattr(PoolRegistry, "add", fails)
    assert asyncio.run(life(finds)) == ({"good", "better"}, 2, 1)
    assert asyncio.run(life(finds)) == ({"good", "better"}, 2, 0)
    assert len(store.kept) == 1 + len(TIER) + 2 * 2, "the index, the host tier, and of each pool memory and record"
    store.remove(list(store.kept))
