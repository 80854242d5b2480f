"""Windows and states of transfers: which logical pages belong together, what is cut, and who hears of it."""

from __future__ import annotations

import json
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvferry.clients import Client, HybridSwaSpec, new_request_id, pages
from kvferry.daemon.transfer.matching import Trim
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
from tests.kit.devices import DEVICE
from tests.kit.transfers import (
    FIRST,
    ORDERS,
    PAGE_BYTES,
    PAGE_TOKENS,
    REQUEST,
    Direction,
    Engine,
    Pair,
    TransferHarness,
    layers,
)

pytestmark = pytest.mark.any_device

PAGES = 17
PLACES = range(PAGES - 1)
MAIN = Component(name="main", space="main", pages=PAGES)
KINDS = {
    "swa": Component(name="swa", space="swa", pages=PAGES, kind="window"),
    "mamba": Component(name="mamba", space="mamba", pages=PAGES, kind="state"),
}
Listed = tuple[PageList, PageIds]


class Window(NamedTuple):
    """A list of a window or state: the logical page it says it starts at, and how many pages it names."""

    first_page: int | None
    length: int
    none: bool = False


class Party(Engine):
    """An engine whose pool has a window or state beside main; it always speaks of all of main's pages."""

    def __init__(self, harness: TransferHarness, name: str, kind: str, entries: list[Entry] | None = None) -> None:
        entries = entries or [*layers(2), *layers(2, component=kind)]
        pool, session = harness.pool(name, entries, pages=PAGES, components=[MAIN, KINDS[kind]]), harness.session()
        super().__init__(harness, session, pool, pool.allocator.allocate(session, 3)[::-1].copy())
        self.kind = kind
        self.swa = pool.allocator_of(kind).allocate(session, PAGES - 1)
        np.random.default_rng(len(name)).shuffle(self.swa)
        if entries[0].page_bytes == entries[-1].page_bytes:
            harness.fill(pool, self.pages)
            harness.fill(pool, self.swa)

    def lists(self, window: Window) -> list[Listed]:
        """Return main's pages and the window's first ones."""
        ids = self.swa[: window.length]
        one = PageList(component=self.kind, first_page=window.first_page, pages=len(ids), none=window.none)
        return [(PageList(component="main", first_page=0, pages=3), self.pages), (one, ids)]

    def speak(self, direction: Direction, window: Window, others: int = 1) -> None:
        """SEND or RECEIVE all of main, and a window."""
        self.come(direction, others=others, ids=self.lists(window))

    def window_page(self, place: int) -> dict[str, bytes]:
        """Return what the window's page at a place of its list holds."""
        (content,) = self.harness.content(self.pool, self.swa[place : place + 1])
        return {name: value for name, value in content.items() if name.startswith(self.kind)}

    @property
    def window_pages(self) -> list[dict[str, bytes]]:
        """Return what all its window's pages hold."""
        return [self.window_page(place) for place in PLACES]


class Ferry(Pair):
    """A prefill and a decode side whose pools have a window beside main."""

    prefill: Party
    decode: Party

    def __init__(self, kind: str = "swa") -> None:
        self.harness = TransferHarness()
        self.prefill, self.decode = Party(self.harness, "prefill", kind), Party(self.harness, "decode", kind)

    def meet(self, sent: Window, wanted: Window, first: str = "send") -> None:
        """Let both sides speak, in this order."""
        for direction in ORDERS[first]:
            one, window = (self.prefill, sent) if direction == "send" else (self.decode, wanted)
            one.speak(direction, window)

    def run(self, sent: Window, wanted: Window, first: str = "send", *, trimmed: int = 0, skipped: int = 0) -> None:
        """Let both speak and all copies end; check what both sides are told."""
        self.meet(sent, wanted, first)
        self.end_well()
        for one in (self.prefill, self.decode):
            assert (one.finished.trimmed_pages, one.finished.skipped_source_pages) == (trimmed, skipped)
        assert len(self.harness.warned) == bool(trimmed)


@pytest.fixture
def ferry() -> Ferry:
    """Return two sides that have not spoken."""
    return Ferry()


@FIRST
@pytest.mark.parametrize(
    ("wanted", "ranges"),
    [(Window(4, 3), "4..6"), (Window(6, 3), "6..8"), (Window(5, 4), "5..8"), (Window(9, 1), "9..9")],
)
def test_destination_pages_missing_at_the_source_are_a_mismatch_with_both_ranges(
    ferry: Ferry, wanted: Window, ranges: str, first: str
) -> None:
    with pytest.raises(WindowMismatchError) as caught:
        ferry.meet(Window(5, 3), wanted, first)
    for part in ("swa", REQUEST, "source has 5..7", f"wants pages {ranges}"):
        assert part in caught.value.detail
    assert not ferry.harness.transport.under_way


@FIRST
@pytest.mark.parametrize("kind", KINDS)
def test_the_warning_names_both_sides_the_component_and_both_lengths(first: str, kind: str) -> None:
    ferry = Ferry(kind)
    ferry.run(Window(None, 5), Window(7 if kind == "swa" else None, 2), first, trimmed=3)
    assert ferry.decode.window_page(1) == ferry.prefill.window_page(1)
    (warning,) = ferry.harness.warned
    assert (warning.send_request.pool.name, warning.receive_request.pool.name) == ("prefill", "decode")
    assert warning.receive_request.request_id == REQUEST
    assert warning.trim == Trim(kind, source_length=5, destination_length=2)
    assert warning.trim.pages == 3


def test_a_refused_message_warns_of_nothing(ferry: Ferry) -> None:
    ferry.prefill.speak("send", Window(None, 5))
    thief = Engine(ferry.harness, ferry.harness.session(), ferry.decode.pool, ferry.decode.pages)
    with pytest.raises(KvferryError):
        thief.receive(ids=ferry.decode.lists(Window(None, 2)))
    assert not ferry.harness.warned


@pytest.mark.parametrize("lengths", [(6, 2), (2, 6)])
def test_all_named_pages_are_held_until_the_end_also_those_cut_off(ferry: Ferry, lengths: tuple[int, int]) -> None:
    ferry.meet(Window(None, lengths[0]), Window(None, lengths[1]))
    allocators = [one.pool.allocators["swa"] for one in (ferry.prefill, ferry.decode)]
    assert tuple(one.busy_count for one in allocators) == lengths
    ferry.finish()
    assert [one.busy_count for one in allocators] == [0, 0]


@FIRST
@pytest.mark.parametrize("first_page", [None, 5])
@pytest.mark.parametrize(
    ("sent", "wanted"), [((3, False), (0, False)), ((0, False), (3, False)), ((0, True), (3, False))]
)
def test_one_side_empty_and_the_other_not_is_an_error(
    ferry: Ferry, sent: tuple[int, bool], wanted: tuple[int, bool], first_page: int | None, first: str
) -> None:
    with pytest.raises(EmptyStateError) as caught:
        ferry.meet(Window(first_page, *sent), Window(first_page, *wanted), first)
    assert caught.value.code == "EMPTY_STATE"
    assert "swa" in caught.value.detail
    ferry.finish()
    assert ferry.decode.told == ""


@FIRST
@pytest.mark.parametrize("sent", [Window(None, 3), Window(5, 3), Window(None, 0), Window(None, 0, none=True)])
def test_a_side_that_wants_none_says_so(ferry: Ferry, sent: Window, first: str) -> None:
    before = ferry.decode.window_pages
    ferry.run(sent, Window(None, 0, none=True), first, skipped=sent.length)
    assert ferry.decode.window_pages == before


def test_who_wants_none_need_not_have_the_sources_geometry(ferry: Ferry) -> None:
    narrow = Party(ferry.harness, "narrow", "swa", [*layers(2), *layers(1, first=7, component="swa")])
    ferry.prefill.speak("send", Window(5, 3))
    narrow.speak("receive", Window(None, 0, none=True))
    ferry.finish()
    assert narrow.told == "OK settled"


def test_both_empty_is_nothing_to_do(ferry: Ferry) -> None:
    ferry.run(Window(5, 0), Window(5, 0))
    assert ferry.decode.finished.moved_bytes == 3 * 4 * PAGE_BYTES


@FIRST
def test_messages_that_make_no_sense(ferry: Ferry, first: Direction) -> None:
    one = ferry.prefill if first == "send" else ferry.decode
    lists, unknown = one.lists(Window(5, 2)), (PageList(component="swb", first_page=0, pages=1), one.swa[5:6])
    for wrong, error, field in (
        (one.lists(Window(None, 2, none=True)), InvalidFieldError, "lists[1].pages"),
        ([*lists, unknown], UnknownComponentError, "lists[2].component"),
        (lists[:1], UnknownComponentError, "lists"),
    ):
        with pytest.raises(error) as caught:
            one.come(first, ids=wrong)
        assert caught.value.field == field


@FIRST
def test_a_list_that_is_refused_leaves_no_page_of_the_others_held(ferry: Ferry, first: Direction) -> None:
    one = ferry.prefill
    lists, other = one.lists(Window(5, 2)), one.pool.allocator.allocate(one.session, 3)
    one.receive(ids=[(lists[0][0], other), lists[1]], request="f" * 32)
    with pytest.raises(PageBusyError):
        one.come(first, ids=lists)
    assert one.held == 3
    one.cancel("receive", "f" * 32)
    one.come(first, ids=lists)


def test_a_plain_list_goes_with_one_chunk_only(ferry: Ferry) -> None:
    (_, main), window = ferry.prefill.lists(Window(None, 2))
    ferry.prefill.send(ids=[(PageList(component="main", first_page=0, pages=1), main[:1]), window], last=False)
    with pytest.raises(PageGapError):
        ferry.prefill.send(ids=[(PageList(component="main", first_page=1, pages=2), main[1:]), window])


def test_paged_lists_are_never_cut(ferry: Ferry) -> None:
    shorter = (PageList(component="main", pages=2), ferry.decode.pages[:2])
    ferry.decode.receive(ids=[shorter, ferry.decode.lists(Window(5, 2))[1]])
    with pytest.raises(LengthMismatchError) as caught:
        ferry.prefill.speak("send", Window(5, 2))
    assert caught.value.field == "lists[0]"


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


def window_of_tokens(tokens: int, window: int) -> range:
    """Return the logical pages that the last tokens lie in."""
    pages = [position // PAGE_TOKENS for position in range(max(0, tokens - window), tokens)]
    return range(pages[0], pages[-1] + 1)


@DEVICE.examples(300)
@given(
    tokens=st.integers(10, 40),
    apart=st.integers(-9, 9),
    windows=st.integers(1, 24).flatmap(lambda one: st.tuples(st.just(one), st.just(one) | st.integers(1, 24))),
    first=st.sampled_from(["send", "receive"]),
    plain=st.sampled_from([(False, False), (False, False), (True, True), (True, False), (False, True)]),
)
def test_any_two_windows(
    *, tokens: int, apart: int, windows: tuple[int, int], first: str, plain: tuple[bool, bool]
) -> None:
    """Logical pages are paired where both sides say where theirs start; else the longer list loses its tail."""
    ours, theirs = window_of_tokens(tokens + apart, windows[0]), window_of_tokens(tokens, windows[1])
    ferry = Ferry()
    sent, wanted = (
        Window(None if its else one.start, len(one)) for its, one in zip(plain, (ours, theirs), strict=True)
    )
    for one in (ferry.prefill, ferry.decode):
        one.swa.flags.writeable = False  # the callers' lists are not changed
    before = ferry.decode.window_pages
    if not any(plain) and not {*theirs} <= {*ours}:
        event("refused")
        with pytest.raises(WindowMismatchError):
            ferry.meet(sent, wanted, first)
        return
    longer = len(ours) - len(theirs)
    ferry.run(sent, wanted, first, trimmed=abs(longer) if any(plain) else 0, skipped=0 if any(plain) else longer)
    event(f"{'plain' if any(plain) else 'logical'}, {longer} pages longer, {ours.start - theirs.start} on")
    for place, got in enumerate(ferry.decode.window_pages):
        of_source = place if any(plain) else place + theirs.start - ours.start
        arrives = place < len(theirs) and of_source < len(ours)
        assert got == (ferry.prefill.window_page(of_source) if arrives else before[place])
    assert ferry.decode.finished.moved_bytes == (3 + min(len(ours), len(theirs))) * 4 * PAGE_BYTES
