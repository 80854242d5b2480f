"""What this server was told to use kvferry for. Where it was told nothing, the plugin's hooks change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

MODES: Final = ("prefill", "decode")
STORAGE: Final = ("kvferry.clients.sglang.hicache", "KvferryHiCacheStorage")
"""Module and class, as SGLang's options name them."""


def transfers_by_kvferry() -> bool:
    """Return whether this process is a prefill or decode server that was told to transfer by kvferry."""
    from sglang.srt.runtime_context import get_disagg  # noqa: PLC0415  SGLang need not be there

    try:
        told = get_disagg().disaggregation_mode, get_disagg().disaggregation_transfer_backend
    except Exception:  # noqa: BLE001  a pool that is made without a server has no configuration
        return False
    return told[0] in MODES and told[1] == "kvferry"


def digest_of_none(original: Callable[..., int], *given: object) -> int:
    """Return SGLang's checksum of a request's pages; 0, which it takes for none, where the daemon compares them."""
    return 0 if transfers_by_kvferry() else original(*given)


def stores_in_kvferry() -> bool:
    """Return whether this server was told to have kvferry as its HiCache storage."""
    try:
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController  # noqa: PLC0415
        from sglang.srt.runtime_context import get_memory  # noqa: PLC0415

        memory = get_memory()
        if memory.hicache_storage_backend != "dynamic":
            return False
        told = HybridCacheController.parse_storage_backend_extra_config(memory.hicache_storage_backend_extra_config)[0]
    except Exception:  # noqa: BLE001  a pool that is made without a server has no configuration; SGLang says what is wrong
        return False
    return (told.get("module_path"), told.get("class_name")) == STORAGE
