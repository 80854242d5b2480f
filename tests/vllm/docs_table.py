"""The table of docs/vllm.md *Tests*, from parameters of the tests; ``python -m tests.vllm.docs_table`` writes it."""

from __future__ import annotations

from typing import Final

from kvferry.clients.vllm.memory import FLOAT8, TO_A_BYTE
from tests.kit.folders import REPOSITORY
from tests.kit.tables import Axes, Tables, rows_of, with_tables
from tests.vllm import test_groups, test_states
from tests.vllm.npu.ascend import KINDS
from tests.vllm.npu.test_ascend import MEMORY
from tests.vllm.test_drafts import SIDES
from tests.vllm.test_ranks import SIZES, UNEQUAL

DOCUMENT: Final = REPOSITORY / "docs" / "vllm.md"

ONE: Final = "one group"
SEVERAL: Final = "windows, chunks, layers that share a cache"
STATES: Final = "states beside attention"
NO_CACHE: Final = "none: with states vLLM's prefix cache is refused"

HANDOFF, CACHE, FAILURES, SPECS = (f"test_{one}.py" for one in ("handoff", "prefix_cache", "failures", "memory"))
REFUSED: Final = f"{SPECS}::test_what_is_not_carried_is_refused_by_name"
OPTIONS: Final = f"{FAILURES}::test_options_that_are_not_carried_are_refused_by_name"
DRAFTS: Final = f"{FAILURES}::test_drafts_that_are_not_carried_are_refused_by_name"
FLOATS: Final = f"{SPECS}::test_blocks_of_8_bits_are_for_their_like_alone"
BYTES: Final = f"{SPECS}::test_every_element_is_where_the_manifest_says"


def _groups(test: str) -> list[str]:
    """Return a test of models of several groups, with each of them."""
    return [f"test_groups.py::{test}[{model}]" for model in test_groups.GROUPS]


def _states(test: str) -> list[str]:
    return [f"test_states.py::{test}[{model}]" for model in test_states.GROUPS]


AXES: Final[Axes] = {
    "from prefill to decode": {
        ONE: [f"{HANDOFF}::test_prefill_first"],
        SEVERAL: _groups("test_prefill_first"),
        STATES: [*_states("test_prefill_first"), *_states("test_decode_has_the_very_states_and_rows")],
        "latents (rows: tokens differ by the batch without a connector, too)": [f"{HANDOFF}::test_latents"],
    },
    "chunks of a prompt": {
        ONE: [f"{HANDOFF}::test_decode_first_while_prefill_computes"],
        SEVERAL: _groups("test_decode_first_while_prefill_computes"),
        STATES: _states("test_decode_first_while_prefill_computes"),
        "layer by layer": [f"{HANDOFF}::test_layers_travel_while_the_next_ones_are_computed"],
    },
    "prefix at decode": {
        ONE: [f"{HANDOFF}::test_only_what_decode_lacks_travels"],
        SEVERAL: _groups("test_only_what_decode_lacks_and_windows_reach_travels"),
        STATES: NO_CACHE,
    },
    "preemption": {
        ONE: [
            f"{HANDOFF}::test_decode_is_preempted",
            f"{HANDOFF}::test_prefill_is_preempted_in_the_midst_of_a_prompt",
            f"{HANDOFF}::test_engines_with_few_blocks_preempt",
            "test_preemption.py::test_preempted_requests_have_the_same_tokens",
        ],
        SEVERAL: [
            *_groups("test_prefill_and_decode_are_preempted"),
            *_groups("test_engines_with_few_blocks_preempt"),
            *_groups("test_preempted_requests_have_the_same_tokens"),
        ],
        STATES: _states("test_prefill_and_decode_are_preempted"),
        "a thousand requests; two hundred of windows": [
            f"test_long_runs.py::test_tokens_stay_those_of_a_plain_engine[{one}]"
            for one in ("tiny-mha-1000", "tiny-gemma-200")
        ],
    },
    "prefix cache in the host tier": {
        ONE: [f"{CACHE}::test_another_engine_finds_it_also_a_part_of_it"],
        SEVERAL: _groups("test_another_engine_finds_it_also_a_part_of_it"),
        STATES: ["test_states.py::test_states_with_vllms_prefix_cache_are_refused_by_name"],
        "both roles": [f"{HANDOFF}::test_both_roles_with_the_prefix_cache"],
    },
    "the same on disk": {
        ONE: [f"{CACHE}::test_disk_tier"],
        SEVERAL: _groups("test_disk_tier"),
        STATES: NO_CACHE,
    },
    "groups, refused": {
        "R-SWA; any kind that kvferry does not know": [f"{REFUSED}[gap]"],
        "Jamba; sparse attention, but vllm-ascend's: vLLM runs neither on a CPU": [
            f"{REFUSED}[Jamba]",
            f"{REFUSED}[sparse attention]",
        ],
    },
    "ranks (TP)": {
        "2 to 2": ["test_ranks.py::test_two_ranks"],
        **{name: [f"test_ranks.py::test_unequal_ranks[{name}]"] for name in UNEQUAL},
        "pipeline and context parallelism, several nodes to an engine: refused": [OPTIONS],
    },
    "tokens of a block": {
        **{name: [f"test_ranks.py::test_block_sizes_that_differ[{name}]"] for name in SIZES},
        "64 to 32 beside windows": ["test_ranks.py::test_block_sizes_that_differ_beside_windows"],
    },
    "draft": {
        "EAGLE at both": ["test_drafts.py::test_as_many_tokens_are_accepted_as_without_a_hand_over"],
        **{f"at {side} alone": [f"test_drafts.py::test_one_side_drafts[{side}]"] for side in SIDES},
        "two that differ": ["test_drafts.py::test_another_draft_at_prefill_is_said_and_computed_again"],
        "a model of its own": ["test_drafts.py::test_a_draft_that_is_a_model_of_its_own"],
        "MTP of one module": ["test_drafts.py::test_blocks_and_acceptance_of_an_mtp"],
        "of the prefix cache": ["test_drafts.py::test_drafts_of_the_prefix_cache"],
        "EAGLE 3": "of the kind of EAGLE",
        "n-gram, suffix": "none: they have no KV; n-gram once by hand, as vLLM's needs numba",
        "MTP of several modules, `medusa` and others; beside several groups: refused": [
            DRAFTS,
            OPTIONS,
            f"{SPECS}::test_a_draft_model_beside_several_groups_is_refused_by_name",
        ],
    },
    "KV cache dtype": {
        "the model's": [f"{HANDOFF}::test_prefill_first"],
        **{f"`{name}`": [FLOATS] for name in FLOAT8 if name.startswith("fp8_e") or name == "fp8"},
        **{f"`{name}`, bytes alone: no kernel on a CPU": [BYTES] for name in TO_A_BYTE},
        "`fp8_ds_mla`, bytes alone": [f"{SPECS}::test_packed_latents_have_their_scales_in_them"],
        "`nvfp4`, `turboquant_…`, latents with scales: refused": [
            f"{REFUSED}[{one}]" for one in ("dtype", "packed", "latents with scales")
        ],
    },
    "memory": {
        "owned": [f"{HANDOFF}::test_prefill_first"],
        **{
            f"{one}, {other}": [
                f"{HANDOFF}::test_memory_of_the_engine[{one}-{other}]",
                *(f"test_groups.py::test_memory_of_the_engine[{model}-{one}-{other}]" for model in test_groups.GROUPS),
            ]
            for one, other in (("registered", "staged"), ("staged", "registered"))
        },
        **{
            f"{memory} on a simulated NPU, without vllm-ascend's runner": [
                f"npu/test_ascend.py::test_a_prompt_goes_from_npu_to_npu[{kind}-{memory}]" for kind in KINDS
            ]
            for memory in MEMORY
        },
    },
    "hosts": {
        "one, two daemons": ["test_handoff_failures.py::test_two_daemons[of one host]"],
        "two": [f"test_handoff_failures.py::test_two_daemons[{one}]" for one in ("owned", "registered", "staged")],
    },
}
"""Each value with the tests that have it, or why there is none; real engines, unless it says so."""

TABLES: Final[Tables] = {"axes": lambda: rows_of(AXES, "test")}

if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), TABLES))
