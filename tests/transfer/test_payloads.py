"""What payloads pools take, and how many bytes of them are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pytest

from kvferry.daemon.transfer.kept import KeptPayloads
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import OverloadedError, TooLargeError
from kvferry.protocol.limits import LARGEST_PAYLOAD_BYTES, MAX_PAYLOAD_BYTES, Limits
from tests.transfer.peer_harness import PeerHarness
from tests.transfer.transfer_harness import TransferHarness

pytestmark = pytest.mark.any_device

OF_SESSION, OF_ALL = 100, 250


class Engines:
    """One engine that sends and one that receives; payloads are bounded by few bytes."""

    def __init__(self) -> None:
        self.harness = TransferHarness(payloads=KeptPayloads(OF_SESSION, OF_ALL))
        self.prefill, self.decode = self.harness.session(), self.harness.session()
        self.source = self.harness.pool("prefill", max_payload_bytes=80)
        self.destination = self.harness.pool("decode", max_payload_bytes=60)

    @property
    def kept(self) -> int:
        """Return how many bytes are kept."""
        return self.harness.state_machine.payloads.kept_bytes

    def send(self, number: int, size: int, *, pool: Pool | None = None, session: int | None = None) -> None:
        """SEND a payload of that size."""
        self.harness.send(
            session or self.prefill, pool or self.source, {}, request=f"{number:032x}", payload=bytes(size)
        )

    def receive(self, number: int, *, session: int | None = None) -> None:
        """RECEIVE without pages."""
        self.harness.receive(session or self.decode, self.destination, {}, request=f"{number:032x}")


@pytest.fixture
def engines() -> Engines:
    """Return two engines."""
    return Engines()


def test_a_payload_over_its_own_pools_bound_is_refused(engines: Engines) -> None:
    engines.send(1, 80)
    with pytest.raises(TooLargeError, match="81 bytes; pool 'prefill' takes 80") as refused:
        engines.send(2, 81)
    assert refused.value.field == "payload"
    assert engines.kept == 80


@pytest.mark.parametrize("first", ["send", "receive"])
def test_a_payload_over_a_receiving_pools_bound_is_refused(engines: Engines, first: str) -> None:
    """Whoever came later is refused; what was there waits on."""
    steps: list[Callable[[], object]] = [lambda: engines.send(1, 61), lambda: engines.receive(1)]
    early, late = steps if first == "send" else steps[::-1]
    early()
    with pytest.raises(TooLargeError, match="61 bytes; pool 'decode' takes 60") as refused:
        late()
    assert refused.value.field == "payload"
    assert engines.harness.outcomes(engines.prefill) == engines.harness.outcomes(engines.decode) == []


def test_a_home_refuses_a_payload_that_its_pool_does_not_take() -> None:
    harness = PeerHarness("source", "home")
    source, home = harness.nodes.values()
    prefill, decode = source.session(), home.session()
    pools = source.pool("prefill"), home.pool("decode", max_payload_bytes=3)
    home.receive(decode, pools[1], {}, source_daemons=(source.tcp,))
    source.send(prefill, pools[0], {}, payload=b"more")
    harness.deliver_all()
    error = source.finished(prefill).error
    assert error is not None
    assert (error.code, error.field) == ("TOO_LARGE", "payload")
    assert "pool 'decode' takes 3" in error.detail
    assert home.outcomes(decode) == []
    source.send(prefill, source.pool("other"), {}, payload=b"few")
    harness.deliver_all()
    assert home.finished(decode).payload == b"few"
    assert home.state_machine.payloads.kept_bytes == 3
    assert source.state_machine.payloads.kept_bytes == 0
    harness.check_nothing_left()


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
    request = f"{1:032x}"
    engines.harness.acknowledge(engines.decode, engines.destination, "receive", request)
    assert engines.kept == 41
    engines.receive(2)
    engines.harness.acknowledge(engines.decode, engines.destination, "receive", f"{2:032x}")
    assert engines.kept == 0


def test_a_receive_that_begins_again_still_keeps_what_is_unacknowledged(engines: Engines) -> None:
    request = f"{1:032x}"
    engines.send(1, 60)
    engines.receive(1)
    engines.send(1, 41)
    with pytest.raises(OverloadedError, match="60 payload bytes of session 2"):
        engines.receive(1)
    engines.harness.acknowledge(engines.decode, engines.destination, "receive", request)
    engines.receive(1)
    assert engines.kept == 41


def test_a_payload_counts_for_all_its_receivers_together(engines: Engines) -> None:
    pools = [engines.harness.pool(f"decode{number}") for number in range(3)]
    for pool in pools:
        engines.harness.receive(engines.decode, pool, {})
    with pytest.raises(OverloadedError, match="0 payload bytes of session 2") as refused:
        engines.harness.send(engines.prefill, engines.source, {}, payload=bytes(34), destinations=3)
    assert refused.value.field == "payload"
    assert engines.kept == 0
    engines.harness.send(engines.prefill, engines.source, {}, payload=bytes(33), destinations=3)
    assert engines.kept == 99, "the SEND has settled"


def test_payloads_of_all_sessions_are_bounded(engines: Engines) -> None:
    others = [engines.harness.session() for _ in range(3)]
    for number, session in enumerate(others[:2]):
        engines.send(number, 80, session=session, pool=engines.harness.pool(f"p{number}", max_payload_bytes=80))
    engines.send(2, 80)
    with pytest.raises(OverloadedError, match="240 payload bytes of all sessions"):
        engines.send(3, 11, session=others[2])


@pytest.mark.parametrize("end", ["cancel", "lose"])
def test_a_transfer_that_ends_keeps_no_payload(engines: Engines, end: str) -> None:
    engines.send(1, 50)
    if end == "cancel":
        engines.harness.cancel(engines.prefill, engines.source, "send", f"{1:032x}")
        assert engines.kept == 0
    else:
        engines.harness.lose(engines.prefill)
        assert engines.kept == 50, "the SEND lives on"
        engines.harness.pass_time(31)
    assert engines.kept == 0


def test_a_receiver_that_dies_keeps_no_payload(engines: Engines) -> None:
    engines.send(1, 50)
    engines.receive(1)
    engines.harness.lose(engines.decode)
    assert engines.kept == 0


FRAMES: Final = {128 << 10: 64 << 10, 4 << 20: 2 << 20, 1 << 30: LARGEST_PAYLOAD_BYTES}


@pytest.mark.parametrize("frame_bytes", FRAMES)
def test_the_largest_payload_leaves_half_of_a_frame(frame_bytes: int) -> None:
    assert Limits(max_frame_bytes=frame_bytes).largest_payload_bytes == FRAMES[frame_bytes]
    assert Limits(max_frame_bytes=frame_bytes).largest_payload_bytes >= MAX_PAYLOAD_BYTES


def test_a_receiver_that_fails_keeps_no_payload(engines: Engines) -> None:
    """It had one, and waits for another source when it ends."""
    request = f"{1:032x}"
    engines.harness.receive(engines.decode, engines.destination, {}, sources=2, request=request)
    engines.send(1, 50)
    assert engines.kept == 2 * 50
    engines.harness.cancel(engines.decode, engines.destination, "receive", request)
    assert engines.kept == 0
