"""What a sender hears of its receivers: how many are there, in each reply and result, and when another one comes."""

from __future__ import annotations

import pytest

from kvferry.daemon.transfer.endpoints import EndpointKey
from kvferry.pools.pool import Pool
from kvferry.protocol.transfer_messages import TransferResult
from tests.transfer.peer_harness import PeerHarness
from tests.transfer.transfer_harness import REQUEST, Direction, TransferHarness

pytestmark = pytest.mark.any_device


class Engines:
    """A sender and two receivers, each with a pool and a page."""

    def __init__(self, harness: TransferHarness) -> None:
        self.harness = harness
        self.prefill = harness.session()
        self.source = harness.pool("prefill")
        self.page = harness.filled(self.source, self.prefill, 1)
        self.receivers = [(harness.session(), harness.pool(f"decode{number}")) for number in range(2)]

    def receive(self, number: int) -> int:
        """RECEIVE; return how many sources are there."""
        session, pool = self.receivers[number]
        return self.harness.receive(session, pool, self.harness.filled(pool, session, 1)).matched

    def told(self) -> list[tuple[int, int]]:
        """Return what the sender was told of: (matched, destinations) of each event."""
        assert all(session == self.prefill for session, _ in self.harness.matched)
        return [(one.matched, one.destinations) for _, one in self.harness.matched]

    def result(self, session: int, pool: Pool, direction: Direction) -> TransferResult:
        """RESULT."""
        return self.harness.state_machine.result(session, EndpointKey(pool.tenant, REQUEST, pool.name, direction))


@pytest.fixture
def engines() -> Engines:
    """Return the engines, at one daemon."""
    return Engines(TransferHarness())


def test_a_send_request_may_be_opened_to_wait_for_its_receivers(engines: Engines) -> None:
    opened = engines.harness.send(engines.prefill, engines.source, {}, last=False, destinations=2)
    assert opened.matched == 0
    assert engines.receive(0) == 1
    assert engines.told() == [(1, 2)]
    assert engines.result(engines.prefill, engines.source, "send").matched == 1
    assert engines.receive(1) == 1
    assert engines.told() == [(1, 2), (2, 2)]
    assert not engines.harness.transport.under_way
    assert engines.harness.send(engines.prefill, engines.source, engines.page).matched == 2
    assert len(engines.harness.transport.under_way) == 2
    assert engines.told() == [(1, 2), (2, 2)]


def test_receivers_that_are_there_already_are_in_the_reply(engines: Engines) -> None:
    assert engines.receive(0) == 0
    accepted = engines.harness.send(engines.prefill, engines.source, engines.page, destinations=2)
    assert accepted.matched == 1
    assert engines.told() == []
    session, pool = engines.receivers[0]
    assert engines.result(session, pool, "receive").matched == 1
    engines.receive(1)
    assert engines.told() == [(2, 2)]


def test_a_result_counts_no_more_once_it_has_settled(engines: Engines) -> None:
    engines.receive(0)
    engines.harness.send(engines.prefill, engines.source, engines.page)
    (op,) = engines.harness.transport.under_way
    engines.harness.transport.copy(op)
    engines.harness.transport.end(op)
    found = engines.result(engines.prefill, engines.source, "send")
    assert (found.state, found.matched) == ("settled", 0)


def test_a_receiver_that_hears_of_an_end_is_no_match(engines: Engines) -> None:
    engines.harness.send(engines.prefill, engines.source, {}, last=False)
    engines.harness.cancel(engines.prefill, engines.source, "send")
    engines.receive(0)
    assert engines.told() == []


@pytest.mark.parametrize("first", ["send", "receive"])
def test_between_daemons_an_announcement_counts(first: str) -> None:
    harness = PeerHarness("source", "home")
    source, home = harness.nodes.values()
    prefill, decode = source.session(), home.session()
    pools = source.pool("prefill"), home.pool("decode")
    pages = source.filled(pools[0], prefill, 1), home.filled(pools[1], decode, 1)
    matched = []
    for side in ("send", "receive") if first == "send" else ("receive", "send"):
        if side == "send":
            matched.append(source.send(prefill, pools[0], {}, last=False).matched)
        else:
            home.receive(decode, pools[1], pages[1], source_daemons=(source.tcp,))
        harness.deliver_all()
    assert matched == [int(first == "receive")]
    assert [one.matched for _, one in source.matched] == ([1] if first == "send" else [])
    assert home.matched == []
    assert source.send(prefill, pools[0], pages[0]).matched == 1
    harness.run()
    assert home.outcomes(decode) == ["OK", "settled"]
    harness.check_nothing_left()
