"""Payloads, also of transfers without pages: what pools take, what comes, and how many bytes are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

from kvferry.daemon.quota import Quota
from kvferry.protocol.errors import (
    InvalidFieldError,
    OverloadedError,
    TooLargeError,
)
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES, Limits
from kvferry.protocol.transfer_messages import LayerStep
from tests.kit.peers import Transfer
from tests.kit.transfers import FIRST, ORDERS, Engine, Lists, TransferHarness

EMPTY: Final[Lists] = {"main": np.empty(0, np.int64)}


@pytest.mark.parametrize(
    ("sent", "wanted"), [({}, {}), (EMPTY, EMPTY), (None, {})], ids=["no lists", "empty lists", "pages nobody wants"]
)
@FIRST
def test_a_payload_comes_without_pages(both: Transfer, sent: Lists | None, wanted: Lists, first: str) -> None:
    for direction in ORDERS[first]:
        if direction == "send":
            both.send(ids=sent, payload=b"logits")
        else:
            both.receive(ids=wanted)
        both.harness.deliver_all()
    both.check_over("OK", "OK")
    finished = both.decode.finished
    assert (finished.payload, finished.moved_bytes, finished.pages) == (b"logits", 0, 0)
    if sent is None:
        assert finished.skipped_source_entries == len(both.prefill.pool.manifest.entries)


def test_a_receive_without_pages_finishes_when_all_sources_have_sent_their_last(here: Transfer) -> None:
    other = here.source.engine("other")
    here.receive(ids={}, sources=2)
    here.send(ids={}, payload=b"x")
    other.send(ids={}, last=False)
    assert here.decode.told == ""
    other.send(ids={})
    here.check_over("OK", "OK")
    assert here.decode.finished.payload == b"x"


def test_a_payload_after_the_last_pages(both: Transfer) -> None:
    """The last SEND of chunks may have no page of its own."""
    both.begin("receive", last=False)
    both.harness.run()
    assert both.decode.told == ""
    both.send(ids={}, payload=b"x")
    both.succeeds()
    assert both.decode.finished.payload == b"x"


def test_steps_need_pages(here: Transfer) -> None:
    with pytest.raises(InvalidFieldError) as refused:
        here.send(ids={}, steps=(LayerStep(first_layer=0, layers=2, event=0, value=1),))
    assert refused.value.field == "steps"


OF_SESSION, OF_ALL = 100, 250


class Engines:
    """One engine that sends and one that receives; payloads are bounded by few bytes."""

    def __init__(self) -> None:
        self.harness = TransferHarness(payloads=Quota("payload", OF_SESSION, OF_ALL, field="payload"))
        self.prefill = self.harness.engine("prefill", max_payload_bytes=80)
        self.decode = self.harness.engine("decode", max_payload_bytes=60)

    @property
    def kept(self) -> int:
        return self.harness.state_machine.payloads.total

    def send(self, number: int, size: int, engine: Engine | None = None) -> None:
        (engine or self.prefill).send(ids={}, request=f"{number:032x}", payload=bytes(size))

    def receive(self, number: int, sources: int = 1) -> None:
        self.decode.receive(ids={}, request=f"{number:032x}", sources=sources)

    def acknowledge(self, number: int) -> None:
        self.decode.acknowledge("receive", f"{number:032x}")


@pytest.fixture
def engines() -> Engines:
    return Engines()


def test_a_payload_over_its_own_pools_bound_is_refused(engines: Engines) -> None:
    engines.send(1, 80)
    with pytest.raises(TooLargeError, match="81 bytes; pool 'prefill' takes 80") as refused:
        engines.send(2, 81)
    assert refused.value.field == "payload"
    assert engines.kept == 80


@FIRST
def test_a_payload_over_a_receiving_pools_bound_is_refused(engines: Engines, first: str) -> None:
    steps: list[Callable[[], None]] = [lambda: engines.send(1, 61), lambda: engines.receive(1)]
    early, late = steps if first == "send" else steps[::-1]
    early()
    with pytest.raises(TooLargeError, match="61 bytes; pool 'decode' takes 60") as refused:
        late()
    assert refused.value.field == "payload"
    assert (engines.prefill.told, engines.decode.told) == ("", "")


def test_a_home_refuses_a_payload_that_its_pool_does_not_take() -> None:
    apart = Transfer("tcp")
    apart.decode.pool.max_payload_bytes = 3
    apart.receive(ids={})
    apart.send(ids={}, payload=b"more")
    apart.harness.deliver_all()
    error = apart.prefill.finished.error
    assert error is not None
    assert (error.code, error.field) == ("TOO_LARGE", "payload")
    assert "pool 'decode' takes 3" in error.detail
    assert apart.decode.told == ""
    apart.source.engine("other").send(ids={}, payload=b"few")
    apart.ends("TOO_LARGE", "OK")
    assert apart.decode.finished.payload == b"few"
    assert [node.state_machine.payloads.total for node in (apart.home, apart.source)] == [3, 0]


def test_payloads_of_a_session_are_bounded_until_they_settle_or_are_acknowledged(engines: Engines) -> None:
    engines.send(1, 60)
    with pytest.raises(OverloadedError, match="60 payload bytes of session 1") as refused:
        engines.send(2, 41)
    assert refused.value.field == "payload"
    engines.receive(1)
    assert engines.kept == 60, "the SEND has settled, the event is not acknowledged"
    engines.send(2, 41)
    with pytest.raises(OverloadedError, match="of session 2"):
        engines.receive(2)
    engines.acknowledge(1)
    assert engines.kept == 41
    engines.receive(2)
    engines.acknowledge(2)
    assert engines.kept == 0


def test_a_payload_counts_for_all_its_receivers_together(engines: Engines) -> None:
    for number in range(3):
        engines.harness.receive(engines.decode.session, engines.harness.pool(f"decode{number}"), {})
    with pytest.raises(OverloadedError, match="0 payload bytes of session 2") as refused:
        engines.prefill.send(ids={}, payload=bytes(34), destinations=3)
    assert refused.value.field == "payload"
    assert engines.kept == 0
    engines.prefill.send(ids={}, payload=bytes(33), destinations=3)
    assert engines.kept == 99, "the SEND has settled"


def test_payloads_of_all_sessions_are_bounded(engines: Engines) -> None:
    others = [engines.harness.engine(f"p{number}", max_payload_bytes=80) for number in range(3)]
    for number, engine in enumerate((*others[:2], engines.prefill)):
        engines.send(number, 80, engine)
    with pytest.raises(OverloadedError, match="240 payload bytes of all sessions"):
        engines.send(3, 11, others[2])


def test_a_transfer_that_ends_keeps_no_payload(engines: Engines) -> None:
    for number in (1, 2):
        engines.send(number, 50)
    engines.prefill.cancel("send", f"{1:032x}")
    engines.prefill.lose()
    assert engines.kept == 50, "the SEND lives on"
    engines.harness.pass_time(31)
    assert engines.kept == 0


def test_a_receiver_that_dies_or_fails_keeps_no_payload(engines: Engines) -> None:
    for number in (1, 2):
        engines.receive(number, sources=number)
        engines.send(number, 30)
    assert engines.kept == 3 * 30
    engines.decode.cancel("receive", f"{2:032x}")
    assert engines.kept == 30
    engines.decode.lose()
    assert engines.kept == 0


FRAMES: Final = {128 << 10: 64 << 10, 4 << 20: 2 << 20, 1 << 30: LARGEST_PAYLOAD_BYTES}


@pytest.mark.parametrize("frame_bytes", FRAMES)
def test_the_largest_payload_leaves_half_of_a_frame(frame_bytes: int) -> None:
    assert Limits(max_frame_bytes=frame_bytes).largest_payload_bytes == FRAMES[frame_bytes]
    assert Limits(max_frame_bytes=frame_bytes).largest_payload_bytes >= MAX_PAYLOAD_BYTES
