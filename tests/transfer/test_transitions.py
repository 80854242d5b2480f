"""The table of ``transfer.transitions``: a case reaches each row, and docs/architecture.md shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeAlias

import numpy as np
import pytest

from kvferry.daemon.transfer import completion, peer_transfers
from kvferry.daemon.transfer.endpoints import SendRequest
from kvferry.daemon.transfer.transitions import TRANSITIONS, Event, Key, Kind, State
from kvferry.pools.allocator import PageAllocator
from kvferry.pools.planning.coverage import Coverage
from kvferry.protocol.errors import TransferFailedError
from kvferry.protocol.peer_messages import Announce
from tests.kit.peers import PAGES, Transfer, Way
from tests.transition_tables import SeenRows, markdown_of_transfers, transitions_of

FAILED: Final = TransferFailedError("a copy failed")


class Reaching(Transfer):
    """A transfer that knows which rows it has reached; prefill has a page too many."""

    def __init__(self, way: Way) -> None:
        self.seen = SeenRows(TRANSITIONS)
        super().__init__(way, self.seen)
        more = self.source.filled(self.prefill.pool, self.prefill.session, 1)
        self.prefill.pages = np.concatenate((self.prefill.pages, more))

    def send(self, first: int = 0, stop: int | None = PAGES, **more: Any) -> None:  # noqa: ANN401  what ``Engine.send`` takes
        super().send(first, stop, **more)

    def bugs(self) -> list[str]:
        found = [bug for node in self.harness.nodes.values() for bug in node.bugs]
        for node in self.harness.nodes.values():
            node.bugs.clear()
        return found

    def settle(self) -> None:
        for _ in range(2):
            self.harness.run()
            self.harness.pass_time(1000)
        self.harness.check_nothing_left()


Case: TypeAlias = Callable[[Reaching], object]
_S, _R, _RS, _RR = Kind.SEND, Kind.RECEIVE, Kind.REMOTE_SEND, Kind.REMOTE_RECEIVE
_OPEN, _FINISHED = State.OPEN, State.FINISHED


def lose_a_cell(one: Reaching) -> None:
    one.meet(last=False)
    (op_id,) = one.home.transport.under_way
    op = one.home.state_machine.endpoints.ops.pop(op_id)
    del op.receive_request.ops[op_id]
    one.home.transport.close()
    one.send(1)
    one.end_copy()


def begin_anew(one: Reaching) -> None:
    """Lose the word of the first end."""
    one.announce()
    one.decode.cancel("receive")
    one.harness.connection(one.home, one.source).on_its_way.clear()
    one.receive()
    one.harness.deliver_until(one.home, one.source, Announce)


def forget_the_home(one: Reaching) -> None:
    """Let the word of a receive request's end be lost."""
    one.send(stop=1, last=False, deadline_s=100.0)
    one.announce()
    one.source.pass_time(31)


def failing(owner: object, name: str, then: Case) -> Case:
    def case(one: Reaching) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, name, raises)
            then(one)
        assert [detail.partition(":")[0] for detail in one.bugs()] == ["the transfer broke off"]

    return case


def raises(*_: object) -> None:
    raise MemoryError


def do(*steps: Case) -> Case:
    def all_of_them(one: Reaching) -> None:
        for step in steps:
            step(one)

    return all_of_them


def lose_source(one: Reaching) -> None:
    one.lose_daemon(one.source, one.home)


def deliver(one: Reaching) -> None:
    one.harness.deliver_all()


def to_home(one: Reaching) -> None:
    connection = one.harness.connection(one.source, one.home)
    while connection.on_its_way:
        one.harness.network.deliver(connection)


def meet_first(one: Reaching) -> None:
    one.meet(last=False)


def cancel_send(one: Reaching) -> None:
    one.prefill.cancel("send")


def cancel_receive(one: Reaching) -> None:
    one.decode.cancel("receive")


def send_too_much(one: Reaching) -> None:
    one.send(1, PAGES + 1)


CASES: Final[dict[Key, Case]] = {
    (_S, _OPEN, Event.CANCEL): do(Reaching.send, cancel_send),
    (_S, _OPEN, Event.DEADLINE): do(Reaching.send, lambda one: one.source.pass_time(31)),
    (_S, _OPEN, Event.SESSION_ENDED): do(lambda one: one.send(last=False), lambda one: one.prefill.lose()),
    (_S, _OPEN, Event.SESSION_ENDED_SENT): do(lambda one: one.send(), lambda one: one.prefill.lose()),
    (_S, _OPEN, Event.DRAIN): do(lambda one: one.send(), lambda one: one.source.drain()),
    (_S, _OPEN, Event.PEER_ABANDONED): do(Reaching.send, lambda one: one.source.abandon("receive")),
    (_R, _OPEN, Event.PEER_ABANDONED): do(Reaching.receive, lambda one: one.home.abandon("send")),
    (_S, _OPEN, Event.PEERS_ENDED_BEFORE): do(Reaching.receive, cancel_receive, Reaching.send),
    (_S, _OPEN, Event.RECEIVERS_DONE): do(Reaching.meet, Reaching.end_copy),
    (_S, _OPEN, Event.RECEIVERS_FAILED): do(Reaching.meet, cancel_receive),
    (_S, _OPEN, Event.BROKEN_OFF): do(
        Reaching.send, failing(SendRequest, "waits_for", lambda one: one.source.pass_time(31))
    ),
    (_S, _FINISHED, Event.CANCEL): do(Reaching.meet, cancel_send, cancel_send),
    (_S, _FINISHED, Event.SESSION_ENDED): do(meet_first, cancel_send, lambda one: one.prefill.lose()),
    (_S, _FINISHED, Event.SESSION_ENDED_SENT): do(Reaching.meet, cancel_send, lambda one: one.prefill.lose()),
    (_S, _FINISHED, Event.DRAIN): do(meet_first, cancel_send, lambda one: one.source.drain()),
    (_S, _FINISHED, Event.RECEIVERS_FAILED): do(Reaching.meet, cancel_send),
    (_S, _FINISHED, Event.NOTHING_UNDER_WAY): do(Reaching.meet, Reaching.end_copy),
    (_S, _FINISHED, Event.END_RAISED): do(Reaching.meet, failing(PageAllocator, "end_write", Reaching.end_copy)),
    (_R, _OPEN, Event.CANCEL): do(Reaching.receive, cancel_receive),
    (_R, _OPEN, Event.DEADLINE): do(Reaching.receive, lambda one: one.home.pass_time(31)),
    (_R, _OPEN, Event.SESSION_ENDED): do(lambda one: one.receive(), lambda one: one.decode.lose()),
    (_R, _OPEN, Event.DRAIN): do(lambda one: one.receive(), lambda one: one.home.drain()),
    (_R, _OPEN, Event.PEERS_ENDED_BEFORE): do(Reaching.send, cancel_send, Reaching.receive),
    (_R, _OPEN, Event.MATCHED_FAILED): do(Reaching.meet, cancel_send),
    (_R, _OPEN, Event.COMPLETE): do(Reaching.meet, Reaching.end_copy),
    (_R, _OPEN, Event.CELLS_MISSING): lose_a_cell,
    (_R, _OPEN, Event.COPY_FAILED): do(Reaching.meet, lambda one: one.end_copy(FAILED)),
    (_R, _OPEN, Event.BROKEN_OFF): do(Reaching.meet, failing(Coverage, "arrive", Reaching.end_copy)),
    (_R, _FINISHED, Event.CANCEL): do(Reaching.meet, cancel_receive, cancel_receive),
    (_R, _FINISHED, Event.SESSION_ENDED): do(Reaching.meet, cancel_send, lambda one: one.decode.lose()),
    (_R, _FINISHED, Event.DRAIN): do(meet_first, cancel_receive, lambda one: one.home.drain()),
    (_R, _FINISHED, Event.COPY_FAILED): do(Reaching.meet, cancel_receive, lambda one: one.end_copy(FAILED)),
    (_R, _FINISHED, Event.NOTHING_UNDER_WAY): do(Reaching.meet, Reaching.end_copy),
    (_R, _FINISHED, Event.END_RAISED): do(Reaching.meet, failing(PageAllocator, "end_write", Reaching.end_copy)),
    (_RS, _OPEN, Event.RECEIVERS_DONE): do(Reaching.meet, lambda one: one.harness.run()),
    (_RS, _OPEN, Event.RECEIVERS_FAILED): do(Reaching.meet, cancel_receive),
    (_RS, _OPEN, Event.REFUSED): do(meet_first, send_too_much, deliver),
    (_RS, _OPEN, Event.WITHDRAWN): do(Reaching.meet, cancel_send, deliver),
    (_RS, _OPEN, Event.DAEMON_LOST): do(Reaching.meet, lose_source),
    (_RS, _OPEN, Event.BROKEN_OFF): do(Reaching.meet, failing(Coverage, "arrive", lambda one: one.harness.run())),
    (_RS, _FINISHED, Event.RECEIVERS_FAILED): do(Reaching.meet, cancel_send, deliver),
    (_RS, _FINISHED, Event.REFUSED): do(meet_first, cancel_receive, lambda one: one.send(1), to_home),
    (_RS, _FINISHED, Event.WITHDRAWN): do(Reaching.meet, cancel_receive, cancel_send, to_home),
    (_RS, _FINISHED, Event.DAEMON_LOST): do(Reaching.meet, cancel_receive, lose_source),
    (_RS, _FINISHED, Event.NOTHING_UNDER_WAY): do(Reaching.meet, cancel_receive, lambda one: one.harness.run()),
    (_RS, _FINISHED, Event.END_RAISED): do(
        Reaching.meet, failing(PageAllocator, "end_write", lambda one: one.harness.run())
    ),
    (_RR, _OPEN, Event.DEADLINE): forget_the_home,
    (_RR, _OPEN, Event.MATCHED_FAILED): do(Reaching.meet, cancel_send),
    (_RR, _OPEN, Event.REFUSED): do(meet_first, send_too_much, deliver),
    (_RR, _OPEN, Event.CLOSED): do(Reaching.meet, lambda one: one.harness.run()),
    (_RR, _OPEN, Event.CLOSED_FAILED): do(Reaching.meet, cancel_receive, deliver),
    (_RR, _OPEN, Event.DAEMON_LOST): do(Reaching.meet, lambda one: one.lose_daemon(one.home, one.source)),
    (_RR, _OPEN, Event.BEGUN_ANEW): begin_anew,
    (_RR, _OPEN, Event.BROKEN_OFF): do(Reaching.announce, failing(peer_transfers, "peer_send_of", Reaching.send)),
    (_RR, _FINISHED, Event.REFUSED): do(meet_first, send_too_much, cancel_send, deliver),
    (_RR, _FINISHED, Event.NOTHING_UNDER_WAY): do(Reaching.meet, cancel_send, lambda one: one.harness.run()),
    (_RR, _FINISHED, Event.END_RAISED): do(Reaching.meet, failing(completion, "SendWithdrawn", cancel_send)),
}


def test_every_row_has_a_case() -> None:
    assert set(CASES) == set(TRANSITIONS)


@pytest.mark.parametrize("key", CASES, ids=lambda key: f"{key[0].name}-{key[1].name}-{key[2].name}")
def test_a_row_is_reached_and_all_settles(key: Key) -> None:
    way: Way = "here"
    if key[0] in {_RS, _RR}:  # of one host where the home's pages must be held until the copy has ended
        way = "ipc" if key[:2] == (_RS, _FINISHED) else "tcp"
    one = Reaching(way)
    CASES[key](one)
    assert key in one.seen.rows
    one.settle()


@pytest.mark.parametrize("state", [State.OPEN, State.FINISHED])
def test_an_event_without_a_row_is_a_bug_and_the_transfer_settles(state: State) -> None:
    one = Reaching("here")
    del one.seen[Kind.SEND, state, Event.CANCEL]
    one.meet()
    if state is State.FINISHED:
        one.decode.cancel("receive")
    one.prefill.cancel("send")
    assert one.source.bugs == [f"send request, {state.value}: no transition for: its own CANCEL"]
    expected = "INTERNAL" if state is State.OPEN else "PEER_CANCELLED"
    assert one.prefill.told == expected
    one.end_copy()
    assert one.prefill.told == f"{expected} settled"


def test_an_announcement_that_ends_without_a_row_is_a_bug_too() -> None:
    one = Reaching("tcp")
    del one.seen[Kind.REMOTE_RECEIVE, State.OPEN, Event.CLOSED]
    one.meet()
    one.harness.run()
    assert set(one.source.bugs) == {
        "another daemon's receive request, open: no transition for: its daemon says that it succeeded"
    }
    assert one.told == ("INTERNAL settled", "OK settled")
    assert not one.source.leftovers()


def test_the_documentation_shows_the_table() -> None:
    assert transitions_of("transfer") == markdown_of_transfers()
