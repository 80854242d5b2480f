"""An engine that will never send, or receive: who waits for it hears it at once, and who comes later as well."""

from __future__ import annotations

from typing import Final

import pytest

from kvferry.daemon.services import peer_transfers
from kvferry.pools.pool import Pool
from tests.transfer.peer_harness import Node, PeerHarness
from tests.transfer.transfer_harness import REQUEST, Direction, TransferHarness

pytestmark = pytest.mark.any_device

OVER: Final = ["PEER_CANCELLED", "settled"]
OTHER_HALF: Final[dict[Direction, Direction]] = {"send": "receive", "receive": "send"}
BOTH = pytest.mark.parametrize("gone", list(OTHER_HALF))


class Waiting:
    """An engine at one daemon, with a pool."""

    def __init__(self, harness: TransferHarness, name: str = "pool", *, tenant: int = 7) -> None:
        self.harness = harness
        self.session = harness.session()
        self.pool: Pool = harness.pool(name, tenant=tenant)
        self.pages = harness.filled(self.pool, self.session, 1)

    def begin(self, direction: Direction, *daemons: str, others: int = 1) -> None:
        """SEND or RECEIVE; ``others``: how many of the other half it waits for."""
        if direction == "send":
            self.harness.send(self.session, self.pool, self.pages, destinations=others)
        else:
            self.harness.receive(self.session, self.pool, self.pages, sources=others, source_daemons=daemons)

    @property
    def outcomes(self) -> list[str]:
        """Return what it was told."""
        return self.harness.outcomes(self.session)

    @property
    def reason(self) -> str:
        """Return what its FINISHED says."""
        error = self.harness.finished(self.session).error
        assert error is not None
        return error.detail


def at(node: TransferHarness, name: str = "pool") -> Waiting:
    """Return an engine at a daemon."""
    return Waiting(node, name)


@BOTH
def test_who_waits_fails_at_once_with_the_reason(gone: Direction) -> None:
    harness = TransferHarness()
    waiting, other_user = Waiting(harness), Waiting(harness, "theirs", tenant=8)
    waiting.begin(OTHER_HALF[gone])
    assert harness.abandon(gone, reason="aborted by its client", tenant=8) == 0
    assert waiting.outcomes == []
    assert harness.abandon(gone, reason="aborted by its client") == 1
    assert waiting.outcomes == OVER
    assert waiting.reason == "aborted by its client"
    assert other_user.outcomes == []
    assert waiting.pool.allocator.busy_count == 0


@BOTH
def test_who_comes_later_hears_it_at_once_and_once(gone: Direction) -> None:
    harness = TransferHarness()
    late, later = Waiting(harness), Waiting(harness, "later")
    assert harness.abandon(gone, reason="aborted") == 0
    late.begin(OTHER_HALF[gone])
    assert late.outcomes == OVER
    assert late.reason == "the other side ended 0.0 s ago: aborted"
    later.begin(OTHER_HALF[gone])
    assert later.outcomes == OVER
    harness.acknowledge(late.session, late.pool, OTHER_HALF[gone])
    late.begin(OTHER_HALF[gone])
    assert late.outcomes == OVER, "it waits for one that comes after all"


@BOTH
def test_a_half_that_comes_after_all_takes_the_word_back(gone: Direction) -> None:
    harness = TransferHarness()
    again, late = Waiting(harness), Waiting(harness, "late")
    harness.abandon(gone)
    again.begin(gone)
    late.begin(OTHER_HALF[gone])
    assert again.outcomes == late.outcomes == []
    assert harness.transport.under_way


@BOTH
def test_one_of_several_fails_all_that_wait_for_the_others(gone: Direction) -> None:
    """A receive of two sources, of which one has come; or a send to two destinations."""
    harness = TransferHarness()
    waiting, came = Waiting(harness), Waiting(harness, "came")
    waiting.begin(OTHER_HALF[gone], others=2)
    came.begin(gone)
    harness.abandon(gone)
    assert waiting.outcomes[0] == came.outcomes[0] == "PEER_CANCELLED"


@BOTH
def test_who_has_all_it_waits_for_goes_on(gone: Direction) -> None:
    harness = TransferHarness()
    waiting, came = Waiting(harness), Waiting(harness, "came")
    waiting.begin(OTHER_HALF[gone])
    came.begin(gone)
    assert harness.abandon(gone) == 0
    assert waiting.outcomes == came.outcomes == []


@BOTH
def test_what_is_remembered_has_a_time(gone: Direction) -> None:
    harness = TransferHarness()
    late = Waiting(harness)
    harness.abandon(gone)
    harness.pass_time(601)
    late.begin(OTHER_HALF[gone])
    assert late.outcomes == []


# -- between daemons


@pytest.fixture
def harness() -> PeerHarness:
    """Return two daemons."""
    return PeerHarness("source", "home")


def both(harness: PeerHarness) -> tuple[Node, Node]:
    """Return the daemons, the source's first."""
    return harness.nodes["source"], harness.nodes["home"]


def test_a_receive_at_another_daemon_hears_that_no_send_comes(harness: PeerHarness) -> None:
    """Its home is known by its announcement: nobody has to name it."""
    source, home = both(harness)
    waiting = at(home)
    waiting.begin("receive", source.tcp)
    harness.deliver_all()
    assert source.abandon("send", reason="aborted") == 0
    harness.deliver_all()
    assert waiting.outcomes == OVER
    assert waiting.reason == "aborted"
    harness.check_nothing_left()


def test_a_receive_that_comes_later_asks_the_source(harness: PeerHarness) -> None:
    source, home = both(harness)
    source.abandon("send", home.tcp, reason="aborted")
    harness.deliver_all()
    late = at(home)
    late.begin("receive", source.tcp)
    harness.deliver_all()
    assert late.outcomes == OVER
    assert "aborted" in late.reason


def test_a_receive_that_expects_nothing_of_a_daemon_does_not_believe_it(harness: PeerHarness) -> None:
    source, home = both(harness)
    waiting, elsewhere = at(home), at(home, "elsewhere")
    waiting.begin("receive")
    source.abandon("send", home.tcp)
    harness.deliver_all()
    assert waiting.outcomes == []
    elsewhere.begin("receive")
    assert elsewhere.outcomes == []


@pytest.mark.parametrize("connected", [True, False])
def test_a_send_at_another_daemon_hears_that_no_receive_comes(harness: PeerHarness, *, connected: bool) -> None:
    source, home = both(harness)
    if connected:
        home.links.connect(source.tcp)
        harness.deliver_all()
    waiting, late = at(source), at(source, "late")
    waiting.begin("send")
    home.abandon("receive", source.tcp, reason="aborted")
    assert waiting.outcomes == []
    harness.deliver_all()
    assert waiting.outcomes == OVER
    assert waiting.reason == "aborted"
    late.begin("send")
    assert late.outcomes == OVER


def test_a_daemon_that_cannot_be_reached_is_told_later_but_not_too_late(
    harness: PeerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_transfers, "MAX_UNSENT", 1)
    source, home = both(harness)
    first, second = at(source), at(source, "second")
    first.begin("send")
    source.send(second.session, second.pool, second.pages, request="f" * 32)
    home.abandon("receive", source.tcp, request=REQUEST)
    home.abandon("receive", source.tcp, request="f" * 32)
    assert home.peers.is_needed(source.tcp)
    harness.deliver_all()
    assert first.outcomes == [], "the oldest of too many is not told"
    assert second.outcomes == OVER
    assert not home.peers.is_needed(source.tcp)


def test_a_word_that_is_too_old_is_not_said(harness: PeerHarness) -> None:
    source, home = both(harness)
    home.abandon("receive", source.tcp)
    harness.pass_time(601)
    waiting = at(source)
    waiting.begin("send")
    assert not home.peers.is_needed(source.tcp)
    harness.deliver_all()
    assert waiting.outcomes == []


# -- halves that existed, and ended before they were paired


def test_a_send_that_was_cancelled_before_pairing_reaches_a_receive_at_another_daemon(harness: PeerHarness) -> None:
    """The announcement is on its way when the SEND ends; or its connection breaks, and heals."""
    source, home = both(harness)
    sender, waiting = at(source), at(home)
    sender.begin("send")
    waiting.begin("receive", source.tcp)
    source.cancel(sender.session, sender.pool, "send")
    harness.deliver_all()
    assert waiting.outcomes == OVER


@pytest.mark.parametrize("others", [1, 2])
def test_a_receive_that_was_cancelled_before_pairing_reaches_a_send_at_another_daemon(
    harness: PeerHarness, others: int
) -> None:
    """One that comes later; and one that still waits for another destination fails by its own receive's end."""
    source, home = both(harness)
    sender, receiver = at(source), at(home)
    receiver.begin("receive", source.tcp)
    harness.deliver_all()
    home.cancel(receiver.session, receiver.pool, "receive")
    harness.deliver_all()
    sender.begin("send", others=others)
    assert sender.outcomes == (OVER if others == 1 else [])
