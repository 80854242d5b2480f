"""Windows and states of transfers: what is refused, held and said. Which pages go where, the byte oracle shows."""

from __future__ import annotations

import json

import pytest

from kvferry.clients import Client, HybridSwaSpec, new_request_id, pages
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    EmptyStateError,
    InvalidFieldError,
    KvferryError,
    LengthMismatchError,
    PageBusyError,
    PageGapError,
    UnknownComponentError,
    WindowMismatchError,
)
from kvferry.protocol.manifests import Component, Entry
from tests import kit
from tests.kit.transfers import FIRST, ORDERS, REQUEST, Direction, Engine, Pair, TransferHarness, layers

PAGES = 17
MAIN = Component(name="main", space="main", pages=PAGES)
WINDOWS = Component(name="swa", space="swa", pages=PAGES, kind="window")
Window = tuple[int | None, int]
"""The logical page that a list of windows says it starts at, and how many pages it names."""


class Party(Engine):
    """An engine whose pool has windows beside main; it always speaks of all of main's pages."""

    def __init__(self, harness: TransferHarness, name: str, entries: list[Entry]) -> None:
        pool, session = harness.pool(name, entries, pages=PAGES, components=[MAIN, WINDOWS]), harness.session()
        super().__init__(harness, session, pool, pool.allocator.allocate(session, 3))
        self.swa = pool.allocator_of("swa").allocate(session, PAGES - 1)

    def lists(self, window: Window, *, none: bool = False) -> list[tuple[PageList, PageIds]]:
        """Return main's pages and the window's first ones."""
        first_page, length = window
        one = PageList(component="swa", first_page=first_page, pages=length, none=none)
        return [(PageList(component="main", first_page=0, pages=3), self.pages), (one, self.swa[:length])]


class Ferry(Pair):
    """A prefill and a decode side whose pools have windows beside main."""

    prefill: Party
    decode: Party

    def __init__(self, decode: list[Entry] | None = None) -> None:
        self.harness, entries = TransferHarness(), [*layers(2), *layers(2, component="swa")]
        self.prefill = Party(self.harness, "prefill", entries)
        self.decode = Party(self.harness, "decode", decode or entries)

    def meet(self, sent: Window, wanted: Window, first: str = "send") -> None:
        for direction in ORDERS[first]:
            if direction == "send":
                self.prefill.send(ids=self.prefill.lists(sent))
            else:
                self.decode.receive(ids=self.decode.lists(wanted))


@pytest.fixture
def ferry() -> Ferry:
    return Ferry()


@FIRST
@pytest.mark.parametrize(
    ("sent", "wanted", "error", "said"),
    [
        ((5, 3), (4, 3), WindowMismatchError, "wants pages 4..6, the source has 5..7"),
        ((5, 3), (6, 3), WindowMismatchError, "wants pages 6..8, the source has 5..7"),
        ((5, 3), (5, 0), EmptyStateError, "the source gives 3 ids, the destination's list is empty"),
        ((None, 0), (None, 3), EmptyStateError, "the destination wants 3 ids, the source's list is empty"),
    ],
)
def test_what_is_missing_is_named_with_what_there_is(
    ferry: Ferry, sent: Window, wanted: Window, error: type[KvferryError], said: str, first: str
) -> None:
    with pytest.raises(error) as caught:
        ferry.meet(sent, wanted, first)
    for part in ("swa", REQUEST, said):
        assert part in caught.value.detail
    assert not ferry.harness.transport.under_way


def test_a_refused_message_warns_of_nothing(ferry: Ferry) -> None:
    ferry.prefill.send(ids=ferry.prefill.lists((None, 5)))
    thief = Engine(ferry.harness, ferry.harness.session(), ferry.decode.pool, ferry.decode.pages)
    with pytest.raises(KvferryError):
        thief.receive(ids=ferry.decode.lists((None, 2)))
    assert not ferry.harness.warned


@pytest.mark.parametrize("lengths", [(6, 2), (2, 6)])
def test_all_named_pages_are_held_until_the_end_also_those_cut_off(ferry: Ferry, lengths: tuple[int, int]) -> None:
    ferry.meet((None, lengths[0]), (None, lengths[1]))
    allocators = [one.pool.allocators["swa"] for one in (ferry.prefill, ferry.decode)]
    assert tuple(one.busy_count for one in allocators) == lengths
    ferry.finish()
    assert [one.busy_count for one in allocators] == [0, 0]


def test_who_wants_none_need_not_have_the_sources_geometry() -> None:
    ferry = Ferry([*layers(2), *layers(1, first=7, component="swa")])
    ferry.prefill.send(ids=ferry.prefill.lists((5, 3)))
    ferry.decode.receive(ids=ferry.decode.lists((None, 0), none=True))
    ferry.end_well()


@FIRST
def test_messages_that_make_no_sense(ferry: Ferry, first: Direction) -> None:
    one = ferry.prefill if first == "send" else ferry.decode
    lists, unknown = one.lists((5, 2)), (PageList(component="swb", first_page=0, pages=1), one.swa[5:6])
    for wrong, error, field in (
        (one.lists((None, 2), none=True), InvalidFieldError, "lists[1].pages"),
        ([*lists, unknown], UnknownComponentError, "lists[2].component"),
        (lists[:1], UnknownComponentError, "lists"),
    ):
        with pytest.raises(error) as caught:
            one.come(first, ids=wrong)
        assert caught.value.field == field


@FIRST
def test_a_list_that_is_refused_leaves_no_page_of_the_others_held(ferry: Ferry, first: Direction) -> None:
    one = ferry.prefill
    lists, other = one.lists((5, 2)), one.pool.allocator.allocate(one.session, 3)
    one.receive(ids=[(lists[0][0], other), lists[1]], request="f" * 32)
    with pytest.raises(PageBusyError):
        one.come(first, ids=lists)
    assert one.held == 3
    one.cancel("receive", "f" * 32)
    one.come(first, ids=lists)


def test_a_plain_list_goes_with_one_chunk_only(ferry: Ferry) -> None:
    (_, main), window = ferry.prefill.lists((None, 2))
    ferry.prefill.send(ids=[(PageList(component="main", first_page=0, pages=1), main[:1]), window], last=False)
    with pytest.raises(PageGapError):
        ferry.prefill.send(ids=[(PageList(component="main", first_page=1, pages=2), main[1:]), window])


def test_paged_lists_are_never_cut(ferry: Ferry) -> None:
    shorter = (PageList(component="main", pages=2), ferry.decode.pages[:2])
    ferry.decode.receive(ids=[shorter, ferry.decode.lists((5, 2))[1]])
    with pytest.raises(LengthMismatchError) as caught:
        ferry.prefill.send(ids=ferry.prefill.lists((5, 2)))
    assert caught.value.field == "lists[0]"


@pytest.mark.full
def test_the_daemon_logs_a_warning_and_counts() -> None:
    spec = HybridSwaSpec(
        full_layers=(0,), window_layers=(1,), tokens=32, window_tokens=32, window=4, page_size=2, kv_heads=1,
        head_dim=2, dtype="int8",
    )  # fmt: skip
    request_id = new_request_id()
    with kit.daemon() as daemon, Client.connect(daemon.runtime_dir, name="both") as client:
        for name in ("prefill", "decode"):
            client.create_pool(name, spec)
        lists = {
            name: [
                pages(client.allocate(name, 2)),
                pages(client.allocate(name, count, "swa"), first_page=None, component="swa"),
            ]
            for name, count in (("prefill", 5), ("decode", 3))
        }
        client.send("prefill", request_id, lists["prefill"])
        assert "transfers.trimmed" not in client.status().counters
        done = client.wait_finished(client.receive("decode", request_id, lists["decode"]))
        assert done.trimmed_pages == 2
        assert client.status().counters["transfers.trimmed"] == 1
        (line,) = [one for one in daemon.log.read_text().splitlines() if "cut to the shorter" in one]
    said = json.loads(line[line.index("{") :])
    expected = {
        "level": "warning", "request_id": request_id, "component": "swa", "source": "prefill", "destination": "decode",
        "source_pages": 5, "destination_pages": 3, "dropped_pages": 2,
    }  # fmt: skip
    assert {name: said[name] for name in expected} == expected
