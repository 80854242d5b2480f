"""What an engine has its daemon told, of which nobody waits for the answer; and what the next daemon is told of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final

import pytest

from kvferry.clients import Client, MhaSpec, Transfer, new_request_id, pages
from kvferry.clients.calls import asked
from kvferry.clients.engine import Engine
from kvferry.protocol.errors import CancelledError, ClientClosedError, PageOutOfRangeError, PeerCancelledError
from kvferry.protocol.session_messages import Status, StatusReport
from kvferry.protocol.transfer_messages import Abandon, Cancel
from tests import kit
from tests.kit.daemons import Daemon, soon

SPEC: Final = MhaSpec(layers=1, tokens=2048, page_size=4, kv_heads=1, head_dim=8, dtype="float16")
MANY: Final = 400
"""More than a session may have requests under way."""


@pytest.fixture
def kept_daemon() -> Iterator[Daemon]:
    with kit.daemon(keep=True) as one:
        yield one


@pytest.fixture
def engine(kept_daemon: Daemon) -> Iterator[Engine]:
    one = Engine("engine", str(kept_daemon.runtime_dir))
    yield one
    one.close()


def test_many_words_at_once(engine: Engine) -> None:
    with engine.client() as client:
        client.create_pool("kv", SPEC)
        ids = client.allocate("kv", MANY)
        waiting = [client.receive("kv", new_request_id(), [pages(ids[at : at + 1])]) for at in range(MANY)]
    for one in waiting:
        engine.say(asked(Cancel(request_id=one.key.request_id, pool="kv", direction="receive", wait=False)))
    assert soon(lambda: all(one.is_settled for one in waiting))


def settled_at(engine: Engine, transfers: list[Transfer]) -> bool:
    """Take what has arrived, and return whether all of these have settled."""
    engine.poll()
    return all(one.is_settled for one in transfers)


def messages(engine: Engine) -> int:
    """Return how many messages the daemon has taken, this one too."""
    with engine.client() as client:
        return client.status().counters["messages.received"]


def test_words_and_what_a_step_collects_go_in_a_message_each(engine: Engine) -> None:
    with engine.client() as client:
        client.create_pool("kv", SPEC)
        ids = client.allocate("kv", 64).reshape(32, 2)
    before, request_ids = messages(engine), [new_request_id() for _ in ids]
    transfers: list[Transfer] = []
    for one, (source, target) in zip(request_ids, ids, strict=True):  # as objects of an adapter do, one by one
        with engine.step() as step:
            transfers += [step.send("kv", one, [pages([source])]), step.receive("kv", one, [pages([target])])]
    assert {one.state for one in transfers} == {"sent"}
    engine.poll()
    assert soon(lambda: settled_at(engine, transfers))
    assert {one.error for one in transfers} == {None}
    assert messages(engine) == before + 2
    for one in request_ids:
        engine.say(asked(Abandon(request_id=one, direction="receive")))
    engine.poll()
    assert messages(engine) == before + 4


def test_who_asks_for_the_client_finds_what_the_step_has_begun(engine: Engine) -> None:
    with engine.client() as client:
        client.create_pool("kv", SPEC)
        ids = client.allocate("kv", 2)
    with engine.step() as step:
        waiting = step.receive("kv", new_request_id(), [pages(ids)])
        bad = step.free("kv", [1 << 20])
    with engine.client() as client:
        assert not client.cancel(waiting).was_finished
        with pytest.raises(PageOutOfRangeError):
            client.wait(bad)
        client.wait_settled(waiting)
    assert isinstance(waiting.error, CancelledError)


def test_what_a_step_collects_is_refused_where_the_client_is_given_up(engine: Engine) -> None:
    with engine.client() as client:
        client.create_pool("kv", SPEC)
        ids = client.allocate("kv", 2)
    with engine.step() as step:
        waiting = step.receive("kv", new_request_id(), [pages(ids)])
    client.close()
    engine.flush()
    assert waiting.is_settled
    assert isinstance(waiting.error, ClientClosedError)


def test_a_word_waits_for_the_daemon_to_be_back(engine: Engine, kept_daemon: Daemon) -> None:
    request_id = new_request_id()
    kept_daemon.end()
    engine.say(asked(Abandon(request_id=request_id, direction="receive", reason="nobody comes")))
    kept_daemon.start()
    with contextlib.closing(Client.connect(kept_daemon.runtime_dir)) as peer:
        peer.create_pool("kv", SPEC)
        ids = peer.allocate("kv", 1)

        def is_told() -> bool:
            sent = peer.send("kv", request_id, [pages(ids)])
            with contextlib.suppress(PeerCancelledError):
                peer.cancel(sent)
            return isinstance(sent.error, PeerCancelledError)

        assert soon(is_told)


def test_an_answer_that_nobody_takes_is_heard_of_all_the_same(engine: Engine) -> None:
    """What a late lookup has pinned is given back, also where the engine has nothing else to do."""
    heard: list[StatusReport] = []
    with engine.client() as client:
        engine.when_answered(client.begin(asked(Status())), heard.append)
    assert soon(lambda: len(heard) == 1)
