"""The two ways between daemons: what went by one is stopped there, also where there is the other."""

from __future__ import annotations

from typing import cast

import pytest

from kvferry.daemon.testing.scripted_transport import ScriptedTransport
from kvferry.daemon.transports.landing_receiver import LandingReceiver
from kvferry.daemon.transports.pull import PullTransport
from kvferry.daemon.transports.remote import RemoteTransports
from kvferry.protocol.errors import KvferryError
from tests.daemon.transports.landing_world import LandingWorld

WAYS = ("ipc", "tcp")


class Ways:
    """Both ways, and a world on this host and one on another."""

    def __init__(self) -> None:
        self.by = {way: ScriptedTransport(self._over) for way in WAYS}
        self.worlds = {way: LandingWorld(way=way) for way in WAYS}
        self.worlds["tcp"].piece()  # so that their numbers differ
        self.transports = RemoteTransports(cast("PullTransport", self.by["ipc"]))
        self.transports.receiver = cast("LandingReceiver", self.by["tcp"])

    def _over(self, piece_id: int, error: KvferryError | None) -> None:
        del error
        self.transports.forget(piece_id)


@pytest.mark.parametrize("way", WAYS)
def test_a_piece_is_stopped_on_the_way_that_it_took(way: str) -> None:
    ways = Ways()
    for one in WAYS:
        ways.transports.start(ways.worlds[one].piece())
    [piece_id] = ways.by[way].under_way
    ways.transports.stop(piece_id)
    assert {one: sorted(transport.stopped) for one, transport in ways.by.items()} == {
        one: [piece_id] if one == way else [] for one in WAYS
    }


def test_where_there_is_no_transport_between_hosts_pieces_of_this_host_are_stopped_all_the_same() -> None:
    ways = Ways()
    ways.transports.receiver = None
    piece = ways.worlds["ipc"].piece()
    ways.transports.start(piece)
    ways.transports.stop(piece.piece_id)
    assert ways.by["ipc"].stopped == {piece.piece_id}
    assert not ways.transports.can_reach(ways.worlds["tcp"].source.tcp)
