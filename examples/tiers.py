"""A small engine under pressure: a request leaves for host memory and comes back, and a prefix is found again.

``python examples/tiers.py``, with a daemon whose ``tiers.host_bytes`` is not 0.
"""

from __future__ import annotations

import argparse

import torch

from kvferry.clients import AttachedPool, Client, KvferryError, MhaSpec, ModelIdentity, block_hashes, pages
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import CacheMissError

SPEC = MhaSpec(layers=2, tokens=128, page_size=16, kv_heads=2, head_dim=8, dtype="float32")
MODEL = ModelIdentity(name="random", revision="1")  # whose KV it is: another model's blocks are never found
POOL = "tiers-example"
PROMPT_TOKENS = 64


def contents(pool: AttachedPool, ids: PageIds) -> torch.Tensor:
    """Return a copy of what pages hold."""
    return torch.stack([pool.tensor("main", role)[:, ids].clone() for role in ("k", "v")])


def compute(pool: AttachedPool, ids: PageIds, seed: int) -> torch.Tensor:
    """Fill pages as a model would, and return what they hold."""
    made = torch.rand((2, SPEC.layers, len(ids), SPEC.page_size, 2, 8), generator=torch.manual_seed(seed))
    for number, role in enumerate(("k", "v")):
        pool.tensor("main", role)[:, ids] = made[number]
    return made


def retract_and_resume(client: Client, pool: AttachedPool) -> None:
    """Let a request leave, give its pages to others, and take it back into other pages."""
    ids = client.allocate(POOL, PROMPT_TOKENS // SPEC.page_size)
    before = compute(pool, ids, seed=1)
    out = client.offload(POOL, [pages(ids, tokens=PROMPT_TOKENS)], release=True)  # the daemon frees the pages
    client.wait_done(out)
    others = client.allocate(POOL, 4)  # some of them are the very same
    compute(pool, others, seed=2)

    back = client.restore(POOL, out.snapshot, drop=True)  # into pages that the daemon takes for this session
    client.wait_done(back)
    resumed = back.pages["main"]
    print(f"resumed in pages {resumed.tolist()}, identical={torch.equal(contents(pool, resumed), before)}")
    for freed in (others, resumed):
        client.free(POOL, freed)


def find_a_prefix_again(client: Client, pool: AttachedPool) -> None:
    """Store the blocks of one request, and load those that another request has in common with it."""
    first = list(range(PROMPT_TOKENS))
    ids = client.allocate(POOL, PROMPT_TOKENS // SPEC.page_size)
    made = compute(pool, ids, seed=3)
    client.wait_done(client.store(POOL, block_hashes(first, SPEC.page_size), ids))
    client.free(POOL, ids)

    second = [*range(PROMPT_TOKENS // 2), *range(1000, 1000 + PROMPT_TOKENS // 2)]  # the same first half
    found = client.lookup(POOL, block_hashes(second, SPEC.page_size))
    if not found.lease:
        print("nothing is cached")
        return
    ids = client.allocate(POOL, found.blocks)
    try:
        client.wait_done(client.load(POOL, found.lease, ids, unpin=True))
    except CacheMissError:  # gone meanwhile: compute it, as if it had never been there
        print("the cached blocks are gone")
    else:
        same = torch.equal(contents(pool, ids), made[:, :, : found.blocks])
        print(f"loaded {found.blocks} of {len(second) // SPEC.page_size} blocks, identical={same}")
    client.free(POOL, ids)


def main() -> int:
    """Run the example; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runtime-dir")
    options = parser.parse_args()
    try:
        with Client.connect(options.runtime_dir, name="example-tiers") as client:
            pool = client.create_pool(POOL, SPEC, model=MODEL)
            retract_and_resume(client, pool)
            find_a_prefix_again(client, pool)
            client.delete_pool(POOL)
    except KvferryError as error:  # TIER_OFF: the daemon has no host tier
        print(f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
