"""``kvferry layout``: what it prints of specs and of models, and how it refuses."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from kvferry.clients.cli.main import main
from tests.clients.cli.json_commands import SPEC, JsonCommands
from tests.kit.kvferry_command import run_kvferry

ABSENT: Final = object()
NONSENSE: Final[dict[str, tuple[object, ...]]] = {
    "kind": ("mla2", 1, None),
    "layers": (0, 4097, 1.5, "3", True, 1 << 64, ABSENT),
    "first_layer": (-1, (1 << 31) - 1),
    "tokens": (0, 127, 1000, 1 << 61),
    "page_size": (-1, 257, None, 10**30),
    "kv_heads": (0, "2", 1 << 31, ABSENT),
    "v_head_dim": (0, 1 << 63),
    "head_start": (-1, (1 << 31) - 1),
    "total_heads": (0, 1),
    "dtype": ("float17", 16, "torch.float16", ABSENT),
    "view": ("FIA", None, 1),
    "colour": ("red",),
}
KINDS: Final[dict[str, dict[str, Any]]] = {
    "mla": {
        "kind": "mla", "layers": 3, "tokens": 256, "page_size": 128, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "index_head_dim": 128, "index_layers": [1], "dtype": "bfloat16", "draft": {"layers": 1},
    },
    "hybrid_swa": {
        "kind": "hybrid_swa", "full_layers": [2], "window_layers": [0, 1], "tokens": 256, "window_tokens": 256,
        "window": 200, "page_size": 128, "kv_heads": 2, "head_dim": 8, "dtype": "bfloat16",
    },
    "mamba": {
        "kind": "mamba", "state_layers": [0, 1], "slots": 4, "conv_window": 3, "conv_channels": 16,
        "ssm_shape": [2, 8, 8], "dtype": "bfloat16",
    },
}  # fmt: skip


def without(spec: dict[str, Any], field: str) -> dict[str, Any]:
    return {key: value for key, value in spec.items() if key != field}


def test_the_layout_of_the_documented_spec() -> None:
    done = run_kvferry("layout", "-", stdin=json.dumps(SPEC))
    assert (done.returncode, done.stderr) == (0, "")
    manifest = json.loads(done.stdout)
    assert list(manifest)[:4] == ["pages", "region_bytes", "layout_digest", "entries"]
    assert (manifest["pages"], manifest["region_bytes"]) == (3, 73728)
    assert manifest["entries"][0] == {
        "component": "main", "role": "k", "layer": 0, "base": 0, "pages": 3, "page_bytes": 4096, "page_tokens": 128,
        "head_start": 0, "heads": 2, "total_heads": 2, "dtype": "float16", "shape": [3, 128, 2, 8], "format": "ND",
    }  # fmt: skip
    assert [(entry["role"], entry["layer"], entry["base"]) for entry in manifest["entries"]] == [
        (role, layer, (number * 3 + layer) * 3 * 4096) for number, role in enumerate("kv") for layer in range(3)
    ]


@pytest.mark.parametrize("field", NONSENSE)
def test_a_spec_that_makes_no_sense(commands: JsonCommands, field: str) -> None:
    named = {"page_size": {"page_size", "tokens"}, "kv_heads": {"kv_heads", "head_start"}}.get(field, {field})
    for value in NONSENSE[field]:
        code, of = commands.refused("layout", without(SPEC, field) if value is ABSENT else {**SPEC, field: value})
        assert code == "INVALID_FIELD", value
        assert of in named, value


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_spec(commands: JsonCommands, kind: str) -> None:
    made = commands.made("layout", KINDS[kind])
    assert sum(one["total_bytes"] for one in made["memory"]) == made["region_bytes"]
    lists = made["engine_lists"]
    listed = {*lists["main"]["names"], *lists["state"]["names"]}
    assert listed == {"{component}/{role}/{layer}".format(**entry) for entry in made["entries"]}
    assert {one["name"] for one in made["components"]} == {entry["component"] for entry in made["entries"]}


def printed(capsys: pytest.CaptureFixture[str], arguments: str) -> str:
    assert main(["layout", *arguments.split()]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def rows(text: str) -> dict[str, list[str]]:
    """Return the rows of the printed tables by their first word."""
    return {line.split()[0]: line.split() for line in text.splitlines() if line.startswith("  ")}


def test_what_a_rank_of_a_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model Qwen3-Next-80B-A3B --tp 2 --rank 1 --tokens 4096 --layers 0:8 --requests 16"
    shown = printed(capsys, arguments)
    lines = shown.splitlines()
    assert lines[0] == "qwen3-next-80b-a3b (Qwen/Qwen3-Next-80B-A3B-Instruct), bfloat16, layers 0:8, rank 1 of 2"
    state = 6 * (3 * 4096 * 2 + 16 * 128 * 128 * 4)
    token = 2 * 2 * 256 * 2
    assert rows(shown)["main"] == ["main", "32", "128", str(token), str(token * 128), "0.008"]
    assert rows(shown)["mamba"][:5] == ["mamba", "16", "-", "-", str(state)]
    assert f"state {state} bytes a request" in lines
    assert f"total {33 * token * 128 + 17 * state} bytes" in shown


def test_the_spec_of_a_model_is_a_layout(capsys: pytest.CaptureFixture[str], commands: JsonCommands) -> None:
    made = json.loads(printed(capsys, "--model gemma-3-1b --json --page-size 16"))
    spec = made.pop("spec")
    assert spec["kind"] == "hybrid_swa"
    assert commands.made("layout", spec) == made


@pytest.mark.parametrize(
    ("code", "field", "arguments"),
    [
        ("INVALID_FIELD", "model", "llama-9"),
        ("INVALID_FIELD", "layers", "llama-3-8b --layers 3:3"),
        ("INVALID_FIELD", "tokens", "llama-3-8b --tokens 5"),
        ("INVALID_FIELD", "tp_rank", "llama-3-8b --rank 1"),
        ("HEADS_INDIVISIBLE", "tp_size", "smollm2-135m --tp 2"),
    ],
)
def test_a_model_that_cannot_be_laid_out(
    capsys: pytest.CaptureFixture[str], code: str, field: str, arguments: str
) -> None:
    assert main(["layout", "--model", *arguments.split(), "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["field"]) == (code, field)
    assert main(["layout", "--model", *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"kvferry layout: {code} [{field}]: ")
