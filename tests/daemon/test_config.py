"""Keys that are right by themselves and wrong together."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvferry.daemon.config import load_config
from kvferry.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("[peers]\nheartbeat_ms = 5000", "peers.timeout_ms"),
        ("[peers]\nheartbeat_ms = 100\ntimeout_ms = 100", "peers.timeout_ms"),
        ("[landing]\ndirect = true", "landing.direct"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(tmp_path: Path, text: str, field: str) -> None:
    file = tmp_path / "kvferry.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(file)
    assert refused.value.field == field
