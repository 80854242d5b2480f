"""Who may ask for a pool's memory: a home of this host, by the key of an open send request."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.protocol.errors import AccessDeniedError
from kvferry.protocol.session_stream import RegionRequest
from tests.kit.peers import Transfer


def told(transfer: Transfer, **other: object) -> RegionRequest:
    """Return what the home asks with after it was sent to; ``other`` is what it says otherwise."""
    (send_request,) = transfer.home.state_machine.endpoints.remote_sends.values()
    assert send_request.origin is not None
    (pool,) = transfer.source.pools
    asked = RegionRequest(
        tenant=pool.tenant,
        pool=pool.name,
        region=pool.region.identity,
        send_request=send_request.origin.send_request,
        key=send_request.region_key,
    )
    return msgspec.structs.replace(asked, **other)


def refused(transfer: Transfer, asked: RegionRequest) -> None:
    """Check that the source gives nothing for it."""
    with pytest.raises(AccessDeniedError) as error:
        transfer.source.state_machine.peers.redeem(asked)
    assert error.value.field == "key"


@pytest.fixture
def transfer() -> Transfer:
    """Return a transfer between two daemons of one host, whose copy is under way."""
    transfer = Transfer("ipc")
    transfer.meet()
    return transfer


def test_a_home_may_ask_again_while_the_send_request_is_open(transfer: Transfer) -> None:
    """What it has mapped it may have dropped, as the op that wanted it was stopped."""
    asked = told(transfer)
    transfer.source.state_machine.peers.redeem(asked)
    transfer.source.state_machine.peers.redeem(asked)
    transfer.succeeds()


@pytest.mark.parametrize(
    "other",
    [{"key": ""}, {"key": "0" * 32}, {"send_request": 99}, {"region": 1}, {"pool": "other"}, {"tenant": 99}],
    ids=str,
)
def test_a_key_is_of_one_send_request_and_one_pool(transfer: Transfer, other: dict[str, object]) -> None:
    refused(transfer, told(transfer, **other))
    transfer.source.state_machine.peers.redeem(told(transfer))


def test_a_key_ends_with_its_send_request(transfer: Transfer) -> None:
    asked = told(transfer)
    transfer.succeeds()
    refused(transfer, asked)


def test_a_home_on_another_host_is_told_none() -> None:
    transfer = Transfer("tcp")
    transfer.meet()
    assert not told(transfer).key
    refused(transfer, told(transfer))
