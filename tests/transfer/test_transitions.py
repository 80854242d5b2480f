"""The table of ``transfer.transitions``: a case reaches each row, and docs/architecture.md shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

import pytest

from kvferry.daemon.transfer.transitions import TRANSITIONS, Event, Key, Kind, State, as_markdown
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import KvferryError, TransferFailedError
from kvferry.protocol.peer_messages import Announce
from tests.transfer.peer_harness import Node, PeerHarness
from tests.transfer.transfer_harness import Direction
from tests.transition_tables import SeenRows, transitions_of

pytestmark = pytest.mark.any_device

PAGES: Final = 3
FAILED: Final = TransferFailedError("a copy failed")


class Transfer:
    """An engine that sends and one that receives, at one daemon or at two.

    Attributes:
        source: the daemon of the one.
        home: that of the other.
        mapped: whether two daemons are of one host.
    """

    def __init__(self, *daemons: str) -> None:
        self.seen = SeenRows(TRANSITIONS)
        self.mapped = False
        self.harness = PeerHarness(*daemons, transitions=self.seen)
        self.source, self.home = self.harness.nodes[daemons[0]], self.harness.nodes[daemons[-1]]
        self.prefill, self.decode = self.source.session(), self.home.session()
        self.source_pool, self.home_pool = self.source.pool("prefill"), self.home.pool("decode")
        self.pages = self.source.filled(self.source_pool, self.prefill, PAGES + 1)
        self.home_pages = self.home.filled(self.home_pool, self.decode, PAGES)

    def send(self, first: int = 0, stop: int = PAGES, *, last: bool = True, **more: float) -> None:
        """SEND some pages."""
        self.source.send(
            self.prefill,
            self.source_pool,
            self.pages[first:stop],
            first_page=first,
            last=last,
            destinations=int(more.get("destinations", 1)),
            deadline_s=more.get("deadline_s", 30.0),
        )

    def receive(self) -> None:
        """RECEIVE, from the other daemon if there is one."""
        address = self.source.ipc if self.mapped else self.source.tcp
        daemons = () if self.source is self.home else (address,)
        self.home.receive(self.decode, self.home_pool, self.home_pages, source_daemons=daemons)

    def meet(self, *, last: bool = True) -> None:
        """Bring both sides together: a copy is under way; without ``last`` of the first page."""
        self.send(stop=PAGES if last else 1, last=last)
        self.receive()
        self.harness.deliver_all()
        assert list(self.harness.steps())

    def cancel(self, direction: Direction) -> None:
        """CANCEL one side."""
        node, session, pool = self._side(direction)
        node.cancel(session, pool, direction)

    def lose(self, direction: Direction) -> None:
        """Let one side's engine die."""
        node, session, _ = self._side(direction)
        node.lose(session)

    def lose_daemon(self, lost: Node, other: Node) -> None:
        """Let a daemon die, and the other one notice."""
        self.harness.cut(lost, other)
        self.harness.end(lost)
        self.harness.notice(other, lost)

    def end_copy(self, error: KvferryError | None = None) -> None:
        """End the one copy that is under way."""
        (step,) = self.harness.steps()
        self.harness.step(*step, error)

    def settle(self) -> None:
        """Let all come to its end."""
        for _ in range(2):
            self.harness.run()
            self.harness.pass_time(1000)
        self.harness.check_nothing_left()

    def _side(self, direction: Direction) -> tuple[Node, int, Pool]:
        if direction == "send":
            return self.source, self.prefill, self.source_pool
        return self.home, self.decode, self.home_pool


Case: TypeAlias = Callable[[Transfer], object]
_S, _R, _RS, _RR = Kind.SEND, Kind.RECEIVE, Kind.REMOTE_SEND, Kind.REMOTE_RECEIVE
_OPEN, _FINISHED = State.OPEN, State.FINISHED


def lose_a_cell(one: Transfer) -> None:
    """Let the daemon forget a copy: a bug."""
    one.meet(last=False)
    (op_id,) = one.home.transport.under_way
    op = one.home.state_machine.endpoints.ops.pop(op_id)
    del op.receive_request.ops[op_id]
    one.home.transport.close()
    one.send(1)
    one.end_copy()


def begin_anew(one: Transfer) -> None:
    """Let a home receive again, and its word of the first end be lost."""
    one.receive()
    one.harness.deliver_all()
    one.cancel("receive")
    one.harness.connection(one.home, one.source).on_its_way.clear()
    one.receive()
    one.harness.deliver_until(one.home, one.source, Announce)


def forget_the_home(one: Transfer) -> None:
    """Let the word of a receive request's end be lost."""
    one.send(last=False, stop=1, deadline_s=100.0)
    one.receive()
    one.harness.deliver_all()
    one.source.pass_time(31)


def do(*steps: Case) -> Case:
    """Return a case of several steps."""

    def all_of_them(one: Transfer) -> None:
        for step in steps:
            step(one)

    return all_of_them


def deliver(one: Transfer) -> None:
    """Deliver all that was said."""
    one.harness.deliver_all()


def to_home(one: Transfer) -> None:
    """Deliver what the source has said, and nothing else."""
    connection = one.harness.connection(one.source, one.home)
    while connection.on_its_way:
        one.harness.network.deliver(connection)


def meet_first(one: Transfer) -> None:
    """Bring the first chunk under way."""
    one.meet(last=False)


def cancel_send(one: Transfer) -> None:
    """CANCEL the SEND."""
    one.cancel("send")


def cancel_receive(one: Transfer) -> None:
    """CANCEL the RECEIVE."""
    one.cancel("receive")


def on_one_host(one: Transfer) -> None:
    """Let copies between the daemons hold the home's pages until they have ended."""
    one.mapped = True


def send_too_much(one: Transfer) -> None:
    """SEND a page more than the receiver has, from the second one on."""
    one.send(1, PAGES + 1)


LOCAL: Final[dict[Key, Case]] = {
    (_S, _OPEN, Event.CANCEL): do(Transfer.send, cancel_send),
    (_S, _OPEN, Event.DEADLINE): do(Transfer.send, lambda one: one.source.pass_time(31)),
    (_S, _OPEN, Event.SESSION_ENDED): do(lambda one: one.send(last=False), lambda one: one.lose("send")),
    (_S, _OPEN, Event.SESSION_ENDED_SENT): do(lambda one: one.send(), lambda one: one.lose("send")),
    (_S, _OPEN, Event.DRAIN): do(lambda one: one.send(), lambda one: one.source.drain()),
    (_S, _OPEN, Event.PEER_ABANDONED): do(Transfer.send, lambda one: one.source.abandon("receive")),
    (_R, _OPEN, Event.PEER_ABANDONED): do(Transfer.receive, lambda one: one.home.abandon("send")),
    (_S, _OPEN, Event.PEERS_ENDED_BEFORE): do(Transfer.receive, cancel_receive, Transfer.send),
    (_S, _OPEN, Event.RECEIVERS_DONE): do(Transfer.meet, Transfer.end_copy),
    (_S, _OPEN, Event.RECEIVERS_FAILED): do(Transfer.meet, cancel_receive),
    (_S, _OPEN, Event.NOTHING_UNDER_WAY): do(
        lambda one: one.send(destinations=2), lambda one: one.receive(), lambda one: one.end_copy()
    ),
    (_S, _FINISHED, Event.CANCEL): do(Transfer.meet, cancel_send, cancel_send),
    (_S, _FINISHED, Event.SESSION_ENDED): do(meet_first, cancel_send, lambda one: one.lose("send")),
    (_S, _FINISHED, Event.SESSION_ENDED_SENT): do(Transfer.meet, cancel_send, lambda one: one.lose("send")),
    (_S, _FINISHED, Event.DRAIN): do(meet_first, cancel_send, lambda one: one.source.drain()),
    (_S, _FINISHED, Event.RECEIVERS_FAILED): do(Transfer.meet, cancel_send),
    (_S, _FINISHED, Event.NOTHING_UNDER_WAY): do(Transfer.meet, Transfer.end_copy),
    (_R, _OPEN, Event.CANCEL): do(Transfer.receive, cancel_receive),
    (_R, _OPEN, Event.DEADLINE): do(Transfer.receive, lambda one: one.home.pass_time(31)),
    (_R, _OPEN, Event.SESSION_ENDED): do(lambda one: one.receive(), lambda one: one.lose("receive")),
    (_R, _OPEN, Event.DRAIN): do(lambda one: one.receive(), lambda one: one.home.drain()),
    (_R, _OPEN, Event.PEERS_ENDED_BEFORE): do(Transfer.send, cancel_send, Transfer.receive),
    (_R, _OPEN, Event.MATCHED_FAILED): do(Transfer.meet, cancel_send),
    (_R, _OPEN, Event.COMPLETE): do(Transfer.meet, Transfer.end_copy),
    (_R, _OPEN, Event.CELLS_MISSING): lose_a_cell,
    (_R, _OPEN, Event.COPY_FAILED): do(Transfer.meet, lambda one: one.end_copy(FAILED)),
    (_R, _OPEN, Event.NOTHING_UNDER_WAY): do(meet_first, Transfer.end_copy),
    (_R, _FINISHED, Event.CANCEL): do(Transfer.meet, cancel_receive, cancel_receive),
    (_R, _FINISHED, Event.SESSION_ENDED): do(Transfer.meet, cancel_send, lambda one: one.lose("receive")),
    (_R, _FINISHED, Event.DRAIN): do(meet_first, cancel_receive, lambda one: one.home.drain()),
    (_R, _FINISHED, Event.COPY_FAILED): do(Transfer.meet, cancel_receive, lambda one: one.end_copy(FAILED)),
    (_R, _FINISHED, Event.NOTHING_UNDER_WAY): do(Transfer.meet, Transfer.end_copy),
}
BETWEEN_DAEMONS: Final[dict[Key, Case]] = {
    (_RS, _OPEN, Event.RECEIVERS_DONE): do(Transfer.meet, lambda one: one.harness.run()),
    (_RS, _OPEN, Event.RECEIVERS_FAILED): do(Transfer.meet, cancel_receive),
    (_RS, _OPEN, Event.REFUSED): do(meet_first, send_too_much, deliver),
    (_RS, _OPEN, Event.WITHDRAWN): do(Transfer.meet, cancel_send, deliver),
    (_RS, _OPEN, Event.DAEMON_LOST): do(Transfer.meet, lambda one: one.lose_daemon(one.source, one.home)),
    (_RS, _FINISHED, Event.RECEIVERS_FAILED): do(Transfer.meet, cancel_send, deliver),
    (_RS, _FINISHED, Event.REFUSED): do(on_one_host, meet_first, cancel_receive, lambda one: one.send(1), to_home),
    (_RS, _FINISHED, Event.WITHDRAWN): do(on_one_host, Transfer.meet, cancel_receive, cancel_send, to_home),
    (_RS, _FINISHED, Event.DAEMON_LOST): do(
        on_one_host, Transfer.meet, cancel_receive, lambda one: one.lose_daemon(one.source, one.home)
    ),
    (_RS, _FINISHED, Event.NOTHING_UNDER_WAY): do(Transfer.meet, cancel_receive, lambda one: one.harness.run()),
    (_RR, _OPEN, Event.DEADLINE): forget_the_home,
    (_RR, _OPEN, Event.MATCHED_FAILED): do(Transfer.meet, cancel_send),
    (_RR, _OPEN, Event.REFUSED): do(meet_first, send_too_much, deliver),
    (_RR, _OPEN, Event.CLOSED): do(Transfer.meet, lambda one: one.harness.run()),
    (_RR, _OPEN, Event.CLOSED_FAILED): do(Transfer.meet, cancel_receive, deliver),
    (_RR, _OPEN, Event.DAEMON_LOST): do(Transfer.meet, lambda one: one.lose_daemon(one.home, one.source)),
    (_RR, _OPEN, Event.BEGUN_ANEW): begin_anew,
    (_RR, _OPEN, Event.NOTHING_UNDER_WAY): do(meet_first, lambda one: one.harness.run()),
    (_RR, _FINISHED, Event.REFUSED): do(meet_first, send_too_much, cancel_send, deliver),
    (_RR, _FINISHED, Event.NOTHING_UNDER_WAY): do(Transfer.meet, cancel_send, lambda one: one.harness.run()),
}


def test_every_row_has_a_case() -> None:
    """Nobody adds a row that no test reaches."""
    assert {*LOCAL, *BETWEEN_DAEMONS} == set(TRANSITIONS)


@pytest.mark.parametrize("key", LOCAL, ids=lambda key: f"{key[0].name}-{key[1].name}-{key[2].name}")
def test_a_row_is_reached_within_a_daemon(key: Key) -> None:
    """What the case does looks the row up, and afterwards all settles."""
    one = Transfer("daemon")
    LOCAL[key](one)
    assert key in one.seen.rows
    one.settle()


@pytest.mark.parametrize("key", BETWEEN_DAEMONS, ids=lambda key: f"{key[0].name}-{key[1].name}-{key[2].name}")
def test_a_row_is_reached_between_daemons(key: Key) -> None:
    """What the case does looks the row up, and afterwards all settles at both daemons."""
    one = Transfer("source", "home")
    BETWEEN_DAEMONS[key](one)
    assert key in one.seen.rows
    one.settle()


@pytest.mark.parametrize("state", [State.OPEN, State.FINISHED])
def test_an_event_without_a_row_is_a_bug_and_the_transfer_settles(state: State) -> None:
    """The endpoint and its peers fail with INTERNAL; one that has finished goes on as it was."""
    one = Transfer("daemon")
    del one.seen[Kind.SEND, state, Event.CANCEL]
    one.meet()
    if state is State.FINISHED:
        one.cancel("receive")
    one.cancel("send")
    assert one.source.bugs == [f"send request, {state.value}: no transition for: its own CANCEL"]
    expected = "INTERNAL" if state is State.OPEN else "PEER_CANCELLED"
    assert one.source.outcomes(one.prefill) == [expected]
    one.end_copy()
    assert one.source.outcomes(one.prefill) == [expected, "settled"]


def test_the_documentation_shows_the_table() -> None:
    """What docs/architecture.md says is what is executed."""
    assert transitions_of("transfer") == as_markdown()
