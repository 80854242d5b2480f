"""Transfers that move no page on one side or on both: a first token and a payload still come, within and between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

from kvferry.pools.pool import Pool
from kvferry.protocol.errors import IncompleteError, InvalidFieldError, KvferryError, UncoveredEntryError
from kvferry.protocol.transfer_messages import LayerStep
from tests.transfer.peer_harness import PeerHarness
from tests.transfer.transfer_harness import Lists, TransferHarness

pytestmark = pytest.mark.any_device

NONE: Final[list[Lists]] = [{}, {"main": np.empty(0, np.int64)}]
NO_PAGES = pytest.mark.parametrize("none", NONE, ids=["no lists", "empty lists"])


class Engines:
    """An engine that sends and one that receives, at one daemon."""

    def __init__(self, harness: TransferHarness) -> None:
        self.harness = harness
        self.prefill, self.decode = harness.session(), harness.session()
        self.source, self.destination = harness.pool("prefill"), harness.pool("decode")
        self.pages = harness.filled(self.source, self.prefill, 2)
        self.wanted = harness.filled(self.destination, self.decode, 2)

    def send(self, lists: Lists, *, last: bool = True, payload: bytes = b"", pool: Pool | None = None) -> None:
        """SEND."""
        self.harness.send(self.prefill, pool or self.source, lists, last=last, payload=payload)


@pytest.fixture
def engines() -> Engines:
    """Return two engines, with pages."""
    return Engines(TransferHarness())


@NO_PAGES
@pytest.mark.parametrize("first", ["send", "receive"])
def test_a_payload_comes_without_pages(engines: Engines, none: Lists, first: str) -> None:
    steps: list[Callable[[], object]] = [
        lambda: engines.send(none, payload=b"logits"),
        lambda: engines.harness.receive(engines.decode, engines.destination, none),
    ]
    for step in steps if first == "send" else steps[::-1]:
        step()
    assert not engines.harness.transport.under_way
    finished = engines.harness.finished(engines.decode)
    assert (finished.error, finished.payload, finished.moved_bytes, finished.pages) == (None, b"logits", 0, 0)
    assert engines.harness.outcomes(engines.prefill) == engines.harness.outcomes(engines.decode) == ["OK", "settled"]


def test_a_receive_without_pages_finishes_when_all_sources_have_sent_their_last(engines: Engines) -> None:
    other = engines.harness.pool("other")
    engines.harness.receive(engines.decode, engines.destination, {}, sources=2)
    engines.send({}, payload=b"x")
    engines.send({}, last=False, pool=other)
    assert engines.harness.outcomes(engines.decode) == []
    engines.send({}, pool=other)
    assert engines.harness.outcomes(engines.decode) == ["OK", "settled"]
    assert engines.harness.finished(engines.decode).payload == b"x"


@pytest.mark.parametrize("first", ["send", "receive"])
def test_what_the_receiver_has_no_list_of_is_skipped(engines: Engines, first: str) -> None:
    steps: list[Callable[[], object]] = [
        lambda: engines.send(engines.pages, payload=b"x"),
        lambda: engines.harness.receive(engines.decode, engines.destination, {}),
    ]
    for step in steps if first == "send" else steps[::-1]:
        step()
    finished = engines.harness.finished(engines.decode)
    assert (finished.error, finished.payload, finished.moved_bytes) == (None, b"x", 0)
    assert finished.skipped_source_entries == len(engines.source.manifest.entries)
    assert engines.source.allocator.busy_count == 0


def test_a_payload_after_the_last_pages(engines: Engines) -> None:
    """The last SEND of chunks may have no page of its own."""
    engines.harness.receive(engines.decode, engines.destination, engines.wanted)
    engines.send(engines.pages, last=False)
    (op,) = engines.harness.transport.under_way
    engines.harness.transport.copy(op)
    engines.harness.transport.end(op)
    assert engines.harness.outcomes(engines.decode) == []
    engines.send({}, payload=b"x")
    assert engines.harness.finished(engines.decode).payload == b"x"
    assert engines.harness.content(engines.source, engines.pages) == engines.harness.content(
        engines.destination, engines.wanted
    )


@NO_PAGES
def test_pages_that_are_wanted_must_still_come(engines: Engines, none: Lists) -> None:
    engines.harness.receive(engines.decode, engines.destination, engines.wanted)
    with pytest.raises((IncompleteError, UncoveredEntryError)):
        engines.send(none, payload=b"x")
    engines.send(engines.pages)
    assert engines.harness.transport.under_way


def test_steps_need_pages(engines: Engines) -> None:
    step = LayerStep(first_layer=0, layers=2, event=0, value=1)
    with pytest.raises(InvalidFieldError) as refused:
        engines.harness.send(engines.prefill, engines.source, {}, steps=(step,))
    assert refused.value.field == "steps"


@NO_PAGES
@pytest.mark.parametrize("first", ["send", "receive"])
def test_between_daemons(none: Lists, first: str) -> None:
    harness = PeerHarness("source", "home")
    source, home = harness.nodes.values()
    prefill, decode = source.session(), home.session()
    pools = source.pool("prefill"), home.pool("decode")
    steps: list[Callable[[], object]] = [
        lambda: source.send(prefill, pools[0], none, payload=b"logits"),
        lambda: home.receive(decode, pools[1], none, source_daemons=(source.tcp,)),
    ]
    for step in steps if first == "send" else steps[::-1]:
        step()
        harness.deliver_all()
    assert home.finished(decode).payload == b"logits"
    assert source.outcomes(prefill) == home.outcomes(decode) == ["OK", "settled"]
    harness.check_nothing_left()


def test_between_daemons_pages_that_nobody_wants_are_skipped() -> None:
    harness = PeerHarness("source", "home")
    source, home = harness.nodes.values()
    prefill, decode = source.session(), home.session()
    pools = source.pool("prefill"), home.pool("decode")
    source.send(prefill, pools[0], source.filled(pools[0], prefill, 2), payload=b"x")
    home.receive(decode, pools[1], {}, source_daemons=(source.tcp,))
    harness.deliver_all()
    assert home.finished(decode).payload == b"x"
    assert source.outcomes(prefill) == ["OK", "settled"]
    harness.check_nothing_left()


def test_a_receive_without_pages_hears_of_a_source_that_gave_up(engines: Engines) -> None:
    engines.harness.receive(engines.decode, engines.destination, {})
    engines.send({}, last=False)
    engines.harness.cancel(engines.prefill, engines.source, "send")
    assert engines.harness.outcomes(engines.decode) == ["PEER_CANCELLED", "settled"]
    with pytest.raises(KvferryError):
        engines.harness.cancel(engines.decode, engines.destination, "receive")
