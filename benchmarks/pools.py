"""What is copied: a pair of pools of a daemon, or of host regions; the source full of noise, what came compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvferry.clients import AttachedPool, Client, MhaSpec, ModelIdentity, Transfer, new_request_id, pages
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.manifest import bytes_per_page
from kvferry.protocol.codec import PageIds
from kvferry.protocol.ids import HOST
from kvferry.protocol.manifests import Entry, Manifest

KIB, MIB = 1 << 10, 1 << 20
NOISE_BYTES = 10_000_019  # a prime: no two pages alike
PAGE_SIZE = 128
ROLES = ("k", "v")
TIMEOUT_S = 60.0
SHOWN_PAGES = 8
Bytes = npt.NDArray[np.uint8]


class Side(NamedTuple):
    """One engine: its client, its pool, and the pages that it sends or fills."""

    client: Client
    pool: AttachedPool
    ids: PageIds

    def content(self, role: str) -> Bytes:
        """Return a role's pages: ``(layers, pages, bytes of a page)``; of a device's pool, a copy on the host."""
        array = self.pool.tensor("main", role).cpu().view(torch.uint8).numpy()
        return array.reshape(*array.shape[:2], -1)


class Pair:
    """Two pools of one layout, the first one full of noise, with random pages in use in each.

    A context manager: the pools are deleted in the end, so that the next ones have their memory.
    """

    def __init__(
        self,
        clients: Sequence[Client],
        spec: MhaSpec,
        *,
        devices: Sequence[str] = (HOST, HOST),
        model: ModelIdentity | None = None,
    ) -> None:
        """``spec`` is of the pages in use; the pools have half as many again, so that few of them are neighbours."""
        self.count = spec.tokens // spec.page_size
        spec = msgspec.structs.replace(spec, tokens=(self.count + -(-self.count // 2)) * spec.page_size)
        sides: list[Side] = []
        for name, client, device in zip(("source", "target"), clients, devices, strict=True):
            pool = client.create_pool(name, spec, device=device, model=model)
            taken = np.random.default_rng(len(sides)).permutation(client.allocate(name, spec.tokens // spec.page_size))
            client.free(name, taken[self.count :])
            sides.append(Side(client, pool, taken[: self.count]))
        self.source, self.target = sides
        self.size_bytes = self.count * bytes_per_page(self.source.pool.manifest)
        for seed, role in enumerate(ROLES):
            tensor = self.source.pool.tensor("main", role).view(torch.uint8)
            tensor.copy_(torch.from_numpy(noise(tensor.numel(), seed)).view(tensor.shape))
        if devices[1] == HOST:
            self.clear()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(self, *_: object) -> None:
        """Delete the pools."""
        for client, pool, ids in (self.source, self.target):
            pool.close()
            client.free(pool.name, ids)
            client.delete_pool(pool.name)

    def clear(self) -> None:
        """Write zeros over the target, which is on the host."""
        for role in ROLES:
            self.target.content(role)[:] = 0

    def check(self) -> None:
        """See that the target's pages are the source's, every byte."""
        for role in ROLES:
            sent, came = (side.content(role)[:, side.ids] for side in (self.source, self.target))
            assert np.array_equal(sent, came), f"{role} differs"

    def transfer_s(self, **receive: Any) -> float:  # noqa: ANN401  receive's
        """Hand the pages over; return the seconds from ``send`` to the receiver's FINISHED."""
        return transfer_s(self.source, self.target, **receive)


def receive(target: Side, **options: Any) -> tuple[str, Transfer]:  # noqa: ANN401  receive's
    """Return a request's id and its transfer, which waits at the daemon already."""
    request_id = new_request_id()
    received = target.client.receive(target.pool.name, request_id, [pages(target.ids)], **options)
    while received.accepted is None:
        assert target.client.poll(TIMEOUT_S), "no reply to RECEIVE"
    return request_id, received


def transfer_s(source: Side, target: Side, **options: Any) -> float:  # noqa: ANN401  receive's
    """Hand the source's pages over; return the seconds from ``send`` to the receiver's FINISHED."""
    request_id, received = receive(target, **options)
    started = time.perf_counter()
    sent = source.client.send(source.pool.name, request_id, [pages(source.ids)])
    finished = target.client.wait_finished(received, TIMEOUT_S)
    elapsed_s = time.perf_counter() - started
    source.client.wait_settled(sent, TIMEOUT_S)
    target.client.wait_settled(received, TIMEOUT_S)
    assert finished.moved_bytes == len(source.ids) * bytes_per_page(source.pool.manifest), finished
    return elapsed_s


def spec_of(page_bytes: int, pages_in_use: int, layers: int) -> MhaSpec:
    """Return the spec of pages of so many bytes in each layer's K and V."""
    return MhaSpec(
        layers=layers,
        tokens=pages_in_use * PAGE_SIZE,
        page_size=PAGE_SIZE,
        kv_heads=1,
        head_dim=page_bytes // PAGE_SIZE // 4,
        dtype="float32",
    )


def noise(size_bytes: int, seed: int = 0) -> Bytes:
    """Return so many bytes that repeat at no page's distance."""
    return np.resize(np.random.default_rng(seed).integers(0, 256, NOISE_BYTES, np.uint8), size_bytes)


@contextmanager
def regions(source_bytes: int, target_bytes: int) -> Iterator[tuple[HostRegion, HostRegion]]:
    """Make populated regions, the first one full of noise."""
    with (
        HostRegion.create("bench-source", source_bytes) as source,
        HostRegion.create("bench-target", target_bytes) as target,
    ):
        source.view()[:] = noise(source_bytes)
        target.view()[:] = 1  # not 0, which would read a page of zeros that is shared
        yield source, target


def check_last_pages(*sides: tuple[Manifest, HostRegion, PageIds]) -> None:
    """See that the last pages of every entry are the same on both sides, in the heads that both have."""
    source, target = ([_last_pages(entry, region, ids) for entry in held.entries] for held, region, ids in sides)
    for sent, came in zip(source, target, strict=True):
        common = min(sent.shape[2], came.shape[2])
        assert np.array_equal(sent[:, :, :common], came[:, :, :common])


def _last_pages(entry: Entry, region: HostRegion, ids: PageIds) -> Bytes:
    held = region.view()[entry.base : entry.base + entry.pages * entry.page_bytes]
    return held.reshape(entry.pages, entry.page_tokens or 1, entry.heads or 1, -1)[ids[-SHOWN_PAGES:]]
