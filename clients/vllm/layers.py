"""Layer by layer: which layers of the step that is being computed are filled, told to the daemon by a memory write."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from kvferry.clients import KvferryError

if TYPE_CHECKING:
    from kvferry.clients import Client
    from kvferry.clients.events import EventRing
    from kvferry.protocol.transfer_messages import LayerStep

logger = logging.getLogger(__name__)

LAYERS: Final = 4
"""Of a step of a SEND: each is a copy of its own."""


class LayerSignals:
    """A worker's, over its session's event ring, which is opened when it is first needed.

    Attributes:
        pending: the steps that are not recorded yet, in order; empty: no layer need be told of.
    """

    def __init__(self, layers: int) -> None:
        """``layers``: of this rank."""
        self._layers = layers
        self._numbers: dict[str, int] = {}
        self._ring: EventRing | None = None
        self._boot_id = ""
        self.pending: list[LayerStep] = []

    def __repr__(self) -> str:
        """Show what is not filled yet."""
        return f"<LayerSignals {len(self.pending)} steps left>"

    def name(self, names: Iterable[str]) -> None:
        """Say how vLLM names the layers, in their order."""
        self._numbers = {name: number for number, name in enumerate(names)}

    def begin(self, client: Client) -> list[LayerStep]:
        """Return the steps of all SENDs of the step that is about to be computed.

        Raises:
            KvferryError: the daemon gives no ring.
        """
        self.end()
        if self._ring is None or self._boot_id != client.boot_id:
            self.close()
            self._ring, self._boot_id = client.open_events(), client.boot_id
        steps = [self._ring.step(first, min(LAYERS, self._layers - first)) for first in range(0, self._layers, LAYERS)]
        self.pending = list(steps)
        return steps

    def filled(self, name: str) -> None:
        """Take note of a layer that was computed; layers are computed in their order."""
        if self.pending:
            number = self._numbers.get(name, -1)
            while self.pending and self.pending[0].first_layer + self.pending[0].layers - 1 <= number:
                self._record()

    def end(self) -> None:
        """Take note that all layers were computed."""
        while self.pending:
            self._record()

    def close(self) -> None:
        """Close the ring."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def _record(self) -> None:
        step = self.pending.pop(0)
        assert self._ring is not None
        try:
            self._ring.record(step)
        except KvferryError as error:  # the ring's daemon is gone, and the transfers with it
            logger.debug("kvferry: a layer's event: %s", error)
