"""``kvferry layout`` and ``kvferry plan``, whose ``--explain`` tells of the very plan, and of what it leaves out."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvferry.clients.cli.main import main
from tests.kit.devices import DEVICE
from tests.kit.kvferry_command import COMMAND, run_kvferry

SPEC: Final[dict[str, Any]] = {
    "kind": "mha", "layers": 3, "first_layer": 0, "tokens": 256, "page_size": 128, "kv_heads": 2, "head_dim": 8,
    "v_head_dim": 8, "dtype": "float16", "view": "paged",
}  # fmt: skip


Json = dict[str, Any]


class Commands:
    """``kvferry layout`` and ``kvferry plan`` in this process, on a file with what they are given."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self._file = folder / "input.json"

    def run(self, command: str, given: object, *flags: str) -> tuple[int, str]:
        """Return the exit status and what was printed: for programs all of it goes to one place."""
        self._file.write_text(given if isinstance(given, str) else json.dumps(given))
        status = main([command, *flags, str(self._file)])
        printed = self._capsys.readouterr()
        assert not (printed.out and printed.err)
        assert "--json" not in flags or printed.err == ""
        return status, printed.out or printed.err

    def made(self, command: str, given: object, *flags: str) -> dict[str, Any]:
        """Return what the command printed as JSON; its status must be 2 where that is an error, else 0."""
        status, text = self.run(command, given, "--json", *flags)
        made: dict[str, Any] = json.loads(text)
        assert status == (2 if "error" in made else 0)
        return made

    def explained(self, given: object) -> str:
        return self.run("plan", given, "--explain")[1]

    def both(self, given: object) -> tuple[Json, Json]:
        """Return the explanation and the plan, which must say the same."""
        made, plain = self.made("plan", given, "--explain"), self.made("plan", given)
        assert made.get("error") == plain.get("error")
        if "error" not in made:
            assert made["blocks"]["after"] == len(plain["blocks"])
            assert made["blocks"]["total_bytes"] == sum(size for _, _, size in plain["blocks"])
            assert len(made["skipped_source_entries"]) == plain["skipped_source_entries"]
        return made, plain


@pytest.fixture
def commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Commands:
    return Commands(capsys, tmp_path)


ENTRY: Final[Json] = {"component": "main", "role": "k", "layer": 0, "base": 0, "pages": 40, "page_bytes": 64}
PLAN: Final[Json] = {
    "source": {"entries": [ENTRY]},
    "destination": {"entries": [{**ENTRY, "base": 100_000}]},
    "source_pages": [1, 2, 5],
    "destination_pages": [7, 8, 9],
}


SIDES: Final = ("source", "destination")


def entry(**changes: object) -> Json:
    return {**ENTRY, **changes}


def plan(source: Sequence[Json] | None = None, destination: Sequence[Json] | None = None, **changes: object) -> Json:
    """Return the plan with these entries, and with these changes."""
    given_ = zip(SIDES, (source, destination), strict=True)
    return {**PLAN, **{side: {"entries": entries} for side, entries in given_ if entries is not None}, **changes}


MIXED: Final = plan(
    [entry(), entry(role="v", base=4096), entry(layer=7, base=9000), entry(component="extra", base=1)],
    [entry(base=100_000), entry(component="draft", base=5), entry(role="v", base=104_096)],
    source_pages=list(range(1, 14)),
    destination_first_page=10,
)


def test_the_documented_explanation(commands: Commands) -> None:
    assert (
        commands.explained(MIXED)
        == """\
pairs
  entry     source  base  page bytes  destination  base    page bytes  heads
  main/k/0  0       0     64          0            100000  64          -
  main/v/0  1       4096  64          2            104096  64          -

skipped source entries
  source  entry      why
  2       main/k/7   the destination has no such entry
  3       extra/k/0  the destination has no component extra

uncovered destination entries
  destination  entry      coverage
  1            draft/k/0  optional

dropped pages
  side    component  logical  pages                       why
  source  all        0..9     1 2 3 4 5 6 7 8 and 2 more  the destination starts at logical page 10: it has them already

copied: pages 3, runs 1, bytes 384
blocks: 6 before coalescing, 2 after
"""
    )


def test_a_refusal_comes_with_what_led_to_it(commands: Commands) -> None:
    given_ = plan([entry()], [entry(base=100_000), entry(layer=1), entry(component="draft")])
    text = commands.explained(given_)
    assert "  1            main/k/1   missing\n" in text
    assert "  2            draft/k/0  optional\n" in text
    assert "blocks:" not in text
    refusal = "refused: UNCOVERED_ENTRY [destination.entries]: no source entry for main/k/1"
    assert text.splitlines()[-1].startswith(refusal)
    assert "blocks" not in commands.both(given_)[0]


LAYERS = st.lists(st.sampled_from([(c, r, n) for c in ("main", "draft") for r in "kv" for n in range(3)]), unique=True)
IDS = st.lists(st.integers(1, 39), unique=True, min_size=1, max_size=12)


@DEVICE.examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=LAYERS, destination=LAYERS, ids=IDS, data=st.data())
def test_it_tells_of_the_plan(
    commands: Commands,
    source: list[tuple[str, str, int]],
    destination: list[tuple[str, str, int]],
    ids: list[int],
    data: st.DataObject,
) -> None:
    """Every entry is in exactly one place, every source page is copied or dropped, and the blocks are the plan's."""
    prefix = data.draw(st.integers(0, len(ids) - 1))
    first = data.draw(st.integers(0, 3))
    given_ = plan(
        [entry(component=c, role=r, layer=n, base=4096 * i) for i, (c, r, n) in enumerate(source)],
        [entry(component=c, role=r, layer=n, base=1 << 20 | 4096 * i) for i, (c, r, n) in enumerate(destination)],
        source_pages=ids,
        destination_pages=data.draw(st.permutations(range(1, 40)))[: len(ids) - prefix],
        source_first_page=first,
        destination_first_page=first + prefix,
        partial=data.draw(st.booleans()),
    )
    made, plain = commands.both(given_)
    names = [["/".join(map(str, one)) for one in side] for side in (source, destination)]
    paired = [pair["entry"] for pair in made["pairs"]]
    skipped = [one["entry"] for one in made["skipped_source_entries"]]
    uncovered = [one["entry"] for one in made["uncovered_destination_entries"]]
    assert paired == [name for name in names[1] if name in names[0]]
    assert sorted(paired + skipped) == sorted(names[0])
    assert sorted(paired + uncovered) == sorted(names[1])
    assert [page for one in made["dropped_pages"] for page in one["pages"]] == ids[:prefix]
    missing = [one["entry"] for one in made["uncovered_destination_entries"] if one["coverage"] == "missing"]
    if "error" in made:
        assert missing or not paired
        return
    assert not missing
    first_base = made["pairs"][0]["source"]["base"]
    first_blocks = plain["blocks"][: made["blocks"]["runs"]]
    copied = [(address - first_base) // 64 + page for address, _, size in first_blocks for page in range(size // 64)]
    assert copied == ids[prefix:]
    assert made["blocks"]["before"] == len(paired) * (len(ids) - prefix)


HYBRID: Final[Json] = {
    "kind": "hybrid_swa", "full_layers": [0], "window_layers": [1, 2], "tokens": 64, "window_tokens": 32, "window": 12,
    "page_size": 4, "kv_heads": 2, "head_dim": 8, "dtype": "float16",
}  # fmt: skip
GROUPS: Final[Json] = {
    "kind": "mla", "layers": 4, "tokens": 64, "page_size": 4, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "joined": True,
    "dtype": "bfloat16", "groups": [[0, 2], [1, 3]],
}  # fmt: skip
LONG: Final[Json] = {**SPEC, "tokens": 16 * SPEC["page_size"]}


def listed(component: str, pages: list[int], first_page: int | None = 0, **more: object) -> Json:
    return {"component": component, "pages": pages, "first_page": first_page, **more}


def of_spec(spec: Json, source: list[Json], destination: list[Json], **more: object) -> Json:
    return {"source": {"spec": spec, "lists": source}, "destination": {"spec": spec, "lists": destination}, **more}


def windows(source: list[Json], destination: list[Json]) -> Json:
    """Return a plan with these lists behind ``main``'s."""
    main_ = listed("main", [1], None)
    return of_spec(HYBRID, [main_, *source], [main_, *destination])


def test_lists_of_components_are_paired_by_logical_page(commands: Commands) -> None:
    given_ = of_spec(
        HYBRID,
        [listed("main", [1, 2, 3, 4, 5]), listed("swa", [1, 2, 3, 4], first_page=1)],
        [listed("main", [7, 8, 9], first_page=2), listed("swa", [5, 6], first_page=2)],
    )
    made, _ = commands.both(given_)
    assert [(one["component"], one["first_page"], one["pages"]) for one in made["dropped_pages"]] == [
        ("main", 0, [1, 2]), ("swa", 1, [1]), ("swa", 4, [4]),
    ]  # fmt: skip
    assert made["dropped_pages"][2]["reason"] == "they are past the destination's last page"
    assert made["blocks"]["total_bytes"] == (2 * 3 + 4 * 2) * 4 * 2 * 8 * 2
    assert "  source  swa        1..1     1 " in commands.explained(given_)


def test_lists_with_gaps_are_paired_as_the_daemon_pairs_them(commands: Commands) -> None:
    given_ = of_spec(
        LONG,
        [listed("main", [1, 2]), listed("main", [3, 4, 5, 6], first_page=4)],
        [listed("main", [7], first_page=1), listed("main", [8, 9], first_page=6)],
    )
    made, _ = commands.both(given_)
    assert [(one["first_page"], one["pages"], one["reason"]) for one in made["dropped_pages"]] == [
        (0, [1], "the destination starts at logical page 1: it has them already"),
        (4, [3, 4], "the destination does not list them"),
    ]
    assert made["blocks"]["pages"] == 3
    lacking = of_spec(LONG, [listed("main", [1])], [listed("main", [7]), listed("main", [8], first_page=6)])
    assert commands.made("plan", {**lacking, "partial": True})["blocks"]


def test_the_example_in_the_docs(commands: Commands) -> None:
    documented = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    example = json.loads(documented.split("```json\n")[1].split("```")[0])
    made, _ = commands.both(example)
    assert [pair["heads"] for pair in made["pairs"]] == [[4, 8]] * 8
    assert [one["pages"] for one in made["dropped_pages"]] == [[4]]
    assert "`4..7 of 0..7 -> 4..7`" in documented
    assert "4..7 of 0..7 -> 4..7" in commands.explained(example)


INT8: Final[Json] = {**SPEC, "dtype": "int8"}


@pytest.mark.parametrize(
    ("code", "field", "given_"),
    [
        ("EMPTY_PAGES", "source_pages", plan(source_pages=[], destination_pages=[])),
        ("LENGTH_MISMATCH", "destination_pages", plan(destination_pages=[7, 8])),
        ("PAGE_OUT_OF_RANGE", "destination_pages", plan(destination_pages=[1, -1, 2])),
        ("DUPLICATE_PAGE", "destination_pages", plan(destination_pages=[3, 4, 3])),
        ("INVALID_FIELD", "source_pages[1]", plan(source_pages=[1, "2", 3])),
        ("DUPLICATE_ENTRY", "source.entries[1]", plan([entry(), entry(base=5)])),
        ("UNCOVERED_ENTRY", "destination.entries", plan(None, [entry(), entry(layer=1)])),
        ("SCALE_MISMATCH", "destination.entries[3].scales",
         {**PLAN, "source": {"spec": {**INT8, "v_scale": "page"}}, "destination": {"spec": INT8}}),
        ("INVALID_FIELD", "source.entries[0].base", plan([entry(base=(1 << 63) - 1)])),
        ("INVALID_FIELD", "source.entries", {**PLAN, "source": {}}),
        ("INVALID_FIELD", "source.entries", {**PLAN, "source": {"entries": [ENTRY], "spec": HYBRID}}),
        ("INVALID_FIELD", "destination_pages",
         {**PLAN, **{side: {"entries": [ENTRY], "lists": []} for side in SIDES}, "source_pages": None}),
        ("LENGTH_MISMATCH", "source.lists[0]", of_spec(LONG, [listed("main", [1, 2], 1)], [listed("main", [7, 8])])),
        ("INVALID_FIELD", "source.lists[0].none",
         {side: {"entries": [ENTRY], "lists": [listed("main", [], none=True)]} for side in SIDES}),
        ("WINDOW_MISMATCH", "first_page", windows([listed("swa", [1, 2], 1)], [listed("swa", [1, 2], 2)])),
        ("EMPTY_STATE", "lists", windows([listed("swa", [], 0)], [listed("swa", [1], 0)])),
        ("DUPLICATE_PAGE", "destination.lists[1].pages", windows([listed("swa", [1, 2])], [listed("swa", [3, 3])])),
        ("UNKNOWN_COMPONENT", "source.lists[1].component", windows([listed("kv", [1])], [listed("swa", [1])])),
        ("PAGE_OVERLAP", "destination.lists[1].first_page", windows([listed("swa", [1])], [listed("main", [2])])),
        ("INCOMPLETE", "lists",
         of_spec(LONG, [listed("main", [1])], [listed("main", [7]), listed("main", [8], first_page=6)])),
        # Groups share one allocator: main has the page.
        ("DUPLICATE_PAGE", "destination.lists[1].pages",
         of_spec(GROUPS, [listed("main", [1]), listed("group1", [3])], [listed("main", [6]), listed("group1", [6])])),
    ],
)  # fmt: skip
def test_a_refused_plan_names_the_field(commands: Commands, code: str, field: str, given_: Json) -> None:
    error = commands.both(given_)[0]["error"]
    assert (error["code"], error["field"]) == (code, field)


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


@pytest.mark.parametrize(
    ("model", "kind"), [("gemma-3-1b", "hybrid_swa"), ("deepseek-v3", "mla"), ("qwen3-next-80b-a3b", "mamba")]
)
def test_the_spec_of_a_model_is_a_layout(
    capsys: pytest.CaptureFixture[str], commands: Commands, model: str, kind: str
) -> None:
    made = json.loads(printed(capsys, f"--model {model} --json --page-size 16"))
    spec = made.pop("spec")
    assert spec["kind"] == kind
    assert commands.made("layout", spec) == made
    assert sum(one["total_bytes"] for one in made["memory"]) == made["region_bytes"]
    lists = made["engine_lists"]
    names = {"{component}/{role}/{layer}".format(**entry) for entry in made["entries"]}
    assert {*lists["main"]["names"], *lists["state"]["names"]} == names
    assert {one["name"] for one in made["components"]} == {entry["component"] for entry in made["entries"]}


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


BROKEN: Final = ("", "{", "[]", "null", "3", '"mha"', '{"kind":"mha",}', "{}x", "\x00", "[" * 100_000, "{'kind':'mha'}")


@pytest.mark.parametrize("command", ["layout", "plan"])
def test_what_is_no_json_object(commands: Commands, command: str) -> None:
    assert {commands.made(command, text)["error"]["code"] for text in BROKEN} == {"INVALID_FIELD"}
    error = commands.made(command, "[]")["error"]
    assert (error["detail"], "field" in error) == ("Expected `object`, got `array`", False)


def test_standard_input_that_is_closed_is_an_empty_one() -> None:
    program = [str(COMMAND), "plan", "-"]
    shell = ["/bin/sh", "-c", 'exec "$@" <&-', "sh"]
    ended = subprocess.run([*shell, *program], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "INVALID_FIELD" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


SCALARS: Final = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5)
)
JSON_VALUES: Final = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=3)


@DEVICE.examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.dictionaries(st.sampled_from([*SPEC, "kv"]), JSON_VALUES),
    st.sampled_from(["layout", "plan"]),
    st.sampled_from([SPEC, PLAN]),
)
def test_any_json_gets_an_answer(
    commands: Commands, changes: dict[str, Any], command: str, base: dict[str, Any]
) -> None:
    commands.made(command, {**base, **changes})
