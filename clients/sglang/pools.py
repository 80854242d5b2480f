"""SGLang's token-to-KV pools in memory that the daemon knows: SGLang's pool is kvferry's, nothing is copied between.

A layer of ``MHATokenToKVPool`` is a tensor of one row a token, (size + page_size, heads, dim); the rows of its page 0
take what padded tokens write. That is kvferry's (pages, page_size, heads, dim) with its padding page 0. SGLang hands
out the pages by itself, so all of them belong to its session.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvferry.clients import AttachedPool, Client, MhaSpec, MlaSpec, ModelIdentity, SharedMemory
from kvferry.clients.elements import array_dtype, torch_dtype
from kvferry.clients.sglang.engine import Engine, Memory, settings, while_predecessor_ends
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.arrays import PointerList, array_of, engine_lists
from kvferry.pools.planning.manifest import bytes_per_page
from kvferry.protocol.errors import InvalidFieldError, PoolExistsError, PoolLostError, UnknownPoolError
from kvferry.protocol.ids import HOST

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

KINDS: Final = ("MHATokenToKVPool", "MLATokenToKVPool")
"""The classes themselves: what is derived from them keeps its bytes in other ways."""

MODES: Final = ("prefill", "decode")

_current: DevicePool | None = None


class DevicePool:
    """The memory of this process's token-to-KV pool.

    Attributes:
        name: of the daemon's pool.
        engine: the session that it belongs to.
        spec: what it holds.
        memory: who allocated it.
        model: whose KV it holds.
        lists: the pointer, length and item lists that SGLang must have for it.
    """

    def __init__(
        self, engine: Engine, name: str, spec: MhaSpec | MlaSpec, model: ModelIdentity, memory: Memory
    ) -> None:
        """Make the pool.

        Raises:
            KvferryError: the daemon refuses it.
        """
        self.name = name
        self.engine = engine
        self.spec = spec
        self.memory = memory
        self.model = model
        self._manifest = manifest_of(spec)
        self._attached: AttachedPool | None = None
        self._again: AttachedPool | None = None
        self._shared: SharedMemory | None = None
        self.largest_payload_bytes = 0
        """Of what a transfer carries beside pages."""
        make = self._create
        if memory == "engine":
            self._shared = SharedMemory(self._manifest.region_bytes)
            make = self._register
        with engine.client() as client:
            while_predecessor_ends(lambda: make(client))
        self.lists: PointerList = engine_lists(self._manifest, self._address()).main
        engine.add(self)
        logger.info(
            "kvferry: pool %s of %d pages of %d tokens, %.2f GiB of the host, allocated by the %s",
            name, self._manifest.pages - 1, spec.page_size, self._manifest.region_bytes / (1 << 30), memory,
        )  # fmt: skip

    def __repr__(self) -> str:
        """Show the name."""
        return f"<DevicePool {self.name!r}>"

    def rows(self, role: str) -> list[torch.Tensor]:
        """Return a role's layers, each (size + page_size, heads, dim): a row a token."""
        import torch  # noqa: PLC0415  of the engine; nothing else here needs it

        array = array_of(self._manifest, "main", role)
        view = self._region().view()[array.start : array.start + array.size_bytes]
        layers = torch.from_numpy(view).view(torch_dtype(array.dtype)).view(array.shape)
        return [one.flatten(0, 1) for one in layers]

    def whole(self) -> torch.Tensor:
        """Return the memory of all arrays, one after another as the manifest has them: uint8."""
        import torch  # noqa: PLC0415  of the engine

        return torch.from_numpy(self._region().view()[: self._manifest.region_bytes])

    @property
    def page_bytes(self) -> int:
        """Return the bytes of a page over all layers and roles."""
        return bytes_per_page(self._manifest)

    @property
    def layout_digest(self) -> str:
        """Return the digest of its layout."""
        return self._manifest.layout_digest

    def come_back(self, client: Client, *, resumed: bool) -> None:
        """Make the daemon know the pool again.

        Raises:
            PoolLostError: its memory was the daemon before's, and is not this one's.
            KvferryError: it does not know it yet.
        """
        if self.memory == "engine":
            try:
                self._register(client)
            except PoolExistsError:
                if not resumed:  # else it is still this session's, else that of the one before, which is about to end
                    raise
            return
        if not resumed:
            raise PoolLostError(f"{self.name}: the daemon ended, and the one after it has not adopted its pools")
        try:
            again = client.attach_pool(self.name)
        except UnknownPoolError as error:
            raise PoolLostError(f"{self.name}: {error.detail}") from error
        ours, theirs = self._region(), again.region
        if not isinstance(theirs, HostRegion) or not ours.is_same(theirs.fd):
            raise PoolLostError(f"{self.name}: the daemon has another memory of this name")
        self._again = again  # by which this client compares the memory of the next daemon

    def _create(self, client: Client) -> None:
        pool = client.create_pool(
            self.name,
            self.spec,
            model=self.model,
            lifetime="instance",
            max_payload_bytes=self._payload_limit(client),
        )
        ids = client.allocate(self.name, self._manifest.pages - 1)
        if not np.array_equal(ids, np.arange(1, self._manifest.pages)):
            raise InvalidFieldError(f"pool {self.name} is used by others", field="KVFERRY_SGLANG_POOL")
        self._attached = pool

    def _register(self, client: Client) -> None:
        """Register it; what the next session of this engine finds is the same memory."""
        assert self._shared is not None
        whole = self._shared.view()
        tensors = {}
        for role in ("k",) if isinstance(self.spec, MlaSpec) else ("k", "v"):
            array = array_of(self._manifest, "main", role)
            part = whole[array.start : array.start + array.size_bytes]
            tensors["main", role] = part.view(array_dtype(array.dtype)).reshape(array.shape)
        limit = self._payload_limit(client)
        client.register_pool(self.name, self.spec, tensors, device=HOST, model=self.model, max_payload_bytes=limit)

    def _payload_limit(self, client: Client) -> int:
        """Return the largest payload that the daemon allows: SGLang's row of metadata grows with the model's width."""
        assert client.welcome is not None
        self.largest_payload_bytes = client.welcome.limits.largest_payload_bytes
        return self.largest_payload_bytes

    def _region(self) -> HostRegion:
        if self._shared is not None:
            return self._shared.region
        assert self._attached is not None
        region = self._attached.region
        assert isinstance(region, HostRegion)
        return region

    def _address(self) -> int:
        return self._region().address


def current() -> DevicePool | None:
    """Return this process's pool, if SGLang's is the daemon's."""
    return _current


def chosen() -> bool:
    """Return whether this process is a prefill or decode server that was told to transfer by kvferry."""
    from sglang.srt.runtime_context import get_disagg  # noqa: PLC0415  SGLang need not be there

    try:
        told = get_disagg().disaggregation_mode, get_disagg().disaggregation_transfer_backend
    except Exception:  # noqa: BLE001  a pool that is made without a server has no configuration
        return False
    return told[0] in MODES and told[1] == "kvferry"


def check_kind(pool: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401  SGLang's object and arguments
    """Refuse a pool of another class before it is made, where kvferry was chosen."""
    kind = type(pool).__name__
    if kind not in KINDS and chosen():
        raise _refusal(f"the KV pool {kind}")


def create_mha_buffers(original: Callable[[Any], None], pool: Any) -> None:  # noqa: ANN401  SGLang's object
    """Create the buffers of an ``MHATokenToKVPool`` in the daemon's pool, where kvferry was chosen."""
    if not chosen():
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
    if not chosen():
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


def _make(spec: MhaSpec | MlaSpec) -> DevicePool:
    global _current  # noqa: PLW0603  as SGLang's own pool, one a process
    told = settings()
    name = pool_name(told.pool)
    engine = Engine(name, told.runtime_dir)
    _current = DevicePool(engine, name, spec, model_identity(), told.memory)
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
    """Return whose KV this process computes: the served model's name, which both sides of a transfer must share."""
    from sglang.srt.runtime_context import get_model, get_serving  # noqa: PLC0415

    return ModelIdentity(name=str(get_serving().served_model_name), revision=str(get_model().revision or ""))


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
