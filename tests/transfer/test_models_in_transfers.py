"""Whose KV goes where: pools of two models exchange nothing unless the receiver says so, on one host or between two."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from kvferry.daemon.transfer.peer_transfers import peer_send_of
from kvferry.protocol.errors import ModelMismatchError
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.peer_messages import PeerSend
from tests.transfer.peer_harness import PeerHarness
from tests.transfer.transfer_harness import TransferHarness

MODEL: Final = ModelIdentity(name="some/model", revision="1", adapter="sql", salt="pepper")
FIRST = pytest.mark.parametrize("first", ["send", "receive"])
DIFFERENT = pytest.mark.parametrize("field", ["name", "revision", "adapter"])
FITTING = pytest.mark.parametrize(
    "other",
    [
        MODEL,
        None,
        msgspec.structs.replace(MODEL, salt="sugar"),
        msgspec.structs.replace(MODEL, revision=""),
    ],
    ids=["same", "none", "salt", "no revision"],
)


def transfer(ours: ModelIdentity | None, theirs: ModelIdentity | None, first: str, *, any_model: bool = False) -> bool:
    """Bring two pools of these models together; return whether anything moves."""
    harness = TransferHarness()
    prefill, decode = harness.session(), harness.session()
    source, destination = harness.pool("prefill"), harness.pool("decode")
    source.model, destination.model = ours, theirs
    sent, wanted = harness.filled(source, prefill, 3), harness.filled(destination, decode, 3)
    for step in ("send", "receive") if first == "send" else ("receive", "send"):
        if step == "send":
            harness.send(prefill, source, sent)
        else:
            harness.receive(decode, destination, wanted, any_model=any_model)
    return bool(harness.transport.under_way)


@FIRST
@DIFFERENT
def test_two_models_exchange_nothing(field: str, first: str) -> None:
    other = msgspec.structs.replace(MODEL, **{field: "other"})
    with pytest.raises(ModelMismatchError) as caught:
        transfer(MODEL, other, first)
    assert caught.value.field == f"model.{field}"
    for said in ("prefill", "decode", MODEL.label, other.label):
        assert said in caught.value.detail
    assert "pepper" not in str(caught.value)


@FIRST
def test_a_model_without_an_adapter_is_another_one(first: str) -> None:
    bare = msgspec.structs.replace(MODEL, adapter="")
    for ours, theirs in ((MODEL, bare), (bare, MODEL)):
        with pytest.raises(ModelMismatchError) as caught:
            transfer(ours, theirs, first)
        assert caught.value.field == "model.adapter"
        assert transfer(ours, theirs, first, any_model=True)


@FIRST
def test_but_where_the_receiver_takes_any(first: str) -> None:
    assert transfer(MODEL, ModelIdentity(name="other"), first, any_model=True)


@FIRST
@FITTING
def test_what_one_side_does_not_say_is_no_difference(other: ModelIdentity | None, first: str) -> None:
    assert transfer(MODEL, other, first)
    assert transfer(other, MODEL, first)


# -- between two daemons


class Between:
    """A source at one daemon, a receive request at another."""

    def __init__(self, ours: ModelIdentity | None, theirs: ModelIdentity | None) -> None:
        self.harness = PeerHarness("source", "home")
        self.source, self.home = self.harness.nodes.values()
        self.prefill, self.decode = self.source.session(), self.home.session()
        self.sending, self.receiving = self.source.pool("prefill"), self.home.pool("decode")
        self.sending.model, self.receiving.model = ours, theirs

    def meet(self, *, any_model: bool = False) -> list[str]:
        """Let them meet; return what the sender was told."""
        sent = self.source.filled(self.sending, self.prefill, 3)
        wanted = self.home.filled(self.receiving, self.decode, 3)
        self.source.send(self.prefill, self.sending, sent)
        self.home.receive(self.decode, self.receiving, wanted, source_daemons=(self.source.ipc,), any_model=any_model)
        self.harness.deliver_all()
        return self.source.outcomes(self.prefill)

    @property
    def scheduling(self) -> bool:
        """Return whether a copy is under way."""
        return bool(self.home.remote.mapped)


@DIFFERENT
def test_two_models_of_two_daemons_exchange_nothing(field: str) -> None:
    between = Between(MODEL, msgspec.structs.replace(MODEL, **{field: "other"}))
    assert between.meet() == ["MODEL_MISMATCH", "settled"]
    assert not between.scheduling
    assert not between.home.outcomes(between.decode), "the receive request goes on waiting for another source"


def test_but_where_the_other_daemons_receiver_takes_any() -> None:
    between = Between(MODEL, ModelIdentity(name="other"))
    assert between.meet(any_model=True) == []
    assert between.scheduling


@FITTING
def test_daemons_too_take_what_is_not_said_for_no_difference(other: ModelIdentity | None) -> None:
    between = Between(MODEL, other)
    assert between.meet() == []
    assert between.scheduling


def test_no_salt_travels_between_daemons() -> None:
    between = Between(MODEL, MODEL)
    between.meet()
    (remote_endpoint,) = between.source.state_machine.endpoints.remote_endpoints.values()
    body = peer_send_of(remote_endpoint, 0).body
    assert isinstance(body, PeerSend)
    assert body.model == msgspec.structs.replace(MODEL, salt="")
