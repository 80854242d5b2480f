"""What happens to transfers between daemons: a test for each row of the table in ``daemon.transfer.transitions``.

Each is tried by mapping, as between daemons of one host, and by bounce buffers, as between hosts. What differs is when
a home has settled: a mapped copy that is under way may write pages until it ends, a slot that a peer writes is no page.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec
import pytest

from kvferry.daemon.transfer import peer_transfers
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.runs import PageIds
from kvferry.pools.pool import Pool
from kvferry.protocol.base import PageList
from kvferry.protocol.errors import (
    PageBusyError,
    TransferExistsError,
    TransferFailedError,
    UnknownTransferError,
)
from kvferry.protocol.manifests import Component, Entry
from kvferry.protocol.peer_messages import (
    Announce,
    Confirm,
    Confirmed,
    Grant,
    PeerSend,
    ReceiveClosed,
    SendRefused,
    SendWithdrawn,
    StepReady,
    Written,
)
from kvferry.protocol.transfer_messages import LayerStep
from tests.transfer.peer_harness import Node, PeerHarness
from tests.transfer.transfer_harness import layers

pytestmark = pytest.mark.any_device

Way: TypeAlias = Literal["ipc", "tcp"]
MAPPED, BY_SLOTS = "ipc", "tcp"
PAGES = 3
POOL_PAGES = 9
BYTES = PAGES * 4 * 8
FIRST = pytest.mark.parametrize("first", ["send", "receive"])
STEPS = (LayerStep(first_layer=0, layers=1, event=0, value=1), LayerStep(first_layer=1, layers=1, event=1, value=1))


class Transfer:
    """A prefill engine at one daemon, a decode engine at another, and their pages.

    Attributes:
        way: how the daemons reach each other: of one host, or not.
        third: a daemon that has nothing to do with them, until a test says so.
    """

    def __init__(self, way: Way) -> None:
        self.way: Way = way
        self.harness = PeerHarness("source", "home", "third")
        self.source, self.home, self.third = self.harness.nodes.values()
        self.prefill, self.decode = self.source.session(), self.home.session()
        self.prefill_pool, self.decode_pool = self.source.pool("prefill"), self.home.pool("decode")
        self.prefill_pool.allocator.allocate(self.prefill, 2)  # so that the page numbers differ
        self.source_pages = self.source.filled(self.prefill_pool, self.prefill, PAGES)
        self.home_pages = self.home.filled(self.decode_pool, self.decode, PAGES)

    def greet(self) -> None:
        """Let the home and the source know each other."""
        self.home.links.connect(self.address(self.source))
        self.harness.deliver_all()

    def address(self, node: Node) -> str:
        """Return how the others reach a daemon."""
        return node.ipc if self.way == MAPPED else node.tcp

    def send(
        self,
        *,
        first: int = 0,
        stop: int = PAGES,
        last: bool = True,
        first_token: int | None = None,
        steps: tuple[LayerStep, ...] = (),
        destinations: int = 1,
        deadline_s: float = 30.0,
    ) -> None:
        """SEND the source's pages, or those of one chunk."""
        self.source.send(
            self.prefill,
            self.prefill_pool,
            self.source_pages[first:stop],
            first_page=first,
            last=last,
            first_token=first_token,
            steps=steps,
            destinations=destinations,
            deadline_s=deadline_s,
        )

    def receive(self, *daemons: Node, sources: int = 1, deadline_s: float = 30.0) -> int:
        """RECEIVE into the home's pages from these daemons, the source by default; return the generation."""
        return self.home.receive(
            self.decode,
            self.decode_pool,
            self.home_pages,
            sources=sources,
            source_daemons=tuple(self.address(one) for one in daemons or (self.source,)),
            deadline_s=deadline_s,
        ).generation

    def meet(self, *, steps: tuple[LayerStep, ...] = (), last: bool = True) -> None:
        """Bring both sides together; one copy or write is under way then."""
        self.send(steps=steps, last=last, stop=PAGES if last else 1)
        self.receive()
        self.harness.deliver_all()

    def under_way(self) -> tuple[Node, str, object]:
        """Return the one copy or write that is under way."""
        (step,) = self.harness.steps()
        return step

    def told(self) -> tuple[list[str], list[str]]:
        """Return what prefill and decode were told; nothing of the dead."""
        return self.outcomes(self.source, self.prefill), self.outcomes(self.home, self.decode)

    def outcomes(self, node: Node, session: int) -> list[str]:
        """Return what a session was told; nothing if it or its daemon is dead."""
        return node.outcomes(session) if session in node.told else []

    def held(self) -> tuple[int, int]:
        """Return how many pages are held at the source and at the home."""
        return self.prefill_pool.allocator.busy_count, self.decode_pool.allocator.busy_count

    def same_bytes(self) -> bool:
        """Return whether the home's pages hold what the source's hold."""
        return same_bytes(self.source, self.prefill_pool, self.source_pages, self)

    def another_prefill(self) -> tuple[int, Pool, PageIds]:
        """Return a session, pool and pages at the third daemon."""
        session, pool = self.third.session(), self.third.pool("prefill")
        return session, pool, self.third.filled(pool, session, PAGES)


def same_bytes(node: Node, pool: Pool, pages: PageIds, both: Transfer) -> bool:
    """Return whether the home's pages hold what these hold."""
    return node.content(pool, pages) == both.home.content(both.decode_pool, both.home_pages)


@pytest.fixture(params=[MAPPED, BY_SLOTS])
def both(request: pytest.FixtureRequest) -> Transfer:
    """Return a transfer that has not begun, by each way."""
    return Transfer(request.param)


@pytest.fixture
def mapped() -> Transfer:
    """Return a transfer between daemons of one host."""
    return Transfer("ipc")


@pytest.fixture
def by_slots() -> Transfer:
    """Return a transfer between hosts."""
    return Transfer("tcp")


# -- announce, send request, grant, end


@FIRST
def test_a_transfer_in_either_order(both: Transfer, first: str) -> None:
    if first == "send":
        both.send(first_token=5)
        both.receive()
    else:
        both.receive()
        both.harness.deliver_all()
        both.send(first_token=5)
    both.harness.deliver_all()
    assert both.told() == ([], []), "nothing has moved"
    assert both.held() == (PAGES, PAGES)
    both.harness.run()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.held() == (0, 0)
    assert both.same_bytes()
    assert both.home.finished(both.decode).first_token == 5
    both.harness.check_nothing_left()


def test_nothing_moves_without_an_announcement(both: Transfer) -> None:
    both.send()
    both.receive(both.third)
    both.harness.run()
    assert both.told() == ([], [])
    assert not both.source.state_machine.endpoints.remote_endpoints


def test_a_source_says_what_it_has_in_order(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    both.send(stop=1, last=False)
    both.send(first=1)
    said = [both.harness.deliver(both.source, both.home) for _ in range(2)]
    assert [one.chunk for one in said if isinstance(one, PeerSend)] == [0, 1]
    assert [one.manifest is None for one in said if isinstance(one, PeerSend)] == [False, True]
    both.harness.run()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.same_bytes()


def test_both_sides_count_the_bytes(both: Transfer) -> None:
    both.meet()
    both.harness.run()
    sent, received = both.source.finished(both.prefill), both.home.finished(both.decode)
    assert (sent.moved_bytes, received.moved_bytes) == (BYTES, BYTES)
    assert (sent.pages, received.pages) == (PAGES, PAGES)


def test_layers_move_when_their_events_have_come(both: Transfer) -> None:
    both.meet(steps=STEPS)
    assert not list(both.harness.steps())
    both.source.events(both.prefill, 1, 0)
    both.harness.deliver_until(both.source, both.home, StepReady)
    both.harness.run()
    assert both.told() == ([], [])
    assert differing(both) == {"main/k/1", "main/v/1"}
    both.source.events(both.prefill, 1, 1)
    both.harness.run()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.same_bytes()


def differing(both: Transfer) -> set[str]:
    """Return the entries in which the home's pages differ from the source's."""
    source = both.source.content(both.prefill_pool, both.source_pages)
    home = both.home.content(both.decode_pool, both.home_pages)
    return {name for ours, theirs in zip(source, home, strict=True) for name in ours if ours[name] != theirs[name]}


def test_an_announcement_that_is_said_again_changes_nothing(both: Transfer) -> None:
    both.greet()
    both.receive()
    both.send()
    both.harness.deliver_until(both.home, both.source, Announce)
    peer = both.home.links.connect(both.address(both.source))
    assert peer is not None
    both.home.links.told.on_up(peer)
    both.harness.run()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.same_bytes()
    both.harness.check_nothing_left()


def test_one_send_fills_receives_of_two_daemons(both: Transfer) -> None:
    decode, pool = both.third.session(), both.third.pool("decode")
    pages = both.third.filled(pool, decode, PAGES)
    both.send(destinations=2)
    both.receive()
    both.harness.run()
    assert both.told() == ([], ["OK", "settled"])
    assert both.held() == (PAGES, 0), "the source waits for its second receive request"
    both.third.receive(decode, pool, pages, source_daemons=(both.address(both.source),))
    both.harness.run()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.third.outcomes(decode) == ["OK", "settled"]
    assert both.third.content(pool, pages) == both.source.content(both.prefill_pool, both.source_pages)
    assert both.source.finished(both.prefill).moved_bytes == 2 * BYTES
    both.harness.check_nothing_left()


def stages(both: Transfer) -> list[tuple[Node, int, Pool, PageIds]]:
    """Return a prefill engine of one layer at each of two daemons."""
    found = []
    for layer, node in enumerate((both.source, both.third)):
        session, pool = node.session(), node.pool(f"stage{layer}", layers(1, first=layer))
        found.append((node, session, pool, node.filled(pool, session, PAGES)))
    return found


def test_a_receive_takes_stages_of_two_daemons(both: Transfer) -> None:
    both.receive(both.source, both.third, sources=2)
    both.harness.deliver_all()
    both_stages = stages(both)
    for node, session, pool, pages in both_stages:
        assert both.outcomes(both.home, both.decode) == []
        node.send(session, pool, pages)
        both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["OK", "settled"]
    for node, session, pool, pages in both_stages:
        assert node.outcomes(session) == ["OK", "settled"]
        for ours, theirs in zip(
            node.content(pool, pages), both.home.content(both.decode_pool, both.home_pages), strict=True
        ):
            assert ours.items() <= theirs.items()
    both.harness.check_nothing_left()


def test_of_two_replicas_the_first_to_come_is_taken(both: Transfer) -> None:
    both.receive(both.source, both.third, sources=2)
    both.harness.deliver_all()
    replicas = []
    for node in (both.third, both.source):
        session = node.session()
        pool = node.pool("replica", [replica(one) for one in layers(2)])
        replicas.append((node, session, pool, node.filled(pool, session, PAGES)))
        node.send(session, pool, replicas[-1][-1])
        both.harness.deliver_all()
    both.harness.run()
    node, _, pool, pages = replicas[0]
    assert same_bytes(node, pool, pages, both), "the one that came first"
    assert [node.outcomes(session) for node, session, _, _ in replicas] == [["OK", "settled"]] * 2
    assert [node.finished(session).moved_bytes for node, session, _, _ in replicas] == [BYTES, 0]
    both.harness.check_nothing_left()


def test_of_replicas_that_cut_their_chunks_apart_each_page_comes_once(both: Transfer) -> None:
    both.receive(both.source, both.third, sources=2)
    both.harness.deliver_all()
    replicas = []
    for node in (both.source, both.third):
        session, pool = node.session(), node.pool("replica", [replica(one) for one in layers(2)])
        replicas.append((node, session, pool, node.filled(pool, session, PAGES)))
    for which, first, stop in ((0, 0, 1), (1, 0, PAGES), (0, 1, PAGES)):
        node, session, pool, pages = replicas[which]
        node.send(session, pool, pages[first:stop], first_page=first, last=stop == PAGES)
        both.harness.deliver_all()
    both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["OK", "settled"]
    sent = [node.content(pool, pages) for node, _, pool, pages in replicas]
    assert both.home.content(both.decode_pool, both.home_pages) == [*sent[0][:1], *sent[1][1:]]
    moved = [node.finished(session).moved_bytes for node, session, _, _ in replicas]
    assert moved == [BYTES // PAGES, BYTES - BYTES // PAGES]
    both.harness.check_nothing_left()


def replica(entry: Entry) -> Entry:
    """Return an entry that another pool holds as well."""
    return msgspec.structs.replace(entry, replicas=2)


# -- send requests that do not fit


def test_a_first_chunk_that_does_not_fit_fails_alone(both: Transfer) -> None:
    both.receive(both.source, both.third)
    wrong = both.source.filled(both.prefill_pool, both.prefill, PAGES + 1)
    both.source.send(both.prefill, both.prefill_pool, wrong)
    both.harness.deliver_all()
    assert both.told() == (["LENGTH_MISMATCH", "settled"], [])
    (receive_request,) = both.home.state_machine.endpoints.receive_requests.values()
    assert "refused: " in receive_request.waits_for()
    session, pool, pages = both.another_prefill()
    both.third.send(session, pool, pages)
    both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["OK", "settled"]
    assert same_bytes(both.third, pool, pages, both)
    both.harness.check_nothing_left()


def test_a_later_chunk_that_does_not_fit_fails_both(both: Transfer) -> None:
    both.meet(last=False)
    wrong = both.source.filled(both.prefill_pool, both.prefill, PAGES)
    both.source.send(both.prefill, both.prefill_pool, wrong, first_page=1)
    both.harness.run()
    assert both.told() == (["LENGTH_MISMATCH", "settled"], ["LENGTH_MISMATCH", "settled"])
    assert both.held() == (0, 0)
    both.harness.check_nothing_left()


def test_an_send_beyond_the_sources_is_refused(both: Transfer) -> None:
    both.receive(both.source, both.third)
    session, pool, pages = both.another_prefill()
    both.harness.deliver_all()
    both.send()
    both.third.send(session, pool, pages)
    both.harness.run()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.third.outcomes(session) == ["UNEXPECTED_SOURCE", "settled"]
    both.harness.check_nothing_left()


def test_a_pool_that_covers_too_little_is_refused(both: Transfer) -> None:
    both.receive()
    session, pool = both.source.session(), both.source.pool("half", layers(1))
    both.harness.deliver_all()
    both.source.send(session, pool, both.source.filled(pool, session, PAGES))
    both.harness.run()
    assert both.source.outcomes(session) == ["UNCOVERED_ENTRY", "settled"]
    assert both.outcomes(both.home, both.decode) == []


# -- another tenant's


def test_a_receive_of_another_tenant_is_refused_where_the_request_lives(both: Transfer) -> None:
    both.send()
    decode, pool = both.third.session(), both.third.pool("foreign", tenant=8)
    pages = both.third.filled(pool, decode, PAGES)
    both.third.receive(decode, pool, pages, source_daemons=(both.address(both.source),))
    both.harness.run()
    assert not both.source.state_machine.endpoints.announcements
    (receive_request,) = both.third.state_machine.endpoints.receive_requests.values()
    assert "another tenant" in receive_request.waits_for()
    both.receive()
    both.harness.run()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])


def test_a_side_of_another_tenant_is_refused_where_a_receive_is_announced(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    session, pool = both.source.session(), both.source.pool("foreign", tenant=8)
    pages = both.source.filled(pool, session, PAGES)
    with pytest.raises(TransferExistsError, match="another tenant"):
        both.source.send(session, pool, pages)
    with pytest.raises(TransferExistsError, match="another tenant"):
        both.source.receive(session, pool, pages)
    both.send()
    both.harness.run()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])


def test_too_many_announcements_are_refused(both: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_transfers, "MAX_ANNOUNCEMENTS", 0)
    both.receive()
    both.harness.deliver_all()
    assert not both.source.state_machine.endpoints.announcements
    (receive_request,) = both.home.state_machine.endpoints.receive_requests.values()
    assert "0 receive requests of other daemons are announced here" in receive_request.waits_for()


# -- the prefill engine dies


def test_prefill_dies_before_its_last_send(both: Transfer) -> None:
    both.meet(last=False)
    step = both.under_way()
    both.source.lose(both.prefill)
    both.harness.deliver_all()
    if both.way == BY_SLOTS:  # a slot is no page: only the source waits, for its own write
        assert both.outcomes(both.home, both.decode) == ["PEER_LOST", "settled"]
        assert both.held() == (1, 0)
    else:  # the copy may write pages until it has ended; nothing is read at the source that matters
        assert both.outcomes(both.home, both.decode) == ["PEER_LOST"]
        assert both.held() == (0, PAGES)
    both.harness.step(*step)
    both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["PEER_LOST", "settled"]
    assert both.held() == (0, 0)
    both.harness.check_nothing_left()


def test_prefill_dies_before_its_steps_are_ready(both: Transfer) -> None:
    both.meet(steps=STEPS)
    both.source.lose(both.prefill)
    both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["PEER_LOST", "settled"]
    assert both.held() == (0, 0)
    both.harness.check_nothing_left()


def test_prefill_dies_after_its_last_send_and_the_receive_completes(both: Transfer) -> None:
    both.send()
    both.source.lose(both.prefill)
    both.receive()
    both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["OK", "settled"]
    assert both.same_bytes()
    both.harness.check_nothing_left()


def test_a_receive_is_begun_anew_on_another_source(both: Transfer) -> None:
    both.meet(last=False)
    step = both.under_way()
    both.source.lose(both.prefill)
    both.harness.deliver_all()
    session, pool, pages = both.another_prefill()
    if both.way == MAPPED:
        with pytest.raises(TransferExistsError):
            both.receive(both.third)  # its pages may still be written
        both.harness.step(*step)
        both.harness.run()
    assert both.receive(both.third) == 2
    both.third.send(session, pool, pages)
    if both.way == BY_SLOTS:  # the write goes on, into its slot
        both.harness.deliver_all()
        both.harness.step(*step)
    both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["PEER_LOST", "settled", "OK", "settled"]
    assert both.home.finished(both.decode).generation == 2
    assert same_bytes(both.third, pool, pages, both)
    both.harness.check_nothing_left()


def test_what_was_said_to_an_older_generation_is_void(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    both.send()  # is on its way to the first generation
    both.home.cancel(both.decode, both.decode_pool, "receive")
    assert both.receive(both.third) == 2
    both.harness.deliver(both.source, both.home)
    (receive_request,) = both.home.state_machine.endpoints.receive_requests.values()
    assert not receive_request.send_requests
    both.harness.run()
    assert both.told() == (["PEER_CANCELLED", "settled"], ["CANCELLED", "settled"])


def test_another_sessions_receive_is_not_the_one_before_it(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    both.send()  # is on its way to the first session's receive request
    both.home.lose(both.decode)
    other = both.home.session()
    pages = both.home.filled(both.decode_pool, other, PAGES)
    accepted = both.home.receive(other, both.decode_pool, pages, source_daemons=(both.address(both.third),))
    assert accepted.generation == 1, "the session counts for itself"
    both.harness.deliver(both.source, both.home)
    (receive_request,) = both.home.state_machine.endpoints.receive_requests.values()
    assert not receive_request.send_requests
    both.harness.run()
    assert both.outcomes(both.home, other) == []


def test_a_daemon_that_the_receive_does_not_name_is_refused(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    (receive_request,) = both.home.state_machine.endpoints.receive_requests.values()
    receive_request.source_daemons = (both.address(both.third),)
    both.send()
    both.harness.run()
    assert both.told() == (["UNEXPECTED_SOURCE", "settled"], [])
    assert not receive_request.send_requests
    assert not both.home.state_machine.peers.remote_pools, "it has no say in what is remembered here"


def test_both_sides_are_told_how_many_pages_were_trimmed(both: Transfer) -> None:
    both.greet()
    window = [Component(name="swa", space="swa", pages=POOL_PAGES, kind="window")]
    parties = []
    for node, session, count in ((both.source, both.prefill, 3), (both.home, both.decode, 2)):
        pool = node.pool("windows", layers(1, component="swa"), pages=POOL_PAGES, components=window)
        ids = pool.allocator_of("swa").allocate(session, count)
        parties.append((pool, [(PageList(component="swa", first_page=None, pages=count), ids)]))
    (source_pool, sent), (home_pool, wanted) = parties
    both.source.send(both.prefill, source_pool, sent)
    both.home.receive(both.decode, home_pool, wanted, source_daemons=(both.address(both.source),))
    both.harness.run()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.source.finished(both.prefill).trimmed_pages == 1
    assert both.home.finished(both.decode).trimmed_pages == 1


# -- pools of other daemons


def test_a_deleted_pools_memory_is_given_up(mapped: Transfer) -> None:
    mapped.meet()
    ((key, pool),) = mapped.home.state_machine.peers.remote_pools.items()
    mapped.harness.run()
    pool.mapping = region = HostRegion.create("mapped", 4096)
    mapped.source.peers.pool_removed(mapped.prefill_pool)
    mapped.harness.run()
    assert region.fd == -1, "it is closed"
    assert key not in mapped.home.state_machine.peers.remote_pools


def test_pools_are_not_remembered_for_receives_that_do_not_exist(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    both.send()
    both.home.cancel(both.decode, both.decode_pool, "receive")
    both.harness.run()
    assert not both.home.state_machine.peers.remote_pools


# -- the decode engine dies


def test_decode_dies(both: Transfer) -> None:
    both.meet()
    step = both.under_way()
    both.home.lose(both.decode)
    both.harness.deliver_all()
    if both.way == BY_SLOTS:
        assert both.told() == (["PEER_LOST"], [])
        assert both.held() == (PAGES, 0), "its bytes are being read"
    else:
        assert both.told() == (["PEER_LOST", "settled"], [])
        assert both.held() == (0, PAGES), "they may be written"
    both.harness.step(*step)
    both.harness.run()
    assert both.told() == (["PEER_LOST", "settled"], [])
    assert both.held() == (0, 0)
    assert both.decode_pool.allocator.idle
    both.harness.check_nothing_left()


# -- a daemon dies


def test_the_source_daemon_dies(both: Transfer) -> None:
    both.meet()
    both.harness.end(both.source)
    assert both.outcomes(both.home, both.decode) == [], "nobody has noticed"
    both.harness.notice(both.home, both.source)
    assert both.outcomes(both.home, both.decode)[:1] == ["PEER_LOST"]
    both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["PEER_LOST", "settled"]
    both.harness.check_nothing_left()


def test_the_source_daemon_dies_while_its_memory_is_read(mapped: Transfer) -> None:
    mapped.meet()
    mapped.harness.end(mapped.source)
    mapped.harness.notice(mapped.home, mapped.source)
    assert mapped.outcomes(mapped.home, mapped.decode) == ["PEER_LOST"]
    assert mapped.held()[1] == PAGES
    mapped.harness.run()
    assert mapped.outcomes(mapped.home, mapped.decode) == ["PEER_LOST", "settled"]


def test_the_source_daemon_dies_before_it_has_confirmed(mapped: Transfer) -> None:
    mapped.meet()
    mapped.harness.step(*mapped.under_way())
    mapped.harness.end(mapped.source)
    mapped.harness.notice(mapped.home, mapped.source)
    assert mapped.outcomes(mapped.home, mapped.decode) == ["PEER_LOST", "settled"]
    mapped.harness.check_nothing_left()


def test_the_source_daemon_dies_before_anything_of_it_joined(both: Transfer) -> None:
    both.receive(both.source, both.third)
    both.harness.deliver_all()
    both.harness.end(both.source)
    both.harness.notice(both.home, both.source)
    (receive_request,) = both.home.state_machine.endpoints.receive_requests.values()
    assert f"no connection to {both.address(both.source)}" in receive_request.waits_for()
    assert both.address(both.third) not in receive_request.waits_for()
    session, pool, pages = both.another_prefill()
    both.third.send(session, pool, pages)
    both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["OK", "settled"]


def test_the_source_daemon_restarts_and_hears_of_receives_that_still_wait(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    again = both.harness.restart(both.source)
    both.harness.notice(both.home, both.source)
    both.harness.heal()
    session, pool = again.session(), again.pool("prefill")
    pages = again.filled(pool, session, PAGES)
    again.send(session, pool, pages)
    both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["OK", "settled"]
    assert same_bytes(again, pool, pages, both)
    both.harness.check_nothing_left()


def test_the_grants_of_a_source_daemon_that_restarts_are_void(both: Transfer) -> None:
    both.meet()
    again = both.harness.restart(both.source)
    for connection in both.harness.network.connections():  # reopened, and the break not noticed before that
        if connection.broken:
            connection.reopen()
    both.harness.deliver_all()
    assert both.outcomes(both.home, both.decode)[:1] == ["PEER_LOST"]
    assert not again.remote.sending
    both.harness.run()
    assert both.outcomes(both.home, both.decode) == ["PEER_LOST", "settled"]
    both.harness.check_nothing_left()


def test_the_destination_daemon_dies(both: Transfer) -> None:
    both.meet()
    both.harness.end(both.home)
    both.harness.notice(both.source, both.home)
    if both.way == BY_SLOTS:
        assert both.told() == (["PEER_LOST"], [])
        assert both.held()[0] == PAGES, "its bytes are being read"
        both.harness.step(*both.under_way(), TransferFailedError("nobody is there"))
    assert both.told() == (["PEER_LOST", "settled"], [])
    assert both.held()[0] == 0
    both.harness.check_nothing_left()


def test_the_destination_daemon_restarts_and_the_old_grant_is_void(by_slots: Transfer) -> None:
    by_slots.meet()
    by_slots.harness.restart(by_slots.home)
    by_slots.harness.notice(by_slots.source, by_slots.home)
    by_slots.harness.heal()
    assert by_slots.told() == (["PEER_LOST"], [])
    by_slots.harness.step(*by_slots.under_way())
    by_slots.harness.run()
    assert by_slots.told() == (["PEER_LOST", "settled"], [])
    by_slots.harness.check_nothing_left()


# -- partition


def test_a_partition_ends_with_the_deadline_on_both_sides(both: Transfer) -> None:
    both.meet()
    both.harness.cut(both.source, both.home)  # neither notices
    step = both.under_way()
    both.harness.pass_time(31.0)
    assert [outcomes[0] for outcomes in both.told()] == ["DEADLINE", "DEADLINE"]
    both.harness.step(*step)
    assert both.told() == (["DEADLINE", "settled"], ["DEADLINE", "settled"])
    both.harness.check_nothing_left()


def test_a_partition_that_both_notice(both: Transfer) -> None:
    both.meet()
    both.harness.cut(both.source, both.home)
    both.harness.notice(both.source, both.home)
    both.harness.notice(both.home, both.source)
    assert [outcomes[0] for outcomes in both.told()] == ["PEER_LOST", "PEER_LOST"]
    both.harness.run()
    assert both.told() == (["PEER_LOST", "settled"], ["PEER_LOST", "settled"])
    both.harness.check_nothing_left()


@pytest.mark.parametrize("who", ["source", "home"])
def test_a_break_that_only_one_side_notices_ends_it_on_both(both: Transfer, who: str) -> None:
    both.meet()
    noticing, other = (both.source, both.home) if who == "source" else (both.home, both.source)
    connection = both.harness.connection(noticing, other)
    connection.break_off()
    connection.reopen()
    both.harness.run()
    assert [outcomes[0] for outcomes in both.told()] == ["PEER_LOST", "PEER_LOST"], "the other must not wait for more"
    assert both.held() == (0, 0)
    both.harness.check_nothing_left()


def test_receives_are_announced_again_when_a_link_is_up_again(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    both.harness.cut(both.source, both.home)
    both.send()
    both.harness.run()
    assert both.told() == ([], []), "the send request is lost on the way"
    both.harness.notice(both.home, both.source)
    (receive_request,) = both.home.state_machine.endpoints.receive_requests.values()
    assert "no connection to" in receive_request.waits_for()
    both.harness.heal()
    assert "no connection to" not in receive_request.waits_for()
    assert both.told() == (["PEER_LOST", "settled"], []), "what became of the send request nobody can tell"
    both.source.acknowledge(both.prefill, both.prefill_pool, "send")
    both.send()
    both.harness.run()
    assert both.told() == (["PEER_LOST", "settled", "OK", "settled"], ["OK", "settled"])
    both.harness.check_nothing_left()


def test_a_send_after_the_link_is_up_again_is_taken(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    both.harness.cut(both.source, both.home)
    both.harness.heal()
    both.send()
    both.harness.run()
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.same_bytes()
    both.harness.check_nothing_left()


# -- daemons that are not there


def test_an_unreachable_daemon_is_named_at_the_deadline(both: Transfer) -> None:
    both.harness.end(both.source)
    both.receive()
    both.harness.run()
    (receive_request,) = both.home.state_machine.endpoints.receive_requests.values()
    assert f"no connection to {both.address(both.source)}" in receive_request.waits_for()
    (shown,) = both.home.peers.status()
    assert (shown.address, shown.state, shown.announced) == (both.address(both.source), "down", 1)
    both.harness.pass_time(31.0)
    (finished,) = [both.home.finished(both.decode)]
    assert finished.error is not None
    assert finished.error.code == "DEADLINE"
    assert f"no connection to {both.address(both.source)}" in finished.error.detail
    both.harness.check_nothing_left()


def test_status_shows_who_waits_where(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    (at_home,), (at_source,) = both.home.peers.status(), both.source.peers.status()
    assert (at_home.address, at_home.state, at_home.announced) == (both.address(both.source), "up", 1)
    assert (at_source.address, at_source.state, at_source.waiting) == (both.address(both.home), "up", 1)


def test_a_daemon_is_not_its_own_source(both: Transfer) -> None:
    own, other = both.address(both.home), both.address(both.source)
    assert both.home.peers.source_daemons((other, own, other)) == (other,)


# -- deadlines


def test_the_deadline_of_a_receive_that_nobody_joined(both: Transfer) -> None:
    both.receive(deadline_s=5.0)
    both.harness.deliver_all()
    both.harness.cut(both.source, both.home)  # the receive request's end is lost on the way
    both.harness.pass_time(5.0)
    assert both.told() == ([], ["DEADLINE", "settled"])
    assert not both.source.state_machine.endpoints.announcements, "the source has its own clock"
    both.harness.check_nothing_left()


def test_the_deadline_of_the_receive(both: Transfer) -> None:
    both.send(deadline_s=60.0)
    both.receive(deadline_s=5.0)
    both.harness.deliver_all()
    step = both.under_way()
    both.home.pass_time(5.0)  # its clock is the first to see it
    assert both.outcomes(both.home, both.decode)[0] == "DEADLINE"
    both.harness.deliver_all()
    assert both.outcomes(both.source, both.prefill)[0] == "DEADLINE"
    both.harness.step(*step)
    both.harness.run()
    assert both.told() == (["DEADLINE", "settled"], ["DEADLINE", "settled"])
    both.harness.check_nothing_left()


def test_the_deadline_of_the_send(both: Transfer) -> None:
    both.send(deadline_s=5.0)
    both.receive(deadline_s=60.0)
    both.harness.deliver_all()
    step = both.under_way()
    both.source.pass_time(5.0)
    assert both.outcomes(both.source, both.prefill)[0] == "DEADLINE"
    both.harness.deliver_until(both.source, both.home, SendWithdrawn)
    assert both.outcomes(both.home, both.decode)[0] == "DEADLINE"
    both.harness.step(*step)
    both.harness.run()
    assert both.told() == (["DEADLINE", "settled"], ["DEADLINE", "settled"])
    both.harness.check_nothing_left()


# -- cancels, and what settles when


def test_the_receiver_cancels(both: Transfer) -> None:
    both.meet()
    step = both.under_way()
    both.home.cancel(both.decode, both.decode_pool, "receive")
    both.harness.deliver_all()
    if both.way == BY_SLOTS:
        assert both.told() == (["PEER_CANCELLED"], ["CANCELLED", "settled"])
    else:
        assert both.told() == (["PEER_CANCELLED", "settled"], ["CANCELLED"])
    both.harness.step(*step)
    both.harness.run()
    assert both.told() == (["PEER_CANCELLED", "settled"], ["CANCELLED", "settled"])
    both.harness.check_nothing_left()


def test_the_sender_cancels(both: Transfer) -> None:
    both.meet()
    step = both.under_way()
    both.source.cancel(both.prefill, both.prefill_pool, "send")
    both.harness.deliver_all()
    if both.way == BY_SLOTS:
        assert both.told() == (["CANCELLED"], ["PEER_CANCELLED", "settled"])
    else:
        assert both.told() == (["CANCELLED", "settled"], ["PEER_CANCELLED"])
    both.harness.step(*step)
    both.harness.run()
    assert both.told() == (["CANCELLED", "settled"], ["PEER_CANCELLED", "settled"])
    both.harness.check_nothing_left()


def test_pages_that_a_copy_may_still_write_cannot_be_used(mapped: Transfer) -> None:
    mapped.meet()
    mapped.home.cancel(mapped.decode, mapped.decode_pool, "receive")
    mapped.harness.deliver_all()
    with pytest.raises(PageBusyError):
        mapped.home.send(mapped.decode, mapped.decode_pool, mapped.home_pages, request="f" * 32)
    mapped.harness.run()
    mapped.home.send(mapped.decode, mapped.decode_pool, mapped.home_pages, request="f" * 32)


def test_what_lands_in_a_slot_after_the_receive_is_over_touches_no_page(by_slots: Transfer) -> None:
    by_slots.meet()
    by_slots.home.cancel(by_slots.decode, by_slots.decode_pool, "receive")
    by_slots.harness.deliver_all()
    before = by_slots.home.content(by_slots.decode_pool, by_slots.home_pages)
    by_slots.harness.run()
    assert by_slots.home.content(by_slots.decode_pool, by_slots.home_pages) == before


def test_a_transfer_that_fails_fails_both(both: Transfer) -> None:
    both.meet()
    both.harness.step(*both.under_way(), TransferFailedError("scripted"))
    both.harness.run()
    assert both.told() == (["TRANSFER_FAILED", "settled"], ["TRANSFER_FAILED", "settled"])
    both.harness.check_nothing_left()


def test_what_was_read_after_its_send_had_ended_does_not_count(mapped: Transfer) -> None:
    mapped.meet()
    mapped.source.cancel(mapped.prefill, mapped.prefill_pool, "send")  # the home does not know it yet
    mapped.source.fill(mapped.prefill_pool, mapped.source_pages)  # the pages are used anew
    mapped.harness.step(*mapped.under_way())
    mapped.harness.deliver_until(mapped.home, mapped.source, Confirm)
    mapped.harness.deliver_until(mapped.source, mapped.home, Confirmed)
    mapped.harness.run()
    assert mapped.told() == (["CANCELLED", "settled"], ["PEER_CANCELLED", "settled"])
    mapped.harness.check_nothing_left()


def test_an_send_that_ends_while_its_grant_is_on_its_way(by_slots: Transfer) -> None:
    by_slots.greet()
    by_slots.send()
    by_slots.receive()
    by_slots.harness.deliver_until(by_slots.home, by_slots.source, Announce)
    by_slots.harness.deliver_until(by_slots.source, by_slots.home, PeerSend)
    by_slots.source.cancel(by_slots.prefill, by_slots.prefill_pool, "send")
    assert by_slots.told()[0] == ["CANCELLED", "settled"], "nothing has been asked for"
    by_slots.harness.deliver_until(by_slots.home, by_slots.source, Grant)
    assert not by_slots.source.remote.sending
    by_slots.harness.deliver_until(by_slots.source, by_slots.home, Written)
    by_slots.harness.run()
    assert by_slots.told() == (["CANCELLED", "settled"], ["PEER_CANCELLED", "settled"])
    by_slots.harness.check_nothing_left()


# -- words that come too late, or from the wrong one


def test_the_end_of_a_receive_is_said_once_for_each_source_daemon(both: Transfer) -> None:
    both.receive(both.source, both.third)
    both.harness.deliver_all()
    both.send()
    both.harness.run()
    assert not both.third.state_machine.endpoints.announcements
    assert not both.source.state_machine.endpoints.announcements
    both.harness.check_nothing_left()


def test_a_second_end_changes_nothing(both: Transfer) -> None:
    both.meet()
    (receive_request,) = both.source.state_machine.endpoints.announcements
    both.harness.run()
    home, name = receive_request
    both.source.state_machine.peers.closed(
        home,
        ReceiveClosed(receive_request=name, error=TransferFailedError("again").info(), moved=((1, BYTES, 0),)),
        both.harness.now,
    )
    assert both.told() == (["OK", "settled"], ["OK", "settled"])
    assert both.source.finished(both.prefill).moved_bytes == BYTES


def test_only_the_home_of_a_receive_may_ask_for_its_send(both: Transfer) -> None:
    both.receive()
    both.harness.deliver_all()
    both.send()
    ((number, remote_endpoint),) = both.source.state_machine.endpoints.remote_endpoints.items()
    home, name = remote_endpoint.announcement.home, remote_endpoint.announcement.receive_request
    peers = both.source.state_machine.peers
    assert peers.open_remote(home, number, name) is remote_endpoint
    for wrong in (
        (home._replace(boot_id="f" * 32), number, name),
        (home, number + 1, name),
        (home, number, msgspec.structs.replace(name, epoch=2)),
    ):
        with pytest.raises(UnknownTransferError):
            peers.open_remote(*wrong)
    refused = SendRefused(receive_request=name, send_request=number, error=TransferFailedError("not the home").info())
    peers.refused(home._replace(boot_id="f" * 32), refused, both.harness.now)
    assert both.told() == ([], [])
