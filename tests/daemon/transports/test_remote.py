"""The two ways between daemons: what went by one is stopped there, also where there is the other."""

from __future__ import annotations

from typing import cast

import pytest

from kvferry.daemon.transports.network_receiver import NetworkReceiver
from kvferry.daemon.transports.pull import PullTransport
from kvferry.daemon.transports.remote import RemoteTransports
from tests.kit.network import NetworkHarness
from tests.kit.scripted_transport import ScriptedTransport

WAYS = ("ipc", "tcp")


class Ways:
    """Both ways, and a harness on this host and one on another."""

    def __init__(self) -> None:
        self.by = {way: ScriptedTransport() for way in WAYS}
        self.harnesses = {way: NetworkHarness(way=way) for way in WAYS}
        self.harnesses["tcp"].op()  # so that their numbers differ
        self.transports = RemoteTransports(
            cast("PullTransport", self.by["ipc"]), cast("NetworkReceiver", self.by["tcp"])
        )


@pytest.mark.parametrize("way", WAYS)
def test_an_op_is_stopped_on_the_way_that_it_took(way: str) -> None:
    ways = Ways()
    for one in WAYS:
        ways.transports.start(ways.harnesses[one].op(), ways.harnesses["ipc"].report)
    [op_id] = ways.by[way].under_way
    ways.transports.stop(op_id)
    assert {one: sorted(transport.stopped) for one, transport in ways.by.items()} == {
        one: [op_id] if one == way else [] for one in WAYS
    }


def test_where_there_is_no_transport_between_hosts_ops_of_this_host_are_stopped_all_the_same() -> None:
    ways = Ways()
    ways.transports.receiver = None
    op = ways.harnesses["ipc"].op()
    ways.transports.start(op, ways.harnesses["ipc"].report)
    ways.transports.stop(op.op_id)
    assert ways.by["ipc"].stopped == {op.op_id}
    assert not ways.transports.can_reach(ways.harnesses["tcp"].source.tcp)
