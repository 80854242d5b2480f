"""Sessions that lose their socket and resume: what goes on, what does not, and who may not."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.clients import Client, MhaSpec, calls, new_request_id, pages
from kvferry.clients.session_channel import SessionChannel
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import NoSessionError
from kvferry.protocol.session_messages import Ping
from kvferry.protocol.session_stream import SessionOpen
from kvferry.protocol.transfer_messages import Accepted, Receive, Result
from tests import kit
from tests.kit.daemons import Daemon, said_by_another_user, soon
from tests.kit.raw_engine import RawEngine, raw_engine, resumed

SPEC = MhaSpec(layers=2, tokens=64, page_size=4, kv_heads=1, head_dim=8, dtype="float16")
ALL = 16
SOON_MS = 20_000
POOL = "pool"
CONFIG = "[service]\nresume_grace_s = 600.0\n"


@pytest.fixture
def other(daemon: Daemon) -> Iterator[Client]:
    """Return a client that looks on."""
    with Client.connect(daemon.runtime_dir, name="other") as one:
        one.create_pool(POOL, SPEC)
        yield one


def keeping(name: str = "keeper") -> SessionOpen:
    """Return an opening of a session that will resume."""
    return calls.session_open(name, keep=True)


def connected(client: Client) -> dict[str, bool]:
    return {one.name: one.connected for one in client.status().sessions}


def free_pages(client: Client) -> int:
    return next(one.free for one in client.status().pools if one.pool == POOL)


def receive(engine: RawEngine, request_id: str, count: int) -> tuple[Receive, PageIds, tuple[bytes, ...]]:
    """Let a raw engine receive new pages; return the request, the pages and their lists."""
    ids = engine.call(calls.allocate(POOL, count, "main"))
    heads, lists = calls.page_lists([pages(ids)])
    body = Receive(request_id=request_id, pool=POOL, lists=heads)
    assert isinstance(engine.ask(body, *lists).body, Accepted)
    return body, ids, lists


def lose_socket(engine: RawEngine, client: Client, name: str = "keeper") -> None:
    """Lose a session's socket, and wait until the daemon has seen it."""
    engine.channel.close()
    assert soon(lambda: not connected(client).get(name))


def test_pages_transfers_and_events_go_on(daemon: Daemon, other: Client) -> None:
    request_id = new_request_id()
    with raw_engine(daemon.runtime_dir, opening=keeping()) as engine:
        _, ids, _ = receive(engine, request_id, 4)
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
    with raw_engine(daemon.runtime_dir, opening=keeping()) as engine:
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
        raw_engine(daemon.runtime_dir, opening=keeping("first")) as first,
        raw_engine(daemon.runtime_dir, opening=keeping("second")) as second,
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
    with raw_engine(daemon.runtime_dir, opening=keeping()) as engine:
        lose_socket(engine, other)
        secret = engine.channel.opened.secret
        assert said_by_another_user(daemon, code, secret.hex()) == "NO_SESSION"
        with resumed(daemon.runtime_dir, engine.channel.opened) as again:
            assert again.channel.opened.resumed
