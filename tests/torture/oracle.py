"""What every byte must be, and who may have written it.

A page's bytes follow from the request, the logical page, the entry and the head. Each engine notes what it puts where
before it does. So a page of a lost session is no excuse for any bytes: they must be its last owner's, or those of
whoever got it since.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
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


def seed(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def pattern(seed: int, logical: Sequence[int], shape: tuple[int, ...], role: int) -> npt.NDArray[np.int16]:
    """Return what pages must hold: ``(layers, pages, tokens, heads, dim)`` int16."""
    layers, _, tokens, heads, dim = shape
    parts = np.ix_(range(layers), logical, range(tokens), range(heads), range(dim))
    value = np.full(tuple(len(one.reshape(-1)) for one in parts), seed ^ role, np.uint32)
    with np.errstate(over="ignore"):
        for part in parts:
            value = (value ^ part.astype(np.uint32)) * _MIX
            value ^= value >> np.uint32(15)
    return value.astype(np.int16)


def fill(memory: Memory, ids: npt.NDArray[np.int64], name: str) -> None:
    for number, role in enumerate(ROLES):
        tensor = memory[role].view(torch.int16)
        shape = (tensor.shape[0], len(ids), *tensor.shape[2:])
        values = torch.from_numpy(pattern(seed(name), range(len(ids)), shape, number))
        tensor[:, torch.from_numpy(ids).to(tensor.device)] = values.to(tensor.device)
        if tensor.device.type != "cpu":
            torch.accelerator.synchronize()


def wrong(memory: Memory, ids: npt.NDArray[np.int64], name: str) -> str:
    """Return where the bytes in pages are not those of a name, in words; empty where all are right."""
    for number, role in enumerate(ROLES):
        found = read(memory[role], ids)
        bad = found != pattern(seed(name), range(len(ids)), found.shape, number)
        if bad.any():
            layer, page, token, head, at = (int(one[0]) for one in np.nonzero(bad))
            return (
                f"{int(bad.sum())} wrong values of {name}, first in {role} of layer {layer}, logical page "
                f"{page} (page {int(ids[page])}), token {token}, head {head}, {at}"
            )
    return ""


def read(tensor: torch.Tensor, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int16]:
    copy = tensor.view(torch.int16)[:, torch.from_numpy(ids).to(tensor.device)].cpu()
    return copy.numpy()


def page_bytes() -> int:
    return len(ROLES) * SPEC.layers * SPEC.page_size * SPEC.kv_heads * SPEC.head_dim * 2


ANY_PAGE: Final = 0
"""Where the daemon chooses the pages: a restore."""

BEFORE_BYTES: Final = 1 << 16
"""Restores noted so long before may still be under way."""


class Claims:
    """A daemon's file of rows ``(page, seed of the name, logical page)`` uint32, which all its engines append to."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def note(self, ids: npt.NDArray[np.int64], name: str) -> int:
        """Note that a name's bytes go into pages, in order, or that nobody writes them; return where that stands."""
        rows = np.empty((len(ids), 3), np.uint32)
        rows[:, 0], rows[:, 1], rows[:, 2] = ids, seed(name), np.arange(len(ids))
        os.write(self._fd, rows.tobytes())
        return os.lseek(self._fd, 0, os.SEEK_CUR)

    def unexplained(self, memory: Memory, ids: npt.NDArray[np.int64], since: int) -> str:
        """Return which values none of those wrote who noted the pages from ``since`` on; empty: there are none."""
        begin = max(0, since - len(ids) * 12 - BEFORE_BYTES // 12 * 12)
        size = os.fstat(self._fd).st_size - begin
        rows = np.frombuffer(os.pread(self._fd, size, begin), np.uint32).reshape(-1, 3)
        own = (since - begin) // 12 - len(ids)
        for page in ids:
            noted = rows[own:][rows[own:, 0] == page]
            patterns = {(int(whose), int(logical)) for _, whose, logical in [*noted, *rows[rows[:, 0] == ANY_PAGE]]}
            patterns |= {(seed(LATE), int(logical)) for _, _, logical in noted}
            for number, role in enumerate(ROLES):
                found = read(memory[role], page[None])
                bad = np.ones(found.shape, np.bool_)
                for whose, logical in patterns:
                    bad &= found != pattern(whose, [logical], found.shape, number)
                if bad.any():
                    return f"{int(bad.sum())} values in {role} of page {page} that none of {len(patterns)} patterns has"
        return ""
