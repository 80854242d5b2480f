"""SGLang's token-to-KV pools in memory that the daemon knows: SGLang's pool is kvferry's, nothing is copied between.

A layer of ``MHATokenToKVPool`` is a tensor of one row a token, (size + page_size, heads, dim); the rows of its page 0
take what padded tokens write. That is kvferry's (pages, page_size, heads, dim) with its padding page 0. SGLang hands
out the pages by itself, so all of them belong to its session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from kvferry.clients import MhaSpec, MlaSpec, ModelIdentity
from kvferry.clients.engine import Engine
from kvferry.clients.engine_pool import EnginePool
from kvferry.clients.sglang import identity
from kvferry.clients.sglang.choice import transfers_by_kvferry
from kvferry.clients.sglang.settings import end_server, settings
from kvferry.protocol.errors import InvalidFieldError

KINDS: Final = ("MHATokenToKVPool", "MLATokenToKVPool")
"""The classes themselves: what is derived from them keeps its bytes in other ways."""


_current: EnginePool | None = None


def current() -> EnginePool | None:
    """Return this process's pool, if SGLang's is the daemon's."""
    return _current


def check_kind(pool: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401  SGLang's object and arguments
    """Refuse a pool of another class before it is made, where kvferry was chosen."""
    kind = type(pool).__name__
    if kind not in KINDS and transfers_by_kvferry():
        raise _refusal(f"the KV pool {kind}")


def create_mha_buffers(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Create the buffers of an ``MHATokenToKVPool`` in the daemon's pool, where kvferry was chosen."""
    if not transfers_by_kvferry():
        original(pool)
        return
    _check(pool)
    if pool.kv_cache_layout != "nhd":
        raise _refusal(f"the KV layout {pool.kv_cache_layout!r}")
    heads, rank, size = pool.head_num, *tensor_parallel()
    spec = MhaSpec(
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
    made = _make(spec)
    pool.k_buffer = [one.view(pool.store_dtype) for one in made.rows("k")]
    pool.v_buffer = [one.view(pool.store_dtype) for one in made.rows("v")]


def create_mla_buffers(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Create the buffers of an ``MLATokenToKVPool`` in the daemon's pool: latent and rope of a token in one row."""
    if not transfers_by_kvferry():
        original(pool)
        return
    _check(pool)
    if pool.use_dsa:
        raise _refusal("sparse attention with an indexer (DSA, NSA)")
    spec = MlaSpec(
        layers=pool.layer_num,
        first_layer=pool.start_layer,
        tokens=pool.size,
        page_size=pool.page_size,
        kv_lora_rank=pool.kv_lora_rank,
        qk_rope_head_dim=pool.qk_rope_head_dim,
        dtype=_dtype(pool),
        joined=True,
        replicas=tensor_parallel()[1],
    )
    pool.kv_buffer = [one.view(pool.store_dtype) for one in _make(spec).rows("k")]


def _make(spec: MhaSpec | MlaSpec) -> EnginePool:
    global _current  # noqa: PLW0603  as SGLang's own pool, one a process
    told = settings()
    name = pool_name(told.pool)
    identity.weights.begin()
    engine = Engine(name, told.runtime_dir, on_pool_lost=end_server)
    _current = EnginePool(engine, name, spec, model_identity(), told.memory)
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


def _check(pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Refuse what is not carried, by name, before anything is made."""
    check_kind(pool)
    if str(pool.device) != "cpu":
        raise _refusal(f"a KV pool on {pool.device}")
    if current() is not None:
        raise _refusal("a second KV pool (speculative decoding's draft model, sliding windows)")
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
    return InvalidFieldError(f"kvferry does not carry {what} yet", field="disaggregation_transfer_backend")


def tensor_parallel() -> tuple[int, int]:
    """Return this rank and the number of ranks that share the heads."""
    from sglang.srt.runtime_context import get_parallel  # noqa: PLC0415

    parallel = get_parallel()
    return parallel.attn_tp_rank, parallel.attn_tp_size


def _dtype(pool: Any) -> str:  # noqa: ANN401  SGLang's object
    return str(pool.dtype).removeprefix("torch.")
