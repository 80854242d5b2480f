"""A step of an engine's loop in one message: what it begins is followed as if each request had been sent by itself."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from weakref import WeakSet

import pytest

from kvferry.clients import Client, MhaSpec, calls, new_request_id, pages
from kvferry.clients.batch import Batch
from kvferry.clients.calls import Call, asked
from kvferry.clients.core.client_core import ClientCore
from kvferry.protocol import errors
from kvferry.protocol.codec import Frames, IncomingRequest, decode_request, encode
from kvferry.protocol.envelope import MAX_BATCH, Batched, Reply
from kvferry.protocol.ids import BootId
from kvferry.protocol.limits import Limits
from kvferry.protocol.pool_messages import AttachPool, Free
from kvferry.protocol.session_messages import OpenEvents, Ping
from kvferry.protocol.transfer_messages import Accepted
from tests.kit.pools import MODEL, SPEC, Filled, hashes

SOON_S = 20.0
SMALL = MhaSpec(layers=1, tokens=2048, page_size=4, kv_heads=1, head_dim=4, dtype="float32")


@pytest.fixture
def client(connect: Callable[[str], Client]) -> Iterator[Client]:
    one = connect("engine")
    yield one
    one.evict_cached()


def requests_of(client: Client) -> int:
    return client.status().counters["messages.received"]


def test_one_step_is_one_message(client: Client, name: str) -> None:
    pool = Filled(client, name)
    ids = client.allocate(name, 12)
    content = pool.write(ids[:4], seed=3)
    client.wait_done(client.store(name, hashes(2), ids[:2]))
    lease = client.lookup(name, hashes(2)).lease
    request_id, before = new_request_id(), requests_of(client)
    with client.batched() as step:
        received = step.receive(name, request_id, [pages(ids[4:8])])
        sent = step.send(name, request_id, [pages(ids[:4])], first_token=5)
        loaded = step.load(name, lease, ids[8:10])
        out = step.offload(name, [pages(ids[:1])])
        found = step.begin(calls.allocate(name, 2, "main"))
        bad = step.free(name, [10_000])
        freed = step.free(name, ids[10:])
        assert (received.state, loaded.state) == ("sent", "sent")
    assert client.wait_finished(received).first_token == 5
    client.wait_settled(sent)
    assert client.wait_done(loaded).loaded == 2
    assert {one.hash for one in client.cached_blocks()} == {one.hex() for one in hashes(2)}
    assert client.wait_done(out).snapshot == out.snapshot != ""
    assert len(client.wait(found)) == 2
    assert client.wait(freed).freed == 2
    with pytest.raises(errors.PageOutOfRangeError):
        client.wait(bad)
    assert requests_of(client) == before + 3, "the batch, and two questions"
    assert pool.holds(ids[4:8], content)
    assert pool.holds(ids[8:10], [one[:, :2] for one in content])
    client.drop_snapshot(out.snapshot)
    pool.close()


@pytest.mark.parametrize(("kind", "batched"), [("offload", True), ("restore", False), ("store", False), ("load", True)])
def test_an_operation_that_waits_for_its_event_is_cancelled(
    client: Client, name: str, kind: str, *, batched: bool
) -> None:
    client.create_pool(name, SPEC, model=MODEL)
    ids, never = client.allocate(name, 1), client.open_events().event()
    snapshot = client.wait_done(client.offload(name, [pages(ids)])).snapshot
    client.wait_done(client.store(name, hashes(1, salt=13), ids))
    lease = client.lookup(name, hashes(1, salt=13)).lease
    arguments: dict[str, tuple[Any, ...]] = {
        "offload": ([pages(ids)],),
        "restore": (snapshot,),
        "store": (hashes(1, salt=14), ids),
        "load": (lease, ids),
    }
    if batched:
        with client.batched() as step:
            step.send(name, new_request_id(), last=False)
            waiting = getattr(step, kind)(name, *arguments[kind], after=never)
    else:
        waiting = getattr(client, kind)(name, *arguments[kind], after=never)
    assert not client.cancel_operation(waiting, deadline_s=SOON_S).was_done
    with pytest.raises(errors.CancelledError, match="before its event was reached"):
        client.wait_done(waiting)
    client.drop_snapshot(snapshot)


def test_a_block_that_raises_sends_nothing(client: Client, name: str) -> None:
    client.create_pool(name, SPEC, model=MODEL)
    ids, before = client.allocate(name, 2), requests_of(client)
    with pytest.raises(ZeroDivisionError), client.batched() as step:  # noqa: PT012  the block is what raises
        sent = step.send(name, new_request_id(), [pages(ids)])
        stored = step.store(name, hashes(1), ids[:1])
        freed = step.free(name, ids)
        1 / 0  # noqa: B018
    assert requests_of(client) == before + 1
    assert isinstance(sent.error, errors.CancelledError)
    assert isinstance(stored.error, errors.CancelledError)
    with pytest.raises(errors.CancelledError, match="ZeroDivisionError"):
        client.wait(freed)
    assert client.free(name, ids).freed == 2
    with pytest.raises(errors.MisuseError, match="this batch was sent"):
        step.free(name, ids)


def test_a_list_of_another_length_moves_no_others(client: Client, name: str) -> None:
    """In one frame the ids of one request would be taken for the next one's."""
    client.create_pool(name, SPEC, model=MODEL)
    ids = client.allocate(name, 4)
    with client.batched() as step:
        for call in (client.begin, step.begin):
            with pytest.raises(errors.InvalidFieldError) as refused:
                call(asked(Free(pool=name, pages=3), ids=(ids[:2].tobytes(),)))
            assert refused.value.field == "ids"
        freed = step.free(name, ids[2:])
    assert client.wait(freed).freed == 2
    assert client.free(name, ids[:2]).freed == 2


def test_what_cannot_be_in_a_batch(client: Client, name: str) -> None:
    before = requests_of(client)
    with client.batched() as step:
        for body in (AttachPool(pool=name), OpenEvents(device="host"), Ping()):
            with pytest.raises(errors.InvalidFieldError, match="cannot be in a BATCH") as refused:
                step.begin(Call(body, (), lambda reply: reply))
            assert refused.value.field == "call"
    assert requests_of(client) == before + 1, "nothing to send"


def test_more_than_one_message_takes(client: Client, name: str) -> None:
    client.create_pool(name, SMALL)
    ids = client.allocate(name, MAX_BATCH + 10)
    before = requests_of(client)
    with client.batched() as step:
        freed = [step.free(name, [page]) for page in ids]
        again = step.free(name, ids[:1])
    assert [client.wait(one).freed for one in freed] == [1] * len(ids)
    with pytest.raises(errors.NotOwnerError):
        client.wait(again)
    assert requests_of(client) == before + 3


@pytest.mark.parametrize("bound", ["max_message_bytes", "max_frame_bytes"])
def test_more_bytes_than_a_message_or_a_frame_may_have(bound: str) -> None:
    """All that a step begins goes, each once and in its order, in messages within the daemon's bounds."""
    core, sent = ClientCore(BootId("1" * 32)), list[Frames]()
    limits = Limits(**{"max_message_bytes": 1 << 20, "max_frame_bytes": 1 << 20, bound: 1 << 17})
    with Batch(
        core,
        contextlib.nullcontext(),
        limits,
        deadline=lambda _: (1.0, 0),
        send=lambda outgoing, frames: sent.append(frames or core.frames(outgoing)),
        refuse=lambda _, error: pytest.fail(str(error)),
        lost_pools=set(),
        tables=WeakSet(),
    ) as step:
        begun = [step.send("p", new_request_id(), [pages([7])], payload=b"x" * 10_000) for _ in range(20)]
    names: list[str] = []
    for frames in sent:
        assert sum(map(len, frames)) <= limits.max_message_bytes
        assert max(map(len, frames)) <= limits.max_frame_bytes
        request = batch_in(frames)
        names += [one.request_id for one in request.body.requests]
        answer = Batched(results=(Accepted(),), times=(len(request.body.requests),))
        core.feed([bytes(one) for one in encode(Reply(request.message_id, core.boot_id, answer))])
    assert names == [one.key.request_id for one in begun]
    assert {one.state for one in begun} == {"open"}
    assert len(sent) > 1
    assert repr(core) == "<ClientCore pending=0 batches=0 transfers=20>"


def batch_in(frames: Frames) -> Any:  # noqa: ANN401  a BATCH's requests are of many types
    incoming = decode_request([bytes(one) for one in frames])
    assert isinstance(incoming, IncomingRequest)
    return incoming.request


def test_pages_of_several_requests_are_taken_at_once_or_not_at_all(client: Client, name: str) -> None:
    free = client.create_pool(name, SPEC, model=MODEL).manifest.pages - 1
    with client.batched() as step:
        taken = step.allocate(name, [3, 0, 2])
        too_many = step.allocate(name, [1, free])
    assert [len(one) for one in client.wait(taken)] == [3, 0, 2]
    with pytest.raises(errors.PoolFullError):
        client.wait(too_many)
    assert len(client.allocate(name, free - 5)) == free - 5
    with client.batched() as step:
        wrong: list[Any] = [[], [-1], 3, ["x"]]
        for counts in wrong:
            with pytest.raises(errors.InvalidFieldError) as refused:
                step.allocate(name, counts)
            assert refused.value.field.startswith("counts")
