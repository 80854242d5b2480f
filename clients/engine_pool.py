"""An inference engine's KV cache in memory that the daemon knows: its pages are kvferry's, nothing is copied between.

The engine numbers the pages itself, from 1 on, so all of them belong to its instance; page 0 takes what padded tokens
write.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec
import numpy as np

from kvferry.clients import AttachedPool, Client, ModelIdentity, SharedMemory
from kvferry.clients.elements import array_dtype, torch_dtype
from kvferry.clients.engine import Engine, while_predecessor_ends
from kvferry.clients.events import EventRing
from kvferry.clients.layers import LayerSignals
from kvferry.clients.shared_memory import InheritedMemory
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.parts import DRAFT
from kvferry.pools.planning.arrays import (
    EngineLists,
    PointerList,
    array_of,
    arrays_of,
    engine_lists,
    placed_at,
)
from kvferry.pools.planning.manifest import bytes_per_page, each_array, spaces_of
from kvferry.protocol.base import DeviceEvent
from kvferry.protocol.errors import (
    ClientClosedError,
    InvalidFieldError,
    PoolExistsError,
    PoolLostError,
    StaleBootError,
    UnknownPoolError,
)
from kvferry.protocol.ids import HOST, MAIN
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.transfer_messages import LayerStep

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

Memory = Literal["daemon", "engine"]
"""Who allocates a pool: ``daemon``, or ``engine``, which registers it."""

MOST_STEPS: Final = 16
"""Of a forward pass, so that its events stay the latest of their slots while four passes are under way."""

OPENING_S: Final = 120.0
"""How long the daemon may take for the first pool of a device: its driver opens the device, which may take a minute."""


class EnginePool:
    """The memory in which an inference engine has its KV cache, and which the daemon knows as a pool.

    Attributes:
        name: of the daemon's pool.
        engine: the session that it belongs to.
        spec: what it holds.
        memory: who allocated it.
        device: where it is, by the daemon's name.
        keeps_memory: whether this process registers what it has mapped where a daemon comes back without the pool.
        model: whose KV it holds.
        first_layer, layers: the least number of a layer of the model, and how many there are from it to the greatest.
        window: the tokens of a sliding window, once the engine has said it.
        compute_stream: on which the model runs, on a device; None: on the calling thread's current one.
        signals: which layers of a forward pass are filled.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        spec: PoolSpec,
        model: ModelIdentity,
        memory: Memory,
        *,
        keeps_memory: bool = False,
        device: str = HOST,
        tensors: Mapping[tuple[str, str], torch.Tensor] | Mapping[tuple[str, str, int], torch.Tensor] | None = None,
    ) -> None:
        """Make the pool.

        Args:
            engine: the session that it is to belong to.
            name: of the daemon's pool.
            spec: what it holds.
            model: whose KV that is.
            memory: who allocates it.
            keeps_memory: register what is mapped where a daemon comes back without the pool; on the host.
            device: where it is, by the daemon's name.
            tensors: with ``engine`` on a device, the memory: all layers of a role, by (component, role), in the spec's
                order; or each layer by itself, by (component, role, layer).

        Raises:
            KvferryError: the daemon refuses it.
        """
        self.name = name
        self.engine = engine
        self.spec = spec
        self.memory = memory
        self.keeps_memory = keeps_memory
        self.device = device
        self.model = model
        self._manifest = manifest_of(spec)
        self._attached: AttachedPool | None = None
        self._shared: SharedMemory | None = None
        self._tensors: dict[tuple[Any, ...], torch.Tensor] = {
            key: self._in_its_form(key, one) for key, one in (tensors or {}).items()
        }
        self._ring: EventRing | None = None
        self.window: int | None = None
        self.compute_stream: torch.Stream | None = None
        self.layer_numbers = tuple(sorted({one.layer for one in self._manifest.entries if one.component != DRAFT}))
        """Those of the model of which it has KV or states."""
        self.first_layer, self.layers = self.layer_numbers[0], self.layer_numbers[-1] - self.layer_numbers[0] + 1
        self.signals = LayerSignals(self.first_layer, self.layers, math.ceil(self.layers / MOST_STEPS))
        self._deadline_s = None if device == HOST else OPENING_S
        self.largest_payload_bytes = 0
        """Of what a transfer carries beside pages."""
        make = self._create
        if memory == "engine":
            if device == HOST:
                self._shared = SharedMemory(self._manifest.region_bytes)
            make = self._register
        with engine.client() as client:
            while_predecessor_ends(lambda: make(client))
            self._open_ring(client)
        engine.add(self)
        logger.info(
            "kvferry: pool %s of %d pages of %d tokens, %.2f GiB of %s, allocated by the %s",
            name, self.pages - 1, self.page_size, self._manifest.region_bytes / (1 << 30), device, memory,
        )  # fmt: skip

    def __repr__(self) -> str:
        """Show the name."""
        return f"<EnginePool {self.name!r}>"

    @property
    def page_size(self) -> int:
        """Return the tokens of a page."""
        size = self.spec.page_size
        assert size is not None  # of states alone: no engine has those
        return size

    @property
    def lists(self) -> PointerList:
        """Return the pointers to its KV, their lengths and those of a page, as engines list them."""
        return self._engine_lists().main

    @property
    def state_lists(self) -> PointerList:
        """Return the same of states (a slot for a page) and windows."""
        return self._engine_lists().state

    def tensor(self, role: str, component: str = MAIN) -> torch.Tensor:
        """Return all layers of a role, as ``AttachedPool.tensor`` shapes them; one where a page holds all layers.

        Not of memory that was given layer by layer.
        """
        if self._tensors:
            return self._tensors[component, role]
        if self._shared is not None:
            return self._in_its_form((component, role), self.elements(role, component))
        assert self._attached is not None
        return self._attached.tensor(component, role)

    def rows(self, role: str, component: str = MAIN) -> list[torch.Tensor]:
        """Return a role's layers, each (size + page_size, heads, dim): a row a token."""
        return [one.flatten(0, 1) for one in self.tensor(role, component)]

    def elements(self, role: str = "k", component: str = MAIN) -> torch.Tensor:
        """Return a role's bytes, of all layers and pages: uint8."""
        array = array_of(self._manifest, component, role)
        return self.whole()[array.start : array.start + array.size_bytes]

    def whole(self) -> torch.Tensor:
        """Return the memory of all arrays, one after another as the manifest has them: uint8."""
        import torch  # noqa: PLC0415  of the engine

        return torch.from_numpy(self._region().view()[: self._manifest.region_bytes])

    def event(self) -> DeviceEvent | None:
        """Return an event behind all that the model's stream was told to do so far; None on the host: it is done.

        Raises:
            DaemonLostError, SessionLostError, PoolLostError: the ring has to be opened anew, and the daemon is away.
        """
        return self._of_ring(lambda ring: ring.record_event(self.compute_stream))

    def step(self) -> list[LayerStep]:
        """Return the step of a SEND whose layers are all in the pages once that is done; none on the host.

        Raises:
            KvferryError: as ``event``.
        """
        return self.step_of(self.event())

    def step_of(self, event: DeviceEvent | None) -> list[LayerStep]:
        """Return the step of a SEND whose layers are all in the pages once an event is done; none without one."""
        if event is None:
            return []
        return [LayerStep(first_layer=self.first_layer, layers=self.layers, **msgspec.structs.asdict(event))]

    def layer_steps(self, signals: LayerSignals | None = None) -> list[LayerStep]:
        """Return the steps of SENDs whose layers the next forward pass fills, for ``signals``; none on the host.

        ``signals``: by default the pool's own.

        Raises:
            KvferryError: as ``event``.
        """
        return self._of_ring((signals or self.signals).begin) or []

    @property
    def pages(self) -> int:
        """Return the number of pages, with the padding page; of a window pool the full ones."""
        return self._manifest.pages

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
                # Memory of a device cannot be registered by a share, nor can reserved pages.
                if self.device != HOST or not self.keeps_memory or self._region().is_reserved:
                    raise
                logger.warning("kvferry: %s; what this engine has mapped of it is registered", error)
                self._shared, self.memory, resumed = InheritedMemory(self._region()), "engine", False
            else:
                self._open_ring(client)
                return
        try:
            self._register(client)
        except PoolExistsError:
            if not resumed:  # else it is still this session's, else that of the one before, which is about to end
                raise
        self._open_ring(client)

    def _attach_again(self, client: Client, *, resumed: bool) -> None:
        if not resumed:
            raise PoolLostError(f"{self.name}: the daemon ended, and the next one has not adopted its memory")
        try:
            again = client.attach_pool(self.name)
        except UnknownPoolError as error:
            raise PoolLostError(f"{self.name}: {error.detail}") from error
        assert self._attached is not None
        ours, theirs = self._attached.region, again.region
        if isinstance(ours, HostRegion) and isinstance(theirs, HostRegion):
            is_same = ours.is_same(theirs.fd)
        else:
            is_same = again.address == self._attached.address  # a process maps device memory once
            again.close()
        if not is_same:
            raise PoolLostError(f"{self.name}: the daemon has another memory of this name")

    def _create(self, client: Client) -> None:
        pool = client.create_pool(
            self.name,
            self.spec,
            model=self.model,
            device=self.device,
            lifetime="instance",
            max_payload_bytes=self._payload_limit(client),
            deadline_s=self._deadline_s,
        )
        for space, count in spaces_of(self._manifest).items():
            ids = client.allocate(self.name, count - 1, space=space)
            if not np.array_equal(ids, np.arange(1, count)):
                raise InvalidFieldError(f"pool {self.name} is used by others", field="pool")
        self._attached = pool

    def _register(self, client: Client) -> None:
        """Register it; what the next session of this engine finds is the same memory."""
        tensors: dict[tuple[Any, ...], Any] = {**self._tensors}
        if self.device == HOST:
            assert self._shared is not None
            whole = self._shared.view()
            entries = each_array(self._manifest.entries)  # several groups may lie in the same bytes
            keys = list(dict.fromkeys((one.component, one.role, None) for one in entries))
            for (component, role, _), array in zip(keys, arrays_of(self._manifest, keys), strict=True):
                part = whole[array.start : array.start + array.size_bytes]
                tensors[component, role] = part.view(array_dtype(array.dtype)).reshape(array.shape)
        client.register_pool(
            self.name,
            self.spec,
            tensors,
            device=self.device,
            model=self.model,
            max_payload_bytes=self._payload_limit(client),
            deadline_s=self._deadline_s,
        )

    def _open_ring(self, client: Client) -> None:
        if self.device != HOST:
            self._ring = client.open_events(self.device, deadline_s=OPENING_S)

    def _of_ring(self, call: Callable[[EventRing], T]) -> T | None:
        if self._ring is None:
            return None
        try:
            return call(self._ring)
        except (StaleBootError, ClientClosedError):  # its daemon, or this process's client of it, is no more
            with self.engine.client() as client:
                self._open_ring(client)
            return call(self._ring)

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

    def _in_its_form(self, key: tuple[Any, ...], one: torch.Tensor) -> torch.Tensor:
        array = array_of(self._manifest, *key)
        return one.view(torch_dtype(array.dtype)).view(array.shape)

    def _engine_lists(self) -> EngineLists:
        if not self._tensors:
            return engine_lists(self._manifest, self._address())
        arrays = [array_of(self._manifest, *key) for key in self._tensors]
        addresses = [one.data_ptr() for one in self._tensors.values()]
        return engine_lists(placed_at(self._manifest, arrays, addresses, self._manifest.region_bytes))

    def _address(self) -> int:
        if self._shared is not None:
            return self._shared.region.address
        assert self._attached is not None
        return self._attached.address
