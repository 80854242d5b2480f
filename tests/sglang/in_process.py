"""What SGLang's schedulers make of the plugin, in the tests' own process: pools, and both halves of requests.

Both managers are over one pool, of which a request has some pages at either side.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import torch
from sglang.srt.disaggregation.base.conn import KVArgs
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import get_context, get_parallel

from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import identity, pools, transfer
from tests.kit.servers import free_ports

PAGE: Final = 4
TOKENS: Final = 256
ROW_BYTES: Final = 100_000
"""Of metadata: hidden states for speculative decoding are more than 64 KiB."""
ROWS: Final = 4
SOON_S: Final = 20.0
LAST: Final = pools.current
"""The pool that was made last."""
KEPT: Final[list[object]] = []
"""Managers: they have sockets that nobody closes, and wait for it where they are collected."""
RANKS: Final = {
    "tp_rank": 0,
    "dp_rank": None,
    "attn_tp_rank": 0,
    "attn_cp_rank": 0,
    "attn_dp_rank": 0,
    "attn_dcp_rank": 0,
    "pp_group": None,
}


@contextlib.contextmanager
def told(environment: Mapping[str, str] | None = None, **options: object) -> Iterator[None]:
    """Have SGLang's options and this process's environment be these; kvferry is chosen where nothing else is said."""
    chosen = {"disaggregation_mode": "prefill", "disaggregation_transfer_backend": "kvferry", "host": "127.0.0.1"}
    load_plugins()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        for name, value in (environment or {}).items():
            patch.setenv(name, value)
        patch.setattr(identity, "weights", identity.RunningWeights())
        stack.enter_context(get_context().override_server_args(**{**chosen, **options}))
        stack.enter_context(get_parallel().override(**RANKS))
        yield


def mha_pool(tokens: int = TOKENS, kind: type[Any] = MHATokenToKVPool, **more: object) -> Any:  # noqa: ANN401
    """Return a pool of SGLang's, of 3 layers of 2 heads."""
    return kind(tokens, PAGE, torch.float32, 2, 8, 3, **{"device": "cpu", "enable_memory_saver": False, **more})


def mla_pool(tokens: int = TOKENS, **more: object) -> Any:  # noqa: ANN401  SGLang's class
    """Return a pool of SGLang's, of 3 layers of rows of 16 + 8."""
    return MLATokenToKVPool(tokens, PAGE, torch.float32, 16, 8, 3, "cpu", enable_memory_saver=False, **more)


@contextlib.contextmanager
def current_pool(pool: Callable[[], EnginePool | None]) -> Iterator[None]:
    """Have the plugin find this as the process's pool: these tests make several in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pools, "current", pool)
        yield


class Made(NamedTuple):
    """A pool of SGLang's, and the daemon's that it is."""

    sglang: Any
    daemon: EnginePool


def made(make: Callable[[], Any]) -> Made:
    """Return what SGLang's constructor makes where kvferry was chosen."""
    with current_pool(lambda: None):
        pool = make()
    ours = LAST()
    assert ours is not None
    return Made(pool, ours)


def kv_args(pool: Any, *metadata: npt.NDArray[Any]) -> Any:  # noqa: ANN401  SGLang's classes
    """Return what the scheduler tells a manager of a pool and of the buffers of metadata, of a row a request each."""
    args = KVArgs()
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = pool.get_contiguous_buf_infos()
    args.aux_data_ptrs = [one.ctypes.data for one in metadata]
    args.aux_data_lens = [one.nbytes for one in metadata]
    args.aux_item_lens = [one[0].nbytes for one in metadata]
    args.state_types, args.state_item_lens = [], []
    args.page_size, args.kv_cache_dtype_str = PAGE, "float32"
    args.engine_rank, args.system_dp_rank, args.pp_rank = 0, 0, 0
    return args


def manager(args: Any, mode: Any) -> transfer.KvferryKVManager:  # noqa: ANN401  SGLang's classes
    """Return a manager, made as the scheduler makes it."""
    one = transfer.KvferryKVManager(args, mode, None)
    KEPT.append(one)
    return one


class Halves:
    """Prefill's manager and decode's, and prefill's bootstrap server.

    Attributes:
        made: their pool.
        rows, counts: of metadata, ROW_BYTES and 16 bytes each.
        address: the bootstrap server's.
        prefill, decode: the managers.
    """

    def __init__(self, one: Made, bootstrap_port: int) -> None:
        self.made = one
        self.rows = np.zeros((ROWS, ROW_BYTES), np.uint8)
        self.counts = np.zeros((ROWS, 2), np.int64)
        self.address = f"127.0.0.1:{bootstrap_port}"
        self._rooms = 0
        self._bootstrap = transfer.KvferryKVBootstrapServer("127.0.0.1", bootstrap_port)
        args = kv_args(one.sglang, self.rows, self.counts)
        self.prefill = manager(args, DisaggregationMode.PREFILL)
        self.decode = self.decode_with(args)

    def decode_with(self, args: Any) -> transfer.KvferryKVManager:  # noqa: ANN401  SGLang's class
        """Return a manager of decode's that has been told this."""
        one = manager(args, DisaggregationMode.DECODE)
        assert one.try_ensure_parallel_info(self.address)
        return one

    def sender(self, room: int, count: int = 0, row: int = 0) -> Any:  # noqa: ANN401  of SGLang's methods, too
        """Return prefill's half of a request of so many pages, whose metadata is in this row."""
        one = transfer.KvferryKVSender(self.prefill, self.address, room)
        one.init(count, row)
        return one

    def receiver(self, room: int) -> Any:  # noqa: ANN401  of SGLang's methods, too
        """Return decode's half of a request."""
        one = transfer.KvferryKVReceiver(self.decode, self.address, room)
        one.init(0)
        return one

    def new_room(self) -> int:
        """Return a number for two halves that belong together."""
        self._rooms += 1
        return self._rooms

    def tokens(self, page_ids: Sequence[int]) -> torch.Tensor:
        """Return the first layer's rows of these pages, to be read or written."""
        buffers: Any = getattr(self.made.sglang, "k_buffer", None) or self.made.sglang.kv_buffer
        layer: torch.Tensor = buffers[0].view(-1, PAGE, *buffers[0].shape[1:])
        return layer[torch.tensor(page_ids)]

    def fill(self, page_ids: Sequence[int], value: float) -> None:
        """Write all layers of these pages."""
        pool = self.made.sglang
        for buffer in [*pool.k_buffer, *pool.v_buffer] if hasattr(pool, "k_buffer") else pool.kv_buffer:
            buffer.view(-1, PAGE, *buffer.shape[1:])[torch.tensor(page_ids)] = value

    def transfers(self) -> list[str]:
        """Return the ids of the daemon's live transfers."""
        with self.made.daemon.engine.client() as client:
            return [one.request_id for one in client.status().transfers]


@contextlib.contextmanager
def halves(runtime_dir: Path, make: Callable[[], Any], **environment: str) -> Iterator[Halves]:
    """Make a pool and both managers over it."""
    port = free_ports(1)[0]
    environment = {"KVFERRY_RUNTIME_DIR": os.fspath(runtime_dir), **environment}
    with told(environment, disaggregation_bootstrap_port=port, served_model_name="tests"):
        one = made(make)
        with current_pool(lambda: one.daemon):
            yield Halves(one, port)


def polled(half: Any, state: int) -> bool:  # noqa: ANN401  of SGLang's methods, too
    """Return whether a half says so soon."""
    ends_at = time.monotonic() + SOON_S
    while (now := half.poll()) != state and time.monotonic() < ends_at:
        pass
    return bool(now == state)
