"""vLLM's KV memory: what a rank's blocks are made of, and how the daemon gets at them.

A block of vLLM is a page of kvferry; its null block 0 is the padding page. A layer is logically (blocks, heads,
tokens, content), content being k and v of a token's head, or the latent and its rope.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvferry.clients import MhaSpec, MlaSpec
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.vllm.configuration import Configuration, Memory, Parallel, refusal
from kvferry.protocol.errors import InvalidFieldError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)

Spec = MhaSpec | MlaSpec

MHA_VIEWS: Final[Mapping[str, Literal["hnd", "paged", "page_first_direct"]]] = {
    "LBHNC": "hnd",
    "LBNHC": "paged",
    "BLNHC": "page_first_direct",
}
MLA_VIEWS: Final[Mapping[str, Literal["paged", "page_first_direct"]]] = {
    "LBHNC": "paged",
    "LBNHC": "paged",
    "BLHNC": "page_first_direct",
    "BLNHC": "page_first_direct",
}
"""vLLM's layouts of a group's memory, which the daemon knows under other names; of one head, two are one."""

DIMENSIONS: Final = 4
"""Of a layer: blocks, heads, tokens, content."""

FLOAT8: Final = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def spec_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, ranks: Parallel, *, staged: bool) -> Spec | None:
    """Return what a rank's blocks hold.

    Args:
        vllm_config: vLLM's.
        kv_cache_config: of this engine.
        ranks: this rank, and how many there are.
        staged: of a pool that is a copy, in the order of bytes that is best for it; else of vLLM's own memory, and None
            where the daemon cannot know its order.

    Raises:
        InvalidFieldError: the cache is of a kind that is not carried yet.
    """
    kind, layers = _only_group(kv_cache_config)
    layout = "LBHNC" if staged else _layout(kv_cache_config, len(layers))
    is_latent = isinstance(kind, MLAAttentionSpec)
    views: Mapping[str, Any] = MLA_VIEWS if is_latent else MHA_VIEWS
    if layout not in views:
        return None
    common: dict[str, Any] = {
        "layers": len(layers),
        "tokens": (kv_cache_config.num_blocks - 1) * kind.block_size,
        "page_size": kind.block_size,
        "dtype": _dtype(vllm_config, kind),
        "view": views[layout],
        "joined": True,
    }
    if is_latent:
        text = vllm_config.model_config.hf_text_config
        if text.kv_lora_rank + text.qk_rope_head_dim != kind.head_size:
            raise refusal(
                f"latents of {kind.head_size} elements, not {text.kv_lora_rank} + {text.qk_rope_head_dim}", "model"
            )
        return MlaSpec(
            kv_lora_rank=text.kv_lora_rank, qk_rope_head_dim=text.qk_rope_head_dim, replicas=ranks.size, **common
        )
    total = vllm_config.model_config.get_total_num_kv_heads()
    return MhaSpec(
        kv_heads=kind.num_kv_heads,
        head_start=ranks.rank * total // ranks.size,
        total_heads=total,
        head_dim=kind.head_size,
        v_head_dim=getattr(kind, "head_size_v", None) or kind.head_size,
        replicas=max(1, ranks.size // total),
        packing=_packing(vllm_config, kind),
        **common,
    )


def _only_group(kv_cache_config: KVCacheConfig) -> tuple[FullAttentionSpec, Sequence[str]]:
    """Return the spec and the layers of the only KV cache group.

    Raises:
        InvalidFieldError: there are several, or it is of a kind that is not carried yet.
    """
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise refusal(f"{len(groups)} KV cache groups (hybrid models)", "kv_cache_groups")
    kind = groups[0].kv_cache_spec
    if type(kind) not in {FullAttentionSpec, MLAAttentionSpec}:
        raise refusal(f"a KV cache of the kind {type(kind).__name__}", "kv_cache_groups")
    for name, plain in (
        ("num_head_slots", None),
        ("state_content_bytes", None),
        ("page_size_padded", None),
        ("tokens_per_state", 1),
        ("compress_ratio", 1),
        ("model_version", None),
    ):
        found = getattr(kind, name, plain)
        if found != plain:
            raise refusal(f"a KV cache whose {name} is {found}", "kv_cache_groups")
    if getattr(groups[0], "is_eagle_group", False):
        raise refusal("a draft model's layers", "speculative_config")
    return kind, groups[0].layer_names


def _layout(kv_cache_config: KVCacheConfig, layers: int) -> str:
    """Return the layout by vLLM's name, where all layers lie in one allocation without a gap; else nothing."""
    tensors = kv_cache_config.kv_cache_tensors
    layout: str | None = getattr(kv_cache_config, "kv_cache_layout", None)
    if layout is None or len(tensors) != 1 or len(tensors[0].layers) != layers or tensors[0].offset:
        return ""
    (one,) = tensors
    if list(one.layers) != in_order(one.layers):
        return ""
    page = kv_cache_config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
    strides = (page * kv_cache_config.num_blocks, page) if layout.startswith("L") else (page, page * layers)
    is_dense = (one.layer_stride, one.block_stride) == strides
    return layout if is_dense and one.size == page * layers * kv_cache_config.num_blocks else ""


def in_order(layers: Iterable[str]) -> list[str]:
    """Return layers by their numbers, which other engines have too; vLLM says them in the order of its own."""
    return sorted(layers, key=lambda name: [int(one) for one in re.findall(r"\d+", name)])


def _dtype(vllm_config: VllmConfig, kind: FullAttentionSpec) -> str:
    """Return the dtype of an element.

    Raises:
        InvalidFieldError: bytes that are no elements, as of a cache with scales of its own.
    """
    told = str(vllm_config.cache_config.cache_dtype)
    if kind.dtype == torch.uint8:
        if told not in FLOAT8:
            raise refusal(f"the KV cache dtype {told}", "kv_cache_dtype")
        return FLOAT8[told]
    return str(kind.dtype).removeprefix("torch.")


def _packing(vllm_config: VllmConfig, kind: FullAttentionSpec) -> str | None:
    """Return how vLLM's kernels order the bytes of a head's part of a block: on a CPU as its instructions like them."""
    if vllm_config.device_config.device_type != "cpu":
        return None
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415  says it no other way

    told = str(vllm_config.cache_config.cache_dtype)
    return f"cpu_{_get_attn_isa(kind.dtype, kind.block_size, kind.head_size, told)}"


class Allocation(TorchFunctionMode):
    """While it is entered, the KV cache that vLLM allocates is the memory of a pool."""

    def __init__(self, memory: torch.Tensor) -> None:
        """Give ``memory``: all of it, zeroed, int8."""
        super().__init__()
        self._memory = memory
        self.given = 0
        """How often it was asked for: twice would be two caches in one memory."""

    def __torch_function__(
        self,
        func: Any,  # noqa: ANN401  of torch
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Return the memory where zeros of its very size and dtype are asked for."""
        kwargs = kwargs or {}
        if func is torch.zeros and args == (self._memory.numel(),) and kwargs.get("dtype") == torch.int8:
            self.given += 1
            return self._memory
        return func(*args, **kwargs)


def choose(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, told: Configuration, ranks: Parallel
) -> tuple[Memory, Spec]:
    """Return who has a rank's blocks, and what its pool is.

    Raises:
        InvalidFieldError: the cache is not carried, or cannot be in the memory that was asked for.
    """
    wanted = told.settings.memory
    own = spec_of(vllm_config, kv_cache_config, ranks, staged=False)
    reason = _why_staged(vllm_config, own)
    if reason and wanted in {"owned", "registered"}:
        raise InvalidFieldError(f"memory {wanted!r} is not possible here: {reason}", field="memory")
    if own is not None and not reason and wanted != "staged":
        return "owned" if wanted == "auto" else wanted, own
    if reason:
        logger.warning("kvferry: vLLM's KV memory is staged, blocks are copied in between: %s", reason)
    copy = spec_of(vllm_config, kv_cache_config, ranks, staged=True)
    assert copy is not None
    return "staged", copy


class RankMemory:
    """A rank's blocks: vLLM's own memory, or a copy of it.

    Attributes:
        kind: ``owned``, ``registered`` or ``staged``.
        pool: in the daemon.
    """

    def __init__(self, kind: Memory, pool: EnginePool) -> None:
        """Take the pool that was made for it."""
        self.kind = kind
        self.pool = pool
        self._allocation: Allocation | None = None
        self._layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Where staged: each layer of vLLM's, and its copy."""
        logger.info("kvferry: pool %s, vLLM's KV memory is %s", pool.name, kind)

    def __repr__(self) -> str:
        """Show the pool."""
        return f"<RankMemory {self.kind} {self.pool.name!r}>"

    @property
    def block_bytes(self) -> int:
        """Return the bytes of a block over all layers."""
        return self.pool.page_bytes

    def allocation(self) -> Allocation | None:
        """Return what gives vLLM the pool's memory; None where that is a copy."""
        if self.kind != "staged":
            self._allocation = Allocation(self.pool.elements().view(torch.int8))
        return self._allocation

    def take(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Compare vLLM's layers with what was described to the daemon.

        Raises:
            InvalidFieldError: they are not as described, or not in the pool's memory.
        """
        elements, layers, blocks = self.pool.elements(), self.pool.layers, self.pool.pages
        if len(kv_caches) != layers:
            raise refusal(f"{len(kv_caches)} layers in {layers} (layers that share their cache)", "model")
        for name, layer in kv_caches.items():
            if layer.dim() != DIMENSIONS or len(layer) != blocks or layer.nbytes * layers != elements.nbytes:
                raise refusal(f"layer {name} of the shape {tuple(layer.shape)} for {blocks} blocks", "block_size")
        if self.kind == "staged":
            pairs = zip(in_order(kv_caches), self.pool.tensor("k"), strict=True)
            self._layers = [
                (kv_caches[name], copy.view(kv_caches[name].dtype).view(kv_caches[name].shape)) for name, copy in pairs
            ]
            return
        base, size = elements.data_ptr(), elements.nbytes
        outside = [name for name, one in kv_caches.items() if not base <= one.data_ptr() < base + size]
        if outside or self._allocation is None or self._allocation.given != 1:
            raise InvalidFieldError(
                f"vLLM has not put its KV cache into the daemon's memory ({len(outside)} layers lie elsewhere): say "
                '"memory": "staged"',
                field="memory",
            )

    def copy_out(self, ids: Sequence[int]) -> None:
        """Where staged: copy blocks of vLLM's to the pool."""
        if self._layers:
            where = torch.tensor(ids)
            for layer, copy in self._layers:
                copy[where] = layer[where.to(layer.device)].to(copy.device)

    def copy_in(self, ids: Sequence[int]) -> None:
        """Where staged: copy blocks of the pool to vLLM's."""
        if self._layers:
            where = torch.tensor(ids)
            for layer, copy in self._layers:
                layer[where.to(layer.device)] = copy[where].to(layer.device)


def _why_staged(vllm_config: VllmConfig, own: Spec | None) -> str:
    """Return why the daemon cannot have vLLM's own memory; empty: it can."""
    device = vllm_config.device_config.device_type
    if device != "cpu":
        return f"memory of the device {device} is vLLM's own"
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return "vLLM's sleep mode gives its memory back"
    if own is None:
        return "this vLLM, or this layout of its, is not known to the daemon"
    return ""
