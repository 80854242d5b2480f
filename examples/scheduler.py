"""A small engine with the synchronous client: a scheduler loop that never waits, as prefill or as decode.

Two terminals, and ``kvferry daemon`` in a third; a router would tell both sides the request ids::

    python examples/scheduler.py prefill 0123456789abcdef0123456789abcdef
    python examples/scheduler.py decode 0123456789abcdef0123456789abcdef

The model is a toy: the KV of token p of a request is p + a number that comes from the request's id.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from kvferry.clients import AttachedPool, Client, KvferryError, MhaSpec, Transfer, pages
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import PoolFullError

SPEC = MhaSpec(layers=2, tokens=256, page_size=16, kv_heads=2, head_dim=8, dtype="float32")
PROMPT_TOKENS = 40
PAGES = -(-PROMPT_TOKENS // SPEC.page_size)
DEADLINE_S = 120.0
"""Of a transfer: the other engine may be started later."""
STEP_S = 0.001
"""How long an idle step waits for news. An engine that has something to compute polls for 0."""


@dataclass
class Request:
    """What the scheduler knows of one request."""

    request_id: str
    ids: PageIds
    transfer: Transfer


def compute_prompt(pool: AttachedPool, request_id: str, ids: PageIds) -> int:
    """Fill a request's pages, as the prefill of a model does, and return the first token."""
    for role in ("k", "v"):
        layers = pool.tensor("main", role)  # (layers, pages, page_size, heads, dim), the daemon's memory itself
        layers[:, ids] = expected_pages(request_id)
    return int(request_id[:4], 16)


def expected_pages(request_id: str) -> torch.Tensor:
    """Return the toy model's KV of a request, page by page."""
    positions = torch.arange(PAGES * SPEC.page_size, dtype=torch.float32).view(PAGES, SPEC.page_size, 1, 1)
    return positions + int(request_id[:4], 16)


class Scheduler:
    """The loop: starts what there are pages for, takes news, ends what is over. Both roles differ in two places."""

    def __init__(self, client: Client, role: str, request_ids: list[str]) -> None:
        self.client = client
        self.role = role
        self.pool = client.create_pool(role, SPEC)
        self.waiting = list(request_ids)
        self.running: dict[Transfer, Request] = {}
        self.failed = 0

    def run(self) -> None:
        """Go on until every request is over."""
        while self.waiting or self.running:
            self.start_requests()
            for changed in self.client.poll(STEP_S):  # a transfer comes here each time that it has changed
                if isinstance(changed, Transfer) and changed in self.running:
                    self.look_at(self.running[changed])

    def start_requests(self) -> None:
        """Start requests for as long as there are pages."""
        while self.waiting:
            try:
                ids = self.client.allocate(self.role, PAGES)
            except PoolFullError:
                return  # some will be free when a request ends
            request_id = self.waiting.pop(0)
            listed = [pages(ids, tokens=PROMPT_TOKENS)]
            if self.role == "prefill":
                token = compute_prompt(self.pool, request_id, ids)
                transfer = self.client.send("prefill", request_id, listed, first_token=token, deadline_s=DEADLINE_S)
            else:
                transfer = self.client.receive("decode", request_id, listed, deadline_s=DEADLINE_S)
            self.running[transfer] = Request(request_id, ids, transfer)

    def look_at(self, request: Request) -> None:
        """End a request whose pages are nobody else's any more: settled, well or not."""
        if not request.transfer.is_settled:
            return
        if request.transfer.error is not None:
            self.failed += 1
            print(f"{request.request_id} failed: {request.transfer.error}")
        elif self.role == "decode":
            self.decode(request)
        else:
            print(f"{request.request_id} sent")
        self.client.free(self.role, request.ids)
        del self.running[request.transfer]

    def decode(self, request: Request) -> None:
        """Use what has arrived: here by looking whether it is what prefill had."""
        same = all(
            torch.equal(layer[request.ids], expected_pages(request.request_id).expand_as(layer[request.ids]))
            for role in ("k", "v")
            for layer in self.pool.tensor("main", role)
        )
        print(f"{request.request_id} received token={request.transfer.outcome().first_token} identical={same}")


def main() -> int:
    """Run one engine; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("role", choices=("prefill", "decode"))
    parser.add_argument("request_ids", nargs="+", metavar="REQUEST_ID")
    parser.add_argument("--runtime-dir")
    options = parser.parse_args()
    try:
        with Client.connect(options.runtime_dir, name=f"example-{options.role}") as client:
            scheduler = Scheduler(client, options.role, options.request_ids)
            scheduler.run()
            return 1 if scheduler.failed else 0
    except KvferryError as error:  # what the remedy says is what to do
        print(f"{type(error).__name__}: {error}")
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
