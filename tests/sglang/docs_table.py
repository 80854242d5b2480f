"""The tables of docs/sglang.md *Tests with real servers* and *Not carried yet*, from the parameters of the tests.

``python -m tests.sglang.docs_table`` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, get_args

from kvferry.clients.engine_pool import Memory
from kvferry.clients.sglang import carried, pools
from tests.kit.folders import REPOSITORY, SMOLLM2, TINY_MHA, TINY_MLA
from tests.kit.tables import Axes, Tables, head, row, rows_of, with_tables
from tests.sglang.npu.pools import HYBRIDS, KINDS, SERVED
from tests.sglang.test_configurations import CONFIGURATIONS
from tests.sglang.test_draft_servers import SIDES_THAT_DRAFT
from tests.sglang.test_ranks import PAIRS, SPLIT, TOPOLOGIES, Kind

DOCUMENT: Final = REPOSITORY / "docs" / "sglang.md"

CONFIGURED: Final = "test_configurations.py::test_tokens_are_those_of_a_plain_server"
BETWEEN: Final = "test_ranks.py::test_tokens_are_those_of_a_plain_server"
CLASSES: Final = {SMOLLM2: "MHATokenToKVPool", TINY_MHA: "MHATokenToKVPool", TINY_MLA: "MLATokenToKVPool"}
"""SGLang's pool of a model."""
DRAFTS: Final = "test_draft_servers.py::test_tokens_and_how_many_are_accepted"
THREE_HUNDRED: Final = "npu/test_ascend_configurations.py::test_three_hundred_requests_and_a_killed_daemon"
ENDS: Final = (
    "test_configurations.py::test_memory_of_the_engine_outlives_the_daemon_and_servers_end_without_the_daemons"
)


def _configured(value: Callable[[str], str]) -> dict[str, list[str]]:
    """Return the first configuration of both sides alike with each value of an axis."""
    return {value(name): [f"{CONFIGURED}[{name}]"] for name in reversed(CONFIGURATIONS)}


def _ranks(name: str) -> str:
    options = [*CONFIGURATIONS[name].options]
    ranks = options[options.index("--tp") + 1] if "--tp" in options else "1"
    return f"{ranks} to {ranks}"


def _between(what: str) -> dict[str, list[str]]:
    """Return the pairs whose sides split the model unequally, by ranks (TP) or stages (PP)."""
    return {name.removeprefix(f"{what} "): [f"{BETWEEN}[{name}]"] for name in PAIRS if name.startswith(what)}


def _ascend(found: dict[str, list[str]]) -> dict[str, list[str]]:
    """Add the tests on NPUs to those of SGLang's other pools."""
    for name, test in SERVED.items():
        file, _, function = test.partition(".")
        kind = HYBRIDS.get(name) or KINDS[name].kind
        found.setdefault(f"`{kind.__name__}`", []).append(f"npu/{file}.py::{function}")
    return found


HICACHE: Final = "test_hicache_servers.py"
FOUND: Final = f"{HICACHE}::test_found_after_a_flush"
LONG_RUN: Final = "test_long_runs.py::test_tokens_stay_those_of_a_plain_server"
PAIR: Final = "test_pair.py::test_tokens_are_those_of_a_plain_server"
AXES: Final[Axes] = {
    "KV pool": {
        **_configured(lambda name: f"`{CLASSES[CONFIGURATIONS[name].model]}`"),
        f"`{pools.STATES}`": ["test_hybrids.py::test_states"],
        **_ascend({f"`{pools.WINDOWS}`": ["test_hybrids.py::test_windows"]}),
        f"`{pools.SPARSE}`": "none: SGLang's indexer is of operators that are not simulated",
    },
    "draft": {"none": [PAIR], **{f"at {name}": [f"{DRAFTS}[{name}]"] for name in SIDES_THAT_DRAFT}},
    "ranks (TP)": {"1 to 1": [PAIR], **_configured(_ranks), **_between("TP")},
    "stages (PP)": {"1 to 1": [PAIR], **_between("PP")},
    "data-parallel attention": {
        "2 groups to 2": ["test_data_parallel_servers.py::test_tokens_are_those_of_a_plain_server"]
    },
    "tokens of a page": _configured(lambda name: str(CONFIGURATIONS[name].page_size)),
    "chunks of a prompt": {"one, and several": [PAIR], "layer by layer, from an NPU": [THREE_HUNDRED]},
    "prefix in a cache": {
        "of prefill": ["test_pair.py::test_decode_computes_with_the_pages_that_prefill_has_in_the_daemon"],
        "of decode, too": ["test_configurations.py::test_prefixes_kept_by_decode[mha]"],
        "the same beside windows": ["test_configurations.py::test_prefixes_kept_by_decode[windows]"],
        "the same beside states": ["test_configurations.py::test_prefixes_kept_by_decode[states]"],
    },
    "HiCache (one server)": {
        "keys and values": [f"{FOUND}[layer-first]", f"{FOUND}[page-first-of-the-engine]"],
        "latents": [f"{FOUND}[latents-page-first-direct]"],
        "windows": [f"{HICACHE}::test_windows_are_found_after_a_flush_and_full_attention_alone_is_not"],
        "states": [f"{HICACHE}::test_states_are_found_where_a_request_has_ended_and_full_attention_alone_is_not"],
    },
    "retraction": {
        "into the host tier": [f"{LONG_RUN}[mha]"],
        "the same with windows and states": [
            "test_configurations.py::test_windows_and_states_come_back_from_the_host_tier",
            f"{LONG_RUN}[windows]",
            f"{LONG_RUN}[states]",
        ],
        "the same from an NPU": [
            "npu/test_ascend_configurations.py::test_latent_attention_in_chunks_and_retracted_requests"
        ],
        "into SGLang's own tensors": [
            "test_configurations.py::test_without_a_tier_sglang_copies_retracted_requests_by_itself"
        ],
    },
    "memory on the host": {memory: [f"{ENDS}[{memory}]"] for memory in get_args(Memory)},
    "memory on an NPU": {memory: [f"{THREE_HUNDRED}[{memory}]"] for memory in get_args(Memory)},
    "hosts": {"one": [PAIR], "two": ["test_configurations.py::test_two_daemons_on_two_hosts"]},
}
"""What pairs of servers differ in: each value with the tests that have it, or why there is none."""

SAME: Final = {"NPUMHATokenToKVPool": "mha", "NPUMLATokenToKVPool": "mla"}
"""Pools whose layers and heads the daemon pairs as those of another kind, whatever the device."""
BESIDE: Final = {pools.STATES: "refused", pools.SPARSE: "as mha"}
"""Pools that are tested without a draft model, and what is said of them with one."""
NAMES: Final = {"windows": f"`{pools.WINDOWS}`"}
"""Of kinds that are SGLang's classes."""


def _topologies() -> Iterator[str]:
    kinds, others = [NAMES.get(kind, kind) for kind in get_args(Kind)], [f"`{name}`" for name in (*BESIDE, *SAME)]
    yield from head("prefill to decode", *kinds, *others)
    same = [f"as {kind}" for kind in SAME.values()]
    for name in TOPOLOGIES:
        beside = ["tested" if name in SPLIT else with_draft for with_draft in BESIDE.values()]
        yield row(name, *["tested"] * len(kinds), *beside, *same)


def _states() -> Iterator[str]:
    yield from head("SGLang's state type", "component", "what the daemon's pools do not have")
    for kind, component in carried.COMPONENTS.items():
        yield row(f"`{kind.value}`", f"`{component}`", "")
    for name, missing in carried.MISSING.items():
        yield row(f"`{name}`", "refused", missing)


TABLES: Final[Tables] = {
    "axes": lambda: rows_of(AXES, "a pair of servers"),
    "topologies": _topologies,
    "states": _states,
}

if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text(), TABLES))
