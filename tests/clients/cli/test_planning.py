"""``kvferry plan``, and that ``--explain`` tells of the very plan that it prints, and of what it leaves out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from tests.clients.cli.json_commands import SPEC, JsonCommands
from tests.kit.devices import DEVICE

Json = dict[str, Any]
ENTRY: Final[Json] = {"component": "main", "role": "k", "layer": 0, "base": 0, "pages": 40, "page_bytes": 64}
PLAN: Final[Json] = {
    "source": {"entries": [ENTRY]},
    "destination": {"entries": [{**ENTRY, "base": 100_000}]},
    "source_pages": [1, 2, 5],
    "destination_pages": [7, 8, 9],
}
HEADS: Final[Json] = {"dtype": "float16", "page_tokens": 4, "total_heads": 8}
HEAD_BYTES: Final = 16
SIDES: Final = ("source", "destination")


def entry(**changes: object) -> Json:
    return {**ENTRY, **changes}


def headed(start: int, count: int, **changes: object) -> Json:
    return entry(**HEADS, head_start=start, heads=count, page_bytes=4 * count * HEAD_BYTES, **changes)


def plan(source: Sequence[Json] | None = None, destination: Sequence[Json] | None = None, **changes: object) -> Json:
    """Return the plan with these entries, and with these changes."""
    given_ = zip(SIDES, (source, destination), strict=True)
    return {**PLAN, **{side: {"entries": entries} for side, entries in given_ if entries is not None}, **changes}


class Plans:
    """``kvferry plan`` with and without ``--explain``."""

    def __init__(self, commands: JsonCommands) -> None:
        self._commands = commands

    def explained(self, given_: object) -> Json:
        return self._commands.made("plan", given_, "--explain")

    def text(self, given_: object) -> str:
        """Return the explanation for people."""
        return self._commands.run("plan", given_, "--explain")[1]

    def planned(self, given_: object) -> Json:
        return self._commands.made("plan", given_)

    def both(self, given_: object) -> tuple[Json, Json]:
        """Return the explanation and the plan, which must say the same."""
        made, plain = self.explained(given_), self.planned(given_)
        assert made.get("error") == plain.get("error")
        if "error" not in made:
            assert made["blocks"]["after"] == len(plain["blocks"])
            assert made["blocks"]["total_bytes"] == sum(size for _, _, size in plain["blocks"])
            assert len(made["skipped_source_entries"]) == plain["skipped_source_entries"]
        return made, plain


@pytest.fixture
def plans(commands: JsonCommands) -> Plans:
    return Plans(commands)


MIXED: Final = plan(
    [entry(), entry(role="v", base=4096), entry(layer=7, base=9000), entry(component="extra", base=1)],
    [entry(base=100_000), entry(component="draft", base=5), entry(role="v", base=104_096)],
    source_pages=list(range(1, 14)),
    destination_first_page=10,
)


def test_the_documented_explanation(plans: Plans) -> None:
    assert (
        plans.text(MIXED)
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


def test_a_refusal_comes_with_what_led_to_it(plans: Plans) -> None:
    given_ = plan([entry()], [entry(base=100_000), entry(layer=1), entry(component="draft")])
    text = plans.text(given_)
    assert "  1            main/k/1   missing\n" in text
    assert "  2            draft/k/0  optional\n" in text
    assert "blocks:" not in text
    refusal = "refused: UNCOVERED_ENTRY [destination.entries]: no source entry for main/k/1"
    assert text.splitlines()[-1].startswith(refusal)
    assert "blocks" not in plans.both(given_)[0]


LAYERS = st.lists(st.sampled_from([(c, r, n) for c in ("main", "draft") for r in "kv" for n in range(3)]), unique=True)
IDS = st.lists(st.integers(1, 39), unique=True, min_size=1, max_size=12)


@DEVICE.examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=LAYERS, destination=LAYERS, ids=IDS, data=st.data())
def test_it_tells_of_the_plan(
    plans: Plans,
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
    made, plain = plans.both(given_)
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
STATES: Final[Json] = {"kind": "mamba", "state_layers": [0], "slots": 8, "ssm_shape": [2, 4], "dtype": "float16"}
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


def test_lists_of_components_are_paired_by_logical_page(plans: Plans) -> None:
    given_ = of_spec(
        HYBRID,
        [listed("main", [1, 2, 3, 4, 5]), listed("swa", [1, 2, 3, 4], first_page=1)],
        [listed("main", [7, 8, 9], first_page=2), listed("swa", [5, 6], first_page=2)],
    )
    made, _ = plans.both(given_)
    assert [(one["component"], one["first_page"], one["pages"]) for one in made["dropped_pages"]] == [
        ("main", 0, [1, 2]), ("swa", 1, [1]), ("swa", 4, [4]),
    ]  # fmt: skip
    assert made["dropped_pages"][2]["reason"] == "they are past the destination's last page"
    assert made["blocks"]["total_bytes"] == (2 * 3 + 4 * 2) * 4 * 2 * 8 * 2
    assert "  source  swa        1..1     1 " in plans.text(given_)


def test_lists_with_gaps_are_paired_as_the_daemon_pairs_them(plans: Plans) -> None:
    given_ = of_spec(
        LONG,
        [listed("main", [1, 2]), listed("main", [3, 4, 5, 6], first_page=4)],
        [listed("main", [7], first_page=1), listed("main", [8, 9], first_page=6)],
    )
    made, _ = plans.both(given_)
    assert [(one["first_page"], one["pages"], one["reason"]) for one in made["dropped_pages"]] == [
        (0, [1], "the destination starts at logical page 1: it has them already"),
        (4, [3, 4], "the destination does not list them"),
    ]
    assert made["blocks"]["pages"] == 3
    lacking = of_spec(LONG, [listed("main", [1])], [listed("main", [7]), listed("main", [8], first_page=6)])
    assert plans.planned({**lacking, "partial": True})["blocks"]


def test_the_example_in_the_docs(plans: Plans) -> None:
    documented = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    example = json.loads(documented.split("```json\n")[1].split("```")[0])
    made, _ = plans.both(example)
    assert [pair["heads"] for pair in made["pairs"]] == [[4, 8]] * 8
    assert [one["pages"] for one in made["dropped_pages"]] == [[4]]
    assert "`4..7 of 0..7 -> 4..7`" in documented
    assert "4..7 of 0..7 -> 4..7" in plans.text(example)


INT8: Final[Json] = {**SPEC, "dtype": "int8"}


@pytest.mark.parametrize(
    ("code", "field", "given_"),
    [
        ("EMPTY_PAGES", "source_pages", plan(source_pages=[], destination_pages=[])),
        ("LENGTH_MISMATCH", "destination_pages", plan(destination_pages=[7, 8])),
        ("PAGE_OUT_OF_RANGE", "source_pages", plan(source_pages=[1, 2, 40])),
        ("PAGE_OUT_OF_RANGE", "destination_pages", plan(destination_pages=[1, -1, 2])),
        ("DUPLICATE_PAGE", "destination_pages", plan(destination_pages=[3, 4, 3])),
        ("INVALID_FIELD", "source_pages[1]", plan(source_pages=[1, "2", 3])),
        ("INCOMPLETE", "source_first_page", plan(source_first_page=1, source_pages=[1, 2])),
        ("DUPLICATE_ENTRY", "source.entries[1]", plan([entry(), entry(base=5)])),
        ("UNCOVERED_ENTRY", "destination.entries", plan(None, [entry(), entry(layer=1)])),
        ("SCALE_MISMATCH", "destination.entries[0].scales", plan([entry(), entry(role="k_scale", page_bytes=4)])),
        ("SCALE_MISMATCH", "destination.entries[3].scales",
         {**PLAN, "source": {"spec": {**INT8, "v_scale": "page"}}, "destination": {"spec": INT8}}),
        ("GEOMETRY_MISMATCH", "destination.entries[0].page_bytes", plan([entry(page_bytes=32)])),
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
def test_a_refused_plan_names_the_field(plans: Plans, code: str, field: str, given_: Json) -> None:
    error = plans.both(given_)[0]["error"]
    assert (error["code"], error["field"]) == (code, field)
