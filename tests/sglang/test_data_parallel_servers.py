"""A pair with data-parallel attention: each group of ranks has requests of its own, and a pool for them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvferry.clients import Client
from tests.kit.daemons import Daemon
from tests.kit.folders import MODELS, TINY_MHA
from tests.kit.servers import AT_ONCE, LENGTHS, prompt
from tests.sglang.servers import (
    ENVIRONMENT,
    RANKS,
    STUBS,
    Pair,
    RoomWatch,
    ask_plain_server,
    assert_tokens,
    new_room,
    running_pair,
)

pytestmark = pytest.mark.long

ON_CPU: Final = {
    **RANKS,
    "PYTHONPATH": f"{STUBS / 'dp'}:{STUBS / 'drafts'}:{ENVIRONMENT['PYTHONPATH']}",
    "SGLANG_USE_CPU_ENGINE": "1",  # else it copies and pads as on a GPU
}
GROUPS: Final = 2
OPTIONS: Final = (
    *("--page-size", "16", "--tp", str(GROUPS), "--attn-dp-size", str(GROUPS)),
    "--enable-dp-lm-head",  # else decode exchanges logits by an operator that a CPU does not have
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a Qwen3 of a Llama's weights: SGLang's Llama splits its heads over all ranks, whatever it is told."""
    plain, folder = MODELS / TINY_MHA, tmp_path_factory.mktemp("model")
    config = json.loads((plain / "config.json").read_text())
    weights = load_file(plain / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for name in ("q_norm", "k_norm"):
            weights[f"model.layers.{layer}.self_attn.{name}.weight"] = torch.ones(config["head_dim"])
    config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for file in plain.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def ask(pair: Pair, group: int) -> list[int]:
    """Return what a group of prefill's and any of decode's say: a request's room says which of prefill's it is."""
    room = new_room() // GROUPS * GROUPS + group
    halves = [pair.half(side, prompt(600, seed=99), room) for side in ("decode", "prefill")]
    return halves[0].result().tokens


def test_tokens_are_those_of_a_plain_server(model: Path, kept_daemon: Daemon, watch: RoomWatch, tmp_path: Path) -> None:
    expected = ask_plain_server(tmp_path, str(model), long=False)
    with running_pair(tmp_path, kept_daemon.runtime_dir, model=str(model), options=OPTIONS, environment=ON_CPU) as pair:
        names = sorted(one.pool for one in watch.status().pools)
        assert names == [f"{side}-tp{one}" for side in ("decode", "prefill") for one in range(GROUPS)]
        before = watch.arrived()
        assert_tokens(pair, expected)
        assert watch.arrived() - before == len(LENGTHS) + len(AT_ONCE)
        as_it_is = ask(pair, 0)
        assert [ask(pair, group) for group in (0, 1, 1)] == [as_it_is] * 3
        for group in range(GROUPS):
            with Client.connect(kept_daemon.runtime_dir) as other:
                pool = other.attach_pool(f"prefill-tp{group}")
                for role in ("k", "v"):
                    pool.tensor("main", role)[:, 1:] = 0
                pool.close()
            assert ask(pair, group) != as_it_is
            assert group == 1 or ask(pair, 1) == as_it_is
        pair.prefill.flush()
        assert [ask(pair, group) for group in range(GROUPS)] == [as_it_is] * GROUPS
        watch.assert_all_is_free(pair)
