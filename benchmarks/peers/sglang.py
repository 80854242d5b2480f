"""SGLang's own functions: grouping pages, planning a transfer's blocks, packing page ids.

``make peers`` puts the wheel into an environment of its own; the functions run here, in this interpreter and with this
numpy, so that both sides of a comparison have the same. A manager's methods get a stand-in for ``self`` with the
settings of one Ascend prefill rank without pipeline stages.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.peers.lifting import Function, LiftError, lift

ENVIRONMENT = Path(__file__).resolve().parents[2] / ".peers" / "sglang"
"""Where ``make peers`` installs it."""

UTILITIES = Path("sglang/srt/disaggregation/common/utils.py")
ASCEND = Path("sglang/srt/disaggregation/ascend/conn.py")
MOONCAKE = Path("sglang/srt/disaggregation/mooncake/conn.py")

PageIndices = npt.NDArray[np.int32]
"""Page ids as SGLang keeps them, ``(n,)`` int32."""
Block = tuple[int, int, int]
"""Source address, destination address, bytes."""
AddressLists = tuple[list[int], list[int], list[int]]
"""The same, as the transfer engine takes them: sources, destinations, bytes."""


class SGLang(NamedTuple):
    """What was lifted.

    Attributes:
        version: of the wheel.
        group: ``group_concurrent_contiguous``: two lists of page ids to the runs of each.
        pack: ``pack_int_lists``: lists of int and a ``struct`` format letter to bytes.
        unpack: ``unpack_int_lists``: the way back.
        send: ``AscendKVManager.send_kvcache``: plans all blocks and hands them to ``self._transfer_data``.
        transfer: ``MooncakeKVManager._transfer_data``: turns blocks into the engine's three lists.
    """

    version: str
    group: Callable[[PageIndices, PageIndices], tuple[list[list[int]], list[list[int]]]]
    pack: Callable[[Sequence[PageIndices | Sequence[int]], str], bytes]
    unpack: Callable[[bytes, str], list[list[int]]]
    send: Function
    transfer: Function


class Buffers(NamedTuple):
    """One side's buffers or both's, a number for each entry."""

    source_ptrs: list[int]
    destination_ptrs: list[int]
    item_lens: list[int]


def find(environment: Path = ENVIRONMENT) -> SGLang | None:
    """Return SGLang's functions, or None, with a line that says so, where ``make peers`` was not run.

    Raises:
        LiftError: it is there, but not as expected.
    """
    packages = next(environment.glob("lib/python*/site-packages/sglang"), None)
    if packages is None:
        print("rows against SGLang left out: run `make peers` first", flush=True)
        return None
    return load(packages.parent)


def load(packages: Path) -> SGLang:
    """Lift the functions from a folder of packages.

    Raises:
        LiftError: a file or a function is not there.
    """
    wheel = next(packages.glob("sglang-*.dist-info"), None)
    if wheel is None:
        raise LiftError(f"{packages} has no sglang-*.dist-info: remove .peers and run `make peers` again")
    helpers = ("pack_list_of_buffers", "unpack_list_of_buffers")
    wanted = ("group_concurrent_contiguous", "pack_int_lists", "unpack_int_lists")
    utilities = lift(packages / UTILITIES, [*helpers, *wanted], {"np": np, "struct": struct})
    group, pack, unpack = (utilities[name] for name in wanted)
    send, transfer = "AscendKVManager.send_kvcache", "MooncakeKVManager._transfer_data"
    return SGLang(
        version=wheel.name.removeprefix("sglang-").removesuffix(".dist-info"),
        group=group,
        pack=pack,
        unpack=unpack,
        send=lift(packages / ASCEND, [send], {"np": np, "group_concurrent_contiguous": group})[send],
        transfer=lift(packages / MOONCAKE, [transfer], {})[transfer],
    )


def plan_blocks(sglang: SGLang, buffers: Buffers, source: PageIndices, destination: PageIndices) -> list[Block]:
    """Return every block of a transfer, as ``send_kvcache`` plans them for its transfer."""
    planned: list[Block] = []

    def keep(_session: str, blocks: list[Block]) -> int:
        nonlocal planned
        planned = blocks
        return 0

    _send(sglang, _manager(buffers, keep), buffers, source, destination)
    return planned


def address_lists(sglang: SGLang, buffers: Buffers, source: PageIndices, destination: PageIndices) -> AddressLists:
    """Return what the transfer engine is called with: the same blocks, taken apart again by ``_transfer_data``."""
    called: AddressLists = ([], [], [])

    def engine(_session: str, sources: list[int], destinations: list[int], lengths: list[int]) -> int:
        nonlocal called
        called = (sources, destinations, lengths)
        return 0

    this = SimpleNamespace(engine=SimpleNamespace(batch_transfer_sync=engine))
    manager = _manager(buffers, lambda session, blocks: sglang.transfer(this, session, blocks))
    _send(sglang, manager, buffers, source, destination)
    return called


def _manager(buffers: Buffers, transfer: Callable[[str, list[Block]], Any]) -> SimpleNamespace:
    return SimpleNamespace(
        kv_args=SimpleNamespace(kv_data_ptrs=buffers.source_ptrs, kv_item_lens=buffers.item_lens),
        pp_size=1,
        is_mla_backend=True,
        is_hybrid_mla_backend=False,
        enable_custom_mem_pool=False,
        # It looks at nothing without --enable-unified-memory.
        _validate_envelope_kv_layout=lambda *_: None,
        _transfer_data=transfer,
    )


def _send(
    sglang: SGLang, manager: SimpleNamespace, buffers: Buffers, source: PageIndices, destination: PageIndices
) -> None:
    status = sglang.send(manager, "session", source, buffers.destination_ptrs, destination, None)
    assert status == 0
