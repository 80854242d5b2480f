"""vLLM's own tests of connectors, beside kvferry's plugin and over its connector (own_tests.py), and the benchmark."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import vllm
from benchmarks.measure import Effort
from tests.kit.daemons import Daemon
from tests.vllm.own_tests import OVER_KVFERRY, WAYS, files, findings, make_hub, run

pytestmark = pytest.mark.long


@pytest.mark.parametrize("file", files())
def test_of_vllm_passes(kept_daemon: Daemon, tmp_path: Path, file: str) -> None:
    make_hub(tmp_path)
    ways = [one for one in WAYS if one != "kvferry" or file in OVER_KVFERRY]
    outcomes = {way: run(file, way, tmp_path, kept_daemon.runtime_dir) for way in ways}
    print(file, outcomes)  # noqa: T201  for docs/vllm.md
    assert findings(outcomes) == []
    assert all(one.passed or one.skipped or one.failed for one in outcomes.values())


def test_the_benchmark_measures(capfd: pytest.CaptureFixture[str]) -> None:
    """Those peers that are installed run, and the others are named."""
    names = [row.name for row in vllm.measure(Effort(quick=True))]
    assert {"vllm/handover/128_tokens/against_recompute", "vllm/hit/128_tokens/against_example"} <= set(names)
    assert "vllm/gemma3/handover/128_tokens/against_recompute" in names
    assert len(set(names)) == len(names)
    said = capfd.readouterr().err
    for peer in ("nixl", "lmcache"):
        assert f"against_{peer}" in said or f"not measured: {peer}, " in said
