"""A daemon that may open few descriptors: whoever takes them all is refused, and everybody else is served on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import numpy as np
import psutil
import pytest

from kvferry.clients import Client, MhaSpec, SharedMemory
from kvferry.clients.cli.main import main
from kvferry.daemon.process.descriptors import OPERATORS, PER_SESSION, Descriptors
from kvferry.protocol.errors import KvferryError, OutOfDescriptorsError, OverloadedError
from kvferry.protocol.session_messages import DescriptorsStatus
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user, soon

T = TypeVar("T")
LIMIT: Final = 256
PREFIX: Final = ("bash", "-c", f'ulimit -n {LIMIT} && exec "$0" "$@"')
SPEC: Final = MhaSpec(layers=1, tokens=16, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
UNAUTHENTICATED: Final = 600
PATIENCE_S: Final = 20.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Run a daemon under a low limit, that other daemons can reach."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    config = f'[peers]\nlisten = "tcp://127.0.0.1:{port}"\n[tiers]\nhost_bytes = "1MiB"\n'
    with kit.daemon(config, prefix=PREFIX) as one:
        yield one


@pytest.fixture
def engine_is_well(daemon: Daemon) -> Iterator[Callable[[], None]]:
    """Return a check of an engine that was there before; after the test as many descriptors are open as before."""
    process = psutil.Process(daemon.process.pid)
    promised, files = descriptors(daemon).promised, process.num_fds()
    with Client.connect(daemon.runtime_dir, name="before") as client:
        tensor = client.create_pool("mine", SPEC).array("main", "k")
        ids = client.allocate("mine", 2)
        tensor[0, ids] = np.arange(2 * 4 * 4).reshape(2, 4, 1, 4)
        before = tensor.copy()

        def is_well() -> None:
            [page] = client.allocate("mine", 1)
            client.free("mine", [page])
            np.testing.assert_array_equal(tensor, before)

        yield is_well
        is_well()
        client.free("mine", ids)
        client.delete_pool("mine")
    assert soon(lambda: descriptors(daemon).promised == promised)
    assert soon(lambda: process.num_fds() <= files + 2), "but for its ping to itself, which comes and goes"


def descriptors(daemon: Daemon) -> DescriptorsStatus:
    """Return what the daemon says of its descriptors: for that, somebody new has to be let in."""
    with Client.connect(daemon.runtime_dir, session=False) as client:
        said = client.status().descriptors
    assert said is not None
    return said


@contextlib.contextmanager
def unauthenticated(daemon: Daemon, where: str) -> Iterator[list[socket.socket]]:
    """Connect ``UNAUTHENTICATED`` times, and say nothing."""
    with contextlib.ExitStack() as stack:
        with Client.connect(daemon.runtime_dir, session=False) as client:
            [tcp] = [one for one in client.status().addresses if one.startswith("tcp:")]
        address = str(daemon.runtime_dir / where) if where != "tcp" else ("127.0.0.1", int(tcp.rpartition(":")[2]))
        family = socket.AF_UNIX if where != "tcp" else socket.AF_INET
        channels = [stack.enter_context(socket.socket(family)) for _ in range(UNAUTHENTICATED)]
        for channel in channels:
            channel.settimeout(PATIENCE_S)
            channel.connect(address)
        yield channels


def until_refused(ask: Callable[[int], T]) -> tuple[list[T], KvferryError]:
    """Ask again and again, with the number of what there is already; return that and the refusal."""
    given: list[T] = []
    while True:
        try:
            given.append(ask(len(given)))
        except (OverloadedError, OutOfDescriptorsError) as error:
            return given, error


def sessions_until_refused(daemon: Daemon, stack: contextlib.ExitStack) -> tuple[list[Client], KvferryError]:
    return until_refused(lambda _: stack.enter_context(Client.connect(daemon.runtime_dir)))


def pools_until_refused(client: Client) -> tuple[list[str], KvferryError]:
    def create(number: int) -> str:
        client.create_pool(f"pool-{number}", SPEC).close()
        return f"pool-{number}"

    return until_refused(create)


@pytest.mark.parametrize("where", ["control.sock", "session.sock", "tcp", "peer.sock"])
def test_unauthenticated_connections_that_connect_and_say_nothing(
    daemon: Daemon, engine_is_well: Callable[[], None], where: str
) -> None:
    with unauthenticated(daemon, where) as channels:
        engine_is_well()
        assert descriptors(daemon).open < LIMIT - 16
        with Client.connect(daemon.runtime_dir, name="newcomer") as newcomer:
            newcomer.ping()
        oldest = channels[0]
        said = oldest.recv(4096)
        assert not oldest.recv(4096), "it had to make room"
        assert (b"BUSY" in said) == (where == "session.sock"), said
    assert "Traceback" not in daemon.log.read_text()


def test_sessions_of_one_user(daemon: Daemon, engine_is_well: Callable[[], None]) -> None:
    with contextlib.ExitStack() as stack:
        opened, refused = sessions_until_refused(daemon, stack)
        assert "(your bound)" in refused.detail
        assert "kvferry status" in refused.remedy
        assert len(opened) > 20
        engine_is_well()
        assert descriptors(daemon).open < LIMIT - 16
        assert main(["verify", "--runtime-dir", str(daemon.runtime_dir)]) == 0, "an operator's check needs no session"
        code = "print(Client.connect(sys.argv[1]).ping() > 0)"
        assert said_by_another_user(daemon, code) == "True", "the bound of a user leaves room for another"
        opened.pop().close()
        assert soon(lambda: bool(sessions_until_refused(daemon, stack)[0])), "one that left makes room"


@pytest.mark.usefixtures("engine_is_well")
def test_pools_of_an_engine_that_left_count_to_their_user(daemon: Daemon) -> None:
    with Client.connect(daemon.runtime_dir) as client:
        made, refused = pools_until_refused(client)
    assert "pools of user" in refused.detail
    assert "your bound" in refused.detail
    with Client.connect(daemon.runtime_dir, name="next") as client:  # pools do not keep sessions out
        with pytest.raises(OutOfDescriptorsError):
            client.create_pool("one-more", SPEC)
        client.delete_pool(made.pop())
        client.create_pool("one-more", SPEC).close()
        for name in (*made, "one-more"):
            client.delete_pool(name)


@pytest.mark.usefixtures("engine_is_well")
def test_every_request_that_needs_a_descriptor_is_refused_by_name(daemon: Daemon) -> None:
    with Client.connect(daemon.runtime_dir) as client, contextlib.ExitStack() as stack:
        memory = SharedMemory(1 << 16)
        arrays = {("main", role): memory.array((1, 5, 4, 1, 4), "float32") for role in ("k", "v")}
        sessions_until_refused(daemon, stack)
        made = pools_until_refused(client)[0]
        for asks in (
            lambda: client.create_pool("more", SPEC),
            client.open_events,
            lambda: client.create_tables("t", "mine", max_batch=1, max_context_tokens=16),
            lambda: client.register_pool("registered", SPEC, arrays, device="host"),
        ):
            with pytest.raises(OutOfDescriptorsError):
                asks()
        client.attach_pool("mine").close()
        client.ping()
        for name in made:
            client.delete_pool(name)


class Holder:
    """Something that descriptors are promised to."""


def test_operators_have_a_few_sessions_where_others_have_taken_all() -> None:
    books = Descriptors(LIMIT, count=lambda: 0)

    def taken_by(user: int) -> list[Holder]:
        def take(_: int) -> Holder:
            books.take(one := Holder(), user, "sessions", PER_SESSION)
            return one

        return until_refused(take)[0]

    others = [taken_by(user) for user in (4711, 4712)]
    assert all(others)
    assert len(taken_by(0)) in {OPERATORS, OPERATORS + 1}, "what is left of the room may be one more"
