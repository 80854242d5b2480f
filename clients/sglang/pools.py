"""SGLang's token-to-KV pools in memory that the daemon knows: SGLang's pool is kvferry's, nothing is copied between.

A layer of ``MHATokenToKVPool`` is a tensor of one row a token, (size + page_size, heads, dim); the rows of its page 0
take what padded tokens write. That is kvferry's (pages, page_size, heads, dim) with its padding page 0. SGLang hands
out the pages by itself, so all of them belong to its session.

Ascend's pools make their tensors on their own, so they make them on torch's device "meta", where they have a shape and
no memory, and are given the daemon's of the same shape. Which shape SGLang reads is thereby SGLang's own choice. So
are the pools within a hybrid one, of windows or of states: together they are one pool of the daemon's, with a component
each. And so are a model's pool and that of the draft model beside it, which SGLang makes after it, before anything
reads either.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvferry.clients import HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec, ModelIdentity
from kvferry.clients.devices import current_npu
from kvferry.clients.engine import Engine
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import identity
from kvferry.clients.sglang.choice import transfers_by_kvferry
from kvferry.clients.sglang.settings import end_server, settings
from kvferry.pools.layouts.parts import DRAFT
from kvferry.pools.planning.geometry import RankHeads, rank_heads
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import HOST, MAIN
from kvferry.protocol.manifests import DraftSpec, PoolSpec

if TYPE_CHECKING:
    import torch

HOST_KINDS: Final = ("MHATokenToKVPool", "MLATokenToKVPool")
NPU_KINDS: Final = ("NPUMHATokenToKVPool", "NPUMLATokenToKVPool")
"""The classes themselves: what is derived from them keeps its bytes in other ways."""
WINDOWS: Final = "SWAKVPool"
STATES: Final = "HybridLinearKVPool"
STATE_POOL: Final = "MambaPool"
MAMBA2: Final = ("falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "nemotron_h_puzzle")
"""The models whose convolution is over x, B and C side by side: SGLang's pool does not say so."""
SPARSE: Final = "NPUMiniMaxSparseKVPool"
KEYS: Final = "NPUMHATokenToKOnlyPool"
"""Of an indexer, within a sparse one."""
KINDS: Final = (*HOST_KINDS, *NPU_KINDS, WINDOWS, STATES, SPARSE)

SWA: Final = "swa"
MAMBA: Final = "mamba"
"""The daemon's components of windows and states."""


class _Part(NamedTuple):
    """A pool of SGLang's that has no memory yet.

    Attributes:
        spec: what it holds.
        fill: has its tensors be a component of the daemon's pool.
        device: SGLang's word for where it is.
        tensors: on a device its own, by component and role, which have memory if they are to be registered.
    """

    spec: PoolSpec
    fill: Callable[[EnginePool, str], None]
    device: Any = "cpu"
    tensors: Mapping[tuple[str, str], torch.Tensor] = {}


_current: EnginePool | None = None
_total_heads: int | None = None
_total_window_heads: int | None = None
"""Of the model whose pool SGLang is about to make: ranks beyond them hold the same ones."""
_model_type = ""
"""That model's."""
_within_hybrid = False
"""Whether SGLang makes the pools within a hybrid one: they get their memory once all of them are known."""
_is_draft = False
"""Whether the pool that SGLang is about to make is a draft model's."""
_awaits_draft = False
"""Whether the draft model's pool follows the model's: that gets its memory with it."""
_awaiting: _Part | None = None
"""The model's pool meanwhile."""
_with_memory: Final[list[Callable[[], None]]] = []
"""What SGLang does with a pool's memory as it makes it, and does here once there is some."""


def current() -> EnginePool | None:
    """Return this process's pool, if SGLang's is the daemon's."""
    return _current


def note_model(configurator: Any, **_: object) -> None:  # noqa: ANN401  SGLang's object
    """Learn whose pool is made, and that model's type and KV heads, in layers of full attention and of windows."""
    global _total_heads, _total_window_heads, _model_type, _is_draft  # noqa: PLW0603  as SGLang's own pool, one a process
    _total_heads = configurator.model_config.get_total_num_kv_heads()
    _total_window_heads = configurator.model_config.get_swa_num_kv_heads(1)
    _model_type = configurator.model_config.hf_text_config.model_type
    _is_draft = configurator.is_draft_worker


def make_pools(original: Callable[[Any], None], scheduler: Any) -> None:  # noqa: ANN401  SGLang's object
    """Make the pools of the model and of its draft model."""
    global _awaits_draft, _awaiting
    draft = scheduler.draft_worker
    has_draft = draft is not None and bool(draft._draft_model_runners())  # noqa: SLF001  SGLang's scheduler asks so
    _awaits_draft, _awaiting = transfers_by_kvferry() and has_draft and is_last_stage(), None
    original(scheduler)
    if _awaiting is not None:
        raise _refusal("a draft model without a KV pool of its own")


def check_kind(pool: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401  SGLang's object and arguments
    """Refuse a pool of another class before it is made, where kvferry was chosen."""
    kind = type(pool).__name__
    known = (*HOST_KINDS, *NPU_KINDS, *((KEYS,) if _within_hybrid else ()))
    if kind not in known and transfers_by_kvferry():
        raise _refusal(f"the KV pool {kind}")


def create_mha_buffers(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Create the buffers of an ``MHATokenToKVPool`` in the daemon's pool, where kvferry was chosen."""
    if not _is_ours():
        original(pool)
        return
    _check(pool, "cpu")
    if pool.kv_cache_layout != "nhd":
        raise _refusal(f"the KV layout {pool.kv_cache_layout!r}")
    _shape(original, pool)
    if not _within_hybrid:
        _place(_Part(_mha_spec(pool), partial(_give, pool)))


def copy_slots(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Prepare copies between slots, for speculative decoding, and try one: once the pool has memory."""
    if any(one.is_meta for one in pool.k_buffer):
        _with_memory.append(partial(original, pool))
    else:
        original(pool)


def create_mla_buffers(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Create the buffers of an ``MLATokenToKVPool`` in the daemon's pool: latent and rope of a token in one row."""
    if not _is_ours():
        original(pool)
        return
    _check(pool, "cpu")
    if _within_hybrid:
        raise _refusal("latent rows beside windows or states")
    if pool.use_dsa:
        raise _refusal("sparse attention with an indexer (DSA, NSA)")
    _shape(original, pool)
    _place(_Part(_mla_spec(pool, joined=True), partial(_give_latents, pool)))


def create_npu_mha_buffers(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Create the buffers of an ``NPUMHATokenToKVPool``: k and v of all layers, with FIA also a view of each layer."""
    if not _is_ours():
        original(pool)
        return
    _check(pool, "npu")
    _shape(original, pool)
    if not _within_hybrid:
        _place(_Part(_mha_spec(pool), partial(_give, pool), pool.device, _tensors(pool)))


def create_npu_mla_pool(original: Callable[..., None], pool: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401
    """Make an ``NPUMLATokenToKVPool``, whose constructor makes its buffers: latent, rope, and the indexer's keys."""
    if not _is_ours() or type(pool).__name__ not in NPU_KINDS:
        original(pool, *given, **named)
        return
    if _within_hybrid:
        raise _refusal("latent rows beside windows or states")
    bound = inspect.signature(original).bind(pool, *given, **named)
    device = bound.arguments["device"]
    bound.arguments["device"] = _made_on(device)
    original(*bound.args, **bound.kwargs)
    pool.device = device
    if pool.k_buffer is None:
        raise _refusal("the offload of sparse KV (SGLANG_NPU_ENABLE_SPARSE_KV_OFFLOAD)")
    _check(pool, "npu")
    packed, indexed = pool.dsa_kv_cache_store_fp8, bool(pool.indexer_layer_ids)
    names = {"k": "k_buffer"}
    names |= {} if packed else {"v": "v_buffer"}
    names |= {"index_k": "index_k_buffer"} if indexed else {}
    names |= {"index_scale": "index_k_scale_buffer"} if indexed and packed else {}

    def fill(made: EnginePool, component: str) -> None:
        for role, name in names.items():
            _fill(pool, name, made.tensor(role, component))
        for name, value in list(vars(pool).items()):
            if getattr(value, "is_meta", False) and not value.numel():  # v of packed tokens; no indexer in a stage
                setattr(pool, name, pool.k_buffer.new_empty(value.shape, dtype=value.dtype))
        if indexed and packed and pool.indexer_hadamard_128.is_meta:
            from sglang.srt.layers.attention.dsa.dsa_npu_indexer import create_npu_hadamard_128  # noqa: PLC0415

            pool.indexer_hadamard_128 = create_npu_hadamard_128(pool.index_head_dim, device)
        _check_filled(pool)

    tensors = {(MAIN, role): getattr(pool, name) for role, name in names.items()}
    _place(_Part(_npu_mla_spec(pool), fill, device, tensors))


def make_windows(original: Callable[..., None], pool: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401
    """Make an ``SWAKVPool`` in the daemon's pool: its full pages and its window pages, each in a page space."""
    if not _is_ours() or type(pool).__name__ != WINDOWS:
        original(pool, *given, **named)
        return
    with _hybrid():
        original(pool, *given, **named)
    parts = {MAIN: pool.full_kv_pool, SWA: pool.swa_kv_pool}

    def fill(made: EnginePool, _: str) -> None:
        for component, part in parts.items():
            _give(part, made, component)

    tensors = _tensors(pool.full_kv_pool) | _tensors(pool.swa_kv_pool, SWA)
    _place(_Part(_windows_spec(**parts), fill, pool.device, tensors))


def make_state_pool(original: Callable[..., None], pool: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401
    """Make a ``MambaPool``, whose tensors get the daemon's memory with those of the KV pool beside it."""
    if not transfers_by_kvferry():
        original(pool, *given, **named)
        return
    bound = inspect.signature(original).bind(pool, *given, **named)
    device = bound.arguments["device"]
    if type(pool).__name__ != STATE_POOL:
        raise _refusal(f"the state pool {type(pool).__name__}")
    bound.arguments["device"] = _made_on(device)
    original(*bound.args, **bound.kwargs)
    pool.device = device


def make_states(original: Callable[..., None], pool: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401
    """Make a ``HybridLinearKVPool`` in the daemon's pool: the attention layers' pages, and the slots of the states."""
    if not _is_ours() or type(pool).__name__ != STATES:
        original(pool, *given, **named)
        return
    with _hybrid():
        original(pool, *given, **named)
    states = pool.mamba_pool

    def fill(made: EnginePool, component: str) -> None:
        _give(pool.full_kv_pool, made, component)
        cache = states.mamba_cache
        states.mamba_cache = dataclasses.replace(
            cache,
            conv=[_like(one, made, "conv", states.device) for one in cache.conv],
            temporal=_like(cache.temporal, made, "ssm", states.device),
        )

    roles = [*(("conv", one) for one in states.mamba_cache.conv), ("ssm", states.mamba_cache.temporal)]
    tensors = _tensors(pool.full_kv_pool) | {(MAMBA, role): one for role, one in roles if one.numel()}
    _place(_Part(_states_spec(pool.full_kv_pool, states), fill, pool.device, tensors))


def make_keys(original: Callable[..., None], pool: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401
    """Make an ``NPUMHATokenToKOnlyPool``, whose tensor gets the daemon's memory with the pool that it is within."""
    if not _is_ours():
        original(pool, *given, **named)
        return
    bound = inspect.signature(original).bind(pool, *given, **named)
    device = bound.arguments["device"]
    bound.arguments["device"] = _made_on(device)
    original(*bound.args, **bound.kwargs)
    pool.device = device


def make_sparse(original: Callable[..., None], pool: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401
    """Make an ``NPUMiniMaxSparseKVPool`` in the daemon's pool: the indexer's keys are on the pages of keys and values.

    SGLang itself hands no values of an indexer from prefill to decode.
    """
    if not _is_ours() or type(pool).__name__ != SPARSE:
        original(pool, *given, **named)
        return
    with _hybrid():
        original(pool, *given, **named)
    if pool.index_kv_pool is not None:
        raise _refusal("an indexer's values (sparse layers without sparse_disable_index_value)")
    main, index = pool.main_pool, pool.index_k_pool
    tensors, more = _tensors(main), {}
    if index is not None:
        tensors[MAIN, "index_k"] = index.k_buffer_tensor
        layers = tuple(pool.index_k_layer_id_mapping)
        more = {"index_head_dim": index.head_dim, "index_layers": layers, "index_dtype": _dtype(index)}

    def fill(made: EnginePool, component: str) -> None:
        _give(main, made, component)
        if index is not None:
            for name in ("k_buffer_tensor", "k_buffer"):
                _fill(index, name, made.tensor("index_k", component))
            _check_filled(index)

    _place(_Part(_mha_spec(main, **more), fill, pool.device, tensors))


def metadata_on_host(_: object, buffers: Any, *__: object, **___: object) -> None:  # noqa: ANN401  SGLang's object
    """Have a request's row of metadata where the processor reads it: SGLang puts it on an NPU, for its own back end."""
    if not transfers_by_kvferry():
        return
    for name, value in vars(buffers).items():
        if getattr(value, "is_cpu", True) is False:
            setattr(buffers, name, value.cpu())


def note_scheduler(_: object, scheduler: Any) -> None:  # noqa: ANN401  SGLang's object
    """Learn how long a window is, and on which stream the model runs: with SGLang's overlap not the scheduler's own."""
    pool = current()
    if pool is None:
        return
    pool.window = scheduler.sliding_window_size
    if scheduler.enable_overlap:
        pool.compute_stream = scheduler.forward_stream


@contextlib.contextmanager
def _hybrid() -> Iterator[None]:
    """Have the pools that SGLang makes meanwhile be without memory."""
    global _within_hybrid  # noqa: PLW0603  SGLang's constructors are called with its own arguments
    _within_hybrid = True
    try:
        yield
    finally:
        _within_hybrid = False


def _shape(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Have SGLang make a pool's tensors, with no memory unless they are to be registered."""
    device = pool.device
    pool.device = _made_on(device)
    original(pool)
    pool.device = device


def _place(part: _Part) -> None:
    """Have a pool be the daemon's; the model's, where a draft's follows, together with that.

    Raises:
        InvalidFieldError: the draft's cannot be on the model's pages.
    """
    global _awaiting, _awaits_draft  # noqa: PLW0603  as SGLang's own pool, one a process
    if _awaits_draft and not _is_draft:
        _awaiting = part
        return
    parts = {MAIN: part}
    if _is_draft and _awaiting is not None:
        parts = {MAIN: _awaiting, DRAFT: part}
    model, _awaiting, _awaits_draft = parts[MAIN], None, False
    spec = _with_draft(model.spec, part.spec) if DRAFT in parts else model.spec
    draft = {(DRAFT, role): one for (_, role), one in part.tensors.items()} if DRAFT in parts else {}
    made = _make(spec, model.device, {**model.tensors, **draft})
    for component, of in parts.items():
        of.fill(made, component)
    while _with_memory:
        _with_memory.pop()()


def _with_draft(model: PoolSpec, draft: PoolSpec) -> PoolSpec:
    """Return what the daemon's pool holds: the layers of a model, and on their pages those of its draft model."""
    if not isinstance(draft, MhaSpec | MlaSpec):
        raise _refusal("windows or states of a draft model")
    if isinstance(draft, MhaSpec) and draft.index_head_dim is not None:
        raise _refusal("an indexer of a draft model beside its keys and values")
    if (draft.tokens, draft.page_size) != (model.tokens, model.page_size):
        raise _refusal(
            f"a draft model's {draft.tokens} tokens in pages of {draft.page_size} beside {model.tokens} in pages of "
            f"{model.page_size}"
        )
    if draft.view != model.view:
        raise _refusal(f"a draft model's pages in the order {draft.view} beside {model.view}")
    fields: dict[str, Any] = {"layers": draft.layers, "replicas": draft.replicas}
    fields |= {} if draft.dtype == model.dtype else {"dtype": draft.dtype}
    names: tuple[str, ...] = ("kv_heads", "head_start", "total_heads", "head_dim", "v_head_dim")
    if isinstance(draft, MlaSpec):
        if not isinstance(model, MlaSpec):
            raise _refusal("latent rows of a draft model beside heads of KV")
        numbers = tuple(range(draft.first_layer, draft.first_layer + draft.layers))
        is_indexed = draft.index_layers is not None
        if draft.packed != model.packed or (is_indexed and draft.index_scale != model.index_scale):
            raise _refusal("a draft model whose latent rows are packed in another way than the model's")
        if is_indexed and draft.index_layers != numbers:
            raise _refusal("a draft model with an indexer in some of its layers")
        names = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")
    fields |= {name: getattr(draft, name) for name in names}
    return msgspec.structs.replace(model, draft=DraftSpec(**fields))


def _is_ours() -> bool:
    """Return whether the pool that SGLang makes is to be the daemon's.

    Every stage of prefill has a draft model, and only the last one's has the hidden states that it computes with.
    """
    return transfers_by_kvferry() and (is_last_stage() or not _is_draft)


def is_last_stage() -> bool:
    """Return whether this is the pipeline's last stage, whose draft model's KV is that of the request."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    parallel = get_parallel()
    return bool(parallel.pp_rank == parallel.pp_size - 1)


def _give_latents(pool: Any, made: EnginePool, component: str) -> None:  # noqa: ANN401  SGLang's object
    """Have the buffers of an ``MLATokenToKVPool`` be the daemon's memory."""
    import torch  # noqa: PLC0415  of the engine

    pool.kv_buffer = [one.view(pool.store_dtype) for one in made.rows("k", component)]
    addresses = [one.data_ptr() for one in pool.kv_buffer]
    pool.data_ptrs = torch.tensor(addresses, dtype=torch.uint64, device=pool.device)


def _tensors(pool: Any, component: str = MAIN) -> dict[tuple[str, str], torch.Tensor]:  # noqa: ANN401  SGLang's object
    """Return all layers of keys and of values, as an ``NPUMHATokenToKVPool`` has them; nothing of another."""
    if type(pool).__name__ not in NPU_KINDS:
        return {}
    return {(component, role): getattr(pool, f"{role}_buffer_tensor") for role in ("k", "v")}


def _give(pool: Any, made: EnginePool, component: str) -> None:  # noqa: ANN401  SGLang's object
    """Have the buffers of a pool of keys and values be the daemon's memory."""
    if type(pool).__name__ in NPU_KINDS:
        for role in ("k", "v"):
            for name in (f"_hicache_{role}_buffer", f"{role}_buffer_tensor", f"{role}_buffer"):
                _fill(pool, name, made.tensor(role, component))
        _check_filled(pool)
        return
    pool.k_buffer = [one.view(pool.store_dtype) for one in made.rows("k", component)]
    pool.v_buffer = [one.view(pool.store_dtype) for one in made.rows("v", component)]
    pool._init_data_ptrs_and_strides()  # noqa: SLF001  SGLang's: where its buffers are


def _like(one: torch.Tensor, made: EnginePool, role: str, device: Any) -> torch.Tensor:  # noqa: ANN401  SGLang's word
    """Return the daemon's memory of a state, in shape and strides of SGLang's tensor, which may have no element."""
    if not one.numel():
        return one.new_empty(one.shape, device=device)
    return made.tensor(role, MAMBA).view(one.dtype).as_strided(one.shape, one.stride())


def _windows_spec(main: Any, swa: Any) -> HybridSwaSpec:  # noqa: ANN401  SGLang's objects
    if swa.dtype != main.dtype:
        raise _refusal(f"windows of {swa.dtype} beside {main.dtype}")
    heads = _heads(swa.head_num, _total_window_heads)
    return HybridSwaSpec(
        full_layers=main.model_layer_ids,
        window_layers=swa.model_layer_ids,
        window_tokens=swa.size,
        window_kv_heads=heads.count,
        window_head_start=heads.start,
        window_total_heads=heads.total,
        window_replicas=heads.replicas,
        window_head_dim=swa.head_dim,
        window_v_head_dim=swa.v_head_dim,
        **_attention(main),
    )


def _states_spec(main: Any, states: Any) -> MambaSpec:  # noqa: ANN401  SGLang's objects
    cache = states.mamba_cache
    unknown = [name for name, one in vars(cache).items() if one is not None and name not in {"conv", "temporal"}]
    if unknown:
        raise _refusal(f"states with {', '.join(unknown)}")
    if len(cache.conv) > 1:
        raise _refusal(f"{len(cache.conv)} convolutions a layer")
    (rank, size), ssm = tensor_parallel(), cache.temporal
    more: dict[str, Any] = {}
    heads = 1
    if ssm.numel():
        heads = ssm.shape[2]
        more |= {"ssm_shape": tuple(ssm.shape[2:]), "ssm_dtype": _name(ssm.dtype)}
    for conv in cache.conv:
        if conv.numel():
            more |= _conv(states, conv, size)
            heads = heads if ssm.numel() else more["conv_channels"]
    return MambaSpec(
        state_layers=tuple(states.mamba_layer_ids),
        slots=states.size,
        state_head_start=heads * rank,
        state_total_heads=heads * size,
        attention_layers=main.model_layer_ids,
        **_attention(main),
        **more,
    )


def _conv(states: Any, conv: torch.Tensor, ranks: int) -> dict[str, Any]:  # noqa: ANN401  SGLang's object
    """Return what a spec says of a convolution's state.

    KDA has its window before its channels, and so has all that SGLang makes with an NPU. With AMX the axes lie the
    other way round in memory.
    """
    from sglang.srt.utils import is_npu  # noqa: PLC0415

    axis = 3 if is_npu() else 2 + states.conv_slice_axis
    channels, window = conv.shape[axis], conv.shape[5 - axis]
    return {
        "conv_window": window,
        "conv_channels": channels,
        "conv_channels_first": conv.stride(axis) >= conv.stride(5 - axis),
        "conv_parts": _conv_parts(states, channels, ranks),
        "conv_dtype": _name(conv.dtype),
    }


def _conv_parts(states: Any, channels: int, ranks: int) -> tuple[int, ...] | None:  # noqa: ANN401  SGLang's object
    """Return the channels of each part that is split over ranks by itself; None: unknown, or not as the heads are."""
    ssm = states.mamba_cache.temporal
    if states.conv_shard_groups is not None:
        parts = tuple(one // ranks for one in states.conv_shard_groups)
    elif not ssm.numel() or channels == ssm.shape[2]:  # a convolution alone; Mamba's, over x
        parts = (channels,)
    elif _model_type in MAMBA2:
        inner = ssm.shape[2] * ssm.shape[3]
        parts = (inner, *2 * ((channels - inner) // 2,))
    else:
        return None
    heads = ssm.shape[2] if ssm.numel() else channels
    return parts if sum(parts) == channels and not any(one % heads for one in parts) else None


def _mha_spec(pool: Any, **more: Any) -> MhaSpec:  # noqa: ANN401  SGLang's object
    return MhaSpec(layers=pool.layer_num, first_layer=pool.start_layer, **_attention(pool), **more)


def _attention(pool: Any) -> dict[str, Any]:  # noqa: ANN401  SGLang's object
    """Return what specs say of a pool of keys and values beside its layers."""
    heads = _heads(pool.head_num, _total_heads)
    return {
        "tokens": pool.size,
        "page_size": pool.page_size,
        "kv_heads": heads.count,
        "head_start": heads.start,
        "total_heads": heads.total,
        "replicas": heads.replicas,
        "head_dim": pool.head_dim,
        "v_head_dim": pool.v_head_dim,
        "dtype": _dtype(pool),
    }


def _heads(count: int, total: int | None) -> RankHeads:
    """Return which KV heads this rank has, of which SGLang says only how many."""
    rank, size = tensor_parallel()
    return rank_heads(count * size if total is None or count > 1 else total, size, rank)


def _npu_mla_spec(pool: Any) -> MlaSpec:  # noqa: ANN401  SGLang's object
    more: dict[str, Any] = {"view": "nz"} if pool.use_fia_nz else {}
    if pool.indexer_layer_ids:
        more |= {"index_head_dim": pool.index_head_dim, "index_layers": pool.indexer_layer_ids}
    if pool.dsa_kv_cache_store_fp8:
        more |= {"packed": "ascend", "index_scale": bool(pool.indexer_layer_ids)}
    return _mla_spec(pool, **more)


def _mla_spec(pool: Any, **more: Any) -> MlaSpec:  # noqa: ANN401  SGLang's object
    return MlaSpec(
        layers=pool.layer_num,
        first_layer=pool.start_layer,
        tokens=pool.size,
        page_size=pool.page_size,
        kv_lora_rank=pool.kv_lora_rank,
        qk_rope_head_dim=pool.qk_rope_head_dim,
        dtype=_dtype(pool),
        replicas=tensor_parallel()[1],
        **more,
    )


def _made_on(device: Any) -> Any:  # noqa: ANN401  SGLang's word for a device
    """Return where SGLang is to make a pool's tensors: on an NPU the engine's own memory is registered."""
    return device if settings().memory == "engine" and not _is_host(device) else "meta"


def _is_host(device: Any) -> bool:  # noqa: ANN401  SGLang's word for a device
    return str(device).startswith("cpu")


def _fill(pool: Any, name: str, ours: torch.Tensor) -> None:  # noqa: ANN401  SGLang's object
    """Have an attribute of SGLang's pool, all layers or a list of them, be the daemon's memory in the same shape."""
    theirs = getattr(pool, name)
    if isinstance(theirs, list):
        setattr(pool, name, [one.view(like.dtype).view(like.shape) for one, like in zip(ours, theirs, strict=True)])
    else:
        setattr(pool, name, ours.view(theirs.dtype).view(theirs.shape))


def _check_filled(pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Refuse a pool of which a tensor has got no memory: this SGLang makes more than is known here."""
    for name, value in vars(pool).items():
        if any(getattr(one, "is_meta", False) for one in (value if isinstance(value, list | tuple) else [value])):
            raise _refusal(f"{type(pool).__name__}.{name}")


def _make(
    spec: PoolSpec,
    on: Any = "cpu",  # noqa: ANN401  SGLang's word for a device
    tensors: Mapping[tuple[str, str], torch.Tensor] | None = None,
) -> EnginePool:
    """Make this process's pool; ``tensors``: SGLang's of a device, where they are to be registered."""
    global _current  # noqa: PLW0603  as SGLang's own pool, one a process
    told = settings()
    name = pool_name(told.pool)
    ours = device = HOST
    if not _is_host(on):
        ours, device = current_npu()
    is_registered = device != HOST and told.memory == "engine"
    identity.weights.begin()
    engine = Engine(name, told.runtime_dir, devices={device: ours} if device != ours else {}, on_pool_lost=end_server)
    _current = EnginePool(
        engine,
        name,
        spec,
        model_identity(),
        told.memory,
        device=device,
        tensors=tensors if is_registered else None,
    )
    return _current


def pool_name(given: str = "") -> str:
    """Return the name of this rank's pool."""
    from sglang.srt.runtime_context import get_disagg, get_parallel, get_serving  # noqa: PLC0415

    parallel = get_parallel()
    name = given or f"sglang-{get_disagg().disaggregation_mode}-{get_serving().port}"
    for what, size, rank in (
        ("dp", parallel.dp_size, parallel.dp_rank),
        ("tp", parallel.tp_size, parallel.tp_rank),
        ("pp", parallel.pp_size, parallel.pp_rank),
    ):
        if size > 1 and rank is not None:
            name += f"-{what}{rank}"
    return name


def model_identity() -> ModelIdentity:
    """Return whose KV this process computes: the served model's name, which both sides of a transfer must share.

    Its weights may be changed while it runs: each request's transfer says which they are.
    """
    from sglang.srt.runtime_context import get_serving  # noqa: PLC0415

    return ModelIdentity(name=str(get_serving().served_model_name))


def _check(pool: Any, device: str) -> None:  # noqa: ANN401  SGLang's object
    """Refuse what is not carried, by name, before the daemon is asked for a pool."""
    check_kind(pool)
    if str(pool.device).partition(":")[0] != device:
        raise _refusal(f"a KV pool on {pool.device}")
    if current() is not None:
        kind = type(pool).__name__
        raise _refusal(
            f"a second KV pool, {kind} (of sparse attention's index, or of one of several draft models: "
            "--enable-multi-layer-eagle)"
        )
    if getattr(pool, "post_capture_active", False):
        raise _refusal("KV memory that is backed after graph capture")
    if getattr(pool, "enable_custom_mem_pool", False):
        raise _refusal("a custom memory pool (SGLANG_MOONCAKE_CUSTOM_MEM_POOL)")
    if pool.size % pool.page_size:
        raise InvalidFieldError(
            f"{pool.size} tokens are no whole pages of {pool.page_size}: give --max-total-tokens as a multiple of it",
            field="max_total_tokens",
        )


def _refusal(what: str) -> InvalidFieldError:
    return InvalidFieldError(
        f"kvferry does not carry {what} yet: choose another --disaggregation-transfer-backend",
        field="disaggregation_transfer_backend",
    )


def tensor_parallel() -> tuple[int, int]:
    """Return this rank and the number of ranks that share the heads."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    parallel = get_parallel()
    return parallel.attn_tp_rank, parallel.attn_tp_size


def _dtype(pool: Any) -> str:  # noqa: ANN401  SGLang's object
    return _name(pool.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
