"""What a model's configuration says of its K and V."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo.model import token_bytes


@pytest.mark.parametrize(("head_dim", "each"), [(24, 24), (None, 16)], ids=["given", "derived"])
def test_bytes_of_a_token(tmp_path: Path, head_dim: int | None, each: int) -> None:
    config = {"num_hidden_layers": 5, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**config, "head_dim": head_dim}))
    assert token_bytes(tmp_path) == 2 * 5 * 2 * each * 4
