"""A daemon that may open few descriptors: whoever takes them all is refused, and everybody else is served on."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Final

import numpy as np
import psutil
import pytest

from kvferry.clients import Client, MhaSpec, SharedMemory
from kvferry.clients.cli.main import main
from kvferry.clients.pool import AttachedPool
from kvferry.daemon.process.descriptors import OPERATORS, PER_SESSION, Descriptors
from kvferry.protocol.errors import OutOfDescriptorsError, OverloadedError
from kvferry.protocol.session_messages import DescriptorsStatus
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user, soon

LIMIT: Final = 256
PREFIX: Final = ("bash", "-c", f'ulimit -n {LIMIT} && exec "$0" "$@"')
SPEC: Final = MhaSpec(layers=1, tokens=16, page_size=4, kv_heads=1, head_dim=4, dtype="float32")
UNAUTHENTICATED: Final = 600
PATIENCE_S: Final = 20.0


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    """Run a daemon under a low limit, that other daemons can reach."""
    config = f'[peers]\nlisten = "tcp://127.0.0.1:{free_port()}"\n[tiers]\nhost_bytes = "1MiB"\n'
    with kit.daemon(config, prefix=PREFIX) as one:
        yield one


class Engine:
    """An engine that was there before, and what it has written."""

    def __init__(self, client: Client, pool: AttachedPool) -> None:
        self.client = client
        self.ids = client.allocate("mine", 2)
        self.tensor = pool.array("main", "k")
        self.tensor[0, self.ids] = np.arange(2 * 4 * 4).reshape(2, 4, 1, 4)
        self.before = self.tensor.copy()

    def is_well(self) -> None:
        """Check that it is served, and that its pages are as they were."""
        [page] = self.client.allocate("mine", 1)
        self.client.free("mine", [page])
        np.testing.assert_array_equal(self.tensor, self.before)


@pytest.fixture
def engine(daemon: Daemon) -> Iterator[Engine]:
    """Return an engine with a pool; after the test it is well, and as many descriptors are open as before."""
    process = psutil.Process(daemon.process.pid)
    promised, files = descriptors(daemon).promised, process.num_fds()
    with Client.connect(daemon.runtime_dir, name="before") as client:
        one = Engine(client, client.create_pool("mine", SPEC))
        yield one
        one.is_well()
        client.free("mine", one.ids)
        client.delete_pool("mine")
    assert soon(lambda: descriptors(daemon).promised == promised)
    assert soon(lambda: process.num_fds() <= files + 2), (
        "what is left open, but for its ping to itself, which comes and goes"
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


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


@pytest.mark.parametrize("where", ["control.sock", "session.sock", "tcp", "peer.sock"])
def test_unauthenticated_connections_that_connect_and_say_nothing(daemon: Daemon, engine: Engine, where: str) -> None:
    with unauthenticated(daemon, where) as channels:
        engine.is_well()
        assert descriptors(daemon).open < LIMIT - 16
        with Client.connect(daemon.runtime_dir, name="newcomer") as newcomer:
            newcomer.ping()
        oldest = channels[0]
        said = oldest.recv(4096)
        assert not oldest.recv(4096), "it had to make room"
        assert (b"BUSY" in said) == (where == "session.sock"), said
    assert "Traceback" not in daemon.log.read_text()


def test_sessions_of_one_user(daemon: Daemon, engine: Engine) -> None:
    with contextlib.ExitStack() as stack:
        opened, refused = until_refused(daemon, stack)
        assert "(your bound)" in refused.detail
        assert "kvferry status" in refused.remedy
        assert len(opened) > 20
        engine.is_well()
        assert descriptors(daemon).open < LIMIT - 16
        assert main(["verify", "--runtime-dir", str(daemon.runtime_dir)]) == 0, "an operator's check needs no session"
        opened.pop().close()
        assert soon(lambda: is_served(daemon)), "one that left makes room"


def until_refused(daemon: Daemon, stack: contextlib.ExitStack) -> tuple[list[Client], OverloadedError]:
    """Open sessions until one is refused."""
    opened: list[Client] = []
    while True:
        try:
            opened.append(stack.enter_context(Client.connect(daemon.runtime_dir)))
        except OverloadedError as error:
            return opened, error


def pools_until_refused(client: Client) -> tuple[list[str], OutOfDescriptorsError]:
    """Create pools until one is refused."""
    made: list[str] = []
    while True:
        try:
            client.create_pool(f"pool-{len(made)}", SPEC).close()
        except OutOfDescriptorsError as error:
            return made, error
        made.append(f"pool-{len(made)}")


def is_served(daemon: Daemon) -> bool:
    try:
        with Client.connect(daemon.runtime_dir):
            return True
    except OverloadedError:
        return False


def test_pools_of_an_engine_that_left_count_to_their_user(daemon: Daemon, engine: Engine) -> None:
    with Client.connect(daemon.runtime_dir) as client:
        made, refused = pools_until_refused(client)
    assert "pools of user" in refused.detail
    assert "your bound" in refused.detail
    with Client.connect(daemon.runtime_dir, name="next") as client:  # pools do not keep sessions out
        engine.is_well()
        with pytest.raises(OutOfDescriptorsError):
            client.create_pool("one-more", SPEC)
        client.delete_pool(made.pop())
        client.create_pool("one-more", SPEC).close()
        for name in (*made, "one-more"):
            client.delete_pool(name)


def test_the_bound_of_a_user_leaves_room_for_another(daemon: Daemon, engine: Engine) -> None:
    with contextlib.ExitStack() as stack:
        until_refused(daemon, stack)
        code = "print(Client.connect(sys.argv[1]).ping() > 0)"
        assert said_by_another_user(daemon, code) == "True"
        engine.is_well()


def test_every_request_that_needs_a_descriptor_is_refused_by_name(daemon: Daemon, engine: Engine) -> None:
    with Client.connect(daemon.runtime_dir) as client, contextlib.ExitStack() as stack:
        memory = SharedMemory(1 << 16)
        arrays = {("main", role): memory.array((1, 5, 4, 1, 4), "float32") for role in ("k", "v")}
        until_refused(daemon, stack)
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
        engine.is_well()


def test_operators_have_a_few_sessions_where_others_have_taken_all() -> None:
    books = Descriptors(LIMIT, count=lambda: 0)
    taken: list[Session] = []

    def take_all(user: int) -> None:
        while True:
            taken.append(Session(user))
            books.take(taken[-1], user, "sessions", PER_SESSION)

    for user in (4711, 4712):
        with pytest.raises(OutOfDescriptorsError):
            take_all(user)
    others = len(taken)
    with pytest.raises(OutOfDescriptorsError):
        take_all(0)
    assert len(taken) - others - 1 in {OPERATORS, OPERATORS + 1}, "what is left of the room may be one more"


class Session:
    """Something that descriptors are promised to."""

    def __init__(self, user: int) -> None:
        self.user = user
