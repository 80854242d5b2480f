"""Writes samples in Prometheus' text format. Imported with the first scrape: prometheus_client takes a while."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from prometheus_client import ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from kvferry.daemon.control.metrics import Distribution
from kvferry.daemon.services.metric_catalogue import Metric, Sample

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_PROCESS: Final = ProcessCollector(registry=None)


class _One(Collector):
    """A collector of one family, as ``generate_latest`` wants one."""

    def __init__(self, family: Family) -> None:
        self._family = family

    def collect(self) -> Iterable[Family]:
        return (self._family,)


def text_of(metric: Metric, samples: Sequence[Sample]) -> bytes:
    """Return the lines of one metric: what it is, and its samples."""
    family: CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
    if metric.kind == "histogram":
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for one in samples:
            assert isinstance(one.value, Distribution), one
            bounds = [f"{bound:g}" for bound in one.value.bounds] + ["+Inf"]
            buckets = list(zip(bounds, (*one.value.at_most, one.value.values), strict=True))
            family.add_metric(one.labels, buckets, one.value.total)
    else:
        of_kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
        family = of_kind(metric.name, metric.help, labels=metric.labels)
        for one in samples:
            assert not isinstance(one.value, Distribution), one
            family.add_metric(one.labels, one.value)
    return generate_latest(_One(family))


def process_text() -> bytes:
    """Return the lines of this process's own metrics; reads ``/proc``, which may take some ms."""
    return generate_latest(_PROCESS)
