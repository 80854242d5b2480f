"""What both state machines of transfers note of the sides that were accepted, and what holds for them at any time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant

from kvferry.daemon.transfer.endpoints import EndpointKey
from kvferry.daemon.transfer.transitions import State
from kvferry.pools.pool import Pool
from kvferry.protocol.codec import PageIds
from kvferry.protocol.events import Finished, Settled
from tests.kit.transfers import TransferHarness


class Life(NamedTuple):
    """One side as its session is told of it."""

    daemon: TransferHarness
    session: int
    key: EndpointKey


class SidesMachine(RuleBasedStateMachine):
    """Daemons and the sides that they have accepted.

    Attributes:
        lives: how often each side of a session that lives has begun.
        sent: what was sent as an entry of a logical page of a request.
        received: the first logical page and the pages of each RECEIVE.
        checked: how many events of each session were looked at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lives: dict[Life, int] = defaultdict(int)
        self.sent: dict[tuple[str, int, str], set[bytes]] = defaultdict(set)
        self.received: dict[Life, tuple[int, PageIds]] = {}
        self.checked: dict[tuple[TransferHarness, int], int] = defaultdict(int)

    def daemons(self) -> Sequence[TransferHarness]:
        raise NotImplementedError

    def settled(self, life: Life) -> None:
        """Hear that the pages of a RECEIVE are its session's again."""

    def pool(self, daemon: TransferHarness, name: str) -> Pool:
        (found,) = [one for one in daemon.pools if one.name == name]
        return found

    def note_sent(self, daemon: TransferHarness, pool: Pool, ids: PageIds, request: str, first_page: int) -> None:
        for logical, content in enumerate(daemon.content(pool, ids), first_page):
            for name, value in content.items():
                self.sent[request, logical, name].add(value)

    def forget(self, daemon: TransferHarness, session: int | None = None) -> None:
        for life in [one for one in self.lives if one.daemon is daemon and session in {None, one.session}]:
            del self.lives[life]

    def cancel(self, data: st.DataObject) -> None:
        live = [(one, side) for one in self.daemons() for side in one.state_machine.endpoints]
        live = [(one, side) for one, side in live if side.session_id in one.told]
        if live:
            daemon, side = data.draw(st.sampled_from(live))
            assert isinstance(side.pool, Pool)
            daemon.cancel(side.session_id, side.pool, side.direction, side.request_id)

    def acknowledge(self, _data: st.DataObject) -> None:
        for daemon, session, key in self.lives:
            daemon.acknowledge(session, self.pool(daemon, key.pool), key.direction, key.request_id)

    @invariant()
    def pages_are_held_as_they_must(self) -> None:
        for daemon in self.daemons():
            daemon.check()
            assert not daemon.bugs

    @invariant()
    def every_side_is_told_once(self) -> None:
        for (daemon, session, key), lives in self.lives.items():
            told = [
                "finished" if isinstance(event, Finished) else "settled"
                for event in daemon.told[session]
                if (event.request_id, event.pool, event.direction) == key[1:]
            ]
            assert told == ["finished", "settled"] * (len(told) // 2) + ["finished"] * (len(told) % 2)
            side = daemon.state_machine.endpoint(session, key)
            expected = 2 * lives if side is None else 2 * lives - (2 if side.state is State.OPEN else 1)
            assert len(told) == expected

    @invariant()
    def what_succeeded_has_the_right_bytes(self) -> None:
        """Check the pages of every success as it is told, before anything else can happen to them."""
        for daemon in self.daemons():
            for session, events in daemon.told.items():
                for event in events[self.checked[daemon, session] :]:
                    tenant = self.pool(daemon, event.pool).tenant
                    life = Life(daemon, session, EndpointKey(tenant, event.request_id, event.pool, event.direction))
                    if event.direction == "receive" and isinstance(event, Settled):
                        self.settled(life)
                    elif event.direction == "receive" and isinstance(event, Finished) and event.error is None:
                        self.check_bytes(life)
                self.checked[daemon, session] = len(events)

    def check_bytes(self, life: Life) -> None:
        first_page, ids = self.received[life]
        for logical, content in enumerate(life.daemon.content(self.pool(life.daemon, life.key.pool), ids), first_page):
            for name, value in content.items():
                assert value in self.sent[life.key.request_id, logical, name], (name, logical)
