"""Pools of two models, or with 8-bit values of two scales, exchange nothing, on one host or between two."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from kvferry.daemon.transfer.peer_transfers import peer_send_of
from kvferry.protocol.errors import ModelMismatchError
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.manifests import Entry
from kvferry.protocol.peer_messages import PeerSend
from tests.kit.peers import Transfer, Way
from tests.kit.transfers import ORDERS, layers

MODEL: Final = ModelIdentity(name="some/model", revision="1", adapter="sql", salt="pepper")
EVERYWHERE: Final = pytest.mark.parametrize(("way", "first"), [("here", "send"), ("here", "receive"), ("ipc", "send")])


def but(**changes: str) -> ModelIdentity:
    return msgspec.structs.replace(MODEL, **changes)


class Models(Transfer):
    """Pools of two models."""

    def __init__(self, way: Way, ours: ModelIdentity | None, theirs: ModelIdentity | None) -> None:
        super().__init__(way)
        self.prefill.pool.model, self.decode.pool.model = ours, theirs

    def meet_if_allowed(self, first: str) -> bool:
        """Let them meet; return whether a copy is under way.

        Raises:
            KvferryError: the later one is refused.
        """
        for direction in ORDERS[first]:
            if direction == "send":
                self.send()
            else:
                self.receive()
        self.harness.deliver_all()
        error = self.prefill.finished.error if self.prefill.told else None
        if error is not None:  # the receive request goes on waiting for another source
            assert (self.prefill.told, self.decode.told) == ("MODEL_MISMATCH settled", "")
            assert not list(self.harness.steps())
            raise ModelMismatchError(error.detail, field=error.field)
        return bool(self.under_way())


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
    with pytest.raises(ModelMismatchError) as caught:
        Models(way, ours, theirs).meet_if_allowed(first)
    assert caught.value.field == f"model.{field}"
    for said in ("prefill", "decode", ours.label, theirs.label):
        assert said in caught.value.detail
    assert "pepper" not in str(caught.value)


@EVERYWHERE
@pytest.mark.parametrize(
    "other", [MODEL, None, but(salt="sugar"), but(revision="")], ids=["same", "none", "salt", "no revision"]
)
def test_what_one_side_does_not_say_is_no_difference(way: Way, first: str, other: ModelIdentity | None) -> None:
    assert Models(way, MODEL, other).meet_if_allowed(first)
    assert Models(way, other, MODEL).meet_if_allowed(first)


def test_no_salt_travels_between_daemons() -> None:
    both = Models("ipc", MODEL, MODEL)
    both.meet()
    (remote_endpoint,) = both.source.state_machine.endpoints.remote_endpoints.values()
    body = peer_send_of(remote_endpoint, 0).body
    assert isinstance(body, PeerSend)
    assert body.model == but(salt="")


def scaled(*scales: float) -> list[Entry]:
    return [msgspec.structs.replace(one, scales=scales or None) for one in layers(2)]


@pytest.mark.parametrize(
    ("ours", "told"),
    [
        (scaled(0.5), ""),
        (scaled(0.25), "SCALE_MISMATCH settled"),
        (scaled(), "SCALE_MISMATCH settled"),
        (scaled(0.5, 0.5), "INVALID_FIELD settled"),
        (scaled(float("inf")), "INVALID_FIELD settled"),
    ],
    ids=["same", "other", "none", "too many", "infinite"],
)
def test_between_daemons_too(ours: list[Entry], told: str) -> None:
    apart = Transfer("ipc")
    prefill, decode = apart.source.engine("scaled", ours), apart.home.engine("scaled", scaled(0.5))
    prefill.send()
    apart.announce(into=decode)
    assert prefill.told == told
    assert bool(apart.home.remote.mapped) == (not told)
