"""Layer by layer: which layers of a pass that is being computed are filled, told to the daemon by a memory write."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kvferry.protocol.errors import KvferryError

if TYPE_CHECKING:
    import torch

    from kvferry.clients.events import EventRing
    from kvferry.protocol.transfer_messages import LayerStep

logger = logging.getLogger(__name__)

LAYERED_BYTES: Final = 4 << 20
"""From how many on a chunk goes layer by layer: the daemon copies fewer as a whole all the same."""


class LayerSignals:
    """The steps of all SENDs of one forward pass.

    Attributes:
        pending: the steps that are not recorded yet, in order; empty: no layer need be told of.
    """

    def __init__(self, first_layer: int, layers: int, together: int) -> None:
        """``first_layer``, ``layers``: of the pool; ``together``: how many layers are a step."""
        self._first, self._end, self._together = first_layer, first_layer + layers, together
        self._ring: EventRing | None = None
        self.pending: list[LayerStep] = []

    def __repr__(self) -> str:
        """Show what is not filled yet."""
        return f"<{type(self).__name__} {len(self.pending)} steps left>"

    def begin(self, ring: EventRing) -> list[LayerStep]:
        """Return the steps of all SENDs of the pass that is about to be computed.

        Raises:
            KvferryError: the ring gives none.
        """
        self.end()
        self._ring, size = ring, self._together
        steps = [ring.step(first, min(size, self._end - first)) for first in range(self._first, self._end, size)]
        self.pending = list(steps)
        return steps

    def filled(self, layer: int, stream: torch.Stream | None = None) -> None:
        """Take note that the pages have all layers up to this one, once ``stream`` is done with what it was told."""
        while self.pending and self.pending[0].first_layer + self.pending[0].layers - 1 <= layer:
            self._record(stream)

    def end(self, stream: torch.Stream | None = None) -> None:
        """Take note that the pages have all layers."""
        self.filled(self._end, stream)

    def _record(self, stream: torch.Stream | None) -> None:
        step = self.pending.pop(0)
        assert self._ring is not None
        try:
            self._ring.record(step, stream)
        except KvferryError as error:  # the ring's daemon is gone, and the transfers with it
            logger.debug("kvferry: a layer's event: %s", error)
