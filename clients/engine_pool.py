"""An inference engine's KV cache in memory that the daemon knows: its pages are kvferry's, nothing is copied between.

The engine numbers the pages itself, from 1 on, so all of them belong to its instance; page 0 takes what padded tokens
write.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Literal

import numpy as np

from kvferry.clients import AttachedPool, Client, MhaSpec, MlaSpec, ModelIdentity, SharedMemory
from kvferry.clients.elements import array_dtype, torch_dtype
from kvferry.clients.engine import Engine, while_predecessor_ends
from kvferry.clients.shared_memory import InheritedMemory
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.arrays import PointerList, array_of, engine_lists
from kvferry.pools.planning.manifest import bytes_per_page
from kvferry.protocol.errors import InvalidFieldError, PoolExistsError, PoolLostError, UnknownPoolError
from kvferry.protocol.ids import HOST

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Memory = Literal["daemon", "engine"]
"""Who allocates a pool: ``daemon``, or ``engine``, which registers it."""


class EnginePool:
    """The memory in which an inference engine has its KV cache, and which the daemon knows as a pool.

    Attributes:
        name: of the daemon's pool.
        engine: the session that it belongs to.
        spec: what it holds.
        memory: who allocated it.
        keeps_memory: whether this process registers what it has mapped where a daemon comes back without the pool.
        model: whose KV it holds.
        lists: the pointers to it, their lengths and those of a page, as engines list them.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        spec: MhaSpec | MlaSpec,
        model: ModelIdentity,
        memory: Memory,
        *,
        keeps_memory: bool = False,
    ) -> None:
        """Make the pool.

        Raises:
            KvferryError: the daemon refuses it.
        """
        self.name = name
        self.engine = engine
        self.spec = spec
        self.memory = memory
        self.keeps_memory = keeps_memory
        self.model = model
        self._manifest = manifest_of(spec)
        self._attached: AttachedPool | None = None
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
        return f"<EnginePool {self.name!r}>"

    def layers(self, role: str) -> list[torch.Tensor]:
        """Return a role's layers, each with the pages first; one where a page holds all layers."""
        array = array_of(self._manifest, "main", role)
        return list(self.elements(role).view(torch_dtype(array.dtype)).view(array.shape))

    def rows(self, role: str) -> list[torch.Tensor]:
        """Return a role's layers, each (size + page_size, heads, dim): a row a token."""
        return [one.flatten(0, 1) for one in self.layers(role)]

    def elements(self, role: str = "k") -> torch.Tensor:
        """Return a role's bytes, of all layers and pages: uint8."""
        array = array_of(self._manifest, "main", role)
        return self.whole()[array.start : array.start + array.size_bytes]

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
        if self.memory == "daemon":
            try:
                self._attach_again(client, resumed=resumed)
            except PoolLostError as error:
                if not self.keeps_memory or self._region().is_reserved:  # those pages cannot be registered
                    raise
                logger.warning("kvferry: %s; what this engine has mapped of it is registered", error)
                self._shared, self.memory, resumed = InheritedMemory(self._region()), "engine", False
            else:
                return
        try:
            self._register(client)
        except PoolExistsError:
            if not resumed:  # else it is still this session's, else that of the one before, which is about to end
                raise

    def _attach_again(self, client: Client, *, resumed: bool) -> None:
        if not resumed:
            raise PoolLostError(f"{self.name}: the daemon ended, and the next one has not adopted its pools")
        try:
            again = client.attach_pool(self.name)
        except UnknownPoolError as error:
            raise PoolLostError(f"{self.name}: {error.detail}") from error
        ours, theirs = self._region(), again.region
        if not isinstance(theirs, HostRegion) or not ours.is_same(theirs.fd):
            raise PoolLostError(f"{self.name}: the daemon has another memory of this name")

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
            raise InvalidFieldError(f"pool {self.name} is used by others", field="pool")
        self._attached = pool

    def _register(self, client: Client) -> None:
        """Register it; what the next session of this engine finds is the same memory."""
        assert self._shared is not None
        whole = self._shared.view()
        tensors = {}
        for role in ("k",) if self.spec.joined else ("k", "v"):
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
