"""What is read as metrics: collects samples from the daemon's parts when asked, and keeps the text for a moment.

The control loop is held up for a millisecond at a time, and in all for a small part of its time however often somebody
asks: a text is given again for ten times as long as it took.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from http import HTTPStatus
from typing import Any, Final

import structlog

from kvferry.daemon.control.http_socket import Asker, HttpAnswer, plain
from kvferry.daemon.services.metric_catalogue import METRICS, Metric, Sample

SLICE_S: Final = 0.5e-3
"""Between two samples the loop goes on with other things after so long."""

KEPT: Final = 10.0
EXPOSITION: Final = "kvferry.daemon.services.exposition"

Source = Callable[[Asker], Iterable[Sample | None]]
"""Yields samples for somebody who asks, and None wherever it may be paused."""

log = structlog.get_logger(__name__)


class Metrics:
    """Answers ``/metrics``. For the control loop."""

    def __init__(self, sources: Sequence[Source], executor: Executor) -> None:
        """Import and read ``/proc`` on ``executor``."""
        self._sources = sources
        self._executor = executor
        self._texts: dict[Asker, asyncio.Task[HttpAnswer]] = {}
        self._until_s: dict[Asker, float] = {}

    def __repr__(self) -> str:
        """Show how many sources there are."""
        return f"<Metrics of {len(self._sources)} sources>"

    async def page(self, asker: Asker) -> HttpAnswer:
        """Return all metrics; pools are named to an operator alone."""
        text = self._texts.get(asker)
        if text is None or (text.done() and time.perf_counter() >= self._until_s.get(asker, 0.0)):
            text = self._texts[asker] = asyncio.create_task(self._answer(asker))
        return await asyncio.shield(text)

    async def close(self) -> None:
        """Stop collecting."""
        for text in self._texts.values():
            text.cancel()
        await asyncio.gather(*self._texts.values(), return_exceptions=True)

    async def _answer(self, asker: Asker) -> HttpAnswer:
        loop = asyncio.get_running_loop()
        try:
            exposition: Any = await loop.run_in_executor(self._executor, importlib.import_module, EXPOSITION)
            process = await loop.run_in_executor(self._executor, exposition.process_text)
            pace = _Pace()
            samples = await self._collect(pace, asker)
            parts = [process]
            for metric in METRICS.values():
                parts.append(exposition.text_of(metric, samples.get(metric, ())))
                await pace.rest()
        except Exception as cause:
            log.exception("the metrics could not be collected", cause=str(cause))
            return plain(HTTPStatus.SERVICE_UNAVAILABLE, f"{type(cause).__name__}: {cause}")
        self._until_s[asker] = time.perf_counter() + KEPT * pace.worked_s
        return HttpAnswer(HTTPStatus.OK, b"".join(parts), exposition.CONTENT_TYPE)

    async def _collect(self, pace: _Pace, asker: Asker) -> Mapping[Metric, list[Sample]]:
        samples: dict[Metric, list[Sample]] = {}
        for source in self._sources:
            for sample in source(asker):
                if sample is not None:
                    samples.setdefault(sample.metric, []).append(sample)
                await pace.rest()
        return samples


class _Pace:
    """Lets the loop go on with other things; counts the time between.

    Attributes:
        worked_s: in which the loop was held up.
    """

    def __init__(self) -> None:
        self.worked_s = 0.0
        self._began_s = time.perf_counter()

    async def rest(self) -> None:
        """Let others have a turn, if it is time."""
        worked_s = time.perf_counter() - self._began_s
        if worked_s >= SLICE_S:
            self.worked_s += worked_s
            await asyncio.sleep(0)
            self._began_s = time.perf_counter()
