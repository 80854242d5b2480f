"""``kvferry layout`` and ``kvferry plan``: what they print, and how they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.clients.cli.main import main
from tests.kvferry_command import run_kvferry

SPEC: Final[dict[str, Any]] = {
    "kind": "mha",
    "layers": 3,
    "first_layer": 0,
    "tokens": 256,
    "page_size": 128,
    "kv_heads": 2,
    "head_dim": 8,
    "v_head_dim": 8,
    "dtype": "float16",
    "view": "paged",
}
ENTRY: Final[dict[str, Any]] = {"component": "main", "role": "k", "layer": 0, "base": 0, "pages": 10, "page_bytes": 64}
PLAN: Final[dict[str, Any]] = {
    "source": {"entries": [ENTRY]},
    "destination": {"entries": [{**ENTRY, "base": 1000}]},
    "source_pages": [1, 2, 5],
    "destination_pages": [7, 8, 9],
}
HUGE: Final = (1 << 31, 1 << 63, 1 << 64, 10**30)
NONSENSE: Final[dict[str, tuple[object, ...]]] = {
    "kind": ("mla2", "", 1, None),
    "layers": (0, -1, 4097, 1.5, "3", None, [3], True, *HUGE),
    "first_layer": (-1, (1 << 31) - 1, "0", 0.5, *HUGE),
    "tokens": (0, 127, -256, 1 << 61, "256", *HUGE[1:]),
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


def run_main(capsys: pytest.CaptureFixture[str], command: str, text: str, folder: Path) -> tuple[int, Any]:
    """Run a command in this process on a file with this text; return its status and what it printed, parsed."""
    file = folder / "input.json"
    file.write_text(text)
    status = main([command, str(file)])
    printed = capsys.readouterr()
    assert printed.err == ""
    return status, json.loads(printed.out)


def refusal(capsys: pytest.CaptureFixture[str], command: str, given_: object, folder: Path) -> dict[str, str]:
    """Return the error that a command prints; its status must be 2."""
    status, printed = run_main(capsys, command, given_ if isinstance(given_, str) else json.dumps(given_), folder)
    assert status == 2, printed
    assert set(printed) == {"error"}
    error: dict[str, str] = printed["error"]
    assert error["code"]
    assert error["detail"]
    return error


def test_the_layout_of_the_documented_spec() -> None:
    done = run_kvferry("layout", "-", stdin=json.dumps(SPEC))
    assert (done.returncode, done.stderr) == (0, "")
    manifest = json.loads(done.stdout)
    assert list(manifest) == ["pages", "region_bytes", "layout_digest", "entries"]
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


BROKEN: Final = ("", "{", "[]", "null", "3", '"mha"', '{"kind":"mha",}', "{}x", "\x00", "[" * 100_000, "{'kind':'mha'}")


@pytest.mark.parametrize("command", ["layout", "plan"])
@pytest.mark.parametrize("text", BROKEN, ids=lambda text: repr(text[:8]))
def test_what_is_no_json_object(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str, text: str) -> None:
    assert refusal(capsys, command, text, tmp_path)["code"] == "INVALID_FIELD"


@pytest.mark.parametrize("command", ["layout", "plan"])
def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path, command: str) -> None:
    assert main([command, str(tmp_path / "nothing.json")]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["field"] == "FILE"


def test_the_documented_plan() -> None:
    done = run_kvferry("plan", "-", stdin=json.dumps(PLAN))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {
        "blocks": [[64, 1448, 128], [320, 1576, 64]],
        "skipped_source_entries": 0,
    }


def test_a_refused_plan_is_json_too() -> None:
    done = run_kvferry("plan", "-", stdin=json.dumps({**PLAN, "destination_pages": [7, 7, 9]}))
    assert (done.returncode, done.stderr) == (2, "")
    assert json.loads(done.stdout)["error"]["code"] == "DUPLICATE_PAGE"


def entry(**changes: object) -> dict[str, object]:
    return {**ENTRY, **changes}


@pytest.mark.parametrize(
    ("code", "field", "changes"),
    [
        ("EMPTY_PAGES", "source_pages", {"source_pages": [], "destination_pages": []}),
        ("LENGTH_MISMATCH", "destination_pages", {"destination_pages": [7, 8]}),
        ("PAGE_OUT_OF_RANGE", "source_pages", {"source_pages": [1, 2, 10]}),
        ("PAGE_OUT_OF_RANGE", "source_pages", {"source_pages": [0, 1, 2]}),
        ("PAGE_OUT_OF_RANGE", "destination_pages", {"destination_pages": [1, -1, 2]}),
        ("DUPLICATE_PAGE", "destination_pages", {"destination_pages": [3, 4, 3]}),
        ("INVALID_FIELD", "source_pages", {"source_pages": [1, 2, 1 << 64]}),
        ("INVALID_FIELD", "source_pages[1]", {"source_pages": [1, "2", 3]}),
        ("INVALID_FIELD", "source_pages", {"source_pages": 7}),
        ("INVALID_FIELD", "partial", {"partial": "yes"}),
        ("INVALID_FIELD", "sourcepages", {"sourcepages": [1]}),
        ("DUPLICATE_ENTRY", "source.entries[1]", {"source": {"entries": [entry(), entry(base=5)]}}),
        ("DUPLICATE_ENTRY", "destination.entries[1]", {"destination": {"entries": [entry(), entry()]}}),
        ("UNCOVERED_ENTRY", "destination.entries", {"destination": {"entries": [entry(), entry(layer=1)]}}),
        ("UNCOVERED_ENTRY", "source.entries", {"source": {"entries": []}, "partial": True}),
        ("UNCOVERED_ENTRY", "destination.entries", {"source": {"entries": []}}),
        (
            "UNCOVERED_ENTRY",
            "destination.entries",
            {"destination": {"entries": [entry(), entry(component="draft")], "optional_components": []}},
        ),
        ("GEOMETRY_MISMATCH", "destination.entries[0].page_bytes", {"source": {"entries": [entry(page_bytes=32)]}}),
        (
            "GEOMETRY_MISMATCH",
            "destination.entries[0].heads",
            {"source": {"entries": [entry(heads=1)]}, "destination": {"entries": [entry(heads=2)]}},
        ),
        (
            "GEOMETRY_MISMATCH",
            "page_bytes",
            {"source": {"entries": [entry(dtype="float16", shape=[20, 1, 2, 16], page_bytes=64)]}},
        ),
        ("INVALID_FIELD", "source.entries[0].base", {"source": {"entries": [entry(base=(1 << 63) - 1)]}}),
        ("INVALID_FIELD", "source.entries[0].layer", {"source": {"entries": [entry(layer=-1)]}}),
        ("INVALID_FIELD", "source.entries[0].component", {"source": {"entries": [entry(component="Main")]}}),
        ("INVALID_FIELD", "source", {"source": 3}),
    ],
)
def test_a_refused_plan_names_the_field(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, code: str, field: str, changes: dict[str, object]
) -> None:
    error = refusal(capsys, "plan", {**PLAN, **changes}, tmp_path)
    assert (error["code"], error["field"]) == (code, field)


def test_a_pipeline_stage_covers_a_part(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    layers = [entry(layer=layer, base=1000 * layer) for layer in range(4)]
    stage = {**PLAN, "source": {"entries": layers[2:3]}, "destination": {"entries": layers}, "partial": True}
    status, made = run_main(capsys, "plan", json.dumps(stage), tmp_path)
    assert status == 0
    assert made["blocks"][0] == [2064, 2448, 128]
    assert len(made["blocks"]) == 2


def test_surplus_source_entries_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    surplus = {**PLAN, "source": {"entries": [ENTRY, entry(role="v"), entry(layer=1)]}}
    status, made = run_main(capsys, "plan", json.dumps(surplus), tmp_path)
    assert (status, made["skipped_source_entries"]) == (0, 2)


def test_draft_is_optional_by_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given_ = {**PLAN, "destination": {"entries": [entry(component="draft"), entry()]}}
    status, made = run_main(capsys, "plan", json.dumps(given_), tmp_path)
    assert (status, len(made["blocks"])) == (0, 2)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    st.dictionaries(st.sampled_from([*SPEC, "kv"]), JSON_VALUES),
    st.sampled_from(["layout", "plan"]),
    st.sampled_from([SPEC, PLAN]),
)
def test_any_json_gets_an_answer(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    changes: dict[str, object],
    command: str,
    base: dict[str, object],
) -> None:
    status, printed = run_main(capsys, command, json.dumps({**base, **changes}), tmp_path)
    assert status in {0, 2}
    assert ("error" in printed) == (status == 2)
