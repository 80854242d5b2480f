"""SGLang's token-to-KV pools in memory that the daemon knows: SGLang's pool is kvferry's, nothing is copied between.

A layer of ``MHATokenToKVPool`` is a tensor of one row a token, (size + page_size, heads, dim); the rows of its page 0
take what padded tokens write. That is kvferry's (pages, page_size, heads, dim) with its padding page 0. SGLang hands
out the pages by itself, so all of them belong to its session.

Ascend's pools make their tensors on their own, so they make them on torch's device "meta", where they have a shape and
no memory, and are given the daemon's of the same shape. Which shape SGLang reads is thereby SGLang's own choice.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from kvferry.clients import MhaSpec, MlaSpec, ModelIdentity
from kvferry.clients.engine import Engine
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import identity
from kvferry.clients.sglang.choice import transfers_by_kvferry
from kvferry.clients.sglang.settings import end_server, settings
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import HOST

if TYPE_CHECKING:
    import torch

HOST_KINDS: Final = ("MHATokenToKVPool", "MLATokenToKVPool")
NPU_KINDS: Final = ("NPUMHATokenToKVPool", "NPUMLATokenToKVPool")
"""The classes themselves: what is derived from them keeps its bytes in other ways."""

VISIBLE: Final = "ASCEND_RT_VISIBLE_DEVICES"
"""Which of the host's NPUs a process sees, by number; it numbers them anew."""

_current: EnginePool | None = None


def current() -> EnginePool | None:
    """Return this process's pool, if SGLang's is the daemon's."""
    return _current


def check_kind(pool: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401  SGLang's object and arguments
    """Refuse a pool of another class before it is made, where kvferry was chosen."""
    kind = type(pool).__name__
    if kind not in (*HOST_KINDS, *NPU_KINDS) and transfers_by_kvferry():
        raise _refusal(f"the KV pool {kind}")


def create_mha_buffers(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Create the buffers of an ``MHATokenToKVPool`` in the daemon's pool, where kvferry was chosen."""
    if not transfers_by_kvferry():
        original(pool)
        return
    _check(pool, "cpu")
    if pool.kv_cache_layout != "nhd":
        raise _refusal(f"the KV layout {pool.kv_cache_layout!r}")
    made = _make(_mha_spec(pool))
    pool.k_buffer = [one.view(pool.store_dtype) for one in made.rows("k")]
    pool.v_buffer = [one.view(pool.store_dtype) for one in made.rows("v")]


def create_mla_buffers(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Create the buffers of an ``MLATokenToKVPool`` in the daemon's pool: latent and rope of a token in one row."""
    if not transfers_by_kvferry():
        original(pool)
        return
    _check(pool, "cpu")
    if pool.use_dsa:
        raise _refusal("sparse attention with an indexer (DSA, NSA)")
    spec = _mla_spec(pool, joined=True)
    pool.kv_buffer = [one.view(pool.store_dtype) for one in _make(spec).rows("k")]


def create_npu_mha_buffers(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Create the buffers of an ``NPUMHATokenToKVPool``: k and v of all layers, with FIA also a view of each layer."""
    if not transfers_by_kvferry():
        original(pool)
        return
    _check(pool, "npu")
    device = pool.device
    pool.device = _made_on(device)
    original(pool)
    pool.device = device
    roles = ("k", "v")
    made = _make(_mha_spec(pool), device, {role: getattr(pool, f"{role}_buffer_tensor") for role in roles})
    for role in roles:
        ours = made.tensor(role)
        for name in (f"_hicache_{role}_buffer", f"{role}_buffer_tensor", f"{role}_buffer"):
            _fill(pool, name, ours)
    _check_filled(pool)


def create_npu_mla_pool(original: Callable[..., None], pool: Any, *given: Any, **named: Any) -> None:  # noqa: ANN401
    """Make an ``NPUMLATokenToKVPool``, whose constructor makes its buffers: latent, rope, and the indexer's keys."""
    if not transfers_by_kvferry() or type(pool).__name__ not in NPU_KINDS:
        original(pool, *given, **named)
        return
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
    more: dict[str, Any] = {"view": "nz"} if pool.use_fia_nz else {}
    if indexed:
        more |= {"index_head_dim": pool.index_head_dim, "index_layers": pool.indexer_layer_ids}
    if packed:
        more |= {"packed": "ascend", "index_scale": indexed}
    made = _make(_mla_spec(pool, **more), device, {role: getattr(pool, name) for role, name in names.items()})
    for role, name in names.items():
        _fill(pool, name, made.tensor(role))
    for name, value in list(vars(pool).items()):
        if getattr(value, "is_meta", False) and not value.numel():  # v of packed tokens; a stage without an indexer
            setattr(pool, name, pool.k_buffer.new_empty(value.shape, dtype=value.dtype))
    if indexed and packed and pool.indexer_hadamard_128.is_meta:
        from sglang.srt.layers.attention.dsa.dsa_npu_indexer import create_npu_hadamard_128  # noqa: PLC0415

        pool.indexer_hadamard_128 = create_npu_hadamard_128(pool.index_head_dim, device)
    _check_filled(pool)


def metadata_on_host(_: object, buffers: Any, *__: object, **___: object) -> None:  # noqa: ANN401  SGLang's object
    """Have a request's row of metadata where the processor reads it: SGLang puts it on an NPU, for its own back end."""
    if not transfers_by_kvferry():
        return
    for name, value in vars(buffers).items():
        if getattr(value, "is_cpu", True) is False:
            setattr(buffers, name, value.cpu())


def note_compute_stream(_: object, scheduler: Any) -> None:  # noqa: ANN401  SGLang's object
    """Learn on which stream the model runs: with SGLang's overlap it is not the scheduler's own."""
    pool = current()
    if pool is not None and scheduler.enable_overlap:
        pool.compute_stream = scheduler.forward_stream


def daemons_device(ours: str, environment: Mapping[str, str] = os.environ) -> str:
    """Return what the daemon calls an NPU of this process, which may see some of the host's only.

    Raises:
        InvalidFieldError: it does not see this one.
    """
    visible = environment.get(VISIBLE, "")
    if not visible:
        return ours
    numbers, index = [one.strip() for one in visible.split(",")], int(ours.removeprefix("npu:"))
    if index >= len(numbers) or not numbers[index].isdecimal():
        raise InvalidFieldError(f"{VISIBLE} is {visible!r}, and this process uses {ours}", field=VISIBLE)
    return f"npu:{int(numbers[index])}"


def _mha_spec(pool: Any) -> MhaSpec:  # noqa: ANN401  SGLang's object
    heads, (rank, size) = pool.head_num, tensor_parallel()
    return MhaSpec(
        layers=pool.layer_num,
        first_layer=pool.start_layer,
        tokens=pool.size,
        page_size=pool.page_size,
        kv_heads=heads,
        head_start=heads * rank,
        total_heads=heads * size,
        head_dim=pool.head_dim,
        v_head_dim=pool.v_head_dim,
        dtype=_dtype(pool),
    )


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
    """Return where SGLang is to make a pool's tensors that is to be on a device."""
    return device if settings().memory == "engine" else "meta"


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
    spec: MhaSpec | MlaSpec,
    on: Any = HOST,  # noqa: ANN401  SGLang's word for a device
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> EnginePool:
    """Make this process's pool; ``tensors``: SGLang's of a device, by role, where they are to be registered."""
    global _current  # noqa: PLW0603  as SGLang's own pool, one a process
    told = settings()
    name = pool_name(told.pool)
    ours = device = HOST
    if on != HOST:
        import torch  # noqa: PLC0415  of the engine

        ours = f"npu:{torch.accelerator.current_device_index()}"
        device = daemons_device(ours)
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
    for what, size, rank in (("dp", parallel.dp_size, parallel.dp_rank), ("tp", parallel.tp_size, parallel.tp_rank)):
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
            f"a second KV pool, {kind} (a draft model's: start without --speculative-algorithm; of sliding windows; "
            "of sparse attention's index)"
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
    return str(pool.dtype).removeprefix("torch.")
