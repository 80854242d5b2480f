"""Whose KV goes where: pools of two models exchange nothing unless the receiver says so, on one host or between two."""

from __future__ import annotations

from typing import Final

import msgspec
import pytest

from kvferry.daemon.rooms.peer_forms import offer_of
from kvferry.protocol.errors import ModelMismatchError
from kvferry.protocol.model_identity import ModelIdentity
from tests.rooms.peer_world import PeerWorld
from tests.rooms.room_world import RoomWorld

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


def hand_off(ours: ModelIdentity | None, theirs: ModelIdentity | None, first: str, *, any_model: bool = False) -> bool:
    """Bring two pools of these models together; return whether anything moves."""
    world = RoomWorld()
    prefill, decode = world.session(), world.session()
    source, destination = world.pool("prefill"), world.pool("decode")
    source.model, destination.model = ours, theirs
    sent, wanted = world.filled(source, prefill, 3), world.filled(destination, decode, 3)
    for step in ("send", "receive") if first == "send" else ("receive", "send"):
        if step == "send":
            world.send(prefill, source, sent)
        else:
            world.receive(decode, destination, wanted, any_model=any_model)
    return bool(world.transport.under_way)


@FIRST
@DIFFERENT
def test_two_models_exchange_nothing(field: str, first: str) -> None:
    other = msgspec.structs.replace(MODEL, **{field: "other"})
    with pytest.raises(ModelMismatchError) as caught:
        hand_off(MODEL, other, first)
    assert caught.value.field == f"model.{field}"
    for said in ("prefill", "decode", MODEL.label, other.label):
        assert said in caught.value.detail
    assert "pepper" not in str(caught.value)


@FIRST
def test_a_model_without_an_adapter_is_another_one(first: str) -> None:
    bare = msgspec.structs.replace(MODEL, adapter="")
    for ours, theirs in ((MODEL, bare), (bare, MODEL)):
        with pytest.raises(ModelMismatchError) as caught:
            hand_off(ours, theirs, first)
        assert caught.value.field == "model.adapter"
        assert hand_off(ours, theirs, first, any_model=True)


@FIRST
def test_but_where_the_receiver_takes_any(first: str) -> None:
    assert hand_off(MODEL, ModelIdentity(name="other"), first, any_model=True)


@FIRST
@FITTING
def test_what_one_side_does_not_say_is_no_difference(other: ModelIdentity | None, first: str) -> None:
    assert hand_off(MODEL, other, first)
    assert hand_off(other, MODEL, first)


# -- between two daemons


class Between:
    """A source at one daemon, a room at another."""

    def __init__(self, ours: ModelIdentity | None, theirs: ModelIdentity | None) -> None:
        self.world = PeerWorld("source", "home")
        self.source, self.home = self.world.nodes.values()
        self.prefill, self.decode = self.source.session(), self.home.session()
        self.sending, self.receiving = self.source.pool("prefill"), self.home.pool("decode")
        self.sending.model, self.receiving.model = ours, theirs

    def meet(self, *, any_model: bool = False) -> list[str]:
        """Let them meet; return what the sender was told."""
        sent = self.source.filled(self.sending, self.prefill, 3)
        wanted = self.home.filled(self.receiving, self.decode, 3)
        self.source.send(self.prefill, self.sending, sent)
        self.home.receive(self.decode, self.receiving, wanted, source_daemons=(self.source.ipc,), any_model=any_model)
        self.world.deliver_all()
        return self.source.outcomes(self.prefill)

    @property
    def moves(self) -> bool:
        """Return whether a copy is under way."""
        return bool(self.home.remote.mapped)


@DIFFERENT
def test_two_models_of_two_daemons_exchange_nothing(field: str) -> None:
    between = Between(MODEL, msgspec.structs.replace(MODEL, **{field: "other"}))
    assert between.meet() == ["MODEL_MISMATCH", "settled"]
    assert not between.moves
    assert not between.home.outcomes(between.decode), "the room goes on waiting for another source"


def test_but_where_the_other_daemons_receiver_takes_any() -> None:
    between = Between(MODEL, ModelIdentity(name="other"))
    assert between.meet(any_model=True) == []
    assert between.moves


@FITTING
def test_daemons_too_take_what_is_not_said_for_no_difference(other: ModelIdentity | None) -> None:
    between = Between(MODEL, other)
    assert between.meet() == []
    assert between.moves


def test_no_salt_travels_between_daemons() -> None:
    between = Between(MODEL, MODEL)
    between.meet()
    (target,) = between.source.book.sides.targets.values()
    offered, _ = offer_of(target, 0)
    assert offered.model == msgspec.structs.replace(MODEL, salt="")
