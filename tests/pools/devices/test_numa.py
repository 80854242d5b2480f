"""The node that memory is taken from: what the kernel then says of it."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Callable
from typing import Final

import pytest

from kvferry.pools.devices.host import HostRegion
from kvferry.pools.host.memory import read_file
from kvferry.pools.host.placement import nodes

GET_MEMPOLICY: Final = {"x86_64": 239, "aarch64": 236}
OF_ADDRESS: Final = 2
PREFERRED: Final = 1
NO_NODE: Final = 1000


def policy_at(address: int) -> tuple[int, int]:
    """Return the mode and the nodes, as bits, of the memory there."""
    mode, mask = ctypes.c_int(-1), (ctypes.c_ulong * 16)()
    number = ctypes.c_long(GET_MEMPOLICY[platform.machine()])
    assert not ctypes.CDLL(None).syscall(
        number, ctypes.byref(mode), mask, ctypes.c_ulong(1024), ctypes.c_void_p(address), ctypes.c_ulong(OF_ADDRESS)
    )
    return mode.value, mask[0]


def test_memory_comes_from_a_node_whoever_touches_it(require: Callable[[object, str], None]) -> None:
    require(nodes(read_file), "a kernel with NUMA")
    node = max(nodes(read_file))
    with HostRegion.create("placed", 1 << 20) as region, HostRegion.create("free", 1 << 20) as other:
        region.prefer_node(node)
        assert policy_at(region.address + (1 << 20) - 1) == (PREFERRED, 1 << node)
        assert policy_at(other.address) == (0, 0)
        with pytest.raises(OSError, match="Invalid argument"):
            region.prefer_node(NO_NODE)


def test_a_machine_whose_calls_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with HostRegion.create("placed", 4096) as region, pytest.raises(OSError, match="not implemented"):
        region.prefer_node(0)
