"""The benchmark of vLLM's engines, as a user runs it: those peers that are installed run, and the others are named."""

from __future__ import annotations

import pytest

from benchmarks import vllm
from benchmarks.measure import Effort


@pytest.mark.long
def test_the_benchmark_measures(capfd: pytest.CaptureFixture[str]) -> None:
    names = [row.name for row in vllm.measure(Effort(quick=True))]
    assert {"vllm/handover/128_tokens/against_recompute", "vllm/hit/128_tokens/against_example"} <= set(names)
    assert len(set(names)) == len(names)
    said = capfd.readouterr().err
    for peer in ("nixl", "lmcache"):
        assert f"against_{peer}" in said or f"not measured: {peer}: " in said
