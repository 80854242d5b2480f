"""vLLM's own tests of connectors, beside kvferry's plugin and over its connector, see own_tests.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.daemons import Daemon
from tests.vllm.own_tests import OVER_KVFERRY, WAYS, files, findings, make_hub, run

pytestmark = pytest.mark.long


@pytest.mark.parametrize("file", files())
def test_of_vllm_passes(kept_daemon: Daemon, tmp_path: Path, file: str) -> None:
    make_hub(tmp_path)
    ways = [one for one in WAYS if one != "kvferry" or file in OVER_KVFERRY]
    outcomes = {way: run(file, way, tmp_path, kept_daemon.runtime_dir) for way in ways}
    assert findings(outcomes) == []
    assert all(one.passed or one.skipped or one.failed for one in outcomes.values())
