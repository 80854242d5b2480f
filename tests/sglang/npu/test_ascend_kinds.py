"""Pairs of servers on a simulated NPU whose pools are of other kinds: fractals, an indexer's keys, windows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.clients import Client
from tests import kit
from tests.kit.devices import DEVICE
from tests.kit.folders import MODELS, TINY_DEEPSEEK, TINY_SINKS
from tests.kit.servers import AT_ONCE, LENGTHS, prompt
from tests.sglang.npu.pools import NZ
from tests.sglang.servers import (
    Expected,
    RoomWatch,
    ask_plain_server,
    assert_pages_count,
    assert_tokens,
    running_pair,
)

HEADS, SIZE = 8, 128
SEEN = 64
"""Tokens to which the model with an indexer attends: fewer than most prompts have."""


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """Return a model: the tiny latent one, with an indexer in all layers."""
    plain, folder = MODELS / TINY_DEEPSEEK, tmp_path / "indexed"
    shutil.copytree(plain, folder)
    config = json.loads((plain / "config.json").read_text())
    indexer = {"index_topk": SEEN, "index_n_heads": HEADS, "index_head_dim": SIZE, "indexer_rope_interleave": True}
    (folder / "config.json").write_text(json.dumps(config | indexer))
    weights, hidden = load_file(plain / "model.safetensors"), config["hidden_size"]
    torch.manual_seed(17)
    shapes = {
        "wq_b": (HEADS * SIZE, config["q_lora_rank"]), "wk": (SIZE, hidden), "weights_proj": (HEADS, hidden)
    }  # fmt: skip
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.self_attn.indexer."
        weights |= {f"{name}{one}.weight": torch.randn(shape) * 0.2 for one, shape in shapes.items()}
        weights |= {f"{name}k_norm.weight": torch.ones(SIZE), f"{name}k_norm.bias": torch.zeros(SIZE)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.long
def test_pages_in_fractals(answers: Callable[[str], Expected], tmp_path: Path) -> None:
    expected = answers(TINY_DEEPSEEK)
    with (
        kit.daemon() as daemon,
        RoomWatch(daemon.runtime_dir) as watch,
        running_pair(tmp_path, daemon.runtime_dir, model=TINY_DEEPSEEK, tokens=2048, chunk=256, environment=NZ) as both,
    ):
        assert_tokens(both, expected)
        assert watch.arrived() == len(LENGTHS) + len(AT_ONCE)
        assert "npu graph: True" in both.decode.logged()
        assert_pages_count(both, daemon.runtime_dir, expected)


@pytest.mark.long
def test_an_indexers_keys(indexed: Path, tmp_path: Path) -> None:
    """Zeros in them alone change the tokens."""
    expected = ask_plain_server(tmp_path, str(indexed), long=False)
    with (
        kit.daemon() as daemon,
        RoomWatch(daemon.runtime_dir) as watch,
        running_pair(tmp_path, daemon.runtime_dir, model=str(indexed), tokens=2048, chunk=256) as both,
    ):
        assert_tokens(both, expected)
        assert watch.arrived() == len(LENGTHS) + len(AT_ONCE)
        assert "npu graph: True" in both.decode.logged()
        ids = prompt(600, seed=99)
        tokens = both.generate(ids).tokens
        with Client.connect(daemon.runtime_dir) as other:
            pool = other.attach_pool("prefill")
            pool.tensor("main", "index_k")[:, 1:] = 0
            DEVICE.synchronize()
            pool.close()
        assert both.generate(ids).tokens != tokens


@pytest.mark.long
def test_windows(answers: Callable[[str], Expected], tmp_path: Path) -> None:
    """Two pools, of full attention and of windows, with V narrower than K; zeros in the windows change the tokens."""
    expected = answers(TINY_SINKS)
    with (
        kit.daemon() as daemon,
        RoomWatch(daemon.runtime_dir) as watch,
        running_pair(tmp_path, daemon.runtime_dir, model=TINY_SINKS, tokens=2048, chunk=256) as both,
    ):
        assert_tokens(both, expected)
        assert watch.arrived() == len(LENGTHS) + len(AT_ONCE)
        assert "npu graph: True" in both.decode.logged()
        [tables] = watch.status().tables
        assert tables.updates > len(LENGTHS)
        assert "SGLang writes the graph tables" not in both.decode.logged()
        assert_pages_count(both, daemon.runtime_dir, expected, component="swa")
        watch.assert_all_is_free(both)
