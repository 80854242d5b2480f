"""``kvferry layout``: what it prints of specs and of models, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from kvferry.clients.cli.main import main
from kvferry.pools.layouts.models import MODELS
from tests.clients.cli.json_commands import SPEC, refusal, run_main
from tests.kvferry_command import run_kvferry

HUGE: Final = (1 << 31, 1 << 63, 1 << 64, 10**30)
NONSENSE: Final[dict[str, tuple[object, ...]]] = {
    "kind": ("mla2", "", 1, None),
    "layers": (0, -1, 4097, 1.5, "3", None, [3], True, *HUGE),
    "first_layer": (-1, (1 << 31) - 1, "0", 0.5, *HUGE),
    "tokens": (0, 127, 1000, -256, 1 << 61, "256", *HUGE[1:]),
    "page_size": (0, -1, 257, None, *HUGE),
    "kv_heads": (0, -2, "2", *HUGE),
    "head_dim": (0, 0.5, *HUGE),
    "v_head_dim": (0, -8, "8", *HUGE),
    "head_start": (-1, (1 << 31) - 1, *HUGE),
    "total_heads": (0, 1, *HUGE),
    "dtype": ("float17", "", 16, None, "torch.float16"),
    "view": ("FIA", "", None, 1),
    "colour": ("red",),
    "Layers": (3,),
}


def test_the_layout_of_the_documented_spec() -> None:
    done = run_kvferry("layout", "-", stdin=json.dumps(SPEC))
    assert (done.returncode, done.stderr) == (0, "")
    manifest = json.loads(done.stdout)
    assert list(manifest)[:4] == ["pages", "region_bytes", "layout_digest", "entries"]
    assert (manifest["pages"], manifest["region_bytes"]) == (3, 73728)
    assert manifest["entries"][0] == {
        "component": "main",
        "role": "k",
        "layer": 0,
        "base": 0,
        "pages": 3,
        "page_bytes": 4096,
        "page_tokens": 128,
        "head_start": 0,
        "heads": 2,
        "total_heads": 2,
        "dtype": "float16",
        "shape": [3, 128, 2, 8],
        "format": "ND",
    }
    assert [(entry["role"], entry["layer"], entry["base"]) for entry in manifest["entries"]] == [
        (role, layer, (number * 3 + layer) * 3 * 4096) for number, role in enumerate("kv") for layer in range(3)
    ]


def test_layouts_can_be_planned_with(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, paged = run_main(capsys, "layout", json.dumps(SPEC), tmp_path)
    _, fia = run_main(capsys, "layout", json.dumps({**SPEC, "view": "fia", "tokens": 1024}), tmp_path)
    assert fia["layout_digest"] == paged["layout_digest"]
    assert fia["entries"][0]["shape"] == [9 * 128, 1, 2, 8]
    sides = {side: {"entries": made["entries"]} for side, made in (("source", paged), ("destination", fia))}
    given_ = {**sides, "source_pages": [1, 2], "destination_pages": [4, 5]}
    status, made = run_main(capsys, "plan", json.dumps(given_), tmp_path)
    assert status == 0
    assert made == {
        "blocks": [
            [source["base"] + 4096, destination["base"] + 4 * 4096, 2 * 4096]
            for source, destination in zip(paged["entries"], fia["entries"], strict=True)
        ],
        "skipped_source_entries": 0,
    }


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in NONSENSE.items() for value in values], ids=str
)
def test_a_spec_that_makes_no_sense(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, field: str, value: object
) -> None:
    error = refusal(capsys, "layout", {**SPEC, field: value}, tmp_path)
    assert error["code"] == "INVALID_FIELD"
    named = {"page_size": {"page_size", "tokens"}, "kv_heads": {"kv_heads", "head_start"}}.get(field, {field})
    assert error["field"] in named


@pytest.mark.parametrize("field", ["layers", "tokens", "page_size", "kv_heads", "head_dim", "dtype"])
def test_a_spec_without(capsys: pytest.CaptureFixture[str], tmp_path: Path, field: str) -> None:
    error = refusal(capsys, "layout", {key: value for key, value in SPEC.items() if key != field}, tmp_path)
    assert (error["code"], error["field"]) == ("INVALID_FIELD", field)


@pytest.mark.parametrize("field", ["first_layer", "v_head_dim", "view"])
def test_a_spec_may_leave_out(capsys: pytest.CaptureFixture[str], tmp_path: Path, field: str) -> None:
    shorter = {key: value for key, value in SPEC.items() if key != field}
    assert run_main(capsys, "layout", json.dumps(shorter), tmp_path) == run_main(
        capsys, "layout", json.dumps(SPEC), tmp_path
    )


KINDS: Final[dict[str, dict[str, Any]]] = {
    "mla": {
        "layers": 3,
        "tokens": 256,
        "page_size": 128,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_head_dim": 128,
        "index_layers": [1],
        "dtype": "bfloat16",
        "draft": {"layers": 1},
    },
    "hybrid_swa": {
        "full_layers": [2],
        "window_layers": [0, 1],
        "tokens": 256,
        "window_tokens": 256,
        "window": 200,
        "page_size": 128,
        "kv_heads": 2,
        "head_dim": 8,
        "dtype": "bfloat16",
    },
    "mamba": {
        "state_layers": [0, 1],
        "slots": 4,
        "conv_window": 3,
        "conv_channels": 16,
        "ssm_shape": [2, 8, 8],
        "dtype": "bfloat16",
    },
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_spec(capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str) -> None:
    status, made = run_main(capsys, "layout", json.dumps({"kind": kind, **KINDS[kind]}), tmp_path)
    assert status == 0
    assert sum(one["total_bytes"] for one in made["memory"]) == made["region_bytes"]
    lists = made["engine_lists"]
    listed = {*lists["main"]["names"], *lists["state"]["names"]}
    assert listed == {"{component}/{role}/{layer}".format(**entry) for entry in made["entries"]}
    assert {one["name"] for one in made["components"]} == {entry["component"] for entry in made["entries"]}


def test_page_bytes_of_the_documented_latent_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    _, made = run_main(capsys, "layout", json.dumps({"kind": "mla", **KINDS["mla"]}), tmp_path)
    sizes = {entry["role"]: entry["page_bytes"] for entry in made["entries"] if entry["component"] == "main"}
    assert sizes == {"k": 131072, "v": 16384, "index_k": 32768}
    assert made["engine_lists"]["main"]["item_lens"] == [131072] * 3 + [16384] * 3 + [32768] + [131072, 16384]
    assert made["engine_lists"]["state"]["names"] == ["main/index_k/1"]


@pytest.mark.parametrize(
    ("kind", "field", "value", "named"),
    [
        ("mla", "index_layers", [5], "index_layers[0]"),
        ("mla", "index_layers", "1", "index_layers"),
        ("mla", "draft", {"layers": 0}, "draft.layers"),
        ("mla", "draft", {"layers": 1, "colour": 1}, "draft"),
        ("mla", "kv_heads", 2, "kv_heads"),
        ("mla", "packed", "zip", "packed"),
        ("hybrid_swa", "window_tokens", 128, "window_tokens"),
        ("hybrid_swa", "full_layers", [1], "window_layers"),
        ("mamba", "slots", 0, "slots"),
        ("mamba", "conv_window", None, "conv_window"),
        ("mamba", "ssm_shape", [], "ssm_shape"),
    ],
)
def test_a_spec_of_another_kind_that_makes_no_sense(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, kind: str, field: str, value: object, named: str
) -> None:
    error = refusal(capsys, "layout", {"kind": kind, **KINDS[kind], field: value}, tmp_path)
    assert (error["code"], error["field"]) == ("INVALID_FIELD", named)


def printed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["layout", *arguments]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    return shown.out


def test_the_models(capsys: pytest.CaptureFixture[str]) -> None:
    rows = {line.split()[0]: line.split() for line in printed(capsys, "--models").splitlines() if line[:2] == "  "}
    assert set(rows) == {"model", *MODELS}
    assert rows["deepseek-v3"][1:5] == ["mla", "61", "70272", str(70272 * 128)]
    assert rows["deepseek-v3"][-1] == "deepseek-ai/DeepSeek-V3"


def test_what_a_rank_of_a_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = "--model Qwen3-Next-80B-A3B --tp 2 --rank 1 --tokens 4096 --layers 0:8 --requests 16"
    shown = printed(capsys, *arguments.split())
    lines = shown.splitlines()
    assert lines[0] == ("qwen3-next-80b-a3b (Qwen/Qwen3-Next-80B-A3B-Instruct), bfloat16, layers 0:8, rank 1 of 2")
    state = 6 * (3 * 4096 * 2 + 16 * 128 * 128 * 4)
    token = 2 * 2 * 256 * 2
    rows = {line.split()[0]: line.split() for line in lines if line.startswith("  ")}
    assert rows["main"] == ["main", "32", "128", str(token), str(token * 128), "0.008"]
    assert rows["mamba"][:5] == ["mamba", "16", "-", "-", str(state)]
    assert f"state {state} bytes a request" in lines
    assert f"total {33 * token * 128 + 17 * state} bytes" in shown


def test_the_spec_of_a_model_is_a_layout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = json.loads(printed(capsys, "--model", "gemma-3-1b", "--json", "--page-size", "16"))
    spec = made.pop("spec")
    assert spec["kind"] == "hybrid_swa"
    assert run_main(capsys, "layout", json.dumps(spec), tmp_path) == (0, made)


@pytest.mark.parametrize(
    ("code", "field", "arguments"),
    [
        ("INVALID_FIELD", "model", "--model llama-9"),
        ("INVALID_FIELD", "layers", "--model llama-3-8b --layers 3"),
        ("INVALID_FIELD", "layers", "--model llama-3-8b --layers 3:3"),
        ("INVALID_FIELD", "layers", "--model llama-3-8b --layers -1:3x"),
        ("INVALID_FIELD", "tokens", "--model llama-3-8b --tokens 5"),
        ("INVALID_FIELD", "tp_rank", "--model llama-3-8b --rank 1"),
        ("INVALID_FIELD", "dtype", "--model llama-3-8b --dtype float9"),
        ("HEADS_INDIVISIBLE", "tp_size", "--model smollm2-135m --tp 2"),
    ],
)
def test_a_model_that_cannot_be_laid_out(
    capsys: pytest.CaptureFixture[str], code: str, field: str, arguments: str
) -> None:
    given = arguments.replace("--layers -1", "--layers=-1").split()
    assert main(["layout", *given, "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["field"]) == (code, field)
    assert main(["layout", *given]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(f"kvferry layout: {code} [{field}]: ")
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["spec.json", "--models"], ["--models", "--model", "x"]])
def test_one_thing_at_a_time(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["layout", *arguments])
    assert ended.value.code == 2
    assert "usage: kvferry layout" in capsys.readouterr().err
