"""A small engine with the asynchronous client: a task for each request; it can be either side of ``scheduler.py``.

``python examples/async_engine.py decode REQUEST_ID …``. What waits is awaited: ``connect``, ``allocate``,
``wait_finished``. What returns at once is not: ``send`` and ``receive``, which give a transfer to wait for.
"""

from __future__ import annotations

import argparse
import asyncio

import torch

from kvferry.clients import AsyncClient, AttachedPool, KvferryError, MhaSpec, pages
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import PoolFullError

SPEC = MhaSpec(layers=2, tokens=256, page_size=16, kv_heads=2, head_dim=8, dtype="float32")
PROMPT_TOKENS = 40
PAGES = -(-PROMPT_TOKENS // SPEC.page_size)
DEADLINE_S = 120.0
"""Of a transfer: the other engine may be started later."""

RETRY_S = 0.01


def expected_pages(request_id: str) -> torch.Tensor:
    """Return the toy model's KV of a request, page by page; see ``scheduler.py``."""
    positions = torch.arange(PAGES * SPEC.page_size, dtype=torch.float32).view(PAGES, SPEC.page_size, 1, 1)
    return positions + int(request_id[:4], 16)


async def allocated(client: AsyncClient, pool: str) -> PageIds:
    """Return a request's pages, as soon as there are enough."""
    while True:
        try:
            return await client.allocate(pool, PAGES)
        except PoolFullError:
            await asyncio.sleep(RETRY_S)


async def prefill(client: AsyncClient, pool: AttachedPool, request_id: str) -> None:
    """Compute one request and hand it over."""
    ids = await allocated(client, pool.name)
    try:
        for role in ("k", "v"):
            pool.tensor("main", role)[:, ids] = expected_pages(request_id)
        token = int(request_id[:4], 16)
        listed = [pages(ids, tokens=PROMPT_TOKENS)]
        sent = client.send(pool.name, request_id, listed, first_token=token, deadline_s=DEADLINE_S)
        await client.wait_finished(sent, DEADLINE_S)
        print(f"{request_id} sent")
    finally:
        await client.free(pool.name, ids)  # those in flight follow when the transfer settles


async def decode(client: AsyncClient, pool: AttachedPool, request_id: str) -> None:
    """Receive one request and use it: here by looking whether it is what prefill had."""
    ids = await allocated(client, pool.name)
    try:
        listed = [pages(ids, tokens=PROMPT_TOKENS)]
        transfer = client.receive(pool.name, request_id, listed, deadline_s=DEADLINE_S)
        finished = await client.wait_finished(transfer, DEADLINE_S)
        k = pool.tensor("main", "k")[:, ids]
        same = torch.equal(k, expected_pages(request_id).expand_as(k))
        print(f"{request_id} received token={finished.first_token} identical={same}")
        await client.wait_settled(transfer)  # now the pages may be written
    finally:
        await client.free(pool.name, ids)


async def run(runtime_dir: str | None, role: str, request_ids: list[str]) -> int:
    """Run all requests at once; return the exit status."""
    operation = prefill if role == "prefill" else decode
    async with AsyncClient.connect(runtime_dir, name=f"example-{role}") as client:
        pool = await client.create_pool(role, SPEC)
        ended = await asyncio.gather(*(operation(client, pool, one) for one in request_ids), return_exceptions=True)
    failed = [one for one in ended if isinstance(one, BaseException)]
    for error in failed:
        print(f"{type(error).__name__}: {error}")
    return 1 if failed else 0


def main() -> int:
    """Run one engine; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("request_ids", nargs="+", metavar="REQUEST_ID")
    parser.add_argument("--runtime-dir")
    options = parser.parse_args()
    try:
        return asyncio.run(run(options.runtime_dir, options.role, options.request_ids))
    except KvferryError as error:
        print(f"{type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
