"""Host memory that engines register: what goes into it and out of it, what is claimed of it, and who survives whom."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import signal
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch

from kvferry.clients import Client, MhaSpec, MlaSpec, SharedMemory, calls, new_request_id, pages
from kvferry.clients.shared_memory import memory_at
from kvferry.daemon.control.session_socket import MAX_MESSAGES_SHARED
from kvferry.pools.devices.host import HostRegion
from kvferry.protocol import errors
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES
from kvferry.protocol.pool_messages import RegisteredArrays, RegisterPool
from kvferry.protocol.session_stream import MemoryFollows, SessionOpen, ShareFollows, pack
from kvferry.protocol.settings import SESSION_SOCKET
from tests import kit
from tests.daemon import victims
from tests.kit.daemons import Daemon, soon
from tests.kit.faults import connected
from tests.kit.raw_engine import RawEngine, raw_engine
from tests.kit.started import started

SPEC: Final = MhaSpec(layers=2, first_layer=4, tokens=64, page_size=4, kv_heads=2, head_dim=4, dtype="float32")
LATENT: Final = MlaSpec(
    layers=2, tokens=64, page_size=4, kv_lora_rank=8, qk_rope_head_dim=4, dtype="bfloat16", joined=True
)
SHAPE: Final = (2, 17, 4, 2, 4)
ARRAY_BYTES: Final = 2 * 17 * 4 * 2 * 4 * 4
MEMORY_BYTES: Final = 4 * ARRAY_BYTES
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
STRIDES: Final = (17 * 32, 32, 8, 4, 1)
WAIT_S: Final = 20.0
CONFIG: Final = "[tiers]\nhost_bytes = 4194304\n[pools]\nmax_bytes = 67108864\n[limits]\nmax_frame_bytes = 1048576\n"
Arrays = dict[tuple[Any, ...], Any]


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return f"pool-{zlib.crc32(request.node.nodeid.encode()):x}"


def filled(memory: SharedMemory, seed: int) -> Arrays:
    chance = np.random.default_rng(seed)
    arrays: Arrays = {("main", role): memory.array(SHAPE, "float32") for role in ("k", "v")}
    for one in arrays.values():
        one[:] = chance.random(SHAPE, np.float32)
    return arrays


def memory_held(daemon: Daemon) -> int:
    """Return how many descriptors of memory that engines made the daemon has."""
    links = []
    for one in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            links.append(os.fspath(one.readlink()))
    return sum("shared-memory" in link or "claimed" in link for link in links)


def wait_until_held(daemon: Daemon, count: int) -> None:
    """Wait until the daemon has so many: it hears of the end of a session by itself."""
    with Client.connect(daemon.runtime_dir, session=False) as watcher:
        assert soon(lambda: watcher.ping() >= 0 and memory_held(daemon) == count), memory_held(daemon)


def move(client: Client, source: str, sent: npt.ArrayLike, target: str, wanted: npt.ArrayLike) -> None:
    """Send pages of a pool to pages of a pool, and wait until that is over."""
    request_id = new_request_id()
    receiving = client.receive(target, request_id, [pages(wanted)])
    client.wait_settled(client.send(source, request_id, [pages(sent)]))
    client.wait_finished(receiving)
    client.wait_settled(receiving)


# -- into it and out of it


def test_bytes_go_into_registered_memory_and_out_of_it(client: Client, name: str) -> None:
    memory = SharedMemory(MEMORY_BYTES + (1 << 16))
    source, target = filled(memory, 1), filled(memory, 2)
    client.register_pool(f"{name}-source", SPEC, source, device="host")
    by_layer = {(*key, 4 + layer): one[layer] for key, one in target.items() for layer in range(2)}
    manifest = client.register_pool(f"{name}-target", SPEC, by_layer, device="host")
    assert [entry.base for entry in manifest.entries] == sorted(entry.base for entry in manifest.entries)
    before = {key: one.copy() for key, one in target.items()}
    own = client.create_pool(f"{name}-own", SPEC)
    ids = client.allocate(own.name, 3)
    move(client, f"{name}-source", [3, 1, 16], own.name, ids)
    move(client, own.name, ids, f"{name}-target", [5, 9, 2])
    for key, one in target.items():
        assert (own.array(*key)[:, ids] == source[key][:, [3, 1, 16]]).all()
        before[key][:, [5, 9, 2]] = source[key][:, [3, 1, 16]]
        assert (one == before[key]).all()
    own.close()
    snapshot = client.wait_done(client.offload(f"{name}-target", [pages([1, 2])])).snapshot
    client.wait_done(client.restore(f"{name}-target", snapshot, [pages([8, 7])], drop=True))
    assert all((one[:, [8, 7]] == one[:, [1, 2]]).all() for one in target.values())
    with pytest.raises(errors.InvalidFieldError, match="numbers its pages itself"):
        client.free(f"{name}-target", [1])


def test_another_daemon_of_the_host_reads_registered_memory(client: Client, name: str) -> None:
    memory = SharedMemory(MEMORY_BYTES + 8192)
    memory.array((8192,), "uint8")  # so that the arrays begin elsewhere
    arrays = filled(memory, 9)
    client.register_pool(name, SPEC, arrays, device="host")
    with kit.daemon() as there, Client.connect(there.runtime_dir) as decode:
        target = decode.create_pool("decode", SPEC)
        ids, request_id = decode.allocate("decode", 2), new_request_id()
        here = client.status().addresses[0]
        receiving = decode.receive("decode", request_id, [pages(ids)], source_daemons=[here])
        client.wait_settled(client.send(name, request_id, [pages([7, 3])]))
        decode.wait_finished(receiving)
        assert all((target.array(*key)[:, ids] == one[:, [7, 3]]).all() for key, one in arrays.items())
        decode.wait_settled(receiving)
        target.close()


def test_other_sessions_of_the_user_attach_it(daemon: Daemon, client: Client, name: str) -> None:
    memory = SharedMemory(MEMORY_BYTES)
    arrays = filled(memory, 4)
    manifest = client.register_pool(name, SPEC, arrays, device="host")
    with Client.connect(daemon.runtime_dir, name="other") as other:
        seen = other.attach_pool(name)
        assert seen.manifest == manifest
        assert all((seen.array(*key) == one).all() for key, one in arrays.items())
        arrays["main", "k"][1, 3] = 7.0
        assert (seen.array("main", "k")[1, 3] == 7.0).all()
        with pytest.raises(errors.PoolInUseError, match="is registered by"):
            other.delete_pool(name)
        with pytest.raises(errors.PoolExistsError, match="is registered by"):
            other.create_pool(name, SPEC)
        seen.close()


# -- who survives whom


def test_an_engine_that_is_killed_takes_its_pool_with_it(daemon: Daemon, client: Client) -> None:
    request_id = new_request_id()
    program = [os.fspath(Path(victims.__file__)), "host", "send", os.fspath(daemon.runtime_dir), request_id, "register"]
    with started(program) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline()
        assert "send" in {one.pool for one in client.status().pools}
        target = client.create_pool("target", victims.SPEC)
        receiving = client.receive("target", request_id, [pages(client.allocate("target", victims.SENT))])
        client.poll(0)
        os.kill(victim.pid, signal.SIGKILL)
        victim.wait(WAIT_S)
    with pytest.raises(errors.PeerLostError):
        client.wait_finished(receiving)
    client.wait_settled(receiving)
    with pytest.raises(errors.PoolLostError, match="was registered by an engine that is gone"):
        client.attach_pool("send")
    wait_until_held(daemon, 0)
    memory = SharedMemory(MEMORY_BYTES)
    client.register_pool("send", SPEC, filled(memory, 6), device="host")  # the name is free again
    target.close()


# -- what is claimed of it


class Claim(NamedTuple):
    """A descriptor and what is said of it."""

    make: Callable[[], int] | None = None
    spec: MhaSpec = SPEC
    arrays: Sequence[RegisteredArrays] | None = None
    max_payload_bytes: int = MAX_PAYLOAD_BYTES


def memfd(size_bytes: int = MEMORY_BYTES, seals: int = SEALS, flags: int = os.MFD_ALLOW_SEALING) -> int:
    fd = os.memfd_create("claimed", flags | os.MFD_CLOEXEC)
    os.ftruncate(fd, size_bytes)
    if seals:
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def read_only() -> int:
    fd = memfd()
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    finally:
        os.close(fd)


def said(role: str, offset: int | None, **changes: Any) -> RegisteredArrays:  # noqa: ANN401  any field
    whole: dict[str, Any] = {"shape": SHAPE, "strides": STRIDES, "dtype": "float32", "offset_bytes": offset}
    return RegisteredArrays(component="main", role=role, **{**whole, **changes})


K: Final = said("k", 0)
V: Final = said("v", ARRAY_BYTES)
CLAIMS: Final[dict[str, tuple[Claim, str, str]]] = {
    "may shrink": (Claim(lambda: memfd(seals=fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)), "INVALID_FIELD", "memory"),
    "sealed against writing": (Claim(lambda: memfd(seals=SEALS | fcntl.F_SEAL_WRITE)), "INVALID_FIELD", "memory"),
    "empty": (Claim(lambda: memfd(0)), "INVALID_FIELD", "memory"),
    "to be read only": (Claim(read_only), "INVALID_FIELD", "memory"),
    "too short": (Claim(lambda: memfd(2 * ARRAY_BYTES - 1)), "INVALID_FIELD", "main/v.storage"),
    "beyond its end": (Claim(arrays=(K, said("v", MEMORY_BYTES))), "INVALID_FIELD", "main/v.storage"),
    "far beyond its end": (Claim(arrays=(K, said("v", (1 << 63) - 1))), "INVALID_FIELD", "main/v.storage"),
    "inside an element": (Claim(arrays=(K, said("v", ARRAY_BYTES + 2))), "INVALID_FIELD", "main/v.storage"),
    "a byte of the other": (Claim(arrays=(K, said("v", ARRAY_BYTES - 4))), "INVALID_FIELD", "main/v.storage"),
    "nowhere": (Claim(arrays=(K, said("v", None))), "INVALID_FIELD", "main/v.offset_bytes"),
    "another dtype": (Claim(arrays=(K, said("v", ARRAY_BYTES, dtype="int32"))), "INVALID_FIELD", "main/v.dtype"),
    "another shape": (
        Claim(arrays=(K, said("v", ARRAY_BYTES, shape=(2, 17, 4, 4, 2)))), "INVALID_FIELD", "main/v.shape",
    ),
    "strided": (
        Claim(arrays=(K, said("v", ARRAY_BYTES, strides=(0, 32, 8, 4, 1)))), "INVALID_FIELD", "main/v.strides",
    ),
    "an array too few": (Claim(arrays=(K,)), "UNCOVERED_ENTRY", "arrays"),
    "an array twice": (Claim(arrays=(K, V, said("v", 2 * ARRAY_BYTES))), "DUPLICATE_ENTRY", "arrays[2]"),
    "an array of no pool": (Claim(arrays=(K, V, said("w", 2 * ARRAY_BYTES))), "INVALID_FIELD", "arrays[2]"),
    "more than the daemon's pools may have": (
        Claim(lambda: memfd(1 << 28), spec=msgspec.structs.replace(SPEC, tokens=1 << 20)), "OUT_OF_MEMORY", "spec",
    ),
    "a payload that no frame takes": (
        Claim(max_payload_bytes=LARGEST_PAYLOAD_BYTES), "TOO_LARGE", "max_payload_bytes",
    ),
}  # fmt: skip


def register(engine: RawEngine, name: str, claim: Claim) -> None:
    arrays = (K, V) if claim.arrays is None else tuple(claim.arrays)
    if claim.spec is not SPEC:
        shape = (2, claim.spec.tokens // 4 + 1, 4, 2, 4)
        strides, size = (shape[1] * 32, 32, 8, 4, 1), 8 * shape[1] * 32
        arrays = (said("k", 0, shape=shape, strides=strides), said("v", size, shape=shape, strides=strides))
    fd = memfd() if claim.make is None else claim.make()
    try:
        body = RegisterPool(
            pool=name, spec=claim.spec, device="host", arrays=arrays, max_payload_bytes=claim.max_payload_bytes
        )
        engine.call(calls.asked(body), lambda message_id: [MemoryFollows(message_id=message_id)], fds=(fd,))
    finally:
        os.close(fd)


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_is_checked(daemon: Daemon, client: Client, name: str, claim: str) -> None:
    what, code, field = CLAIMS[claim]
    wait_until_held(daemon, 0)
    pools = {one.pool for one in client.status().pools}
    with raw_engine(daemon.runtime_dir) as engine:
        with pytest.raises(errors.KvferryError) as refused:
            register(engine, name, what)
        assert (refused.value.code, refused.value.field) == (code, field), refused.value
        if field == "memory":
            assert "SharedMemory" in refused.value.detail
        assert memory_held(daemon) == 0
        assert {one.pool for one in client.status().pools} == pools
        register(engine, name, Claim())
        assert memory_held(daemon) > 0


@pytest.mark.parametrize("offset", [0, ARRAY_BYTES // 2, 2 * ARRAY_BYTES - 4, 2 * ARRAY_BYTES])
def test_no_byte_is_of_two_pools(daemon: Daemon, name: str, offset: int) -> None:
    """Nor of a pool of the daemon's own and of a registered one: an engine has its descriptor, too."""
    with kit.engine(daemon) as client, raw_engine(daemon.runtime_dir) as engine:
        pool = client.create_pool(f"{name}-own", SPEC)
        assert isinstance(pool.region, HostRegion)
        own = pool.region.fd
        with pytest.raises(errors.InvalidFieldError, match="overlaps memory of another pool"):
            register(engine, f"{name}-again", Claim(lambda: os.dup(own)))
        pool.close()
    fd = memfd()
    with raw_engine(daemon.runtime_dir) as engine, raw_engine(daemon.runtime_dir) as other:
        register(engine, name, Claim(lambda: os.dup(fd)))
        second = Claim(lambda: os.dup(fd), arrays=(said("k", offset), said("v", offset + ARRAY_BYTES)))
        if offset == 2 * ARRAY_BYTES:
            register(other, f"{name}-second", second)
        else:
            with pytest.raises(errors.InvalidFieldError, match="overlaps memory of another pool"):
                register(other, f"{name}-second", second)
    os.close(fd)


def test_arrays_outside_of_shared_memory_are_named(client: Client, name: str) -> None:
    memory, other = SharedMemory(MEMORY_BYTES), SharedMemory(MEMORY_BYTES)
    arrays = filled(memory, 1)
    for outside in (np.zeros(SHAPE, np.float32), torch.zeros(SHAPE), other.array(SHAPE, "float32")):
        with pytest.raises(errors.InvalidFieldError, match=r"kvferry\.clients\.SharedMemory") as refused:
            client.register_pool(name, SPEC, arrays | {("main", "v"): outside}, device="host")
        assert refused.value.field == "main/v.storage"


def test_two_threads_make_shared_memory() -> None:
    """What looks for the memory of an array does not stumble over what another thread makes."""
    memories, ends = [SharedMemory(4096) for _ in range(64)], threading.Event()
    starts = [(memory, memory.region.address) for memory in memories]

    def make() -> None:
        while not ends.is_set():
            SharedMemory(4096).close()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=make)
    thread.start()
    try:
        assert all(memory_at(start, start + 1) is memory for _ in range(64) for memory, start in starts)
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(interval)


# -- descriptors on the session socket


@contextlib.contextmanager
def claimed(daemon: Daemon) -> Iterator[tuple[socket.socket, int]]:
    """Yield a session's socket and memory; the daemon must end the session and keep nothing of the memory."""
    fd = memfd()
    with raw_engine(daemon.runtime_dir) as engine:
        channel = engine.channel.socket
        channel.settimeout(WAIT_S)
        yield channel, fd
        with contextlib.suppress(ConnectionResetError):  # what had too many descriptors was not read
            assert channel.recv(4096) == b""
    os.close(fd)
    wait_until_held(daemon, 0)


MEMORY_FRAME: Final = pack(MemoryFollows(message_id=1))


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (pack(ShareFollows(message_id=1)), 1),
        (MEMORY_FRAME, 0),
        (MEMORY_FRAME, 100),
        (MEMORY_FRAME * 2, 2),
        (MEMORY_FRAME[:7], 2),
    ],
    ids=["with a share", "none", "a hundred", "two for one message", "two with half a frame"],
)
def test_descriptors_that_no_frame_speaks_of_end_the_session(daemon: Daemon, data: bytes, count: int) -> None:
    with claimed(daemon) as (rude, fd):
        socket.send_fds(rude, [data], [fd] * count)
    with Client.connect(daemon.runtime_dir) as client:
        client.ping()


def test_a_descriptor_with_the_opening_is_refused(daemon: Daemon) -> None:
    fd = memfd()
    with connected(daemon.runtime_dir / SESSION_SOCKET) as rude:
        opening = pack(SessionOpen(protocol_min=4, protocol_max=4))
        try:
            socket.send_fds(rude, [opening[:5]], [fd])
        except PermissionError:  # since Linux 6.16 the kernel refuses it
            rude.send(opening)
            assert b"OPENED" in rude.recv(4096)
        else:
            assert rude.recv(4096)[4:] != b""
            assert rude.recv(4096) == b""
    os.close(fd)
    wait_until_held(daemon, 0)


def test_descriptors_of_messages_that_never_come_have_a_bound(daemon: Daemon) -> None:
    with claimed(daemon) as (rude, fd):
        for number in range(MAX_MESSAGES_SHARED + 1):
            socket.send_fds(rude, [pack(MemoryFollows(message_id=number))], [fd])


def test_mapped_memory_stays_as_it_is_when_the_engine_unmaps_it(client: Client, name: str) -> None:
    memory = SharedMemory(MEMORY_BYTES)
    manifest = client.register_pool(name, SPEC, filled(memory, 8), device="host")
    wanted, fd = memory.view().copy(), os.dup(memory.region.fd)
    memory.close()
    with HostRegion(fd, MEMORY_BYTES) as mapped_again:
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(fd, mmap.PAGESIZE)
        move(client, name, [1], name, [2])
        for entry in manifest.entries:
            first, second, third = (entry.base + page * entry.page_bytes for page in (1, 2, 3))
            wanted[second:third] = wanted[first:second]
        assert (mapped_again.view() == wanted).all()
