"""State pools: a slot a request, conv and ssm by layer, which share of the heads, attention beside them."""

from __future__ import annotations

import pytest

from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.pairing import pair_entries
from kvferry.protocol.errors import GeometryMismatchError
from kvferry.protocol.manifests import Component, DraftSpec, Manifest
from tests.kit.pool_specs import MAMBA, changed


def rank_of(ranks: int, rank: int, total: int = 8) -> Manifest:
    heads = total // ranks
    return changed(
        MAMBA,
        ssm_shape=(heads, 8, 16),
        conv_channels=32 * heads,
        state_head_start=rank * heads,
        state_total_heads=total,
    )


def test_a_page_is_a_slot() -> None:
    manifest = manifest_of(MAMBA)
    state = [one for one in manifest.entries if one.component == "mamba"]
    assert [(one.role, one.layer) for one in state] == [(role, n) for role in ("conv", "ssm") for n in (0, 1, 2, 4)]
    conv, ssm = state[0], state[4]
    assert (conv.shape, conv.dtype, conv.page_bytes) == ((7, 3, 64), "bfloat16", 3 * 64 * 2)
    assert (ssm.shape, ssm.dtype, ssm.page_bytes) == ((7, 4, 8, 16), "float32", 4 * 8 * 16 * 4)
    assert all(one.page_tokens is None for one in state)
    assert manifest.components == (
        Component(name="main", space="main", pages=3),
        Component(name="mamba", space="mamba", pages=7, kind="state"),
    )


def test_a_pool_of_states_only() -> None:
    manifest = changed(MAMBA, attention_layers=(), tokens=None, page_size=None, kv_heads=None, head_dim=None)
    assert [one.name for one in manifest.components] == ["mamba"]
    assert manifest.pages == 7


@pytest.mark.parametrize("left_out", ["tokens", "page_size", "kv_heads", "head_dim"])
def test_a_stage_of_states_only_may_leave_out_any_of_it(left_out: str) -> None:
    fields = {"attention_layers": (), "head_dim": 32, "dtype": "int8", "k_scale": 2.0, "view": "nz", left_out: None}
    assert [one.name for one in changed(MAMBA, **fields).components] == ["mamba"]


def test_a_stage_of_attention_only() -> None:
    assert [one.name for one in changed(MAMBA, state_layers=()).components] == ["main"]


def test_the_draft_is_on_the_attentions_pages() -> None:
    manifest = changed(MAMBA, draft=DraftSpec(layers=1))
    assert [one.name for one in manifest.components] == ["main", "draft", "mamba"]


def test_conv_and_ssm_may_be_alone() -> None:
    assert {one.role for one in changed(MAMBA, ssm_shape=None).entries if one.component == "mamba"} == {"conv"}
    only_ssm = changed(MAMBA, conv_window=None, conv_channels=None)
    assert {one.role for one in only_ssm.entries if one.component == "mamba"} == {"ssm"}


def test_slots_of_as_many_bytes_in_another_form_are_another_layout() -> None:
    digests = [
        changed(MAMBA, conv_window=4, conv_channels=6, ssm_shape=(2, 4, 8)).layout_digest,
        changed(MAMBA, conv_window=6, conv_channels=4, ssm_shape=(2, 4, 8)).layout_digest,
        changed(MAMBA, conv_window=4, conv_channels=6, ssm_shape=(2, 8, 4)).layout_digest,
    ]
    assert len(set(digests)) == 3
    assert changed(MAMBA, slots=7).layout_digest == manifest_of(MAMBA).layout_digest


def test_ranks_of_one_split_pair_with_themselves_only() -> None:
    state = [one for one in rank_of(2, 1).entries if one.component == "mamba"]
    assert len(pair_entries(state, state).pairs) == len(state)
    other = [one for one in rank_of(2, 0).entries if one.component == "mamba"]
    assert pair_entries(other, state).pairs == ()


@pytest.mark.parametrize(("source", "destination"), [((1, 0), (2, 0)), ((2, 0), (1, 0)), ((4, 1), (2, 0))])
def test_another_split_is_refused(source: tuple[int, int], destination: tuple[int, int]) -> None:
    """A rank's conv channels are shares of q, k and v side by side: no slice of them is another rank's."""
    with pytest.raises(GeometryMismatchError, match="mamba/conv/0"):
        pair_entries(
            [one for one in rank_of(*source).entries if one.component == "mamba"],
            [one for one in rank_of(*destination).entries if one.component == "mamba"],
        )
