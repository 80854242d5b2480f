"""What SGLang calls in each of its processes before it reads its arguments, and what of SGLang is hooked.

SGLang leaves closed which transfer backends there are and what its token pools are made of. Both are hooked through its
HookRegistry, once what is hooked has proved to be as this module knows it. Where kvferry was not chosen, the hooks do
what was there before.
"""

from __future__ import annotations

import enum
import inspect
import logging
import pkgutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final, NamedTuple

logger = logging.getLogger(__name__)

BACKEND: Final = "kvferry"
SUPPORTED: Final = ("0.5.23",)
"""The releases of SGLang with which this was tested."""


class Known(NamedTuple):
    """Something of SGLang's that this plugin hooks or calls, by its path, and its parameters."""

    path: str
    parameters: tuple[str, ...]


_SRT: Final = "sglang.srt."
_POOL: Final = f"{_SRT}mem_cache.memory_pool."
_REQ: Final = f"{_SRT}managers.schedule_batch.Req"
_CONN: Final = f"{_SRT}disaggregation.common.conn."
_SCHEDULER: Final = f"{_SRT}managers.scheduler.Scheduler"
_NPU: Final = f"{_SRT}hardware_backend.npu.memory_pool_npu."
_METADATA: Final = f"{_SRT}disaggregation.utils.MetadataBuffers.__init__"
_HOST: Final = f"{_SRT}mem_cache.pool_host."
_STATES: Final = "mamba.MambaPoolHost."
_FITS: Final = f"{_SRT}managers.cache_controller.HiCacheController.can_fit_prefetch_host_buffers"
_STORAGE: Final = f"{_SRT}mem_cache.hicache_storage.HiCacheStorage."
_WEIGHTS: Final = f"{_SRT}managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
_UPDATES: Final = tuple(
    f"{_WEIGHTS}{call}"
    for call in (
        "begin_weight_update",
        "update_weights_from_disk",
        "update_weights_from_distributed",
        "update_weights_from_tensor",
        "update_weights_from_ipc",
    )
)
_END_UPDATE: Final = f"{_WEIGHTS}end_weight_update"
_RESUME: Final = f"{_WEIGHTS}resume_memory_occupation"
_LORA: Final = f"{_SRT}lora.lora_manager.LoRAManager._load_lora_adapter"
_CONFIGURE: Final = f"{_SRT}mem_cache.kv_cache_configurator.KVCacheConfigurator.configure"
_SENDERS: Final = f"{_SRT}disaggregation.prefill.PrefillBootstrapQueue.create_sender"
_DECODE: Final = f"{_SRT}managers.schedule_batch.ScheduleBatch.prepare_for_decode"
_CHECKPOINT: Final = f"{_SRT}disaggregation.prefill.SchedulerDisaggregationPrefillMixin.checkpoint_disagg_prefill"
_ATTENTION: Final = f"{_SRT}layers.attention.base_attn_backend.AttentionBackend.forward"
_CHECKSUM: Final = f"{_SRT}disaggregation.checksum.KvChecksumComputer.compute"
_RECEIVERS: Final = f"{_SRT}disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue"
_WINDOWS: Final = f"{_SRT}mem_cache.swa_memory_pool.SWAKVPool"
_HYBRIDS: Final = (_WINDOWS, f"{_POOL}HybridLinearKVPool")
_KINDS: Final = (
    *(f"{_POOL}{kind}" for kind in ("MHATokenToKVPool", "MLATokenToKVPool")),
    *(f"{_NPU}{kind}" for kind in ("NPUMHATokenToKVPool", "NPUMLATokenToKVPool")),
)
_BASE: Final = f"{_POOL}KVCache"
_COPIED: Final = {**dict.fromkeys((*_KINDS, _BASE, _WINDOWS), "kv_cache_cpu"), _HYBRIDS[1]: "cache_cpu"}
"""What is copied to the processor's memory, and how SGLang calls the copy; the base has none, and some inherit that."""
KNOWN: Final = (
    Known(f"{_SRT}server_args.add_disagg_transfer_backend_choices", ("iterable",)),
    Known(f"{_SRT}disaggregation.utils.get_kv_class", ("transfer_backend", "class_type")),
    Known(
        f"{_POOL}KVCache.__init__",
        (
            "self", "size", "page_size", "dtype", "layer_num", "device", "enable_memory_saver", "start_layer",
            "end_layer", "allocation_label",
        ),
    ),
    Known(f"{_POOL}MHATokenToKVPool._create_buffers_normal", ("self",)),
    Known(f"{_POOL}MHATokenToKVPool._init_data_ptrs_and_strides", ("self",)),
    Known(f"{_POOL}MHATokenToKVPool._init_kv_copy_and_warmup", ("self",)),
    Known(f"{_POOL}MLATokenToKVPool._create_buffers", ("self",)),
    Known(f"{_NPU}NPUMHATokenToKVPool._create_buffers", ("self",)),
    Known(
        f"{_NPU}NPUMLATokenToKVPool.__init__",
        (
            "self", "size", "page_size", "dtype", "kv_lora_rank", "qk_rope_head_dim", "layer_num", "device",
            "enable_memory_saver", "index_head_dim", "index_size", "start_layer", "end_layer", "index_page_size",
            "indexer_layer_ids", "kv_cache_dim", "is_draft_worker",
        ),
    ),
    Known(
        f"{_NPU}NPUMHATokenToKOnlyPool.__init__",
        (
            "self", "size", "page_size", "dtype", "head_num", "head_dim", "layer_num", "device", "enable_memory_saver",
            "start_layer", "end_layer",
        ),
    ),
    Known(f"{_NPU}NPUMiniMaxSparseKVPool.__init__", ("self", "args", "kwargs")),
    Known(
        _METADATA,
        (
            "self", "size", "hidden_size", "hidden_states_dtype", "max_sampling_mask_tokens", "max_top_logprobs_num",
            "custom_mem_pool", "output_dsa_topk_indices_dim", "kv_checksum_enabled",
        ),
    ),
    Known(_CHECKSUM, ("self", "kv_page_indices_gpu", "state_indices_gpu")),
    *(
        Known(f"{kind}.{call}", ("self", *given, "indices", "mamba_indices", "req_pool_index"))
        for kind, copied in _COPIED.items()
        for call, given in (("get_cpu_copy", ()), ("load_cpu_copy", (copied,)))
    ),
    Known(f"{_REQ}.load_kv_cache", ("self", "req_to_token_pool", "token_to_kv_pool_allocator")),
    Known(
        f"{_CONN}CommonKVManager.__init__", ("self", "args", "disaggregation_mode", "server_args", "is_mla_backend")
    ),
    Known(f"{_CONN}CommonKVManager.register_to_bootstrap", ("self",)),
    Known(f"{_CONN}CommonKVManager.update_status", ("self", "bootstrap_room", "status")),
    Known(f"{_CONN}CommonKVManager._resolve_rank_mapping", ("self", "info")),
    Known(f"{_CONN}CommonKVManager._handle_node_failure", ("self", "failed_bootstrap_addr")),
    Known(
        f"{_CONN}CommonKVSender.__init__",
        ("self", "mgr", "bootstrap_addr", "bootstrap_room", "req_has_disagg_prefill_dp_rank"),
    ),
    Known(f"{_CONN}CommonKVSender.init", ("self", "num_kv_indices", "aux_index")),
    Known(
        f"{_CONN}CommonKVSender.send", ("self", "kv_indices", "state_indices", "num_kv_tokens", "indices_event")
    ),
    Known(f"{_CONN}CommonKVSender._check_bootstrap_timeout", ("self",)),
    Known(f"{_CONN}CommonKVSender.get_transfer_metric", ("self",)),
    Known(f"{_CONN}CommonKVSender._record_transfer_indices", ("self", "kv_indices", "state_indices")),
    Known(f"{_CONN}CommonKVReceiver.__init__", ("self", "mgr", "bootstrap_addr", "bootstrap_room")),
    Known(f"{_CONN}CommonKVReceiver.init", ("self", "prefill_dp_rank")),
    Known(
        f"{_CONN}CommonKVReceiver.send_metadata",
        (
            "self", "kv_indices", "aux_index", "state_indices", "decode_prefix_len", "destination", "device_kv_indices",
        ),
    ),
    Known(f"{_CONN}CommonKVReceiver._register_kv_args", ("self",)),
    Known(f"{_CONN}CommonKVReceiver.ensure_abort_notified", ("self", "force_arm")),
    Known(f"{_CONN}CommonKVBootstrapServer.__init__", ("self", "host", "port")),
    Known(f"{_CONN}CommonKVBootstrapServer._setup_routes", ("self",)),
    Known(f"{_HOST}base.HostKVCache._allocate_host_buffer", ("self",)),
    Known(f"{_HOST}base.HostKVCache.clear", ("self",)),
    *(Known(f"{_HOST}{_STATES}{call}", ("self",)) for call in ("clear", "init_kv_buffer")),
    Known(f"{_HOST}common.HostTensorAllocator.allocate", ("self", "dims", "dtype", "device")),
    Known(
        f"{_HOST}common.alloc_with_pin_memory",
        ("dims", "dtype", "device", "pin_memory", "allocator", "registration_granularity_bytes"),
    ),
    Known(_FITS, ("self", "operation", "need_size")),
    Known(f"{_STORAGE}register_mem_pool_host", ("self", "mem_pool_host")),
    Known(f"{_STORAGE}register_mem_host_pool_v2", ("self", "host_pool", "host_pool_name")),
    Known(f"{_STORAGE}on_host_pools_registered", ("self",)),
    Known(f"{_STORAGE}batch_exists", ("self", "keys", "extra_info")),
    Known(f"{_STORAGE}batch_exists_v2", ("self", "keys", "pool_transfers", "extra_info")),
    *(Known(f"{_STORAGE}{call}", ("self", "transfers", "extra_info")) for call in ("batch_get_v2", "batch_set_v2")),
    Known(f"{_STORAGE}batch_get_v1", ("self", "keys", "host_indices", "extra_info")),
    Known(f"{_STORAGE}batch_set_v1", ("self", "keys", "host_indices", "extra_info")),
    *(Known(path, ("self", "recv_req")) for path in (*_UPDATES, _END_UPDATE, _RESUME)),
    Known(f"{_SCHEDULER}.handle_update_weight_version", ("self", "recv_req")),
    Known(_LORA, ("self", "lora_ref")),
    Known(f"{_LORA}_from_tensors", ("self", "lora_ref", "tensors", "config_dict", "added_tokens_config")),
    Known(_CONFIGURE, ("self", "pre_model_load_memory")),
    Known(_SENDERS, ("self", "req", "num_kv_heads")),
    Known(_DECODE, ("self",)),
    Known(f"{_SRT}mem_cache.allocation_sizing.get_alloc_reserve_per_decode", ()),
    Known(f"{_SRT}layers.attention.attention_registry.create_ascend_backend", ("runner",)),
    Known(_RECEIVERS, ("self", "req", "is_rebootstrap")),
    Known(f"{_SCHEDULER}.init_memory_pools", ("self",)),
    Known(f"{_SRT}speculative.base_spec_worker.BaseSpecWorker._draft_model_runners", ("self",)),
    Known(f"{_SCHEDULER}.init_overlap", ("self",)),
    Known(f"{_SCHEDULER}.on_idle", ("self",)),
    Known(f"{_SCHEDULER}.run_batch", ("self", "batch", "pp_proxy_tensors")),
    Known(_CHECKPOINT, ("self", "req")),
    Known(_ATTENTION, ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache", "kwargs")),
    Known(f"{_SCHEDULER}.is_fully_idle", ("self", "for_health_check", "ignore_waiting")),
)  # fmt: skip


def register() -> None:
    """Let SGLang choose kvferry. It never raises: what does not fit is said where kvferry is chosen."""
    try:
        unknown = differences()
        _register(unknown)
    except Exception:
        logger.exception("kvferry cannot be chosen in this SGLang")


def differences() -> list[str]:
    """Return what of this SGLang is not as the plugin knows it, by name; nothing if it can be used."""
    found = []
    installed = installed_version()
    if installed not in SUPPORTED:
        found.append(f"SGLang is {installed}, known are {', '.join(SUPPORTED)}")
    for one in KNOWN:
        try:
            parameters = tuple(inspect.signature(pkgutil.resolve_name(one.path)).parameters)
        except (ImportError, AttributeError, TypeError, ValueError) as error:
            found.append(f"{one.path} is not there ({error})")
        else:
            if parameters != one.parameters:
                found.append(f"{one.path} takes ({', '.join(parameters)}), known is ({', '.join(one.parameters)})")
    return found


def installed_version() -> str:
    """Return the version of SGLang in this environment."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return "of an unknown version"


def _register(unknown: list[str]) -> None:
    from sglang.srt.disaggregation import utils  # noqa: PLC0415  SGLang need not be there
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415
    from sglang.srt.server_args import add_disagg_transfer_backend_choices  # noqa: PLC0415

    def get_kv_class(original: Callable[..., Any], transfer_backend: Any, class_type: Any) -> Any:  # noqa: ANN401
        if transfer_backend.value != BACKEND or class_type.name == "KVARGS":
            return original(transfer_backend, class_type)
        if unknown:
            raise RuntimeError(
                f"kvferry does not know this SGLang: {'; '.join(unknown)}. Install a supported version, "
                "see docs/sglang.md"
            )
        return _kv_class(class_type.name)

    add_disagg_transfer_backend_choices([BACKEND])
    # An enumeration with members cannot be derived from: it is made anew with one more.
    members = {one.name: one.value for one in utils.TransferBackend} | {"KVFERRY": BACKEND}
    backends = enum.Enum("TransferBackend", members, module=utils.__name__)  # type: ignore[misc]  # of SGLang's members
    HookRegistry.register(f"{_SRT}disaggregation.utils.TransferBackend", backends, HookType.REPLACE)
    HookRegistry.register(f"{_SRT}disaggregation.utils.get_kv_class", get_kv_class, HookType.AROUND)
    if unknown:
        return
    from sglang.srt.layers.attention.attention_registry import register_attention_backend  # noqa: PLC0415

    from kvferry.clients.sglang import (  # noqa: PLC0415  numpy and the client only now
        choice,
        graphs,
        hicache,
        identity,
        layers,
        pools,
        retraction,
        waiting,
    )

    register_attention_backend("ascend")(graphs.ascend_backend)
    HookRegistry.register(f"{_POOL}KVCache.__init__", pools.check_kind, HookType.BEFORE)
    for target, hook in (
        (f"{_SCHEDULER}.init_memory_pools", pools.make_pools),
        (f"{_POOL}MHATokenToKVPool._create_buffers_normal", pools.create_mha_buffers),
        (f"{_POOL}MHATokenToKVPool._init_kv_copy_and_warmup", pools.copy_slots),
        (f"{_POOL}MLATokenToKVPool._create_buffers", pools.create_mla_buffers),
        (f"{_NPU}NPUMHATokenToKVPool._create_buffers", pools.create_npu_mha_buffers),
        (f"{_NPU}NPUMLATokenToKVPool.__init__", pools.create_npu_mla_pool),
        (f"{_NPU}NPUMHATokenToKOnlyPool.__init__", pools.make_keys),
        (f"{_NPU}NPUMiniMaxSparseKVPool.__init__", pools.make_sparse),
        (f"{_WINDOWS}.__init__", pools.make_windows),
        (f"{_POOL}MambaPool.__init__", pools.make_state_pool),
        (f"{_POOL}HybridLinearKVPool.__init__", pools.make_states),
        *((f"{kind}.get_cpu_copy", retraction.get_cpu_copy) for kind in _COPIED),
        *((f"{kind}.load_cpu_copy", retraction.load_cpu_copy) for kind in _COPIED),
        (f"{_REQ}.load_kv_cache", retraction.load_kv_cache),
        *((f"{_HOST}{one}clear", hicache.clear_all_but_padding) for one in ("base.HostKVCache.", _STATES)),
        (_FITS, hicache.fits_beside_padding),
        (f"{_SCHEDULER}.on_idle", waiting.on_idle),
        (f"{_SCHEDULER}.run_batch", layers.run_batch),
        (_CHECKPOINT, layers.checkpoint),
        (_CHECKSUM, choice.digest_of_none),
        *((path, identity.note_weights) for path in _UPDATES),
        (_LORA, identity.note_adapter),
        (f"{_LORA}_from_tensors", identity.note_adapter_of_tensors),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
    for one in ("base.HostKVCache._allocate_host_buffer", f"{_STATES}init_kv_buffer"):
        HookRegistry.register(f"{_HOST}{one}", hicache.choose_allocator, HookType.BEFORE)
    HookRegistry.register(_ATTENTION, layers.note_attention, HookType.BEFORE)
    HookRegistry.register(_CONFIGURE, pools.note_model, HookType.BEFORE)
    for target, note in (
        (_METADATA, pools.metadata_on_host),
        (f"{_SCHEDULER}.init_overlap", pools.note_scheduler),
        (_DECODE, graphs.note_step),
        (_END_UPDATE, identity.note_end),
        (_RESUME, identity.note_resumed),
        (f"{_SCHEDULER}.handle_update_weight_version", identity.note_version),
        (_SENDERS, identity.note_sender),
        (_RECEIVERS, identity.note_receiver),
        (f"{_REQ}.__init__", hicache.tell_apart),
    ):
        HookRegistry.register(target, note, HookType.AFTER)


def _kv_class(kind: str) -> type[Any]:
    from kvferry.clients.sglang import bootstrap, transfer  # noqa: PLC0415  derive from SGLang's classes

    return {
        "MANAGER": transfer.KvferryKVManager,
        "SENDER": transfer.KvferryKVSender,
        "RECEIVER": transfer.KvferryKVReceiver,
        "BOOTSTRAP_SERVER": bootstrap.KvferryKVBootstrapServer,
    }[kind]
