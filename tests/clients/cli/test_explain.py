"""``kvferry plan --explain``: it tells of the very plan that ``kvferry plan`` prints, and of what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvferry.clients.cli.main import main
from tests.clients.cli.json_commands import SPEC
from tests.devices import DEVICE
from tests.kvferry_command import run_kvferry

ENTRY: Final[dict[str, Any]] = {"component": "main", "role": "k", "layer": 0, "base": 0, "pages": 40, "page_bytes": 64}
PLAN: Final[dict[str, Any]] = {
    "source": {"entries": [ENTRY]},
    "destination": {"entries": [{**ENTRY, "base": 100_000}]},
    "source_pages": [1, 2, 5],
    "destination_pages": [7, 8, 9],
}
HEADS: Final[dict[str, Any]] = {"dtype": "float16", "page_tokens": 4, "total_heads": 8}
HEAD_BYTES = 16


def entry(**changes: object) -> dict[str, Any]:
    return {**ENTRY, **changes}


def headed(start: int, count: int, **changes: object) -> dict[str, Any]:
    return entry(**HEADS, head_start=start, heads=count, page_bytes=4 * count * HEAD_BYTES, **changes)


def sides(source: list[dict[str, Any]], destination: list[dict[str, Any]], **changes: object) -> dict[str, Any]:
    return {**PLAN, "source": {"entries": source}, "destination": {"entries": destination}, **changes}


class Command:
    """``kvferry plan`` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self._file = folder / "input.json"

    def run(self, given_: object, *flags: str) -> tuple[int, str]:
        """Return the exit status and what was printed: for programs all of it goes to one place."""
        self._file.write_text(given_ if isinstance(given_, str) else json.dumps(given_))
        status = main(["plan", *flags, str(self._file)])
        printed = self._capsys.readouterr()
        assert not (printed.out and printed.err)
        assert "--json" not in flags or printed.err == ""
        return status, printed.out or printed.err

    def explained(self, given_: object) -> dict[str, Any]:
        """Return the explanation as JSON."""
        made: dict[str, Any] = json.loads(self.run(given_, "--explain", "--json")[1])
        return made

    def text(self, given_: object) -> str:
        """Return the explanation for people."""
        return self.run(given_, "--explain")[1]

    def planned(self, given_: object) -> dict[str, Any]:
        """Return the plain plan."""
        made: dict[str, Any] = json.loads(self.run(given_, "--json")[1])
        return made


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Command:
    return Command(capsys, tmp_path)


MIXED: Final = sides(
    [entry(), entry(role="v", base=4096), entry(layer=7, base=9000), entry(component="extra", base=1)],
    [entry(base=100_000), entry(component="draft", base=5), entry(role="v", base=104_096)],
    source_pages=list(range(1, 14)),
    destination_first_page=10,
)


def test_the_documented_explanation() -> None:
    done = run_kvferry("plan", "--explain", "-", stdin=json.dumps(MIXED))
    assert (done.returncode, done.stderr) == (0, "")
    assert (
        done.stdout
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


def test_the_same_for_programs(command: Command) -> None:
    status, text = command.run(MIXED, "--explain", "--json")
    assert status == 0
    assert json.loads(text) == {
        "pairs": [
            {
                "entry": "main/k/0",
                "source": {"index": 0, "base": 0, "page_bytes": 64},
                "destination": {"index": 0, "base": 100_000, "page_bytes": 64},
            },
            {
                "entry": "main/v/0",
                "source": {"index": 1, "base": 4096, "page_bytes": 64},
                "destination": {"index": 2, "base": 104_096, "page_bytes": 64},
            },
        ],
        "skipped_source_entries": [
            {"entry": "main/k/7", "index": 2, "reason": "the destination has no such entry"},
            {"entry": "extra/k/0", "index": 3, "reason": "the destination has no component extra"},
        ],
        "uncovered_destination_entries": [{"entry": "draft/k/0", "index": 1, "coverage": "optional"}],
        "dropped_pages": [
            {
                "side": "source",
                "first_page": 0,
                "pages": list(range(1, 11)),
                "reason": "the destination starts at logical page 10: it has them already",
            }
        ],
        "blocks": {"pages": 3, "runs": 1, "before": 6, "after": 2, "of_sliced_heads": 0, "total_bytes": 384},
    }


@pytest.mark.parametrize("flags", [(), ("--json",)])
def test_the_plain_plan_stays_as_it_is(command: Command, flags: tuple[str, ...]) -> None:
    status, text = command.run(PLAN, *flags)
    assert status == 0
    assert json.loads(text) == {"blocks": [[64, 100_448, 128], [320, 100_576, 64]], "skipped_source_entries": 0}


def test_nothing_left_out(command: Command) -> None:
    lines = command.text(PLAN).splitlines()
    assert [line for line in lines if line.startswith("no ")] == [
        "no skipped source entries",
        "no uncovered destination entries",
        "no dropped pages",
    ]
    assert "blocks: 3 before coalescing, 2 after" in lines


def test_heads_that_both_sides_hold(command: Command) -> None:
    given_ = sides([headed(2, 4)], [headed(2, 4, base=100_000)])
    assert command.explained(given_)["pairs"][0]["heads"] == [2, 6]
    assert "2..5\n" in command.text(given_)


def test_heads_of_which_a_part_is_exchanged(command: Command) -> None:
    given_ = sides([headed(0, 4), headed(0, 4, layer=1)], [headed(2, 4, base=100_000), headed(4, 4, layer=1)])
    given_["partial"] = True
    made = command.explained(given_)
    (pair,) = made["pairs"]
    assert (pair["heads"], pair["sliced"]) == ([2, 4], True)
    assert (pair["source"]["head_start"], pair["destination"]["head_start"]) == (0, 2)
    assert made["skipped_source_entries"] == [
        {"entry": "main/k/1", "index": 1, "reason": "the destination's entry of that name holds other heads"}
    ]
    assert made["uncovered_destination_entries"] == [{"entry": "main/k/1", "index": 1, "coverage": "other source"}]
    assert made["blocks"]["of_sliced_heads"] == 3 * 4
    assert made["blocks"]["total_bytes"] == 3 * 4 * 2 * HEAD_BYTES
    text = command.text(given_)
    assert "2..3 of 0..3 -> 2..5\n" in text
    assert "of these, heads of single tokens: 12" in text


def test_a_refusal_comes_with_what_led_to_it(command: Command) -> None:
    given_ = sides([entry()], [entry(base=100_000), entry(layer=1), entry(component="draft")])
    status, text = command.run(given_, "--explain")
    assert status == 2
    assert "  1            main/k/1   missing\n" in text
    assert "  2            draft/k/0  optional\n" in text
    assert "blocks:" not in text
    assert text.splitlines()[-1].startswith(
        "refused: UNCOVERED_ENTRY [destination.entries]: no source entry for main/k/1"
    )
    made = command.explained(given_)
    assert made["error"] == command.planned(given_)["error"]
    assert "blocks" not in made


@pytest.mark.parametrize(
    "given_",
    ["{", {**PLAN, "colour": 1}, sides([entry()], [entry(page_bytes=32)]), {**PLAN, "source_pages": [1, 2, 1 << 64]}],
)
def test_what_makes_no_pairing_is_only_refused(command: Command, given_: object) -> None:
    error = command.planned(given_)["error"]
    assert command.run(given_, "--explain", "--json") == (2, json.dumps({"error": error}, separators=(",", ":")) + "\n")
    status, text = command.run(given_, "--explain")
    assert status == 2
    assert text.startswith(f"kvferry plan: {error['code']}")
    assert error["detail"] in text
    assert len(text.splitlines()) == 1


@pytest.mark.parametrize(
    ("code", "field", "changes"),
    [
        ("LENGTH_MISMATCH", "source_pages", {"source_first_page": 1}),
        ("INCOMPLETE", "source_first_page", {"source_first_page": 1, "source_pages": [1, 2]}),
        ("LENGTH_MISMATCH", "destination_pages", {"destination_first_page": 1}),
        ("LENGTH_MISMATCH", "destination_pages", {"destination_first_page": 9}),
        ("INVALID_FIELD", "source_first_page", {"source_first_page": -1}),
        ("INVALID_FIELD", "destination_first_page", {"destination_first_page": 1 << 31}),
    ],
)
def test_logical_pages_that_do_not_fit(command: Command, code: str, field: str, changes: dict[str, object]) -> None:
    for flags in (("--json",), ("--explain", "--json")):
        status, text = command.run({**PLAN, **changes}, *flags)
        error = json.loads(text)["error"]
        assert (status, error["code"], error["field"]) == (2, code, field)


def test_pages_that_nothing_fills_are_named(command: Command) -> None:
    status, text = command.run({**PLAN, "source_first_page": 1, "source_pages": [1, 2]}, "--json")
    assert status == 2
    assert json.loads(text)["error"]["detail"].endswith("nothing fills the destination's pages 0..0")


LAYERS = st.lists(st.sampled_from([(c, r, n) for c in ("main", "draft") for r in "kv" for n in range(3)]), unique=True)
IDS = st.lists(st.integers(1, 39), unique=True, min_size=1, max_size=12)


@DEVICE.examples(80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(source=LAYERS, destination=LAYERS, ids=IDS, data=st.data())
def test_it_tells_of_the_plan(
    command: Command,
    source: list[tuple[str, str, int]],
    destination: list[tuple[str, str, int]],
    ids: list[int],
    data: st.DataObject,
) -> None:
    """Every entry is in exactly one place, every source page is copied or dropped, and the blocks are the plan's."""
    prefix = data.draw(st.integers(0, len(ids) - 1))
    first = data.draw(st.integers(0, 3))
    given_ = sides(
        [entry(component=c, role=r, layer=n, base=4096 * i) for i, (c, r, n) in enumerate(source)],
        [entry(component=c, role=r, layer=n, base=1 << 20 | 4096 * i) for i, (c, r, n) in enumerate(destination)],
        source_pages=ids,
        destination_pages=data.draw(st.permutations(range(1, 40)))[: len(ids) - prefix],
        source_first_page=first,
        destination_first_page=first + prefix,
        partial=data.draw(st.booleans()),
    )
    made, plain = command.explained(given_), command.planned(given_)
    names = [["/".join(map(str, one)) for one in side] for side in (source, destination)]
    paired = [pair["entry"] for pair in made["pairs"]]
    skipped = [one["entry"] for one in made["skipped_source_entries"]]
    uncovered = [one["entry"] for one in made["uncovered_destination_entries"]]
    assert paired == [name for name in names[1] if name in names[0]]
    assert sorted(paired + skipped) == sorted(names[0])
    assert sorted(paired + uncovered) == sorted(names[1])
    assert [page for one in made["dropped_pages"] for page in one["pages"]] == ids[:prefix]
    assert made.get("error") == plain.get("error")
    missing = [one["entry"] for one in made["uncovered_destination_entries"] if one["coverage"] == "missing"]
    if "error" in made:
        assert missing or not paired
        return
    assert not missing
    assert len(skipped) == plain["skipped_source_entries"]
    first_base = made["pairs"][0]["source"]["base"]
    first_blocks = plain["blocks"][: made["blocks"]["runs"]]
    copied = [(address - first_base) // 64 + page for address, _, size in first_blocks for page in range(size // 64)]
    assert copied == ids[prefix:]
    assert made["blocks"]["after"] == len(plain["blocks"])
    assert made["blocks"]["before"] == len(paired) * (len(ids) - prefix)
    assert made["blocks"]["total_bytes"] == sum(size for _, _, size in plain["blocks"])


@pytest.mark.parametrize("start", [0, 2, 4, 6])
def test_sliced_heads_are_counted_as_planned(command: Command, start: int) -> None:
    given_ = sides([headed(0, 8), headed(0, 8, layer=1)], [headed(start, 2, base=100_000), headed(0, 8, layer=1)])
    made, plain = command.explained(given_), command.planned(given_)
    assert made["blocks"]["after"] == len(plain["blocks"]) == 3 * 4 + 2
    assert made["blocks"]["before"] == 3 * 4 + 3
    assert made["blocks"]["total_bytes"] == sum(size for _, _, size in plain["blocks"])


HYBRID: Final = {
    "kind": "hybrid_swa",
    "full_layers": [0],
    "window_layers": [1, 2],
    "tokens": 64,
    "window_tokens": 32,
    "window": 12,
    "page_size": 4,
    "kv_heads": 2,
    "head_dim": 8,
    "dtype": "float16",
}
STATES: Final = {"kind": "mamba", "state_layers": [0], "slots": 8, "ssm_shape": [2, 4], "dtype": "float16"}


def listed(component: str, pages: list[int], first_page: int | None = 0, **more: object) -> dict[str, object]:
    return {"component": component, "pages": pages, "first_page": first_page, **more}


def of_spec(
    spec: dict[str, object], source: list[dict[str, object]], destination: list[dict[str, object]]
) -> dict[str, object]:
    return {"source": {"spec": spec, "lists": source}, "destination": {"spec": spec, "lists": destination}}


def test_lists_of_components_are_paired_by_logical_page(command: Command) -> None:
    given_ = of_spec(
        HYBRID,
        [listed("main", [1, 2, 3, 4, 5]), listed("swa", [1, 2, 3, 4], first_page=1)],
        [listed("main", [7, 8, 9], first_page=2), listed("swa", [5, 6], first_page=2)],
    )
    made, plain = command.explained(given_), command.planned(given_)
    assert [(one["component"], one["first_page"], one["pages"]) for one in made["dropped_pages"]] == [
        ("main", 0, [1, 2]),
        ("swa", 1, [1]),
        ("swa", 4, [4]),
    ]
    assert made["dropped_pages"][2]["reason"] == "they are past the destination's last page"
    page_bytes = 4 * 2 * 8 * 2
    assert made["blocks"]["total_bytes"] == (2 * 3 + 4 * 2) * page_bytes
    assert made["blocks"]["total_bytes"] == sum(size for _, _, size in plain["blocks"])
    assert "  source  swa        1..1     1 " in command.text(given_)


def test_lists_without_logical_pages_are_trimmed_at_either_side(command: Command) -> None:
    for sent, wanted, side, dropped in (([1, 2, 3], [4], "source", [2, 3]), ([4], [1, 2, 3], "destination", [2, 3])):
        given_ = of_spec(STATES, [listed("mamba", sent, None)], [listed("mamba", wanted, None)])
        (one,) = command.explained(given_)["dropped_pages"]
        assert (one["side"], one["pages"], "first_page" in one) == (side, dropped, False)
        assert "cut to one length" in one["reason"]


def test_lists_with_gaps_are_paired_as_the_daemon_pairs_them(command: Command) -> None:
    spec = {**SPEC, "tokens": 16 * SPEC["page_size"]}
    given_ = of_spec(
        spec,
        [listed("main", [1, 2]), listed("main", [3, 4, 5, 6], first_page=4)],
        [listed("main", [7], first_page=1), listed("main", [8, 9], first_page=6)],
    )
    made, plain = command.explained(given_), command.planned(given_)
    assert [(one["first_page"], one["pages"], one["reason"]) for one in made["dropped_pages"]] == [
        (0, [1], "the destination starts at logical page 1: it has them already"),
        (4, [3, 4], "the destination does not list them"),
    ]
    assert (made["blocks"]["pages"], made["blocks"]["total_bytes"]) == (3, sum(size for _, _, size in plain["blocks"]))
    lacking = of_spec(spec, [listed("main", [1])], [listed("main", [7]), listed("main", [8], first_page=6)])
    error = command.planned(lacking)["error"]
    assert (error["code"], error["field"]) == ("INCOMPLETE", "lists")
    assert command.planned({**lacking, "partial": True})["blocks"]


def test_a_state_that_nobody_wants_is_dropped(command: Command) -> None:
    given_ = of_spec(STATES, [listed("mamba", [3], None)], [listed("mamba", [], None, none=True)])
    made = command.explained(given_)
    assert [one["pages"] for one in made["dropped_pages"]] == [[3]]
    assert made["blocks"]["total_bytes"] == 0
    assert command.planned(given_)["blocks"] == []


def test_a_draft_without_a_list_lies_on_mains_pages(command: Command) -> None:
    spec = {**SPEC, "draft": {"layers": 1}}
    given_ = of_spec(spec, [listed("main", [1, 2])], [listed("main", [2, 1])])
    made = command.explained(given_)
    assert made["blocks"]["before"] == 2 * (2 * SPEC["layers"] + 2)


def test_a_component_without_a_list_is_left_out_and_said(command: Command) -> None:
    one = {"entries": [entry(), entry(component="draft")]}
    given_ = {
        "source": {**one, "lists": [listed("main", [1])]},
        "destination": {**one, "lists": [listed("main", [2]), listed("draft", [2])]},
    }
    made = command.explained(given_)
    assert [pair["entry"] for pair in made["pairs"]] == ["main/k/0"]
    assert made["skipped_source_entries"] == [
        {"entry": "draft/k/0", "index": 1, "reason": "one side gives no pages of component draft"}
    ]
    assert made["uncovered_destination_entries"] == [{"entry": "draft/k/0", "index": 1, "coverage": "optional"}]


@pytest.mark.parametrize(
    ("code", "field", "source", "destination"),
    [
        ("WINDOW_MISMATCH", "first_page", [listed("swa", [1, 2], 1)], [listed("swa", [1, 2], 2)]),
        ("EMPTY_STATE", "lists", [listed("swa", [], 0)], [listed("swa", [1], 0)]),
        ("PAGE_OUT_OF_RANGE", "source.lists[1].pages", [listed("swa", [99], 0)], [listed("swa", [1], 0)]),
        ("DUPLICATE_PAGE", "destination.lists[1].pages", [listed("swa", [1, 2])], [listed("swa", [3, 3])]),
        ("UNKNOWN_COMPONENT", "source.lists[1].component", [listed("kv", [1])], [listed("swa", [1])]),
        ("PAGE_OVERLAP", "destination.lists[1].first_page", [listed("swa", [1])], [listed("main", [2])]),
        ("UNCOVERED_ENTRY", "destination.entries", [], [listed("swa", [1])]),
    ],
)
def test_lists_that_do_not_fit(
    command: Command, code: str, field: str, source: list[dict[str, object]], destination: list[dict[str, object]]
) -> None:
    main_ = listed("main", [1], None)
    error = command.planned(of_spec(HYBRID, [main_, *source], [main_, *destination]))["error"]
    assert (error["code"], error["field"]) == (code, field)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("source.entries", {"source": {}}),
        ("source.entries", {"source": {"entries": [ENTRY], "spec": HYBRID}}),
        ("destination.lists", {"source": {"entries": [ENTRY], "lists": []}}),
        ("source_pages", {"source_pages": None}),
        (
            "destination_pages",
            {name: {"entries": [ENTRY], "lists": []} for name in ("source", "destination")} | {"source_pages": None},
        ),
    ],
)
def test_half_an_input_says_what_is_missing(command: Command, field: str, changes: dict[str, object]) -> None:
    error = command.planned({**PLAN, **changes})["error"]
    assert (error["code"], error["field"]) == ("INVALID_FIELD", field)


def test_the_example_in_the_docs(command: Command) -> None:
    documented = (Path(__file__).parents[3] / "docs/operations.md").read_text()
    example = documented.split("```json\n")[1].split("```")[0]
    made = command.explained(json.loads(example))
    assert [pair["heads"] for pair in made["pairs"]] == [[4, 8]] * 8
    assert [one["pages"] for one in made["dropped_pages"]] == [[4]]
    assert "`4..7 of 0..7 -> 4..7`" in documented
    assert "4..7 of 0..7 -> 4..7" in command.text(json.loads(example))


def test_heads_that_the_source_lacks_are_missing_unless_it_is_one_of_several(command: Command) -> None:
    given_ = sides([headed(0, 2)], [headed(0, 4)])
    error = command.planned(given_)["error"]
    assert error["code"] == "INCOMPLETE"
    assert "heads 2..3" in error["detail"]
    assert "blocks" in command.explained({**given_, "partial": True})
