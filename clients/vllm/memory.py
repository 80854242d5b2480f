"""vLLM's KV memory: what a rank's blocks are made of, and how the daemon gets at them.

A block of vLLM is a page of kvferry; its null block 0 is the padding page. A layer is logically (blocks, heads,
tokens, content), content being k and v of a token's head, or the latent and its rope.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, MLAAttentionSpec

from kvferry.clients import DraftSpec, MhaSpec, MlaSpec, ModelIdentity
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.vllm.ascend import NPU, Allocations, by_layer, roles_of
from kvferry.clients.vllm.configuration import Configuration, Memory, Parallel, refusal
from kvferry.clients.vllm.groups import DRAFT_MODEL, Group, groups_of, in_order, index_of, numbers_of
from kvferry.clients.vllm.metadata import Blocks
from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.mla import packed_token_bytes
from kvferry.pools.layouts.parts import DRAFT
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import HOST

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from kvferry.clients.engine import Engine
    from kvferry.protocol.manifests import PoolSpec

logger = logging.getLogger(__name__)

Spec = MhaSpec | MlaSpec
Cache = torch.Tensor | Sequence[torch.Tensor]
"""A layer's, as vLLM has it; vllm-ascend has several tensors of a layer."""

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

SCALE_BYTES: Final = 4
TO_A_BYTE: Final = {"fp8_per_token_head": 1, "int8_per_token_head": 1, "int4_per_token_head": 2}
"""Elements in a byte of the caches that have a scale after each head's k of a token, and after its v."""

DS_MLA: Final = "fp8_ds_mla"
"""Latents that have their scales, and the rope part, in one row of bytes."""

FLOAT8: Final = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    DS_MLA: "float8_e4m3fn",
}


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
    groups = groups_of(kv_cache_config)
    kind = cast("AttentionSpec", groups[0].spec)
    for one in groups:
        if isinstance(one.spec, AttentionSpec):
            _check_content(vllm_config, one.spec)
    names = in_order(name for one in groups for name in one.layers)
    drafts = draft_layers(vllm_config, names)
    is_split = vllm_config.device_config.device_type == NPU
    if len(groups) > 1:
        _check_several(drafts=bool(drafts), is_split=is_split)
    layout = "LBHNC" if staged or is_split else _layout(kv_cache_config, groups)
    is_latent = isinstance(kind, MLAAttentionSpec)
    views: Mapping[str, Any] = MLA_VIEWS if is_latent else MHA_VIEWS
    if layout not in views or ((drafts or len(groups) > 1) and not layout.startswith("L")):
        return None
    numbers = {name: number for number, name in enumerate(names)}
    index = index_of(kind)
    common: dict[str, Any] = {
        "layers": len(names) - len(drafts),
        "draft": DraftSpec(layers=len(drafts), index_head_dim=index) if drafts else None,
        "groups": tuple(tuple(numbers[name] for name in one.layers) for one in groups) if len(groups) > 1 else (),
        "joined": not is_split,
    }
    if not _are_alike(groups):
        return _of_bytes(vllm_config, kv_cache_config, groups, ranks, common)
    common |= {
        "tokens": (kv_cache_config.num_blocks - 1) * kind.block_size,
        "page_size": kind.block_size,
        "dtype": _dtype(vllm_config, kind),
        "view": "paged" if is_split else views[layout],
    }
    told = str(vllm_config.cache_config.cache_dtype)
    if is_latent:
        text = vllm_config.model_config.hf_text_config
        widths = [text.kv_lora_rank, text.qk_rope_head_dim, *([index] if index else [])]
        if sum(widths) != kind.head_size:
            raise refusal(f"latents of {kind.head_size} elements, not {' + '.join(map(str, widths))}", "model")
        _check_order(vllm_config)
        if told == DS_MLA:
            if common["view"] != "paged":
                return None
            common |= {"joined": False, "packed": "ds_mla"}
        return MlaSpec(
            kv_lora_rank=text.kv_lora_rank,
            qk_rope_head_dim=text.qk_rope_head_dim,
            index_head_dim=index,
            replicas=ranks.size,
            **common,
        )
    total = vllm_config.model_config.get_total_num_kv_heads()
    keys, values = _widths(told, kind)
    return MhaSpec(
        kv_heads=kind.num_kv_heads,
        head_start=ranks.rank * total // ranks.size,
        total_heads=total,
        head_dim=keys,
        v_head_dim=values,
        replicas=max(1, ranks.size // total),
        packing=_packing(vllm_config, kind),
        **common,
    )


def _check_order(vllm_config: VllmConfig) -> None:
    """Refuse latents in fractals: vllm-ascend has them at decode alone, so no prefill has them.

    Raises:
        InvalidFieldError: says what to configure.
    """
    additional = getattr(vllm_config, "additional_config", None) or {}
    if additional.get("enable_kv_nz"):
        raise InvalidFieldError(
            "decode has its latents in fractals (FRACTAL_NZ), prefill row by row (ND): leave enable_kv_nz out of "
            "--additional-config",
            field="additional_config",
        )


def _check_several(*, drafts: bool, is_split: bool) -> None:
    """Refuse by name what is not carried beside several KV cache groups.

    Raises:
        InvalidFieldError: a draft model, or vllm-ascend's tensors.
    """
    if drafts:
        raise refusal("a draft model beside several KV cache groups", "speculative_config")
    if is_split:
        raise refusal("several KV cache groups with vllm-ascend", "kv_cache_groups")


ALIKE: Final = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "page_size_padded")
"""What is equal in all groups whose blocks have the same form."""


def _are_alike(groups: Sequence[Group]) -> bool:
    """Return whether the blocks of all groups have the same form, of heads and tokens; else they are bytes."""
    forms = {
        (isinstance(one.spec, MLAAttentionSpec), *(getattr(one.spec, name, None) for name in ALIKE)) for one in groups
    }
    attention = all(isinstance(one.spec, AttentionSpec) for one in groups)
    return attention and len(forms) == 1 and getattr(groups[0].spec, "page_size_padded", None) is None


def _of_bytes(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    groups: Sequence[Group],
    ranks: Parallel,
    common: dict[str, Any],
) -> MhaSpec:
    """Return a spec whose pages are bytes: a token and head a page, and a head a rank, so that nothing is cut.

    Their format names what all groups have in them: they pair with the very same only.

    Raises:
        InvalidFieldError: the blocks of groups have not as many bytes.
    """
    sizes = {int(one.spec.page_size_bytes) for one in groups}
    if len(sizes) > 1:
        raise refusal(f"groups with blocks of {sorted(sizes)} bytes", "kv_cache_groups")
    (size,) = sizes
    told: list[Any] = []
    for one in groups:
        if isinstance(one.spec, MambaSpec):  # whose block's tokens are as many as a request may have
            told.append(("state", one.spec.shapes, one.spec.dtypes, str(one.spec.mamba_type)))
        else:
            told.append((one.spec, _packing(vllm_config, cast("AttentionSpec", one.spec))))
    digest = hashlib.sha256(repr(told).encode()).hexdigest()[:16]
    return MhaSpec(
        tokens=kv_cache_config.num_blocks - 1,
        page_size=1,
        kv_heads=1,
        head_start=ranks.rank,
        total_heads=ranks.size,
        head_dim=size // 2,
        v_head_dim=size - size // 2,
        dtype="uint8",
        view="hnd",
        packing=f"groups_{digest}",
        **common,
    )


def _layout(kv_cache_config: KVCacheConfig, groups: Sequence[Group]) -> str:
    """Return the layout by vLLM's name, where all layers lie in one allocation without a gap; else nothing.

    Layers at the same place of their groups lie in the same bytes.
    """
    tensors = kv_cache_config.kv_cache_tensors
    layout: str | None = getattr(kv_cache_config, "kv_cache_layout", None)
    if layout is None or len(tensors) != len(groups):
        return ""
    most = max(len(one.layers) for one in groups)
    for group, one in zip(groups, tensors, strict=True):
        page = group.spec.page_size_bytes
        strides = (page * kv_cache_config.num_blocks, page) if layout.startswith("L") else (page, page * most)
        is_dense = (one.layer_stride, one.block_stride) == strides and not one.offset
        if not is_dense or tuple(one.layers) != group.layers or one.size != page * most * kv_cache_config.num_blocks:
            return ""
    return layout


def draft_layers(vllm_config: VllmConfig, layers: Iterable[str]) -> list[str]:
    """Return which of these layers are a draft model's: vLLM numbers them after the model's, or names them so."""
    if vllm_config.speculative_config is None:
        return []
    count = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    return [name for name in layers if name.startswith(DRAFT_MODEL) or numbers_of(name) >= [count]]


def _widths(told: str, kind: AttentionSpec) -> tuple[int, int]:
    """Return the elements of a head's k and v of a token, each with its scale where it has one."""
    widths = kind.head_size, getattr(kind, "head_size_v", None) or kind.head_size
    if told not in TO_A_BYTE:
        return widths
    keys, values = (one // TO_A_BYTE[told] + SCALE_BYTES for one in widths)
    return keys, values


def _check_content(vllm_config: VllmConfig, kind: AttentionSpec) -> None:
    """Check that a token's row is as long as what is known of it.

    Raises:
        InvalidFieldError: it has more in it, or less, as of a cache with scales that is not carried.
    """
    told, found = str(vllm_config.cache_config.cache_dtype), getattr(kind, "state_content_bytes", None)
    expected = None
    if isinstance(kind, MLAAttentionSpec):
        text = vllm_config.model_config.hf_text_config
        expected = packed_token_bytes(text.kv_lora_rank, text.qk_rope_head_dim) if told == DS_MLA else None
    elif told in TO_A_BYTE:
        expected = sum(_widths(told, kind))
    if found != expected:
        raise refusal(f"a KV cache of the dtype {told} with rows of {found} bytes", "kv_cache_dtype")


def _dtype(vllm_config: VllmConfig, kind: AttentionSpec) -> str:
    """Return the dtype of an element.

    Raises:
        InvalidFieldError: bytes that are no elements, as of a cache with scales of its own.
    """
    told = str(vllm_config.cache_config.cache_dtype)
    if kind.dtype == torch.uint8 and told not in TO_A_BYTE:
        if told not in FLOAT8:
            raise refusal(f"the KV cache dtype {told}", "kv_cache_dtype")
        return FLOAT8[told]
    return str(kind.dtype).removeprefix("torch.")


def _packing(vllm_config: VllmConfig, kind: AttentionSpec) -> str | None:
    """Return how vLLM's kernels order the bytes of a head's part of a block: on a CPU as its instructions like them."""
    if vllm_config.device_config.device_type != "cpu":
        return None
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: PLC0415  says it no other way

    told = str(vllm_config.cache_config.cache_dtype)
    dtype = vllm_config.model_config.dtype  # of the model's, whatever the cache's is
    return f"cpu_{_get_attn_isa(dtype, kind.block_size, kind.head_size, told)}"


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
        best: Memory = "registered" if vllm_config.device_config.device_type == NPU else "owned"
        return best if wanted == "auto" else wanted, own
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

    def __init__(self, kind: Memory, pool: EnginePool, groups: Sequence[Group]) -> None:
        """Take the pool that was made for it, of layers in these groups."""
        self.kind = kind
        self.pool = pool
        self.groups = groups
        self._allocation: Allocation | None = None
        self._given: Allocations | None = None
        self._layers: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
        """Where staged: of each group each layer of vLLM's, and its copy."""
        entries = manifest_of(pool.spec).entries
        self._block_bytes = [sum(e.page_bytes for e in entries if e.component == one.component) for one in groups]
        logger.info("kvferry: pool %s, vLLM's KV memory is %s", pool.name, kind)

    def __repr__(self) -> str:
        """Show the pool."""
        return f"<RankMemory {self.kind} {self.pool.name!r}>"

    def size_of(self, blocks: Iterable[Blocks]) -> int:
        """Return the bytes of blocks over all layers of their groups."""
        return sum(self._block_bytes[one.group] * len(one.ids) for one in blocks)

    def allocation(self) -> Allocation | None:
        """Return what gives vLLM the pool's memory; None where that is a copy, or a device's."""
        if self.kind != "staged" and self.pool.device == HOST:
            self._allocation = Allocation(self.pool.whole().view(torch.int8))
        return self._allocation

    def give(self, kv_cache_config: KVCacheConfig) -> None:
        """Have vllm-ascend's KV cache be the pool's memory.

        Raises:
            InvalidFieldError: it allocates in another way than is known.
        """
        self._given = Allocations(self.pool, kv_cache_config.kv_cache_tensors, names_of(self.groups))

    def take(self, kv_caches: Mapping[str, Cache]) -> None:
        """Compare vLLM's layers with what was described to the daemon; those that share another's have none.

        Raises:
            InvalidFieldError: they are not as described, or not in the pool's memory.
        """
        caches = layers_of(kv_caches, self.groups, self.pool.spec)
        if self.kind == "staged":
            self._layers = [
                [
                    (part, _formed(copy, part))
                    for name, copies in zip(one.layers, self._copies(one), strict=True)
                    for part, copy in zip(caches[name], copies, strict=True)
                ]
                for one in self.groups
            ]
            return
        if self.pool.device != HOST:
            self._check_given(caches)
            return
        base, size = self.pool.whole().data_ptr(), self.pool.whole().nbytes
        outside = [name for name, (one, *_) in caches.items() if not base <= one.data_ptr() < base + size]
        if outside or self._allocation is None or self._allocation.given != 1:
            raise InvalidFieldError(
                f"vLLM has not put its KV cache into the daemon's memory ({len(outside)} layers lie elsewhere): say "
                '"memory": "staged"',
                field="memory",
            )

    def _copies(self, group: Group) -> Iterator[tuple[torch.Tensor, ...]]:
        """Yield of each layer of a group what the pool has of it, by role."""
        components = [group.component, *([DRAFT] if self.pool.spec.draft is not None else [])]
        for component in components:
            roles = roles_of(self.pool.spec)
            yield from zip(*(self.pool.tensor(role, component) for role in roles), strict=True)

    def _check_given(self, caches: Mapping[str, Sequence[torch.Tensor]]) -> None:
        """Check that vllm-ascend has put its tensors where the daemon has them.

        Raises:
            InvalidFieldError: it has not.
        """
        if self.kind != "owned":  # what is registered are these very tensors
            return
        assert self._given is not None
        was_given = self._given.end()
        theirs = by_layer(self.pool.spec, [caches[name] for name in names_of(self.groups)])
        ours = {
            (component, role, layer): one.data_ptr()
            for component, role in dict.fromkeys((component, role) for component, role, _ in theirs)
            for layer, one in enumerate(self.pool.tensor(role, component))
        }
        elsewhere = [key for key, one in theirs.items() if one.data_ptr() != ours[key]]
        if elsewhere or not was_given:
            raise InvalidFieldError(
                f"vllm-ascend has not put its KV cache into the daemon's memory ({len(elsewhere)} tensors lie "
                'elsewhere): say "memory": "registered"',
                field="memory",
            )

    def copy_out(self, blocks: Iterable[Blocks]) -> None:
        """Where staged: copy blocks of vLLM's to the pool."""
        for layer, copy, where in self._staged(blocks):
            copy[where] = layer[where.to(layer.device)].to(copy.device)

    def copy_in(self, blocks: Iterable[Blocks]) -> None:
        """Where staged: copy blocks of the pool to vLLM's."""
        for layer, copy, where in self._staged(blocks):
            layer[where.to(layer.device)] = copy[where].to(layer.device)

    def _staged(self, blocks: Iterable[Blocks]) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        for one in blocks if self._layers else ():
            for layer, copy in self._layers[one.group]:
                yield layer, copy, torch.tensor(one.ids, dtype=torch.int64)


def names_of(groups: Sequence[Group]) -> list[str]:
    """Return the names of the layers that have a cache of their own, in the pool's order."""
    return in_order(name for one in groups for name in one.layers)


def layers_of(
    kv_caches: Mapping[str, Cache], groups: Sequence[Group], spec: PoolSpec
) -> dict[str, tuple[torch.Tensor, ...]]:
    """Return the tensors of the layers that have a cache of their own: others of the same memory share it.

    Raises:
        InvalidFieldError: one is missing, or has another cache or form than the daemon is told.
    """
    names = names_of(groups)
    missing = [name for name in names if name not in kv_caches]
    if missing:
        raise refusal(f"{len(kv_caches)} layers in {len(names)}, without {missing[0]}", "model")
    parts = {name: (one,) if isinstance(one, torch.Tensor) else tuple(one) for name, one in kv_caches.items()}
    own = {name: parts[name] for name in names}
    known = {one.data_ptr() for one, *_ in own.values()}
    other = [name for name, (one, *_) in parts.items() if name not in own and one.data_ptr() not in known]
    if other:
        raise refusal(f"{len(kv_caches)} layers in {len(names)}, with {other[0]}", "model")
    blocks, roles = manifest_of(spec).pages, roles_of(spec)
    for group in groups:
        for name in group.layers:
            _check(name, own[name], group, blocks, roles, spec)
    return own


def _check(
    name: str, parts: Sequence[torch.Tensor], group: Group, blocks: int, roles: Sequence[str], spec: PoolSpec
) -> None:
    page = int(group.spec.page_size_bytes)
    if len(parts) != len(roles):
        raise refusal(f"layer {name} of {len(parts)} tensors, not {len(roles)}", "kv_cache_groups")
    size, counts = sum(one.nbytes for one in parts), {len(one) for one in parts}
    is_whole = counts == {blocks} and size == blocks * page
    if spec.page_size != group.block_size:  # of bytes, which may be parts of blocks, or end with a gap
        is_whole = not any(count % blocks for count in counts) and size <= blocks * page
    if any(one.dim() != DIMENSIONS for one in parts) or not is_whole:
        shapes = " and ".join(str(tuple(one.shape)) for one in parts)
        raise refusal(f"layer {name} of the shape {shapes} for {blocks} blocks", "block_size")


def made(
    kind: Memory,
    engine: Engine,
    name: str,
    spec: Spec,
    model: ModelIdentity,
    groups: Sequence[Group],
    *,
    device: str = HOST,
    kv_caches: Mapping[str, Cache] | None = None,
) -> RankMemory:
    """Return a rank's memory.

    Args:
        kind: whose memory it is: the daemon's, vLLM's and registered, or vLLM's and copied.
        engine: the session that it is to belong to.
        name: of the pool.
        spec: what it holds.
        model: whose KV that is.
        groups: of its layers.
        device: where it is, by the daemon's name.
        kv_caches: on a device, what is registered.

    Raises:
        InvalidFieldError: the layers are not as described.
        KvferryError: the daemon refuses it.
    """
    tensors = None
    if kv_caches is not None:
        layers = layers_of(kv_caches, groups, spec)
        tensors = by_layer(spec, [layers[one] for one in names_of(groups)])
    memory: Literal["daemon", "engine"] = "engine" if kind == "registered" else "daemon"
    pool = EnginePool(engine, name, spec, model, memory, keeps_memory=True, device=device, tensors=tensors)
    return RankMemory(kind, pool, groups)


def _formed(copy: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """Return a layer's copy in the form of vLLM's, of which a block may end with a gap."""
    pages = copy.shape[0]
    rows = copy.view(torch.uint8).view(pages, -1)[:, : cache.nbytes // pages]
    return rows.view(cache.dtype).view(cache.shape)


def _why_staged(vllm_config: VllmConfig, own: Spec | None) -> str:
    """Return why the daemon cannot have vLLM's own memory; empty: it can."""
    device = vllm_config.device_config.device_type
    if device not in {"cpu", NPU}:
        return f"memory of the device {device} is vLLM's own"
    if getattr(vllm_config.model_config, "enable_sleep_mode", False):
        return "vLLM's sleep mode gives its memory back"
    if own is None:
        return "this vLLM, or this layout of its, is not known to the daemon"
    return ""
