"""Pools with known contents, and what tests of the tiers look at from outside."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from kvferry.clients import AttachedPool, Client, HybridSwaSpec, MhaSpec, ModelIdentity
from tests.kit.daemons import Daemon
from tests.kit.devices import DEVICE

PAGE_SIZE: Final = 4
SPEC: Final = MhaSpec(
    layers=2, first_layer=3, tokens=64, page_size=PAGE_SIZE, kv_heads=2, head_dim=4, v_head_dim=2, dtype="float32"
)
HYBRID: Final = HybridSwaSpec(
    full_layers=(0, 2), window_layers=(1,), tokens=64, window_tokens=32, window=8, page_size=PAGE_SIZE, kv_heads=2,
    head_dim=4, dtype="float32",
)  # fmt: skip
GROUPED: Final = msgspec.structs.replace(SPEC, layers=4, first_layer=0, groups=((0, 2), (1, 3)))
PAGE_BYTES: Final = 2 * PAGE_SIZE * 2 * (4 + 2) * 4
"""Of one page of SPEC, over all entries."""

ROLES: Final = ("k", "v")
MODEL: Final = ModelIdentity(name="some/model", revision="1")


class Filled:
    """A pool of the test's device, as its engine sees it."""

    def __init__(
        self, client: Client, name: str, spec: MhaSpec | HybridSwaSpec = SPEC, model: ModelIdentity | None = MODEL
    ) -> None:
        self.client = client
        self.name = name
        self.pool: AttachedPool = client.create_pool(name, spec, device=DEVICE.name, model=model)

    def write(self, ids: npt.NDArray[np.int64], seed: int, component: str = "main") -> list[torch.Tensor]:
        """Fill pages, and return what is in them: a tensor a role, ``(layers, len(ids), …)``."""
        generator = torch.Generator().manual_seed(seed)
        at = torch.from_numpy(ids)
        written = []
        for role in ROLES:
            tensor = self.pool.tensor(component, role)
            content = torch.randn((tensor.shape[0], len(ids), *tensor.shape[2:]), generator=generator)
            tensor[:, at.to(tensor.device)] = content.to(tensor.device)
            written.append(content)
        DEVICE.synchronize()
        return written

    def read(self, ids: npt.NDArray[np.int64], component: str = "main") -> list[torch.Tensor]:
        """Return what is in pages, as ``write`` does."""
        found = []
        for role in ROLES:
            tensor = self.pool.tensor(component, role)
            found.append(tensor[:, torch.from_numpy(ids).to(tensor.device)].cpu())
        return found

    def holds(self, ids: npt.NDArray[np.int64], content: list[torch.Tensor], component: str = "main") -> bool:
        """Return whether pages hold exactly this."""
        pairs = zip(self.read(ids, component), content, strict=True)
        return all(torch.equal(found, wanted) for found, wanted in pairs)

    def take(self, count: int) -> npt.NDArray[np.int64]:
        return self.client.allocate(self.name, count)

    def close(self) -> None:
        """Unmap the pool; views that are left keep it mapped."""
        self.pool.close()


@contextmanager
def pool(
    client: Client, name: str = "pool", spec: MhaSpec | HybridSwaSpec = SPEC, *, model: ModelIdentity | None = MODEL
) -> Iterator[Filled]:
    """Create a pool of the test's device, and unmap it in the end."""
    one = Filled(client, name, spec, model)
    try:
        yield one
    finally:
        one.close()


def hashes(count: int, salt: int = 0) -> list[bytes]:
    """Return block hashes that mean nothing."""
    return [(1 + number).to_bytes(8, "little") + salt.to_bytes(8, "little") for number in range(count)]


@contextmanager
def arena_of(daemon: Daemon, name: str = "kvferry:host-tier") -> Iterator[mmap.mmap]:
    """Map the memory of a daemon's host tier, or other memory of that name, to damage it."""
    folder = Path(f"/proc/{daemon.process.pid}/fd")
    # A descriptor that the daemon closes amid the search has no link any more; realpath says so by its own path.
    number, *_ = [one for one in folder.iterdir() if name in os.path.realpath(one)]
    fd = os.open(number, os.O_RDWR)
    try:
        with mmap.mmap(fd, os.fstat(fd).st_size) as memory:
            yield memory
    finally:
        os.close(fd)
