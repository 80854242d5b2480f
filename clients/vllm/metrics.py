"""What the connector has moved, for vLLM's log line and its Prometheus endpoint."""

from __future__ import annotations

import copy
from typing import Any, Final, Literal, get_args

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.metrics.utils import create_metric_per_engine

Kind = Literal["load", "store", "send", "receive"]
KINDS: Final[tuple[Kind, ...]] = get_args(Kind)
BUCKETS_S: Final = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)
MIB: Final = 1 << 20


class Moved(KVConnectorStats):
    """Loads and stores of the prefix cache, and sends and receives of prompts, since it was last reset.

    ``data`` has, by kind: ``KIND_bytes`` moved, ``KIND_seconds`` of each from its beginning to its end, and
    ``KIND_failures``, a count by error code.
    """

    data: dict[str, Any]

    def __init__(self, data: dict[str, Any] | None = None) -> None:
        """Take what another process has counted, or begin with nothing."""
        super().__init__(data=data or {})
        self._has_new = False
        if not self.data:
            self.reset()

    def __repr__(self) -> str:
        """Show the counts."""
        return f"<Moved {self.reduce()}>"

    def reset(self) -> None:
        """Forget all of it."""
        self.data = {}
        for kind in KINDS:
            self.data |= {f"{kind}_bytes": 0, f"{kind}_seconds": [], f"{kind}_failures": {}}

    def record(self, kind: Kind, size_bytes: int, seconds: float) -> None:
        """Count one that has succeeded."""
        self._has_new = True
        self.data[f"{kind}_bytes"] += size_bytes
        self.data[f"{kind}_seconds"].append(seconds)

    def failed(self, kind: Kind, code: str) -> None:
        """Count one that has failed."""
        self._has_new = True
        failures = self.data[f"{kind}_failures"]
        failures[code] = failures.get(code, 0) + 1

    def taken(self) -> Moved | None:
        """Return what was counted, and begin anew; None: nothing was."""
        if not self._has_new:
            return None
        taken = copy.copy(self)
        self._has_new = False
        self.reset()
        return taken

    def aggregate(self, other: KVConnectorStats) -> Moved:
        """Add what another rank, or another step, has counted."""
        for kind in KINDS:
            self.data[f"{kind}_bytes"] += other.data[f"{kind}_bytes"]
            self.data[f"{kind}_seconds"] += other.data[f"{kind}_seconds"]
            for code, count in other.data[f"{kind}_failures"].items():
                failures = self.data[f"{kind}_failures"]
                failures[code] = failures.get(code, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return one line's worth: of what there was any."""
        line: dict[str, int | float] = {}
        for kind in KINDS:
            seconds = self.data[f"{kind}_seconds"]
            if seconds:
                line[f"{kind}s"] = len(seconds)
                line[f"{kind} MiB"] = round(self.data[f"{kind}_bytes"] / MIB, 2)
                line[f"{kind} avg ms"] = round(sum(seconds) / len(seconds) * 1000, 2)
            failures = sum(self.data[f"{kind}_failures"].values())
            if failures:
                line[f"{kind} failures"] = failures
        return line

    def is_empty(self) -> bool:
        """Return whether nothing was counted."""
        return not any(self.data.values())


class MovedPrometheus(KVConnectorPromMetrics):
    """The same for Prometheus: ``vllm:kvferry_KIND_bytes``, ``_seconds`` and ``_failures``."""

    def __init__(
        self,
        vllm_config: Any,  # noqa: ANN401  vLLM's
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """Register them."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        texts = {"load": "blocks loaded from", "store": "blocks stored in"}
        self._metrics: dict[str, dict[int, Any]] = {}
        for kind in KINDS:
            what = f"{texts[kind]} the prefix cache" if kind in texts else f"prompts that were {kind.rstrip('e')}ed"
            for name, cls, text, more in (
                ("bytes", self._counter_cls, "Bytes of", {}),
                ("seconds", self._histogram_cls, "Seconds, beginning to end, of", {"buckets": BUCKETS_S}),
                ("failures", self._counter_cls, "How often it failed:", {}),
            ):
                metric = cls(
                    name=f"vllm:kvferry_{kind}_{name}", documentation=f"{text} {what}.", labelnames=labelnames, **more
                )
                self._metrics[f"{kind}_{name}"] = create_metric_per_engine(metric, per_engine_labelvalues)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted in an interval."""
        for kind in KINDS:
            self._metrics[f"{kind}_bytes"][engine_idx].inc(transfer_stats_data[f"{kind}_bytes"])
            for seconds in transfer_stats_data[f"{kind}_seconds"]:
                self._metrics[f"{kind}_seconds"][engine_idx].observe(seconds)
            self._metrics[f"{kind}_failures"][engine_idx].inc(sum(transfer_stats_data[f"{kind}_failures"].values()))
