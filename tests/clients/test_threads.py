"""One client and several threads or event loops: the wrong call is refused by name, and no reply goes astray."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import FrameType
from typing import Final, TypeVar

import pytest

from kvferry.clients import AsyncClient, Client, Transfer, new_request_id, pages
from kvferry.clients.calls import Call, asked
from kvferry.clients.exclusive_use import ExclusiveUse
from kvferry.protocol.errors import ClientClosedError, ConcurrentUseError
from kvferry.protocol.events import Finished
from kvferry.protocol.session_messages import Ping
from tests import kit
from tests.kit.daemons import Daemon
from tests.kit.pools import SPEC

SOON_S = 20.0
ROUNDS = 300
T = TypeVar("T")


@pytest.fixture
def client(daemon: Daemon) -> Iterator[Client]:
    with kit.engine(daemon, "threads") as one:
        yield one


@pytest.fixture
def helper() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1, "helper") as one:
        yield one


def wait_in_turn(client: Client, transfer: Transfer) -> Finished:
    """Wait for a transfer, as soon as the other thread is not in a call."""
    while True:
        try:
            return client.wait_finished(transfer, SOON_S)
        except ConcurrentUseError:
            continue


def refused(call: Callable[[], object]) -> ConcurrentUseError:
    """Call until another thread's call is under way, and return the error."""
    ends_at = time.monotonic() + SOON_S
    while time.monotonic() < ends_at:
        try:
            call()
        except ConcurrentUseError as error:
            return error
    pytest.fail("two threads were in one client at a time")


def test_a_call_while_another_threads_waits_is_refused(
    daemon: Daemon, client: Client, helper: ThreadPoolExecutor, name: str
) -> None:
    client.create_pool(name, SPEC)
    ids = client.allocate(name, 1)
    transfer = client.receive(name, new_request_id(), [pages(ids)])
    waiting = helper.submit(wait_in_turn, client, transfer)
    error = refused(client.poll)
    assert "thread 'MainThread' calls a client that is in use by thread 'helper_0'" in error.detail
    for call in (
        client.ping,
        lambda: client.allocate(name, 1),
        lambda: client.send(name, new_request_id(), [pages(ids)]),
    ):
        with pytest.raises(ConcurrentUseError):
            call()
    with Client.connect(daemon.runtime_dir) as prefill:
        sent = prefill.send(name, transfer.key.request_id, [pages(prefill.allocate(name, 1))], first_token=7)
        assert waiting.result(SOON_S).first_token == 7, "the call that was under way goes on"
        prefill.wait_settled(sent, SOON_S)
        assert client.allocate(name, 1).tolist() == [3], "what was refused has sent nothing"


def test_replies_never_go_astray(client: Client, name: str) -> None:
    client.create_pool(name, SPEC)
    start = threading.Barrier(2)

    def in_turn(call: Callable[[], T]) -> T:
        while True:
            with contextlib.suppress(ConcurrentUseError):
                return call()

    def use(count: int) -> None:
        start.wait()
        for _ in range(ROUNDS):
            ids = in_turn(lambda: client.allocate(name, count))
            assert len(ids) == count, "another thread's reply"
            assert in_turn(lambda: client.free(name, ids)).freed == count  # noqa: B023  it is called at once

    with ThreadPoolExecutor(2) as threads:
        for one in [threads.submit(use, count) for count in (1, 3)]:
            one.result(SOON_S)


def test_a_poll_goes_on_after_what_is_no_change(
    daemon: Daemon, client: Client, helper: ThreadPoolExecutor, name: str
) -> None:
    client.create_pool(name, SPEC)
    transfer = client.receive(name, new_request_id(), [pages(client.allocate(name, 1))])
    while transfer.state != "open":
        client.poll(SOON_S)
    with Client.connect(daemon.runtime_dir) as prefill:
        ids = prefill.allocate(name, 1)

        def send() -> Transfer:
            for _ in range(3):  # the reply below is there by then
                prefill.ping()
            return prefill.send(name, transfer.key.request_id, [pages(ids)])

        pong = client.begin(asked(Ping()))
        sent = helper.submit(send)
        assert client.poll(SOON_S) == [transfer]
        client.wait(pong)
        prefill.wait_settled(sent.result(SOON_S))


def test_any_thread_may_close(daemon: Daemon, client: Client, helper: ThreadPoolExecutor, name: str) -> None:
    client.create_pool(name, SPEC)
    transfer = client.receive(name, new_request_id(), [pages(client.allocate(name, 16))])
    waiting = helper.submit(wait_in_turn, client, transfer)
    refused(client.poll)
    client.close()
    with pytest.raises(ClientClosedError, match="while this call waited"):
        waiting.result(SOON_S)
    for ping in (client.ping, helper.submit(client.ping).result):
        with pytest.raises(ClientClosedError, match="was closed"):
            ping()
    with Client.connect(daemon.runtime_dir) as other:
        while any(one.name == "threads" for one in other.status().sessions):
            pass
        assert len(other.allocate(name, 16)) == 16


def refused_everywhere(client: AsyncClient) -> None:
    with pytest.raises(ConcurrentUseError, match="a thread without a running event loop"), client.batched():
        pytest.fail("it began")


@pytest.mark.anyio
async def test_an_async_client_stays_on_its_loop(daemon: Daemon, name: str) -> None:
    async with await AsyncClient.connect(daemon.runtime_dir) as client:
        await client.create_pool(name, SPEC)
        ids = await client.allocate(name, 1)

        def in_a_thread() -> None:
            with pytest.raises(ConcurrentUseError, match="a thread without a running event loop"):
                client.send(name, new_request_id(), [pages(ids)])
            with pytest.raises(ConcurrentUseError, match="another event loop"):
                asyncio.run(client.ping())

        with client.batched() as step:
            await asyncio.to_thread(refused_everywhere, client)
            step.allocate(name, [1])
        await asyncio.to_thread(in_a_thread)
        assert (await client.allocate(name, 1)).tolist() == [3]


class Intruder:
    """Another thread that begins a call at every step of a call, once that is under way, and stays in it."""

    def __init__(self, client: Client, helper: ThreadPoolExecutor) -> None:
        self._client = client
        self._helper = helper
        self._inside, self._leave = threading.Event(), threading.Event()
        self._calls: list[Future[None]] = []
        self._under_way = False
        self.refused = 0

    def watch(self, call: Callable[[], object]) -> object:
        """Return what a call returns that this thread tries to come into the middle of."""
        sys.setprofile(self._step)
        try:
            return call()
        finally:
            sys.setprofile(None)
            self._leave.set()
            for one in self._calls:
                one.result(SOON_S)

    def _step(self, frame: FrameType, event: str, _: object) -> None:
        self._under_way |= event == "return" and frame.f_code is ExclusiveUse.__enter__.__code__
        if event != "return" or not self._under_way or self._inside.is_set():
            return
        call = self._helper.submit(self._stay)
        while not self._inside.is_set() and not call.done():
            pass
        if call.done() and call.exception() is not None:
            assert isinstance(call.exception(), ConcurrentUseError)
            self.refused += 1
        else:
            self._calls.append(call)

    def _stay(self) -> None:
        def read(_: object) -> None:
            self._inside.set()
            self._leave.wait(SOON_S)

        self._client.call(Call(Ping(), (), read))


WHOLE: Final[dict[str, Callable[[Client, str], object]]] = {
    "create_tables": lambda client, name: client.create_tables("t", name, max_batch=1, max_context_tokens=16),
    "attach_pool": lambda client, name: client.attach_pool(name),
    "open_events": lambda client, _: client.open_events(),
}


@pytest.mark.parametrize(
    "call", ["create_tables", *(pytest.param(one, marks=pytest.mark.full) for one in ("attach_pool", "open_events"))]
)
def test_a_call_that_has_begun_ends_whatever_another_thread_calls(
    client: Client, helper: ThreadPoolExecutor, name: str, call: str
) -> None:
    client.create_pool(name, SPEC)
    intruder = Intruder(client, helper)
    assert intruder.watch(lambda: WHOLE[call](client, name)) is not None
    assert intruder.refused > 5


def test_a_call_in_the_midst_of_ones_own_says_what_it_is(client: Client) -> None:
    call = Call(Ping(), (), lambda _: client.poll())  # as a signal handler would
    with pytest.raises(ConcurrentUseError, match="'MainThread' is already in a call of this client: a signal handler"):
        client.call(call)
    assert client.ping() > 0, "the client goes on"
