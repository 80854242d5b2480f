"""What ``benchmarks.sglang_servers`` has in SGLang's processes, as a plugin of SGLang's: how long transfers take.

The times are the same of any backend: before prefill hands its last chunk over, after decode has taken the request to
compute on, and while HiCache reads from its storage.
"""

from __future__ import annotations

import os
import time
from typing import Any, Final

import msgspec

TIMES: Final = "SGLANG_BENCH_TIMES"
"""The environment variable that names the file of times: a JSON object a line."""

SENT: Final = "sent"
TAKEN: Final = "taken"
LOADED: Final = "loaded"


class Note(msgspec.Struct, frozen=True):
    """A time of a request: at which something was, by the system's monotonic clock, or how long it took."""

    what: str
    request: str | int
    seconds: float


def register() -> None:
    """Hook this process; SGLang calls it."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415  only SGLang's has it

    file = os.open(os.environ[TIMES], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def note(what: str, request: str | int, seconds: float) -> None:
        os.write(file, msgspec.json.encode(Note(what, request, seconds)) + b"\n")

    def send(original: Any, self: Any, req: Any, last_chunk: bool = False, end_idx: Any = None) -> None:  # noqa: ANN401, FBT001, FBT002
        at_s = time.monotonic()
        original(self, req, last_chunk, end_idx)
        if last_chunk:
            note(SENT, req.bootstrap_room, at_s)

    def take(original: Any, self: Any, decode_req: Any) -> Any:  # noqa: ANN401
        taken = original(self, decode_req)
        note(TAKEN, decode_req.req.bootstrap_room, time.monotonic())
        return taken

    def load(original: Any, self: Any, operation: Any) -> Any:  # noqa: ANN401
        started = time.monotonic()
        loaded = original(self, operation)
        note(LOADED, operation.request_id, time.monotonic() - started)
        return loaded

    def read_page(original: Any, host_pool: Any) -> Any:  # noqa: ANN401
        host_pool.pin_memory = False  # there is nothing on a CPU to pin it for
        return original(host_pool)

    for target, hook in (
        ("disaggregation.prefill.SchedulerDisaggregationPrefillMixin.send_kv_chunk", send),
        ("disaggregation.decode.DecodeTransferQueue._commit_transfer_to_req", take),
        ("managers.cache_controller.HiCacheController._page_transfer", load),
        ("mem_cache.pool_host.mha.MHATokenToKVPoolHost.get_dummy_flat_data_page", read_page),
    ):
        HookRegistry.register(f"sglang.srt.{target}", hook, HookType.AROUND)
    _let_mooncake_send_from_a_cpu()


def _let_mooncake_send_from_a_cpu() -> None:
    """Have page ids given to Mooncake's sender as they are: by default SGLang pins them and records a CUDA event."""
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender  # noqa: PLC0415

    MooncakeKVSender.supports_host_tensor_indices = False
