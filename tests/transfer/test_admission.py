"""What a SEND or RECEIVE must satisfy. The later message is refused; what was accepted goes on.

Which pages and heads go where, in which order whatever is said, the byte oracle shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from kvferry.clients import Client, HybridSwaSpec, new_request_id, pages
from kvferry.daemon.transfer import admission
from kvferry.daemon.transfer.peer_transfers import peer_send_of
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.geometry import rank_heads
from kvferry.protocol import errors
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.manifests import Component, Entry, MhaSpec
from kvferry.protocol.peer_messages import PeerSend
from tests import kit
from tests.kit.peers import Transfer, Way
from tests.kit.transfers import FIRST, ORDERS, Direction, Engine, Pair, TransferHarness, layers


class Refusing(Pair):
    """An engine that sends and one that receives, with six pages each."""

    def __init__(self) -> None:
        super().__init__(count=6)

    @contextmanager
    def refuses(self, error: type[errors.KvferryError], field: str) -> Iterator[None]:
        """Expect a refusal that leaves no trace: no events, no copies, no held pages, and the same sides."""
        before = self.snapshot()
        with pytest.raises(error) as caught:
            yield
        assert caught.value.field == field
        assert self.snapshot() == before

    def snapshot(self) -> list[Any]:
        """Return all that a refusal may not change."""
        harness = self.harness
        return [
            {session: list(events) for session, events in harness.told.items()},
            dict(harness.transport.under_way),
            [(one.allocator.free_count, one.allocator.busy_count, harness.held_pages(one)) for one in harness.pools],
            [(one.key, one.state, one.pages, one.waits_for()) for one in harness.state_machine.endpoints],
            [harness.state_machine.results.count(session) for session in harness.told],
        ]


@pytest.fixture
def pair() -> Refusing:
    return Refusing()


def test_the_chunks_of_a_transfer_are_bounded(pair: Refusing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_CHUNKS", 3)
    for _ in range(3):
        pair.prefill.send(ids={}, last=False)
    with pair.refuses(errors.TooLargeError, "last"):
        pair.prefill.send(ids={})


@pytest.mark.parametrize("first_page", [0, 1, 3])
def test_a_chunk_must_continue_the_one_before(pair: Refusing, first_page: int) -> None:
    rest = pair.prefill.pages[2:4]
    pair.prefill.send(0, 2, last=False)
    with pair.refuses(errors.PageGapError, "lists[0].first_page"):
        pair.prefill.send(first_page, ids=rest)
    pair.decode.receive(0, 4)
    with pair.refuses(errors.PageGapError, "lists[0].first_page"):
        pair.prefill.send(first_page, ids=rest)
    pair.prefill.send(2, 4)
    pair.end_well()


@pytest.mark.parametrize("first", [{"first_token": 1}, {"payload": b"x"}, {"first_token": 0}])
@pytest.mark.parametrize("second", [{"first_token": 2}, {"payload": b"y"}])
def test_one_send_of_a_request_carries_the_first_token(
    pair: Refusing, first: dict[str, Any], second: dict[str, Any]
) -> None:
    pair.prefill.send(0, 1, last=False, **first)
    with pair.refuses(errors.FirstTokenTwiceError, "first_token"):
        pair.prefill.send(1, **second)
    pair.decode.receive()
    with pair.refuses(errors.FirstTokenTwiceError, "first_token"):
        pair.prefill.send(1, **second)
    pair.prefill.send(1)
    pair.end_well()
    finished = pair.decode.finished
    assert (finished.first_token, finished.payload) == (first.get("first_token"), first.get("payload", b""))


@pytest.mark.parametrize("receives_before", [0, 1, 2])
def test_two_receives_take_the_same_pages(pair: Refusing, receives_before: int) -> None:
    decodes = [pair.decode, pair.harness.engine("second", count=6)]
    for number in range(3):
        if number == receives_before:
            pair.prefill.send(first_token=3)
        if number < 2:
            decodes[number].receive(destinations=2)
    first, second = pair.harness.transport.under_way
    pair.harness.transport.finish(first)
    assert [one.told for one in (pair.prefill, *decodes)] == ["", "OK settled", ""]
    assert pair.prefill.held == 6
    pair.harness.transport.finish(second)
    pair.end_well(pair.prefill, *decodes)
    for one in decodes:
        assert one.content == pair.prefill.content
        assert one.finished.first_token == 3
    assert pair.prefill.finished.moved_bytes == 2 * pair.decode.finished.moved_bytes


@FIRST
def test_a_receive_too_many_waits_for_another_send(pair: Refusing, first: str) -> None:
    second = pair.harness.engine("second", count=6)
    for direction in ORDERS[first]:
        for one in [pair.prefill] if direction == "send" else [pair.decode, second]:
            one.come(direction)
    pair.end_well()
    assert [one.pool for one in pair.harness.state_machine.endpoints] == [second.pool]


@pytest.mark.parametrize("met", ["nobody", "a SEND", "a SEND that the first has left"])
def test_receives_say_the_same_number_of_them(pair: Refusing, met: str) -> None:
    second = pair.harness.engine("second", count=6)
    pair.decode.receive(destinations=2)
    if met != "nobody":
        pair.prefill.send()
    if met == "a SEND that the first has left":
        pair.finish()
        assert (pair.prefill.told, pair.decode.told) == ("", "OK settled")
    for wrong in (1, 3):
        with pair.refuses(errors.InvalidFieldError, "destinations"):
            second.receive(destinations=wrong)
    second.receive(destinations=2)
    if met == "nobody":
        pair.prefill.send()
    pair.end_well(pair.prefill, pair.decode, second)


def test_only_receives_with_a_common_source_say_the_same_number(pair: Refusing) -> None:
    second, third = (pair.harness.engine(name, count=6) for name in ("second", "third"))
    pair.decode.receive(sources=("prefill",), destinations=2)
    second.receive(sources=("other",), destinations=1)
    with pair.refuses(errors.InvalidFieldError, "destinations"):
        third.receive(sources=("other", "prefill"), destinations=1)
    with pair.refuses(errors.InvalidFieldError, "source_pools"):
        third.receive(sources=("prefill", "prefill"), destinations=2)
    pair.prefill.send()
    with pair.refuses(errors.InvalidFieldError, "destinations"):
        third.receive(destinations=3)
    third.receive(sources=("prefill",), destinations=2)
    pair.end_well(pair.prefill, pair.decode, third)
    assert second.told == ""


def test_a_refused_send_does_not_keep_the_receive_from_a_right_one(pair: Refusing) -> None:
    busy = pair.harness.filled(pair.prefill.pool, pair.prefill.session, 1)
    pair.prefill.receive(ids=busy, request="e" * 32)
    pair.decode.receive(0, 3)
    with pair.refuses(errors.PageBusyError, "lists[0].pages"):  # after its cells were planned
        pair.prefill.send(ids=np.concatenate((pair.prefill.pages[:2], busy)))
    pair.prefill.send(0, 3)
    pair.end_well(pair.decode)


@pytest.mark.parametrize("state", ["waiting", "under way", "finished, not settled"])
def test_a_live_duplicate(pair: Refusing, state: str) -> None:
    prefill, decode = pair.prefill, pair.decode
    other = pair.harness.session()
    theirs = Engine(pair.harness, other, prefill.pool, pair.harness.filled(prefill.pool, other, 2))
    prefill.send(0, 2)
    if state != "waiting":
        decode.receive(0, 2)
    if state == "finished, not settled":
        decode.cancel("receive")
    with pair.refuses(errors.TransferExistsError, "request_id" if state.startswith("finished") else "last"):
        prefill.send(2, 4)
    with pair.refuses(errors.TransferExistsError, "request_id"):
        theirs.send()
    if state != "waiting":
        with pair.refuses(errors.TransferExistsError, "request_id"):
            decode.receive(2, 4)


def test_another_tenants_request_of_that_number_is_another_one(pair: Refusing) -> None:
    theirs = pair.harness.engine("prefill", tenant=8)
    pair.prefill.send()
    assert theirs.send().matched == 0
    pair.decode.receive()
    pair.end_well()
    assert theirs.told == ""


# -- windows beside main's pages

WINDOW_PAGES: Final = 17
COMPONENTS: Final = [
    Component(name="main", space="main", pages=WINDOW_PAGES),
    Component(name="swa", space="swa", pages=WINDOW_PAGES, kind="window"),
]
Window = tuple[int | None, int]
"""The logical page that a list of windows says it starts at, and how many pages it names."""


class Party(Engine):
    """An engine whose pool has windows beside main; it always speaks of all of main's pages."""

    def __init__(self, harness: TransferHarness, name: str, swa: list[Entry]) -> None:
        entries = [*layers(2), *swa]
        pool, session = harness.pool(name, entries, pages=WINDOW_PAGES, components=COMPONENTS), harness.session()
        super().__init__(harness, session, pool, pool.allocator.allocate(session, 3))
        self.swa = pool.allocator_of("swa").allocate(session, WINDOW_PAGES - 1)

    def lists(self, window: Window, *, none: bool = False) -> list[tuple[PageList, PageIds]]:
        """Return main's pages and the window's first ones."""
        first_page, length = window
        one = PageList(component="swa", first_page=first_page, pages=length, none=none)
        return [(PageList(component="main", first_page=0, pages=3), self.pages), (one, self.swa[:length])]


class WindowPair(Pair):
    """A prefill and a decode side whose pools have windows beside main."""

    prefill: Party
    decode: Party

    def __init__(self, decode_swa: list[Entry] | None = None) -> None:
        self.harness, swa = TransferHarness(), layers(2, component="swa")
        self.prefill = Party(self.harness, "prefill", swa)
        self.decode = Party(self.harness, "decode", decode_swa or swa)


@pytest.fixture
def windows() -> WindowPair:
    return WindowPair()


def test_a_refused_message_warns_of_nothing(windows: WindowPair) -> None:
    windows.prefill.send(ids=windows.prefill.lists((None, 5)))
    thief = Engine(windows.harness, windows.harness.session(), windows.decode.pool, windows.decode.pages)
    with pytest.raises(errors.KvferryError):
        thief.receive(ids=windows.decode.lists((None, 2)))
    assert not windows.harness.warned


@pytest.mark.parametrize("lengths", [(6, 2), (2, 6)])
def test_all_named_pages_are_held_until_the_end_also_those_cut_off(
    windows: WindowPair, lengths: tuple[int, int]
) -> None:
    windows.prefill.send(ids=windows.prefill.lists((None, lengths[0])))
    windows.decode.receive(ids=windows.decode.lists((None, lengths[1])))
    allocators = [one.pool.allocators["swa"] for one in (windows.prefill, windows.decode)]
    assert tuple(one.busy_count for one in allocators) == lengths
    windows.finish()
    assert [one.busy_count for one in allocators] == [0, 0]


def test_who_wants_none_need_not_have_the_sources_geometry() -> None:
    windows = WindowPair(layers(1, first=7, component="swa"))
    windows.prefill.send(ids=windows.prefill.lists((5, 3)))
    windows.decode.receive(ids=windows.decode.lists((None, 0), none=True))
    windows.end_well()


@FIRST
def test_messages_that_make_no_sense(windows: WindowPair, first: Direction) -> None:
    one = windows.prefill if first == "send" else windows.decode
    lists, unknown = one.lists((5, 2)), (PageList(component="swb", first_page=0, pages=1), one.swa[5:6])
    for wrong, error, field in (
        (one.lists((None, 2), none=True), errors.InvalidFieldError, "lists[1].pages"),
        ([*lists, unknown], errors.UnknownComponentError, "lists[2].component"),
        (lists[:1], errors.UnknownComponentError, "lists"),
    ):
        with pytest.raises(error) as caught:
            one.come(first, ids=wrong)
        assert caught.value.field == field


@FIRST
def test_a_list_that_is_refused_leaves_no_page_of_the_others_held(windows: WindowPair, first: Direction) -> None:
    one = windows.prefill
    lists, other = one.lists((5, 2)), one.pool.allocator.allocate(one.session, 3)
    one.receive(ids=[(lists[0][0], other), lists[1]], request="f" * 32)
    with pytest.raises(errors.PageBusyError):
        one.come(first, ids=lists)
    assert one.held == 3
    one.cancel("receive", "f" * 32)
    one.come(first, ids=lists)


def test_a_plain_list_goes_with_one_chunk_only(windows: WindowPair) -> None:
    (_, main), window = windows.prefill.lists((None, 2))
    windows.prefill.send(ids=[(PageList(component="main", first_page=0, pages=1), main[:1]), window], last=False)
    with pytest.raises(errors.PageGapError):
        windows.prefill.send(ids=[(PageList(component="main", first_page=1, pages=2), main[1:]), window])


@pytest.mark.full
def test_the_daemon_logs_a_warning_and_counts() -> None:
    spec = HybridSwaSpec(
        full_layers=(0,), window_layers=(1,), tokens=32, window_tokens=32, window=4, page_size=2, kv_heads=1,
        head_dim=2, dtype="int8",
    )  # fmt: skip
    with kit.daemon() as daemon, Client.connect(daemon.runtime_dir, name="both") as client:
        lists = {}
        for name, count in (("prefill", 5), ("decode", 3)):
            client.create_pool(name, spec)
            window = pages(client.allocate(name, count, "swa"), first_page=None, component="swa")
            lists[name] = [pages(client.allocate(name, 2)), window]
        request_id = new_request_id()
        client.send("prefill", request_id, lists["prefill"])
        done = client.wait_finished(client.receive("decode", request_id, lists["decode"]))
        assert (done.trimmed_pages, client.status().counters["transfers.trimmed"]) == (2, 1)
        (line,) = [one for one in daemon.log.read_text().splitlines() if "cut to the shorter" in one]
    for said in (request_id, '"component": "swa"', '"source_pages": 5', '"destination_pages": 3', '"dropped_pages": 2'):
        assert said in line


# -- heads: ranks of unequal tensor parallelism


class Ranks(TransferHarness):
    """A model of some heads; ranks of both sides join as a test says, each an engine with three pages of two layers."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def rank(self, size: int, number: int, without: int | None = None) -> Engine:
        """Add a rank, which may lack a layer."""
        held = rank_heads(self.heads, size, number)
        manifest = manifest_of(
            MhaSpec(
                layers=2, tokens=16, page_size=2, kv_heads=held.count, head_start=held.start, total_heads=self.heads,
                head_dim=3, dtype="int8", replicas=held.replicas,
            )
        )  # fmt: skip
        entries = tuple(one for one in manifest.entries if one.layer != without)
        pool = self.pool_of(f"pool{len(self.pools)}", msgspec.structs.replace(manifest, entries=entries))
        session = self.session()
        return Engine(self, session, pool, pool.allocator.allocate(session, 3))


@FIRST
def test_of_replicas_one_sends_and_the_others_are_covered(first: str) -> None:
    ranks = Ranks(2)
    sources, receiver = [ranks.rank(4, number) for number in range(4)], ranks.rank(1, 0)
    if first == "receive":
        receiver.receive(sources=4)
    covered = [one.send().covered_source_entries for one in sources]
    if first == "receive":
        assert covered == [0, 4, 0, 4]
    else:
        assert receiver.receive(sources=4).covered_source_entries == 4
    senders = [op.source.name for op in ranks.transport.under_way.values()]
    assert senders == [sources[0].pool.name, sources[2].pool.name]
    ranks.transport.finish_all()
    assert receiver.told == "OK settled"


@FIRST
@pytest.mark.parametrize(
    ("splits", "error", "what"),
    [
        ([(2, 0), (4, 3)], errors.IncompleteError, "heads 2..2, has no sender (12 cells missing)"),
        ([(2, 1)], errors.IncompleteError, "heads 0..1, has no sender"),
        ([(2, 0), (4, 1)], errors.PageOverlapError, "heads 1..1, has a sender already"),
        ([(2, 1), (2, 1)], errors.PageOverlapError, "heads 2..3, has a sender already"),
    ],
)
def test_a_missing_or_doubled_head_is_named(
    splits: list[tuple[int, int]], error: type[errors.KvferryError], what: str, first: str
) -> None:
    ranks = Ranks(4)
    sources, receiver = [ranks.rank(*one) for one in splits], ranks.rank(1, 0)
    steps: list[Callable[[], object]] = [one.send for one in sources]
    steps.insert(0 if first == "receive" else len(steps), lambda: receiver.receive(sources=len(sources)))
    for step in steps[:-1]:
        step()
    with pytest.raises(error) as caught:
        steps[-1]()
    assert f"main/k/0: transfer page 0, {what}" in caught.value.detail


@FIRST
def test_a_replica_sends_what_is_left_of_each_layer(first: str) -> None:
    """Stages of one side share layers with a rank of the other, and are not equally far."""
    ranks = Ranks(1)
    one, two, other, receiver = (
        ranks.rank(2, 0, without=1),
        ranks.rank(2, 0, without=0),
        ranks.rank(2, 1),
        ranks.rank(1, 0),
    )
    if first == "receive":
        receiver.receive(sources=3)
    one.send(0, 1, last=False)
    two.send()
    other.send()
    one.send(1)
    if first == "send":
        receiver.receive(sources=3)
    ranks.transport.finish_all()
    assert [party.told for party in (one, two, other, receiver)] == ["OK settled"] * 4


@FIRST
def test_what_is_left_of_a_replica_is_in_one_extent(first: str) -> None:
    ranks = Ranks(1)
    one, other, receiver = ranks.rank(2, 0), ranks.rank(2, 1), ranks.rank(1, 0)
    if first == "receive":
        receiver.receive(sources=2)
    one.send(1, 2, last=False)
    if first == "send":
        other.send()
    with pytest.raises(errors.PageOverlapError, match="main/k/0: transfer page 1 has a sender already"):
        other.send() if first == "receive" else receiver.receive(sources=2)


# -- models: pools of two exchange nothing, on one host or between two

MODEL: Final = ModelIdentity(name="some/model", revision="1", adapter="sql", salt="pepper")
EVERYWHERE: Final = pytest.mark.parametrize(("way", "first"), [("here", "send"), ("here", "receive"), ("ipc", "send")])


def but(**changes: str) -> ModelIdentity:
    return msgspec.structs.replace(MODEL, **changes)


def meeting(way: Way, first: str, ours: ModelIdentity | None, theirs: ModelIdentity | None) -> Transfer:
    both = Transfer(way)
    both.prefill.pool.model, both.decode.pool.model = ours, theirs
    both.begin(first)
    return both


@EVERYWHERE
@pytest.mark.parametrize(
    ("ours", "theirs", "field"),
    [
        (MODEL, but(name="other"), "name"),
        (MODEL, but(revision="other"), "revision"),
        (MODEL, but(adapter="other"), "adapter"),
        (MODEL, but(adapter=""), "adapter"),
        (but(adapter=""), MODEL, "adapter"),
    ],
)
def test_two_models_exchange_nothing(
    way: Way, first: str, ours: ModelIdentity, theirs: ModelIdentity, field: str
) -> None:
    if way == "here":
        with pytest.raises(errors.ModelMismatchError) as caught:
            meeting(way, first, ours, theirs)
        error = caught.value.info()
    else:
        both = meeting(way, first, ours, theirs)
        assert both.told == ("MODEL_MISMATCH settled", ""), "the receive request goes on waiting for another source"
        assert not list(both.harness.steps())
        assert both.prefill.finished.error is not None
        error = both.prefill.finished.error
    assert error.field == f"model.{field}"
    assert all(said in error.detail for said in ("prefill", "decode", ours.label, theirs.label))
    assert "pepper" not in error.detail


@EVERYWHERE
@pytest.mark.parametrize(
    "other", [MODEL, None, but(salt="sugar"), but(revision="")], ids=["same", "none", "salt", "no revision"]
)
def test_what_one_side_does_not_say_is_no_difference(way: Way, first: str, other: ModelIdentity | None) -> None:
    for ours, theirs in ((MODEL, other), (other, MODEL)):
        assert meeting(way, first, ours, theirs).under_way()


def test_no_salt_travels_between_daemons() -> None:
    both = meeting("ipc", "send", MODEL, MODEL)
    (remote_endpoint,) = both.source.state_machine.endpoints.remote_endpoints.values()
    body = peer_send_of(remote_endpoint, 0).body
    assert isinstance(body, PeerSend)
    assert body.model == but(salt="")
