"""SGLang's HiCache: its host pools (L2) in kvferry pools, and the daemon's prefix cache as its storage (L3).

SGLang copies between its device pool and the host pool by itself. From there to the daemon's tiers and back it is STORE
and LOAD of the host pool's pages: no byte goes through Python. SGLang calls the storage from several threads, which it
makes anew at each flush; each call has a session to itself. What fails is a miss, never an exception, and a storage
that is away is none: no call waits for a daemon that has gone.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)
from sglang.srt.mem_cache.pool_host.common import (
    ALLOC_MEMORY_FUNCS,
    HostTensorAllocator,
    alloc_with_host_register,
    alloc_with_pin_memory,
)
from sglang.srt.mem_cache.pool_host.npu_memfabric import memfabric_host_memory_enabled
from sglang.srt.utils import get_bool_env_var

from kvferry.clients import CacheGroup, Client, MambaSpec, MhaSpec, MlaSpec, ModelIdentity
from kvferry.clients.engine import Engine, end_of
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.model_weights import weights_revision
from kvferry.clients.sglang import identity, plugin
from kvferry.clients.sglang.choice import stores_in_kvferry
from kvferry.clients.sglang.pools import MAMBA, SWA, model_identity, pool_name, tensor_parallel
from kvferry.clients.sglang.settings import settings
from kvferry.clients.slots import pages_from_slots
from kvferry.pools.devices.npu import NpuVendor
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import (
    DaemonLostError,
    InvalidFieldError,
    KvferryError,
    LengthMismatchError,
    NoSessionError,
    OutOfMemoryError,
    SessionLostError,
)
from kvferry.protocol.ids import MAIN
from kvferry.protocol.tier_messages import HASH_BYTES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

VIEWS: Final = {"layer_first": "paged", "page_first": "page_first", "page_first_direct": "page_first_direct"}
"""The view of a pool in each of SGLang's layouts."""

SPLIT: Final = "page_first_kv_split"
"""SGLang's layout of latents on an NPU: as ``page_first_direct``, latent and rope in an array each."""

LOOKUP_S: Final = 2.0
"""How long a question may take; the daemon's remote tier has half a second."""

LIST_BLOCKS: Final = 32768
"""In one message."""

BESIDE: Final = (SWA, MAMBA)
"""SGLang's names of the host pools of windows and of states, beside that of full attention, and the daemon's."""

SHA256_DIGITS: Final = 64
COMPUTED_WITH: Final = (
    "dtype",
    "quantization",
    "modelopt_quant",
    "kv_cache_dtype",
    "json_model_override_args",
    "model_config_parser",
    "is_embedding",
    "load_format",
    "model_impl",
)
"""Arguments of SGLang's under which the same weights and tokens give other KV, or other bytes of it."""

FILES: Final = ("quantization_param_path", "decrypted_config_file", "modelopt_checkpoint_restore_path")
"""Arguments that name files of the same effect."""


class HostPool(NamedTuple):
    """SGLang's host pool in the daemon's memory: of one model, one rank, one process.

    Attributes:
        pool: the daemon's.
        page_size: in tokens; 1 where a page is a slot of states.
        address: of SGLang's first array.
        group: of its blocks in the daemon's prefix cache.
    """

    pool: EnginePool
    page_size: int
    address: int
    group: str


_allocators: weakref.WeakSet[HostAllocator] = weakref.WeakSet()


# -- the host pool


def choose_allocator(host_pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Have a host pool allocated in the daemon's pool, where kvferry was chosen."""
    if not stores_in_kvferry():
        return
    if memfabric_host_memory_enabled():
        raise _refusal("a host pool that memfabric allocates (SGLANG_HICACHE_HOST_MEM_BACKEND)")
    host_pool.allocator = HostAllocator(host_pool)
    ALLOC_MEMORY_FUNCS["npu"] = allocate_beside_npu


def allocate_beside_npu(
    dims: tuple[int, ...],
    dtype: torch.dtype,
    device: str,
    pin_memory: bool,  # noqa: FBT001  SGLang's signature
    allocator: HostTensorAllocator,
    registration_granularity_bytes: int | None = None,
) -> torch.Tensor:
    """Allocate host memory for an NPU by the allocator where that is ours; SGLang does not ask one there."""
    if isinstance(allocator, HostAllocator):
        return allocator.allocate(dims, dtype, device)
    made: torch.Tensor = alloc_with_pin_memory(
        dims, dtype, device, pin_memory, allocator, registration_granularity_bytes
    )
    return made


def clear_all_but_padding(original: Callable[[Any], None], host_pool: Any) -> None:  # noqa: ANN401
    """Clear a host pool; page 0 of ours is the padding page, and never free."""
    if not isinstance(host_pool.allocator, HostAllocator):
        original(host_pool)
        return
    with host_pool.lock:
        original(host_pool)
        host_pool.free_slots = host_pool.free_slots[host_pool.free_slots >= host_pool.page_size]


def fits_beside_padding(
    original: Callable[[Any, Any, int], bool],
    controller: Any,  # noqa: ANN401
    operation: Any,  # noqa: ANN401
    need_size: int,
) -> bool:
    """Return whether what was found fits into an empty host pool; else SGLang would wait for the padding page."""
    host = controller.mem_pool_host
    host = host.anchor_entry.host_pool if hasattr(host, "anchor_entry") else host  # of a group, or alone
    padding = host.page_size if isinstance(host.allocator, HostAllocator) else 0
    return original(controller, operation, need_size + padding)


def tell_apart(_: object, req: Any, *__: object, **___: object) -> None:  # noqa: ANN401  SGLang's object
    """Have a request's cached prefixes be those of its adapter's content, not of SGLang's number of it."""
    if not _allocators:
        return
    told: str | None = req.extra_key
    req.extra_key = identity.namespaced(told.removesuffix(req.lora_id) if told and req.lora_id else told, req.lora_id)


class HostAllocator(HostTensorAllocator):
    """Allocates a host pool as the daemon's pool.

    Attributes:
        host: what it has allocated, or None.
    """

    def __init__(self, host_pool: Any) -> None:  # noqa: ANN401
        """``host_pool``: SGLang's, whose geometry is known already."""
        super().__init__()
        self.host: HostPool | None = None
        self._parts: Iterator[torch.Tensor] | None = None
        _allocators.add(self)
        self._host_pool = weakref.proxy(host_pool)  # which has this

    def __repr__(self) -> str:
        """Show the pool."""
        return f"<HostAllocator {self.host and self.host.pool.name!r}>"

    def allocate(self, dims: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
        """Return the pool's memory as SGLang wants it: k of all layers, then v, or one array of latents.

        SGLang asks twice for latents of an NPU, and for states, whose two arrays are one pool.

        Raises:
            InvalidFieldError: it is a host pool that is not carried yet; says which.
            KvferryError: there is no daemon, or it refuses the pool, or an NPU its memory.
        """
        self.dims, self.dtype = dims, dtype
        if self._parts is None:
            self._parts = self._made()
        memory = next(self._parts, None)
        has = 0 if memory is None else memory.nbytes
        if memory is None or device != "cpu" or math.prod(dims) * dtype.itemsize != has:
            raise _refusal(f"a host pool of {dims} {dtype} on {device}, where a pool has {has} bytes")
        return memory.view(dtype).view(dims)

    def _made(self) -> Iterator[torch.Tensor]:
        """Make the daemon's pool; return the memory of each array that SGLang asks for."""
        spec = _spec(self._host_pool)
        told, label = settings(), _label(self._host_pool)
        name = f"{pool_name(told.pool)}-hicache{f'-{label}' if label in BESIDE else ''}"
        pool = EnginePool(Engine(name, told.runtime_dir), name, spec, _identity(self._host_pool), told.memory)
        memory = pool.whole()
        arrays = [memory]
        if isinstance(spec, MambaSpec):
            roles = ("ssm", spec.ssm_shape), ("conv", spec.conv_window)
            arrays = [pool.elements(role, MAMBA) for role, has in roles if has]
        elif self._host_pool.layout == SPLIT:
            arrays = [pool.elements("k"), pool.elements("v")]
        self.host = HostPool(pool, pool.page_size, arrays[0].data_ptr(), MAMBA if label == MAMBA else MAIN)
        if _where(self._host_pool) == "npu":
            self._register(memory)
        return iter(arrays)

    def _register(self, memory: torch.Tensor) -> None:
        """Let the NPU copy to and from the memory while its stream goes on: with any other, a copy waits for it."""
        npu = NpuVendor()
        npu.load()
        try:
            npu.register_host(memory.data_ptr(), memory.nbytes)
        except OutOfMemoryError as error:
            error.remedy = "give a smaller --hicache-size or --hicache-ratio, or let the server lock more memory"
            raise
        self._registered = memory  # mapped until it is not registered any more
        weakref.finalize(self, npu.unregister_host, memory.data_ptr()).atexit = False


def _label(host_pool: Any) -> str:  # noqa: ANN401  SGLang's object
    """Return SGLang's name of a host pool; that of states has none of its own."""
    return str(getattr(host_pool, "pool_label", MAMBA))


def _where(host_pool: Any) -> str:  # noqa: ANN401  SGLang's object
    """Return the kind of device that a host pool copies from; nothing else of SGLang says it."""
    device = host_pool._buffer_device if _label(host_pool) == MAMBA else host_pool._transfer_device  # noqa: SLF001
    return str(device.type)


def _spec(host_pool: Any) -> MhaSpec | MlaSpec | MambaSpec:  # noqa: ANN401
    """Return what describes a host pool.

    Raises:
        InvalidFieldError: it is not carried yet; says what of it.
    """
    kind, label, where = host_pool.__class__.__name__, _label(host_pool), _where(host_pool)
    known = {"MHATokenToKVPoolHost": ("kv", "full", SWA), "MLATokenToKVPoolHost": ("kv",), "MambaPoolHost": (MAMBA,)}
    if label not in known.get(kind, ()):
        raise _refusal(f"the {label!r} host pool {kind} on {where} (draft models, indexers)")
    if ALLOC_MEMORY_FUNCS[where] not in {alloc_with_host_register, allocate_beside_npu}:
        raise _refusal(f"the host pool of a device of kind {where}, which allocates for itself")
    if host_pool.page_num < 2:  # noqa: PLR2004  one is the padding page
        raise _refusal("a host pool without a page: give --hicache-size or --hicache-ratio")
    return _states_spec(host_pool) if kind == "MambaPoolHost" else _kv_spec(host_pool)


def _states_spec(host_pool: Any) -> MambaSpec:  # noqa: ANN401
    """Return what describes a host pool of states, whose slots have those of all layers."""
    (*others, conv), ssm = host_pool.conv_state_shapes, host_pool.temporal_state_shape
    if others:
        raise _refusal(f"{len(others) + 1} convolutions a layer in the host pool")
    if host_pool.mtp_draft_buffer_infos or host_pool.slot_state_device_tensors:
        raise _refusal("a draft model's states in the host pool, or other states beside a slot's")
    rank, ranks = tensor_parallel()
    more: dict[str, Any] = {}
    heads = ssm[0] if math.prod(ssm) else 1
    if math.prod(ssm):
        more |= {"ssm_shape": tuple(ssm), "ssm_dtype": _dtype(host_pool.temporal_dtype)}
    if math.prod(conv):  # its axes as they lie, whichever is the window
        more |= {"conv_window": conv[0], "conv_channels": conv[1]}
    return MambaSpec(
        state_layers=tuple(range(host_pool.num_mamba_layers)),
        slots=host_pool.page_num - 1,
        state_head_start=heads * rank,
        state_total_heads=heads * ranks,
        page_size=1,
        dtype=_dtype(host_pool.conv_dtype),
        view="page_first",
        **more,
    )


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _kv_spec(host_pool: Any) -> MhaSpec | MlaSpec:  # noqa: ANN401
    """Return what describes a host pool of keys and values, or of latents."""
    is_split = host_pool.layout == SPLIT
    if host_pool.layout not in VIEWS and not is_split:
        raise _refusal(f"the layout {host_pool.layout}: give --hicache-mem-layout {' or '.join(VIEWS)}")
    drafts = host_pool.layer_num - host_pool.target_layer_num
    if drafts or getattr(host_pool, "dsa_kv_cache_store_fp8", False):
        raise _refusal(f"{drafts} draft layers in the host pool" if drafts else "packed latents (DSA, NSA)")
    if host_pool.dcp_size > 1 or getattr(host_pool, "_layer_shard_enabled", False):
        raise _refusal("context parallelism of decode, or layers split over ranks")
    rank, ranks = tensor_parallel()
    common: dict[str, Any] = {
        "layers": host_pool.layer_num,
        "first_layer": host_pool.start_layer,
        "tokens": host_pool.size - host_pool.page_size,
        "page_size": host_pool.page_size,
        "dtype": _dtype(host_pool.dtype),
        "view": "page_first_direct" if is_split else VIEWS[host_pool.layout],
    }
    if host_pool.__class__.__name__ == "MLATokenToKVPoolHost":
        widths = host_pool.kv_lora_rank, host_pool.qk_rope_head_dim
        if is_split and host_pool._native_buffers.index_k is not None:  # noqa: SLF001
            raise _refusal("an indexer's keys in the host pool (DSA, NSA)")
        if not is_split and sum(widths) != host_pool.kv_cache_dim:
            raise _refusal(f"latents of {host_pool.kv_cache_dim} elements, which are not {widths[0]} + {widths[1]}")
        return MlaSpec(
            kv_lora_rank=widths[0], qk_rope_head_dim=widths[1], joined=not is_split, replicas=ranks, **common
        )
    heads = host_pool.head_num
    return MhaSpec(
        kv_heads=heads, head_start=heads * rank, total_heads=heads * ranks, head_dim=host_pool.head_dim, **common
    )


def _identity(host_pool: Any) -> ModelIdentity:  # noqa: ANN401
    """Return whose KV it is: the served model, the very weights, what they are computed with, and in which order."""
    from sglang.srt.runtime_context import get_model  # noqa: PLC0415

    model = get_model()
    told = {name: str(getattr(model, name)) for name in COMPUTED_WITH}
    for name in FILES:
        if path := getattr(model, name):
            told[name] = weights_revision(str(path), None, None)
    if host_pool.layout == SPLIT and get_bool_env_var("SGLANG_USE_FIA_NZ"):  # as its device pool reads it
        told["order"] = "nz"
    if _label(host_pool) in BESIDE:  # whose layers may look like those of full attention
        told["layers"] = _label(host_pool)
    settings_digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:8]
    return msgspec.structs.replace(model_identity(), revision=f"{identity.weights.begin()}-{settings_digest}")


def _refusal(what: str) -> InvalidFieldError:
    return InvalidFieldError(f"kvferry does not carry {what} yet", field="hicache_storage_backend")


# -- the storage


class KvferryHiCacheStorage(HiCacheStorage):
    """SGLang's ``dynamic`` storage backend, with ``interface_v1``: the daemon's prefix cache.

    A key of SGLang's is the hash of a page and of all before it, and names a block of one page.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, _: object = None) -> None:
        """Check what the server was told.

        Raises:
            InvalidFieldError: it is not carried yet, or SGLang is not as known; says what.
        """
        unknown = plugin.differences()
        if unknown:
            raise InvalidFieldError(
                f"kvferry does not know this SGLang: {'; '.join(unknown)}. Install a supported version, "
                "see docs/sglang.md",
                field="hicache_storage_backend",
            )
        if not (storage_config.extra_config or {}).get("interface_v1"):
            raise InvalidFieldError(
                'it copies nothing through Python: give "interface_v1": 1', field="hicache_storage_backend_extra_config"
            )
        for name in ("pp_size", "attn_cp_size", "dcp_size"):
            if getattr(storage_config, name) > 1:
                raise _refusal(f"{name} {getattr(storage_config, name)}")
        if storage_config.should_split_heads:
            raise _refusal("heads split for another tensor parallelism (tp_lcm_size)")
        self._measures = bool(storage_config.enable_storage_metrics)
        self._hosts: dict[str, tuple[HostPool, Sessions]] = {}
        self._failures: set[tuple[str, str]] = set()
        self._measured: dict[str, list[tuple[int, float]]] = {"prefetch": [], "backup": []}

    def __repr__(self) -> str:
        """Show the pool."""
        return f"<KvferryHiCacheStorage {', '.join(host.pool.name for host, _ in self._hosts.values())}>"

    # -- SGLang's beginning and end

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:  # noqa: ANN401
        """Take the host pool.

        Raises:
            InvalidFieldError: its memory is not the daemon's.
        """
        self._take(PoolName.KV, mem_pool_host)
        super().register_mem_pool_host(mem_pool_host)

    def _take(self, name: str, host_pool: Any) -> None:  # noqa: ANN401
        found, buffer = getattr(host_pool, "allocator", None), getattr(host_pool, "kv_buffer", None)
        host = found.host if isinstance(found, HostAllocator) else None
        first = buffer[0] if isinstance(buffer, list) else buffer
        if host is None or first is None or first.data_ptr() != host.address:
            raise InvalidFieldError(
                "the host pool is not in the daemon's memory: the storage must be chosen when the server starts",
                field="hicache_storage_backend",
            )
        self._hosts[str(name)] = host, Sessions(host.pool.engine)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:  # noqa: ANN401
        """Take a pool by name: the KV's, which it has already, or that of windows or states beside it.

        Raises:
            InvalidFieldError: it is another pool, which is not carried yet, or its memory is not the daemon's.
        """
        if host_pool_name in BESIDE:
            self._take(host_pool_name, host_pool)
        elif host_pool_name != PoolName.KV:
            raise _refusal(f"the {str(host_pool_name)!r} host pool {type(host_pool).__name__}")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def on_host_pools_registered(self) -> None:
        """Ask the daemon once.

        Raises:
            KvferryError: it has no host tier, or does not answer: the server had better not start.
        """
        host, sessions = self._registered(PoolName.KV)
        with sessions.client() as client:
            client.lookup(host.pool.name, [bytes(HASH_BYTES)], pin=False)

    def close(self) -> None:
        """End the threads' sessions. The host pools stay SGLang's, and this process's."""
        for _, sessions in self._hosts.values():
            sessions.close()

    # -- what its threads call

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:  # noqa: ARG002  SGLang's signature
        """Return how many leading keys are stored."""

        def ask(client: Client, host: HostPool) -> tuple[int, None]:
            names, found = self._names(keys), 0
            for start in range(0, len(names), LIST_BLOCKS):
                part = names[start : start + LIST_BLOCKS]
                blocks = client.lookup(host.pool.name, part, pin=False, deadline_s=LOOKUP_S).blocks
                found += blocks
                if blocks < len(part):
                    break
            return found, None

        return self._try("lookup", ask, 0)

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Sequence[PoolTransfer] | None = None,
        extra_info: object = None,
    ) -> PoolTransferResult:
        """Return how many leading keys are stored in all pools, of windows and states the last ones of each transfer.

        Of the lengths that can be restored it tells the longest alone: ranks that differ find nothing.
        """
        found, before = self.batch_exists(keys, extra_info), 0
        hits = {PoolName.KV: found} if found else {}
        beside = pool_transfers or ()
        while found and found != before:  # what one pool lacks may leave another without its last ones
            before = found
            for transfer in beside:
                found = self._found(transfer, keys[:found]) if found else 0
            if len(beside) < 2:  # noqa: PLR2004  there is no other
                break
        hits |= {transfer.name: found for transfer in beside if found}
        return PoolTransferResult(found, hits, [found] if found else [])

    def _found(self, transfer: PoolTransfer, keys: list[str]) -> int:
        """Return how many leading keys end with stored ones, as many as a transfer names, or are all stored."""
        trails = transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES
        last = max(1, len(transfer.keys or ())) if trails else None

        def ask(client: Client, host: HostPool) -> tuple[int, None]:
            need = CacheGroup(group=host.group, last=last)
            found = client.lookup(host.pool.name, self._names(keys), groups=[need], pin=False, deadline_s=LOOKUP_S)
            return found.blocks, None

        return self._try("lookup", ask, 0, transfer.name)

    def exists(self, key: str) -> bool:
        """Return whether a key is stored."""
        return self.batch_exists([key]) == 1

    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: object = None,  # noqa: ARG002
    ) -> list[bool]:
        """Load pages of the host pool, up to the first that is not stored; return which are loaded."""
        return self._load(PoolName.KV, keys, host_indices)

    def batch_get_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: object = None,  # noqa: ARG002
    ) -> dict[str, list[bool]]:
        """Load pages of the pools that are named, as ``batch_get_v1`` does."""
        return {one.name: self._load(one.name, one.keys or [], one.host_indices) for one in transfers}

    def _load(self, name: str, keys: list[str], host_indices: torch.Tensor) -> list[bool]:
        def load(client: Client, host: HostPool) -> tuple[int, KvferryError | None]:
            ids = _pages(keys, host_indices, host.page_size)
            names, groups = self._names(keys), [CacheGroup(group=host.group)]
            found = client.lookup(host.pool.name, names, groups=groups, deadline_s=LOOKUP_S)
            if not found.blocks:
                return 0, None
            began, ids = time.perf_counter(), ids[: found.blocks]
            operation = client.load(host.pool.name, found.lease, ids, group=host.group, unpin=True)
            error = end_of(client, operation)
            if operation.refused is not None:  # it has not ended its lease
                client.unpin(found.lease)
            loaded = operation.done.loaded if operation.done else 0
            self._moved("prefetch", host, loaded, began)
            return loaded, error

        loaded = self._try("load", load, 0, name) if keys else 0
        return [number < loaded for number in range(len(keys))]

    def batch_set_v1(self, keys: list[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:  # noqa: ANN401
        """Store pages of the host pool, those that are not stored yet; return for each whether it is."""
        return self._store(PoolName.KV, keys, host_indices, extra_info)

    def batch_set_v2(
        self,
        transfers: Sequence[PoolTransfer],
        extra_info: Any = None,  # noqa: ANN401
    ) -> dict[str, list[bool]]:
        """Store pages of the pools that are named, as ``batch_set_v1`` does."""
        return {one.name: self._store(one.name, one.keys or [], one.host_indices, extra_info) for one in transfers}

    def _store(self, name: str, keys: list[str], host_indices: torch.Tensor, extra_info: Any) -> list[bool]:  # noqa: ANN401
        def store(client: Client, host: HostPool) -> tuple[bool, KvferryError | None]:
            ids = _pages(keys, host_indices, host.page_size)
            before = self._names((getattr(extra_info, "prefix_keys", None) or [])[-1:])
            began, parent = time.perf_counter(), before[0] if before else None
            operation = client.store(host.pool.name, self._names(keys), ids, group=host.group, parent=parent)
            error = end_of(client, operation)
            self._moved("backup", host, 0 if error else len(keys), began)
            return error is None, error

        return [bool(keys) and self._try("store", store, otherwise=False, name=name)] * len(keys)

    def clear(self) -> bool:
        """Drop what is stored of this model in this layout, also what other engines of this user have stored.

        Raises:
            KvferryError: the daemon does not answer; SGLang says so.
        """
        self._registered(PoolName.KV)
        for host, sessions in self._hosts.values():
            with sessions.client() as client:
                client.evict_cached(pool=host.pool.name)
        return True

    def get_stats(self) -> Any:  # noqa: ANN401  SGLang's StorageMetrics
        """Return what was moved since the last time; pages, and GB/s as SGLang's other backends count."""
        if not self._measures:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics  # noqa: PLC0415

        metrics = StorageMetrics()
        for what, moved in self._measured.items():
            taken, moved[:] = moved[:], []
            getattr(metrics, f"{what}_pgs").extend(count for count, _ in taken)
            getattr(metrics, f"{what}_bandwidth").extend(rate for _, rate in taken)
        return metrics

    # -- what SGLang calls only without interface_v1

    def get(self, key: str, target_location: object = None, target_sizes: object = None) -> None:
        """Find nothing: pages go to the host pool alone."""

    def batch_get(self, keys: list[str], target_locations: object = None, target_sizes: object = None) -> list[None]:  # noqa: ARG002
        """Find nothing."""
        return [None] * len(keys)

    def set(self, *_: object, **__: object) -> bool:
        """Store nothing: pages come from the host pool alone."""
        return False

    def batch_set(self, *_: object, **__: object) -> bool:
        """Store nothing."""
        return False

    # -- within

    def _registered(self, name: str) -> tuple[HostPool, Sessions]:
        found = self._hosts.get(str(name))
        if found is None:
            raise InvalidFieldError(f"no host pool {str(name)!r} was registered", field="hicache_storage_backend")
        return found

    def _try(
        self,
        what: str,
        call: Callable[[Client, HostPool], tuple[T, KvferryError | None]],
        otherwise: T,
        name: str = PoolName.KV,
    ) -> T:
        """Call with a session; return what the call has done, or ``otherwise`` where it raises."""
        try:
            host, sessions = self._registered(name)
            if host.pool.engine.is_away:
                raise host.pool.engine.lost or DaemonLostError("the daemon is away")
            with sessions.client() as client:
                done, error = call(client, host)
        except (KvferryError, OSError) as failure:
            self._failed(what, failure)
            return otherwise
        if error is None:
            self._worked(what)
        else:
            self._failed(what, error)
        return done

    def _failed(self, what: str, error: Exception) -> None:
        """Say why, once."""
        cause = what, error.code if isinstance(error, KvferryError) else type(error).__name__
        if cause not in self._failures:
            self._failures.add(cause)
            logger.warning("kvferry: HiCache storage: %s failed, %s: %s; it counts as a miss", what, cause[1], error)

    def _worked(self, what: str) -> None:
        if self._failures:
            again = {one for one in self._failures if one[0] == what}
            self._failures -= again
            if again:
                logger.warning("kvferry: HiCache storage: %s works again", what)

    def _names(self, keys: Sequence[str]) -> list[bytes]:
        weights = identity.weights.key
        return [name_of(key, weights) for key in keys]

    def _moved(self, what: str, host: HostPool, count: int, began: float) -> None:
        if self._measures and count:
            rate = count * host.pool.page_bytes / (time.perf_counter() - began) / 1e9
            self._measured[what].append((count, rate))


def name_of(key: str, weights: bytes = b"") -> bytes:
    """Return the name of a block: of SGLang's hash its first 16 bytes; ``weights`` keeps changed ones apart."""
    if weights:
        return hashlib.blake2b(key.encode(), digest_size=HASH_BYTES, key=weights).digest()
    if len(key) == SHA256_DIGITS:
        with contextlib.suppress(ValueError):
            return bytes.fromhex(key)[:HASH_BYTES]
    return hashlib.sha256(key.encode()).digest()[:HASH_BYTES]


def _pages(keys: Sequence[str], host_indices: torch.Tensor, page_size: int) -> PageIds:
    """Return the pages of token slots, one a key."""
    ids = pages_from_slots(host_indices.cpu().numpy(), page_size)
    if len(ids) != len(keys) or len(host_indices) != len(keys) * page_size:
        raise LengthMismatchError(f"{len(host_indices)} slots for {len(keys)} keys", field="host_indices")
    return ids


class Sessions:
    """Sessions of one instance for any number of threads, each lent to one call at a time."""

    def __init__(self, engine: Engine) -> None:
        """``engine``: of the instance; it knows whether the daemon is there."""
        self._engine = engine
        self._idle: deque[Client] = deque()
        self._closed = threading.Event()

    def __repr__(self) -> str:
        """Show how many are idle."""
        return f"<Sessions of {self._engine!r}: {len(self._idle)} idle>"

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        """Lend a client.

        Raises:
            KvferryError: there is no daemon, or it refuses a session.
        """
        client = self._taken()
        try:
            yield client
        except (DaemonLostError, SessionLostError, NoSessionError):
            client.close()
            raise
        except BaseException:
            self._give_back(client)
            raise
        self._give_back(client)

    def close(self) -> None:
        """End all of them, those that are lent when they come back."""
        self._closed.set()
        while self._idle:
            self._idle.pop().close()

    def _taken(self) -> Client:
        while self._idle:
            with contextlib.suppress(IndexError):  # another thread was quicker
                client = self._idle.pop()
                if not client.is_away and client.boot_id == self._engine.boot_id:
                    return client
                client.close()
        return self._engine.connect(f"{self._engine.name}-io")

    def _give_back(self, client: Client) -> None:
        self._idle.append(client)
        if self._closed.is_set():
            self.close()
