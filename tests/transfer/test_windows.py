"""Windows and states of transfers: which logical pages belong together, what is cut, and who hears of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvferry.clients import Client, HybridSwaSpec, new_request_id, pages
from kvferry.daemon.transfer.matching import Trim
from kvferry.daemon.transfer.registry import WarnTrimmed
from kvferry.pools.planning.page_ids import PageIds
from kvferry.pools.pool import Pool
from kvferry.protocol.base import PageList
from kvferry.protocol.errors import (
    EmptyStateError,
    GeometryMismatchError,
    InvalidFieldError,
    KvferryError,
    LengthMismatchError,
    PageGapError,
    UnknownComponentError,
    WindowMismatchError,
)
from kvferry.protocol.manifests import Component
from tests.daemons import running_daemon
from tests.devices import DEVICE
from tests.transfer.transfer_harness import PAGE_BYTES, PAGE_TOKENS, REQUEST, TransferHarness, layers

pytestmark = pytest.mark.any_device

PAGES = 17
COMPONENTS = [
    Component(name="main", space="main", pages=PAGES),
    Component(name="swa", space="swa", pages=PAGES, kind="window"),
    Component(name="mamba", space="mamba", pages=PAGES, kind="state"),
]
NAMES = [one.name for one in COMPONENTS]


class Window(NamedTuple):
    """A list of a window or state: the logical page it says it starts at, and how many pages it names."""

    first_page: int | None
    length: int
    none: bool = False


class Party(NamedTuple):
    """One side: its session and its pool, and the pages of its window."""

    session: int
    pool: Pool
    main: PageIds
    swa: PageIds


class Ferry:
    """A prefill and a decode side whose pools have a window beside main."""

    def __init__(self, names: tuple[str, ...] = ("main", "swa")) -> None:
        self.harness = TransferHarness()
        self.names = names
        self.prefill, self.decode = self.party("prefill"), self.party("decode")

    def party(self, name: str) -> Party:
        """Open a session, and a pool with pages for it."""
        harness, session = self.harness, self.harness.session()
        entries = [entry for component in self.names for entry in layers(2, component=component)]
        pool = harness.pool(
            name, entries, pages=PAGES, components=[one for one in COMPONENTS if one.name in self.names]
        )
        main = harness.filled(pool, session, 3)[::-1].copy()
        swa = pool.allocator_of(self.names[1]).allocate(session, PAGES - 1)
        np.random.default_rng(len(name)).shuffle(swa)
        harness.fill(pool, swa)
        return Party(session, pool, main, swa)

    def lists(self, party: Party, window: Window) -> list[tuple[PageList, PageIds]]:
        """Return main's pages and the window's first ones."""
        ids = party.swa[: window.length]
        one = PageList(component=self.names[1], first_page=window.first_page, pages=len(ids), none=window.none)
        return [(PageList(component="main", first_page=0, pages=3), party.main), (one, ids)]

    def send(self, window: Window) -> None:
        """SEND all of main, and a window."""
        self.harness.send(self.prefill.session, self.prefill.pool, self.lists(self.prefill, window))

    def receive(self, window: Window) -> None:
        """RECEIVE all of main, and a window."""
        self.harness.receive(self.decode.session, self.decode.pool, self.lists(self.decode, window))

    def run(self, sent: Window, wanted: Window, *, receive_first: bool = False) -> None:
        """Let both sides speak, and all copies end."""
        if receive_first:
            self.receive(wanted)
            self.send(sent)
        else:
            self.send(sent)
            self.receive(wanted)
        self.harness.transport.finish_all()
        assert [self.harness.outcomes(one.session) for one in (self.prefill, self.decode)] == [["OK", "settled"]] * 2

    def page(self, party: Party, place: int) -> dict[str, bytes]:
        """Return what the window's page at a place of a side's list holds."""
        (content,) = self.harness.content(party.pool, party.swa[place : place + 1])
        return {name: value for name, value in content.items() if name.startswith(self.names[1])}

    def trimmed(self) -> list[int]:
        """Return how many trimmed pages each side was told."""
        return [self.harness.finished(one.session).trimmed_pages for one in (self.prefill, self.decode)]

    def skipped(self) -> list[int]:
        """Return how many surplus source pages each side was told."""
        return [self.harness.finished(one.session).skipped_source_pages for one in (self.prefill, self.decode)]


@pytest.fixture
def ferry() -> Ferry:
    """Return two sides that have not spoken."""
    return Ferry()


BOTH_ORDERS = pytest.mark.parametrize("receive_first", [False, True])


# -- both sides give first_page


@BOTH_ORDERS
@pytest.mark.parametrize(
    ("sent", "wanted"),
    [
        (Window(5, 3), Window(5, 3)),
        (Window(5, 4), Window(6, 3)),
        (Window(5, 4), Window(5, 3)),
        (Window(0, 9), Window(7, 1)),
    ],
)
def test_pages_are_paired_by_logical_page(ferry: Ferry, sent: Window, wanted: Window, *, receive_first: bool) -> None:
    before = [ferry.page(ferry.decode, place) for place in range(PAGES - 1)]
    ferry.run(sent, wanted, receive_first=receive_first)
    assert sent.first_page is not None
    assert wanted.first_page is not None
    shift = wanted.first_page - sent.first_page
    for place in range(PAGES - 1):
        got = ferry.page(ferry.decode, place)
        assert got == (ferry.page(ferry.prefill, place + shift) if place < wanted.length else before[place])


@BOTH_ORDERS
def test_surplus_source_pages_are_dropped_and_counted(ferry: Ferry, *, receive_first: bool) -> None:
    ferry.run(Window(4, 6), Window(6, 3), receive_first=receive_first)
    assert ferry.skipped() == [3, 3]
    assert ferry.trimmed() == [0, 0]
    assert not ferry.harness.warned
    assert ferry.harness.finished(ferry.decode.session).moved_bytes == (3 + 3) * 4 * PAGE_BYTES


@BOTH_ORDERS
@pytest.mark.parametrize(
    ("sent", "wanted", "ranges"),
    [
        (Window(5, 3), Window(4, 3), ("5..7", "4..6")),
        (Window(5, 3), Window(6, 3), ("5..7", "6..8")),
        (Window(5, 3), Window(5, 4), ("5..7", "5..8")),
        (Window(5, 3), Window(9, 1), ("5..7", "9..9")),
    ],
)
def test_destination_pages_missing_at_the_source_are_a_mismatch_with_both_ranges(
    ferry: Ferry, sent: Window, wanted: Window, ranges: tuple[str, str], *, receive_first: bool
) -> None:
    first, second = (ferry.receive, ferry.send) if receive_first else (ferry.send, ferry.receive)
    first(wanted if receive_first else sent)
    with pytest.raises(WindowMismatchError) as caught:
        second(sent if receive_first else wanted)
    for part in ("swa", REQUEST, f"source has {ranges[0]}", f"wants pages {ranges[1]}"):
        assert part in caught.value.detail
    assert not ferry.harness.transport.under_way


# -- a side without first_page


@BOTH_ORDERS
@pytest.mark.parametrize("plain", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("lengths", [(4, 3), (3, 4), (1, 5), (5, 1)])
def test_plain_lists_are_cut_to_the_shorter_length_keeping_the_head(
    ferry: Ferry, plain: tuple[bool, bool], lengths: tuple[int, int], *, receive_first: bool
) -> None:
    before = [ferry.page(ferry.decode, place) for place in range(PAGES - 1)]
    sent, wanted = (Window(None if one else 7, length) for one, length in zip(plain, lengths, strict=True))
    ferry.run(sent, wanted, receive_first=receive_first)
    for place in range(PAGES - 1):
        got = ferry.page(ferry.decode, place)
        assert got == (ferry.page(ferry.prefill, place) if place < min(lengths) else before[place])
    dropped = abs(lengths[0] - lengths[1])
    assert ferry.trimmed() == [dropped, dropped]
    assert ferry.skipped() == [0, 0]


@BOTH_ORDERS
def test_the_warning_names_both_sides_the_component_and_both_lengths(ferry: Ferry, *, receive_first: bool) -> None:
    ferry.run(Window(None, 5), Window(7, 2), receive_first=receive_first)
    (warning,) = ferry.harness.warned
    assert isinstance(warning, WarnTrimmed)
    assert (warning.send_request.pool.name, warning.receive_request.pool.name) == ("prefill", "decode")
    assert warning.receive_request.request_id == REQUEST
    assert warning.trim == Trim("swa", source_length=5, destination_length=2)
    assert warning.trim.pages == 3


def test_plain_lists_of_one_length_are_no_reason_to_warn(ferry: Ferry) -> None:
    ferry.run(Window(None, 4), Window(9, 4))
    assert not ferry.harness.warned
    assert ferry.trimmed() == [0, 0]


def test_a_refused_message_warns_of_nothing(ferry: Ferry) -> None:
    ferry.send(Window(None, 5))
    lists = ferry.lists(ferry.decode, Window(None, 2))
    stranger = ferry.harness.session()
    with pytest.raises(KvferryError):
        ferry.harness.receive(stranger, ferry.decode.pool, lists)
    assert not ferry.harness.warned


@BOTH_ORDERS
@pytest.mark.parametrize("lengths", [(6, 2), (2, 6)])
def test_the_callers_lists_are_not_changed(ferry: Ferry, lengths: tuple[int, int], *, receive_first: bool) -> None:
    before = [ferry.prefill.swa.copy(), ferry.decode.swa.copy()]
    for one in (ferry.prefill, ferry.decode):
        one.swa.flags.writeable = False
    ferry.run(Window(None, lengths[0]), Window(None, lengths[1]), receive_first=receive_first)
    assert [one.tolist() for one in before] == [ferry.prefill.swa.tolist(), ferry.decode.swa.tolist()]


@pytest.mark.parametrize("lengths", [(6, 2), (2, 6)])
def test_all_named_pages_are_held_until_the_end_also_those_cut_off(ferry: Ferry, lengths: tuple[int, int]) -> None:
    ferry.send(Window(None, lengths[0]))
    ferry.receive(Window(None, lengths[1]))
    for one, length in zip((ferry.prefill, ferry.decode), lengths, strict=True):
        assert one.pool.allocators["swa"].busy_count == length
    ferry.harness.transport.finish_all()
    for one in (ferry.prefill, ferry.decode):
        assert one.pool.allocators["swa"].busy_count == 0


def test_each_of_several_receives_is_warned_of(ferry: Ferry) -> None:
    other = ferry.party("other")
    lists = ferry.lists(ferry.prefill, Window(None, 5))
    ferry.harness.send(ferry.prefill.session, ferry.prefill.pool, lists, destinations=2)
    ferry.receive(Window(None, 2))
    ferry.harness.receive(other.session, other.pool, ferry.lists(other, Window(None, 4)))
    ferry.harness.transport.finish_all()
    assert [one.receive_request.pool.name for one in ferry.harness.warned] == ["decode", "other"]
    assert ferry.harness.finished(ferry.prefill.session).trimmed_pages == 3 + 1
    assert ferry.harness.finished(ferry.decode.session).trimmed_pages == 3
    assert ferry.harness.finished(other.session).trimmed_pages == 1


# -- empty, and none


@BOTH_ORDERS
@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize(
    ("sent", "wanted"), [((3, False), (0, False)), ((0, False), (3, False)), ((0, True), (3, False))]
)
def test_one_side_empty_and_the_other_not_is_an_error(
    ferry: Ferry, sent: tuple[int, bool], wanted: tuple[int, bool], *, plain: bool, receive_first: bool
) -> None:
    ours, theirs = (Window(None if plain else 5, *one) for one in (sent, wanted))
    first, second = (ferry.receive, ferry.send) if receive_first else (ferry.send, ferry.receive)
    first(theirs if receive_first else ours)
    with pytest.raises(EmptyStateError) as caught:
        second(ours if receive_first else theirs)
    assert caught.value.code == "EMPTY_STATE"
    assert "swa" in caught.value.detail
    ferry.harness.transport.finish_all()
    assert ferry.harness.outcomes(ferry.decode.session) == []


@BOTH_ORDERS
@pytest.mark.parametrize("sent", [Window(None, 3), Window(5, 3), Window(None, 0), Window(None, 0, none=True)])
def test_a_side_that_wants_none_says_so(ferry: Ferry, sent: Window, *, receive_first: bool) -> None:
    before = [ferry.page(ferry.decode, place) for place in range(PAGES - 1)]
    ferry.run(sent, Window(None, 0, none=True), receive_first=receive_first)
    assert [ferry.page(ferry.decode, place) for place in range(PAGES - 1)] == before
    assert ferry.skipped() == [sent.length, sent.length]
    assert ferry.trimmed() == [0, 0]
    assert not ferry.harness.warned


def test_who_wants_none_need_not_have_the_sources_geometry(ferry: Ferry) -> None:
    narrow = [*layers(2), *layers(1, first=7, component="swa")]
    pool = ferry.harness.pool("narrow", narrow, pages=PAGES, components=COMPONENTS[:2])
    session = ferry.harness.session()
    decode = Party(session, pool, pool.allocator.allocate(session, 3), np.empty(0, np.int64))
    ferry.send(Window(5, 3))
    ferry.harness.receive(session, pool, ferry.lists(decode, Window(None, 0, none=True)))
    ferry.harness.transport.finish_all()
    assert ferry.harness.outcomes(session) == ["OK", "settled"]


def test_both_empty_is_nothing_to_do(ferry: Ferry) -> None:
    ferry.run(Window(5, 0), Window(5, 0))
    assert ferry.harness.finished(ferry.decode.session).moved_bytes == 3 * 4 * PAGE_BYTES


@BOTH_ORDERS
def test_none_that_names_pages_is_refused(ferry: Ferry, *, receive_first: bool) -> None:
    speak = ferry.receive if receive_first else ferry.send
    with pytest.raises(InvalidFieldError) as caught:
        speak(Window(None, 2, none=True))
    assert caught.value.field == "lists[1].pages"


# -- components


@BOTH_ORDERS
def test_an_unknown_component_is_an_error(ferry: Ferry, *, receive_first: bool) -> None:
    one = ferry.decode if receive_first else ferry.prefill
    lists = [*ferry.lists(one, Window(5, 2)), (PageList(component="swb", first_page=0, pages=1), one.swa[5:6])]
    speak = ferry.harness.receive if receive_first else ferry.harness.send
    with pytest.raises(UnknownComponentError) as caught:
        speak(one.session, one.pool, lists)
    assert caught.value.field == "lists[2].component"


@BOTH_ORDERS
def test_a_component_without_a_list_is_an_error(ferry: Ferry, *, receive_first: bool) -> None:
    one = ferry.decode if receive_first else ferry.prefill
    speak = ferry.harness.receive if receive_first else ferry.harness.send
    with pytest.raises(UnknownComponentError, match="no list for component 'swa'"):
        speak(one.session, one.pool, ferry.lists(one, Window(5, 2))[:1])


def test_components_are_paired_by_name_and_not_by_place(ferry: Ferry) -> None:
    harness = ferry.harness
    harness.send(ferry.prefill.session, ferry.prefill.pool, ferry.lists(ferry.prefill, Window(5, 3)))
    harness.receive(ferry.decode.session, ferry.decode.pool, ferry.lists(ferry.decode, Window(5, 3))[::-1])
    harness.transport.finish_all()
    for place in range(3):
        assert ferry.page(ferry.decode, place) == ferry.page(ferry.prefill, place)


def test_a_states_slots_are_cut_alike() -> None:
    ferry = Ferry(("main", "mamba"))
    ferry.run(Window(None, 2), Window(None, 1))
    assert ferry.page(ferry.decode, 0) == ferry.page(ferry.prefill, 0)
    assert ferry.trimmed() == [1, 1]
    assert [one.trim.component for one in ferry.harness.warned] == ["mamba"]


def test_a_plain_list_goes_with_one_chunk_only(ferry: Ferry) -> None:
    one = ferry.prefill
    main, window = ferry.lists(one, Window(None, 2))
    first = (PageList(component="main", first_page=0, pages=1), main[1][:1])
    second = (PageList(component="main", first_page=1, pages=2), main[1][1:])
    ferry.harness.send(one.session, one.pool, [first, window], last=False)
    with pytest.raises(PageGapError):
        ferry.harness.send(one.session, one.pool, [second, window])


def test_paged_lists_are_never_cut(ferry: Ferry) -> None:
    one = ferry.decode
    shorter = (PageList(component="main", pages=2), one.main[:2])
    ferry.harness.receive(one.session, one.pool, [shorter, ferry.lists(one, Window(5, 2))[1]])
    with pytest.raises(LengthMismatchError) as caught:
        ferry.send(Window(5, 2))
    assert caught.value.field == "lists[0]"


def test_main_may_have_draft_layers_only() -> None:
    """The last pipeline stage of a model may have window layers and a draft model, and no full layer."""
    harness = TransferHarness()
    draft = Component(name="draft", space="main", pages=PAGES)
    entries = [*layers(1, component="draft"), *layers(1, component="swa")]
    lists: dict[str, list[tuple[PageList, PageIds]]] = {}
    for name in ("prefill", "decode"):
        session = harness.session()
        pool = harness.pool(name, entries, pages=PAGES, components=[COMPONENTS[0], draft, COMPONENTS[1]])
        main, swa = harness.filled(pool, session, 2), pool.allocator_of("swa").allocate(session, 1)
        lists[name] = [
            (PageList(component="main", first_page=0, pages=2, tokens=2 * PAGE_TOKENS - 1), main),
            (PageList(component="swa", first_page=1, pages=1), swa),
        ]
        (harness.send if name == "prefill" else harness.receive)(session, pool, lists[name])
    harness.transport.finish_all()
    source, destination = harness.pools
    sent, got = (harness.content(pool, lists[pool.name][0][1]) for pool in (source, destination))
    assert [page["draft/k/0"] for page in got] == [page["draft/k/0"] for page in sent]
    assert harness.outcomes(2) == ["OK", "settled"]


def test_a_window_must_fit_in_geometry_too(ferry: Ferry) -> None:
    wide = [*layers(2), *(type(e)(**{f: getattr(e, f) for f in e.__struct_fields__} | {"page_bytes": 16})
            for e in layers(2, component="swa"))]  # fmt: skip
    pool = ferry.harness.pool("wide", wide, pages=PAGES, components=COMPONENTS[:2])
    session = ferry.harness.session()
    swa = pool.allocator_of("swa").allocate(session, 3)
    decode = Party(session, pool, pool.allocator.allocate(session, 3), swa)
    ferry.send(Window(5, 3))
    with pytest.raises(GeometryMismatchError):
        ferry.harness.receive(session, pool, ferry.lists(decode, Window(5, 3)))


def test_the_daemon_logs_a_warning_and_counts(tmp_path: Path) -> None:
    spec = HybridSwaSpec(
        full_layers=(0,), window_layers=(1,), tokens=32, window_tokens=32, window=4, page_size=2, kv_heads=1,
        head_dim=2, dtype="int8",
    )  # fmt: skip
    request_id = new_request_id()
    with running_daemon(tmp_path) as daemon, Client.connect(daemon.runtime_dir, name="both") as client:
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
    assert said["level"] == "warning"
    assert {name: said[name] for name in ("request_id", "component", "source", "destination")} == {
        "request_id": request_id,
        "component": "swa",
        "source": "prefill",
        "destination": "decode",
    }
    assert (said["source_pages"], said["destination_pages"], said["dropped_pages"]) == (5, 3, 2)


# -- sequence lengths that the sides do not agree about


def window_of_tokens(tokens: int, window: int) -> range:
    """Return the logical pages that the last tokens lie in."""
    pages = [position // PAGE_TOKENS for position in range(max(0, tokens - window), tokens)]
    return range(pages[0], pages[-1] + 1)


@DEVICE.examples(150)
@given(
    tokens=st.integers(5, 40),
    apart=st.integers(-4, 4),
    window=st.integers(1, 24),
    receive_first=st.booleans(),
    plain=st.booleans(),
)
def test_lengths_up_to_four_tokens_apart(
    *, tokens: int, apart: int, window: int, receive_first: bool, plain: bool
) -> None:
    ours, theirs = window_of_tokens(tokens + apart, window), window_of_tokens(tokens, window)
    ferry = Ferry()
    sent, wanted = (Window(None if plain else one.start, len(one)) for one in (ours, theirs))
    before = [ferry.page(ferry.decode, place) for place in range(len(theirs))]
    if not plain and not {*theirs} <= {*ours}:
        event("refused")
        with pytest.raises(WindowMismatchError):
            ferry.run(sent, wanted, receive_first=receive_first)
        return
    ferry.run(sent, wanted, receive_first=receive_first)
    event(f"{'plain' if plain else 'logical'}, {len(ours) - len(theirs)} pages longer, {ours.start - theirs.start} on")
    for place, page in enumerate(theirs):
        of_source = place if plain else ours.index(page)
        expected = before[place] if of_source >= len(ours) else ferry.page(ferry.prefill, of_source)
        assert ferry.page(ferry.decode, place) == expected
    clash = abs(len(ours) - len(theirs)) if plain else 0
    assert ferry.trimmed() == [clash, clash]
    assert ferry.skipped() == [0 if plain else len(ours) - len(theirs)] * 2
    assert len(ferry.harness.warned) == bool(clash)
