"""The scheduler hears of each transfer op of a transfer, from before its first byte may move until none can."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvferry.clients import new_request_id, pages
from kvferry.daemon.control.control_socket import ControlSocket
from kvferry.daemon.daemon import Tuning
from kvferry.daemon.tiers.scheduler import Scheduler
from kvferry.daemon.transfer.registry import StartOp
from kvferry.daemon.transports.local import LocalTransport, OnOpDone
from kvferry.protocol.codec import Frames, decode_from_daemon
from kvferry.protocol.errors import InternalError
from tests.kit.in_process import ON_THREADS, SPEC, TUNING, client_of_one
from tests.kit.peers import Transfer, Way
from tests.kit.tiers import until

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let the daemon block where it ends: it waits for its own threads."""


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what schedulers are told of transfers, and which transfer ops the local transport is given, in order."""
    said: list[str] = []

    def note(owner: type, name: str, word: str) -> None:
        method = getattr(owner, name)

        def noted(*arguments: Any) -> None:  # noqa: ANN401
            said.append(word)
            method(*arguments)

        monkeypatch.setattr(owner, name, noted)

    note(Scheduler, "transfer_began", "began")
    note(Scheduler, "transfer_ended", "ended")
    note(LocalTransport, "start", "copy")
    return said


async def test_the_scheduler_knows_each_op_from_before_its_copy_until_after_it(heard: list[str]) -> None:
    async with client_of_one() as (client, _):
        await client.create_pool("other", SPEC)
        for destinations in (["pool"], ["pool", "other"]):
            request_id = new_request_id()
            receiving = [
                client.receive(
                    name, request_id, [pages(await client.allocate(name, 2))], destinations=len(destinations)
                )
                for name in destinations
            ]
            await client.ping()
            assert not heard, "a receive request that waits for its source holds nothing up"
            listed = [pages(await client.allocate("pool", 2))]
            sending = client.send("pool", request_id, listed)
            for one in (*receiving, sending):
                await client.wait_settled(one)
            assert sorted(heard) == sorted(["began", "copy", "ended"] * len(destinations))
            assert heard[:2] + heard[-1:] == ["began", "copy", "ended"]
            heard.clear()


@pytest.mark.parametrize("tuning", [TUNING, ON_THREADS], ids=["at once", "on a thread"])
async def test_engines_are_told_in_order_at_once_and_before_what_gave_way_goes_on(
    heard: list[str], monkeypatch: pytest.MonkeyPatch, tuning: Tuning
) -> None:
    """No event overtakes the reply to what caused it, also where the copy is over before the request is answered."""
    send, start = ControlSocket.send, LocalTransport.start

    def noted(self: ControlSocket, identity: bytes, frames: Frames, *, more: bool = False) -> bool:
        message, _ = decode_from_daemon([bytes(one) for one in frames])
        heard.append(type(message.body).__name__)
        return send(self, identity, frames, more=more)

    def in_a_turn(self: LocalTransport, op: StartOp, on_done: OnOpDone, reported: Callable[[], None]) -> None:
        def report() -> None:
            reported()
            heard.append("turn over")

        start(self, op, on_done, report)

    monkeypatch.setattr(ControlSocket, "send", noted)
    monkeypatch.setattr(LocalTransport, "start", in_a_turn)
    async with client_of_one(tuning) as (client, _):
        request_id = new_request_id()
        receiving = client.receive("pool", request_id, [pages(await client.allocate("pool", 2))])
        ids = await client.allocate("pool", 2)
        heard.clear()
        sending = client.send("pool", request_id, [pages(ids)])
        for one in (receiving, sending):
            await client.wait_settled(one)
        await until(lambda: tuning is TUNING or "turn over" in heard)
    assert next(one for one in heard if one[0].isupper()) == "Accepted", heard
    told = [number for number, one in enumerate(heard) if one in {"Finished", "Settled", "Together"}]
    assert heard.index("copy") < min(told)
    assert tuning is TUNING or max(told) < min(heard.index("ended"), heard.index("turn over")), heard


@pytest.mark.parametrize("begins", [False, True])
async def test_an_op_whose_transport_raises_does_not_count_for_ever(
    heard: list[str], monkeypatch: pytest.MonkeyPatch, *, begins: bool
) -> None:
    start = LocalTransport.start

    def fails(self: LocalTransport, op: StartOp, on_done: OnOpDone, *reported: Callable[[], None]) -> None:
        if begins:
            start(self, op, on_done, *reported)  # its end is reported later: it counts as one end all the same
        raise RuntimeError("a bug of the transport")

    monkeypatch.setattr(LocalTransport, "start", fails)
    async with client_of_one(ON_THREADS) as (client, _):
        request_id = new_request_id()
        receiving = client.receive("pool", request_id, [pages(await client.allocate("pool", 2))])
        sending = client.send("pool", request_id, [pages(await client.allocate("pool", 2))])
        with pytest.raises(InternalError, match="a bug of the transport"):
            await client.wait_finished(receiving)
        for one in (receiving, sending):
            await client.wait_settled(one)
        assert [one for one in heard if one != "copy"] == ["began", "ended"]


@pytest.mark.parametrize(("way", "ends"), [("ipc", True), ("tcp", True), ("tcp", False)])
async def test_a_source_says_when_it_writes_to_another_daemon(way: Way, *, ends: bool) -> None:
    both = Transfer(way)
    both.meet()
    wrote = way == "tcp"  # a home of the same host reads by itself, and its own service counts the transfer op
    assert both.source.activity == ["began"] * wrote
    if not ends:  # it is cut off
        both.harness.pass_time(31)
    both.harness.run()
    assert both.source.activity == ["began", "ended"] * wrote
    assert both.held == (0, 0)
