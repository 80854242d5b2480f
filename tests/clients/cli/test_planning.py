"""``kvferry plan``: what it prints, and how it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.clients.cli.json_commands import SPEC, refusal, run_main
from tests.devices import DEVICE
from tests.kvferry_command import run_kvferry

ENTRY: Final[dict[str, Any]] = {"component": "main", "role": "k", "layer": 0, "base": 0, "pages": 10, "page_bytes": 64}
PLAN: Final[dict[str, Any]] = {
    "source": {"entries": [ENTRY]},
    "destination": {"entries": [{**ENTRY, "base": 1000}]},
    "source_pages": [1, 2, 5],
    "destination_pages": [7, 8, 9],
}


def test_the_documented_plan() -> None:
    done = run_kvferry("plan", "-", stdin=json.dumps(PLAN))
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == {"blocks": [[64, 1448, 128], [320, 1576, 64]], "skipped_source_entries": 0}


def test_a_refused_plan_is_json_where_json_is_asked_for() -> None:
    text = json.dumps({**PLAN, "destination_pages": [7, 7, 9]})
    done = run_kvferry("plan", "-", "--json", stdin=text)
    assert (done.returncode, done.stderr) == (2, "")
    assert json.loads(done.stdout)["error"]["code"] == "DUPLICATE_PAGE"
    done = run_kvferry("plan", "-", stdin=text)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert done.stderr.startswith("kvferry plan: DUPLICATE_PAGE [destination_pages]: ")


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
        (
            "INVALID_FIELD",
            "destination.optional_components",
            {"destination": {"entries": [entry()], "optional_components": ["foo"]}},
        ),
        (
            "INVALID_FIELD",
            "destination.optional_components",
            {"destination": {"entries": [entry()], "optional_components": ["main"]}},
        ),
        (
            "INVALID_FIELD",
            "destination.optional_components",
            {"source": {"spec": SPEC}, "destination": {"spec": SPEC, "optional_components": ["foo"]}},
        ),
        (
            "SCALE_MISMATCH",
            "destination.entries[0].scales",
            {"source": {"entries": [entry(), entry(role="k_scale", page_bytes=4)]}},
        ),
        (
            "SCALE_MISMATCH",
            "destination.entries[3].scales",
            {
                "source": {"spec": {**SPEC, "dtype": "int8", "v_scale": "page"}},
                "destination": {"spec": {**SPEC, "dtype": "int8"}},
            },
        ),
        ("GEOMETRY_MISMATCH", "destination.entries[0].page_bytes", {"source": {"entries": [entry(page_bytes=32)]}}),
        (
            "GEOMETRY_MISMATCH",
            "destination.entries[0].heads",
            {"source": {"entries": [entry(heads=1)]}, "destination": {"entries": [entry(heads=2)]}},
        ),
        (
            "GEOMETRY_MISMATCH",
            "source.entries[0].page_bytes",
            {"source": {"entries": [entry(dtype="float16", shape=[20, 1, 2, 16], page_bytes=64)]}},
        ),
        (
            "GEOMETRY_MISMATCH",
            "destination.entries[0].page_bytes",
            {"destination": {"entries": [entry(page_tokens=16, heads=3)]}},
        ),
        (
            "GEOMETRY_MISMATCH",
            "destination.entries[0].shape",
            {"destination": {"entries": [entry(page_tokens=16, heads=2, dtype="int8", shape=[10, 16, 1, 4])]}},
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


def test_groups_have_lists_of_their_own(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = {
        "kind": "mla", "layers": 4, "tokens": 64, "page_size": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "joined": True, "dtype": "bfloat16", "groups": [[0, 2], [1, 3]],
    }  # fmt: skip
    source = [{"component": "main", "pages": [1, 2]}, {"component": "group1", "pages": [3], "first_page": 1}]
    wanted = [{"component": "main", "pages": [5, 6]}, {"component": "group1", "pages": [9], "first_page": 1}]
    plan = {"source": {"spec": spec, "lists": source}, "destination": {"spec": spec, "lists": wanted}}
    status, made = run_main(capsys, "plan", json.dumps(plan), tmp_path)
    page, array = 4 * 12 * 2, 17 * 4 * 12 * 2
    assert status == 0
    assert sorted(made["blocks"]) == sorted(
        [base + source_page * page, base + page_there * page, pages * page]
        for base in (0, array)
        for source_page, page_there, pages in ((1, 5, 2), (3, 9, 1))
    )
    wanted = [wanted[0], {"component": "group1", "pages": [6]}]  # main has it: groups share one allocator
    shared = {**plan, "destination": {"spec": spec, "lists": wanted}}
    error = refusal(capsys, "plan", shared, tmp_path)
    assert (error["code"], error["field"]) == ("DUPLICATE_PAGE", "destination.lists[1].pages")


def test_draft_is_optional_by_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    given_ = {**PLAN, "destination": {"entries": [entry(component="draft"), entry()]}}
    status, made = run_main(capsys, "plan", json.dumps(given_), tmp_path)
    assert (status, len(made["blocks"])) == (0, 2)


DRAFT: Final = {"layers": 1, "kv_heads": 1, "head_dim": 8}


@pytest.mark.parametrize(
    ("said", "covered"),
    [
        ({"spec": {**SPEC, "draft": DRAFT}}, True),
        ({"spec": {**SPEC, "draft": DRAFT, "optional_components": []}}, False),
        ({"spec": {**SPEC, "draft": DRAFT, "optional_components": ["draft"]}}, True),
        ({"entries": [entry(), entry(component="draft")]}, True),
        ({"entries": [entry(), entry(component="draft")], "optional_components": []}, False),
        ({"entries": [entry(), entry(component="extra")], "optional_components": ["extra"]}, True),
        ({"entries": [entry(), entry(component="extra")]}, False),
    ],
)
def test_what_is_optional_is_the_destinations_to_say(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, said: dict[str, Any], *, covered: bool
) -> None:
    source = {"spec": SPEC} if "spec" in said else {"entries": [ENTRY]}
    made = {"source": source, "destination": said, "source_pages": [1], "destination_pages": [1]}
    status, printed = run_main(capsys, "plan", json.dumps(made), tmp_path)
    assert status == (0 if covered else 2)
    assert covered or printed["error"]["code"] == "UNCOVERED_ENTRY"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@DEVICE.examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
