"""Checksums on demand: a byte that is not the source's fails the transfer, on both sides, and names entry and page."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from kvferry.clients import AsyncClient, new_request_id, pages
from kvferry.daemon.transports import local
from kvferry.pools.planning.copies import copy_one_by_one
from kvferry.pools.planning.plan import Blocks
from kvferry.protocol import errors
from tests.kit.faults import flip_bit
from tests.kit.in_process import SPEC, serving

pytestmark = pytest.mark.anyio
COUNT = 4


@pytest.fixture(autouse=True)
def _no_blocking_calls() -> None:
    """Let the daemons block where they end: they wait for their own threads."""


def copy_wrongly(blocks: Blocks) -> None:
    """Copy, and flip a bit of what was copied first, unless it is looked at by the way of staging."""
    copy_one_by_one(blocks)
    if len(blocks) > 1 or int(blocks[0, 2]) >= COUNT * PAGE_BYTES:
        flip_bit(int(blocks[0, 1]))


PAGE_BYTES = SPEC.page_size * SPEC.kv_heads * SPEC.head_dim * 4


@pytest.fixture(params=["one daemon", "two daemons"])
async def clients(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    anyio_backend: object,  # noqa: ARG001
) -> AsyncIterator[tuple[AsyncClient, AsyncClient]]:
    """Return a client that sends and one that receives, of daemons whose copies are wrong."""
    monkeypatch.setattr(local, "best_copy", lambda: copy_wrongly)
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(serving())
        other = one if request.param == "one daemon" else await stack.enter_async_context(serving())
        found = [await stack.enter_async_context(await AsyncClient.connect(at.path)) for at in (one, other)]
        for name, client in zip(("prefill", "decode"), found, strict=True):
            await client.create_pool(name, SPEC)
        yield found[0], found[1]


@pytest.mark.parametrize("asks", ["sender", "receiver", "nobody"])
async def test_a_wrong_byte_fails_the_transfer_where_either_side_asks(
    clients: tuple[AsyncClient, AsyncClient], asks: str
) -> None:
    prefill, decode = clients
    ids, theirs = await prefill.allocate("prefill", COUNT), await decode.allocate("decode", COUNT)
    sources = [(await prefill.status()).addresses[0]]
    request_id = new_request_id()
    receiving = decode.receive(
        "decode", request_id, [pages(theirs)], source_daemons=sources, checksums=asks == "receiver"
    )
    sending = prefill.send("prefill", request_id, [pages(ids)], checksums=asks == "sender", payload=b"state")
    for client, transfer in ((decode, receiving), (prefill, sending)):
        if asks == "nobody":
            await client.wait_finished(transfer)
        else:
            with pytest.raises(errors.TransferFailedError, match=r"page \d+ of main.*has other bytes"):
                await client.wait_finished(transfer)
            assert transfer.finished is not None
            assert transfer.finished.payload == b""
        await client.wait_settled(transfer)
    assert (await decode.free("decode", theirs)).deferred == 0
    assert (await prefill.free("prefill", ids)).deferred == 0
