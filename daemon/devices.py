"""The cards that pools and tables were asked for on: opened when they are first needed, watched, and counted.

All but ``status`` and the budget belongs on a thread that may wait. A card that is lost ends the daemon: see
``pools.devices.accelerator``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import structlog

from kvferry.daemon.config import DevicesConfig
from kvferry.pools.arrays import Array, Held, check_apart
from kvferry.pools.devices.accelerator import REGION_ALIGNMENT, Accelerator, DeviceMemory
from kvferry.pools.devices.accelerator_region import AcceleratorRegion, RegionPart
from kvferry.pools.devices.staging import StagingPool
from kvferry.pools.devices.vendor import Mapped
from kvferry.protocol.errors import DeviceLostError, InvalidFieldError, KvferryError, OutOfMemoryError
from kvferry.protocol.session_messages import DeviceStatus
from kvferry.protocol.shares import TorchShare

CHECK_S: Final = 1.0
log = structlog.get_logger(__name__)


class _Card:
    """A card, its staging, and what of its memory is ours."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.stagings = StagingPool(accelerator)
        self.memory = DeviceMemory(0, 0)
        self.pool_bytes = 0
        self.lent: list[Held] = []
        self.failed: KvferryError | None = None

    @property
    def state(self) -> str:
        lost = self.accelerator.lost
        return f"lost: {lost.detail}" if lost else f"unavailable: {self.failed.detail}" if self.failed else "ready"


class LentPart(NamedTuple):
    """What an engine lends of a pool: which array, and by which share."""

    array: Array
    share: TorchShare


class Devices:
    """All cards, by name. ``on_lost`` is called once for each that is lost, on the thread that saw it."""

    def __init__(self, config: DevicesConfig, on_lost: Callable[[str, DeviceLostError], None]) -> None:
        self._config = config
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._cards: dict[str, _Card] = {}

    def __repr__(self) -> str:
        """Show the cards."""
        return f"<Devices {', '.join(f'{name} {card.state}' for name, card in self._cards.items())}>"

    @property
    def in_use(self) -> bool:
        """Return whether a card was asked for."""
        return bool(self._cards)

    @property
    def lost(self) -> bool:
        """Return whether a card is lost."""
        return any(card.accelerator.lost for card in list(self._cards.values()))

    def open(self, name: str) -> Accelerator:
        """Return a card, ready to be used.

        Raises:
            DeviceUnavailableError: no such card, or what drives it is missing.
        """
        return self._open(name).accelerator

    def allocate(self, name: str, size_bytes: int) -> AcceleratorRegion:
        """Return zeroed memory of a card.

        Raises:
            DeviceUnavailableError: no such card, or what drives it is missing.
            OutOfMemoryError: the card has not enough, or pools would take more of it than they may.
        """
        card = self._open(name)
        whole_bytes = -(-size_bytes // REGION_ALIGNMENT) * REGION_ALIGNMENT  # what it takes of the card
        with card.accelerator.calling():
            memory = card.memory = card.accelerator.memory()
            allowed = int(memory.total * self._config.max_fraction)
            with self._lock:
                if card.pool_bytes + whole_bytes > allowed:
                    raise OutOfMemoryError(
                        f"the pool needs {whole_bytes} bytes of {name}; pools may take {allowed} of its {memory.total} "
                        f"(devices.max_fraction) and have {card.pool_bytes}",
                        field="spec",
                    )
                card.pool_bytes += whole_bytes
            try:
                mapped = card.accelerator.allocate(size_bytes)
            except BaseException as cause:
                self._give_back(card, whole_bytes)
                if isinstance(cause, OutOfMemoryError):
                    cause.detail += f"; {name} has {memory.free} of {memory.total} bytes free, {size_bytes} are needed"
                    cause.field = "spec"
                raise
            card.memory = card.accelerator.memory()
        return AcceleratorRegion(
            card.accelerator,
            [RegionPart(0, mapped)],
            size_bytes,
            card.stagings,
            lambda: self._give_back(card, whole_bytes),
        )

    def borrow(self, name: str, lent: Sequence[LentPart], size_bytes: int) -> AcceleratorRegion:
        """Return memory of a card that an engine lends, once the driver has said that it is there.

        Raises:
            DeviceUnavailableError: no such card, or a share cannot be mapped.
            InvalidFieldError: it is another card's, or less than was said, or lent already; names the array.
        """
        card = self._open(name)
        parts: list[RegionPart] = []
        held: list[Held] = []
        try:
            with card.accelerator.calling():
                for one in lent:
                    parts.append(RegionPart(one.array.start, _mapped(card.accelerator, one)))
                    start = int(parts[-1].mapped.tensor.data_ptr())
                    _check_mapped(card.accelerator, one, start)
                    held.append(Held(start, start + one.array.size_bytes, one.array.name))
            check_apart([*card.lent, *held])
        except BaseException:
            AcceleratorRegion(card.accelerator, parts, size_bytes, card.stagings).close()
            parts.clear()  # the error may be held elsewhere; the memory goes now, on this thread
            raise
        card.lent += held

        def returned() -> None:
            card.lent = [one for one in card.lent if one not in held]

        return AcceleratorRegion(card.accelerator, parts, size_bytes, card.stagings, returned)

    def check(self, now_s: float) -> None:
        """Look for calls that do not come back; every ``CHECK_S`` or so."""
        for card in list(self._cards.values()):
            card.accelerator.check(now_s)

    def status(self) -> Iterable[DeviceStatus]:
        """Yield the cards as STATUS shows them; their memory as it was when it was last asked for."""
        for name, card in sorted(self._cards.items()):
            yield DeviceStatus(
                device=name,
                state=card.state,
                total_bytes=card.memory.total,
                free_bytes=card.memory.free,
                pool_bytes=card.pool_bytes,
            )

    def _open(self, name: str) -> _Card:
        with self._lock:
            card = self._cards.get(name)
            if card is None:
                card = self._cards[name] = _Card(Accelerator(name, stuck_after_s=self._config.stuck_after_s))
                card.accelerator.on_lost = lambda error: self._on_lost(name, error)
        try:
            card.accelerator.open()
        except KvferryError as error:
            card.failed = error
            raise
        card.failed = None
        return card

    def _give_back(self, card: _Card, size_bytes: int) -> None:
        with self._lock:
            card.pool_bytes -= size_bytes


def _mapped(accelerator: Accelerator, lent: LentPart) -> Mapped:
    try:
        return accelerator.vendor.map(lent.share, accelerator.index, lent.array.size_bytes)
    except KvferryError as error:
        error.field = f"{lent.array.name}.storage"
        raise


def _check_mapped(accelerator: Accelerator, lent: LentPart, start: int) -> None:
    """Check that what is mapped for an array is what was said, by the driver's word: all of its storage, on this card.

    Raises:
        InvalidFieldError: it is not.
    """
    array, share = lent
    card, found_bytes = accelerator.vendor.memory_at(start - share.offset_bytes, share.storage_bytes)
    if card != accelerator.index:
        where = "memory of no card" if card is None else f"on {accelerator.kind}:{card}"
        raise InvalidFieldError(
            f"{array.name} is {where} by the driver's word, not on {accelerator.name}", field=f"{array.name}.device"
        )
    if found_bytes < share.storage_bytes:
        raise InvalidFieldError(
            f"{array.name} is said to be in a storage of {share.storage_bytes} bytes, of which the driver has mapped "
            f"{found_bytes}",
            field=f"{array.name}.storage",
        )
