"""Layer by layer, as vLLM names its layers, over a ring of the worker's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kvferry.clients.layers import LayerSignals

if TYPE_CHECKING:
    from kvferry.clients import Client
    from kvferry.clients.events import EventRing
    from kvferry.protocol.transfer_messages import LayerStep

LAYERS: Final = 4
"""Of a step of a SEND: each is a copy of its own."""


class NamedLayers(LayerSignals):
    """A worker's; on the host over its session's event ring, which is opened when it is first needed."""

    def __init__(self, layers: int) -> None:
        """``layers``: of this rank, without a draft model's."""
        super().__init__(0, layers, LAYERS)
        self._numbers: dict[str, int] = {}
        self._layers = layers
        self._last = layers - 1
        """The last layer of which it is told amid a step: a draft model's are filled after it, in the same group."""
        self._opened: EventRing | None = None
        self._boot_id = ""

    def name(self, names: Iterable[str]) -> None:
        """Say how vLLM names the layers, in their order, and then a draft model's."""
        self._numbers = {name: number for number, name in enumerate(names)}
        self._last = self._layers - (2 if len(self._numbers) > self._layers else 1)

    def begin_step(self, client: Client) -> list[LayerStep]:
        """Return the steps of all SENDs of the step that is about to be computed, on the host.

        Raises:
            KvferryError: the daemon gives no ring.
        """
        self.end()
        if self._opened is None or self._boot_id != client.boot_id:
            self.close()
            self._opened, self._boot_id = client.open_events(), client.boot_id
        return self.begin(self._opened)

    def computed(self, name: str) -> None:
        """Take note of a layer that was computed; layers are computed in their order."""
        self.filled(min(self._numbers.get(name, -1), self._last))

    def close(self) -> None:
        """Close the ring."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None
