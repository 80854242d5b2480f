"""8-bit keys and values of two scales exchange nothing, on one host or between two, and a peer's scales are checked."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.protocol.errors import ScaleMismatchError
from kvferry.protocol.manifests import Entry
from tests.transfer.peer_harness import PeerHarness
from tests.transfer.transfer_harness import TransferHarness, layers


def scaled(*scales: float) -> list[Entry]:
    """Return k and v of two layers with these scales; without any where there are none."""
    return [msgspec.structs.replace(one, scales=scales or None) for one in layers(2)]


@pytest.mark.parametrize("theirs", [scaled(0.25), scaled()], ids=["other", "none"])
def test_other_scales_are_refused(theirs: list[Entry]) -> None:
    harness = TransferHarness()
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill", scaled(0.5)), harness.pool("decode", theirs)
    harness.send(prefill, source, harness.filled(source, prefill, 2))
    with pytest.raises(ScaleMismatchError, match="main/k/0"):
        harness.receive(decode, destination, harness.filled(destination, decode, 2))


@pytest.mark.parametrize("source_has_them", [True, False])
@pytest.mark.parametrize("sources", [1, 2])
def test_scales_that_travel_are_on_both_sides_or_on_none(*, source_has_them: bool, sources: int) -> None:
    harness = TransferHarness()
    prefill, decode = harness.session(), harness.session()
    bare, scaled_ = layers(2), [*layers(2), *(msgspec.structs.replace(one, role="v_scale") for one in layers(2)[2:])]
    source = harness.pool("prefill", scaled_ if source_has_them else bare)
    destination = harness.pool("decode", bare if source_has_them else scaled_)
    harness.receive(decode, destination, harness.filled(destination, decode, 2), sources=sources)
    with pytest.raises(ScaleMismatchError, match="main/v/0 has scales that travel"):
        harness.send(prefill, source, harness.filled(source, prefill, 2))


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        (scaled(0.5), []),
        (scaled(0.25), ["SCALE_MISMATCH", "settled"]),
        (scaled(), ["SCALE_MISMATCH", "settled"]),
        (scaled(0.5, 0.5), ["INVALID_FIELD", "settled"]),
        (scaled(float("inf")), ["INVALID_FIELD", "settled"]),
    ],
    ids=["same", "other", "none", "too many", "infinite"],
)
def test_between_daemons_too(ours: list[Entry], told: list[str]) -> None:
    harness = PeerHarness("source", "home")
    source, home = harness.nodes.values()
    prefill, decode = source.session(), home.session()
    sending, receiving = source.pool("prefill", ours), home.pool("decode", scaled(0.5))
    source.send(prefill, sending, source.filled(sending, prefill, 2))
    wanted = home.filled(receiving, decode, 2)
    home.receive(decode, receiving, wanted, source_daemons=(source.ipc,))
    harness.deliver_all()
    assert source.outcomes(prefill) == told
    assert bool(home.remote.mapped) == (not told)
