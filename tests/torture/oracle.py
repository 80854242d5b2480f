"""What every byte must be: a page's bytes follow from the request, the logical page, the entry and the head."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from kvferry.clients import MhaSpec

SPEC: Final = MhaSpec(layers=2, tokens=16 * 256, page_size=16, kv_heads=2, head_dim=8, dtype="float16")
PAGES: Final = 256
ROLES: Final = ("k", "v")
LATE: Final = "nobody"
"""The name of the bytes in pages that nobody writes any more: a late write would be seen in them."""

Memory: TypeAlias = Mapping[str, torch.Tensor]
"""A pool's tensors by role: ``(layers, pages, tokens, heads, dim)``, on the host or a device."""

_MIX: Final = np.uint32(0x9E3779B1)


def wanted(name: str, logical: Sequence[int], shape: tuple[int, ...], role: int) -> npt.NDArray[np.int16]:
    """Return what pages must hold: ``(layers, pages, tokens, heads, dim)`` int16.

    Args:
        name: whose bytes: a request, and in which life of it.
        logical: the number of each page in it.
        shape: of the pages.
        role: 0 for k, 1 for v.
    """
    return pattern(seed(name), logical, shape, role)


def seed(name: str) -> int:
    """Return the 32 bits that a name's bytes follow from."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def pattern(seed: int, logical: Sequence[int], shape: tuple[int, ...], role: int) -> npt.NDArray[np.int16]:
    """Return what ``wanted`` does, for a name's seed."""
    layers, _, tokens, heads, dim = shape
    parts = np.ix_(range(layers), logical, range(tokens), range(heads), range(dim))
    value = np.full(tuple(len(one.reshape(-1)) for one in parts), seed ^ role, np.uint32)
    with np.errstate(over="ignore"):
        for part in parts:
            value = (value ^ part.astype(np.uint32)) * _MIX
            value ^= value >> np.uint32(15)
    return value.astype(np.int16)


def fill(memory: Memory, ids: npt.NDArray[np.int64], name: str, first: int = 0) -> None:
    """Write the bytes of a name into pages, of logical pages from ``first`` on."""
    for number, role in enumerate(ROLES):
        tensor = memory[role].view(torch.int16)
        shape = (tensor.shape[0], len(ids), *tensor.shape[2:])
        values = torch.from_numpy(wanted(name, range(first, first + len(ids)), shape, number))
        tensor[:, torch.from_numpy(ids).to(tensor.device)] = values.to(tensor.device)
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize()


def wrong(memory: Memory, ids: npt.NDArray[np.int64], name: str, first: int = 0) -> str:
    """Return where the bytes in pages are not those of a name, in words; empty where all are right."""
    for number, role in enumerate(ROLES):
        found = read(memory[role], ids)
        bad = found != wanted(name, range(first, first + len(ids)), found.shape, number)
        if bad.any():
            layer, page, token, head, at = (int(one[0]) for one in np.nonzero(bad))
            return (
                f"{int(bad.sum())} wrong values of {name}, first in {role} of layer {layer}, logical page "
                f"{first + page} (page {int(ids[page])}), token {token}, head {head}, {at}"
            )
    return ""


def read(tensor: torch.Tensor, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
    """Return a copy of a role's pages."""
    copy = tensor.view(torch.int16)[:, torch.from_numpy(ids).to(tensor.device)].cpu()
    return copy.numpy()


def page_bytes() -> int:
    """Return the bytes of a page over all entries."""
    return len(ROLES) * SPEC.layers * SPEC.page_size * SPEC.kv_heads * SPEC.head_dim * 2
