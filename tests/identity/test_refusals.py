"""What does not work is refused with the error that ``docs/topologies.md`` names, and the transfer stays as it was."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

import numpy as np
import pytest
from msgspec.structs import replace

from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.geometry import rank_heads
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec, PoolSpec
from tests.identity.models import MODELS
from tests.identity.topologies import DOCUMENT, REFUSALS, TABLES, TOPOLOGIES, Refusal, with_tables
from tests.kit.transfers import FIRST, Engine, TransferHarness

MHA: Final = MhaSpec(layers=2, tokens=32, page_size=4, kv_heads=4, head_dim=16, dtype="bfloat16")
HALF: Final = replace(MHA, kv_heads=2, total_heads=4)
MLA: Final = MlaSpec(layers=2, tokens=32, page_size=4, kv_lora_rank=16, qk_rope_head_dim=8, dtype="bfloat16")
WINDOWS: Final = HybridSwaSpec(
    full_layers=(1,), window_layers=(0,), tokens=32, window_tokens=32, window=8, page_size=4, kv_heads=4, head_dim=16,
    dtype="bfloat16",
)  # fmt: skip
STATES: Final = MambaSpec(
    state_layers=(0,), attention_layers=(1,), slots=4, conv_window=3, conv_channels=24, ssm_shape=(4, 8), tokens=32,
    page_size=4, kv_heads=4, head_dim=16, dtype="bfloat16",
)  # fmt: skip
HALF_STATES: Final = replace(STATES, conv_channels=12, ssm_shape=(2, 8), state_total_heads=4)
TOKENS: Final = 8
WINDOW_START: Final = 5


class Case(NamedTuple):
    """Pools that do not fit, or lists that do not: the specs of both sides, of which the last SEND is refused."""

    receive_request: PoolSpec
    sources: tuple[PoolSpec, ...]
    expected: int | None = None  # how many sources the transfer is told
    is_open: bool = False  # chunks follow after each SEND but the refused one
    first_page: int = WINDOW_START  # of the source's window
    no_state: bool = False  # the source says that it has none
    tokens: int = TOKENS  # of the source's pages


CASES: Final = {
    "a convolution's states at different TP sizes, without its parts": Case(STATES, (HALF_STATES,)),
    "parts of a convolution that are not split by heads": Case(
        replace(STATES, conv_parts=(16, 8)), (replace(HALF_STATES, conv_channels=16, conv_parts=(8, 8)),)
    ),
    "FIA-NZ pages against ND pages": Case(MHA, (replace(MHA, view="nz"),)),
    "FIA-NZ pages at different TP sizes": Case(replace(MHA, view="nz"), (replace(HALF, view="nz"),)),
    "page sizes that differ, of FIA-NZ pages": Case(replace(MHA, view="nz"), (replace(MHA, view="nz", page_size=8),)),
    "page sizes that differ, of windows": Case(WINDOWS, (replace(WINDOWS, page_size=8),)),
    "dtypes that differ": Case(MHA, (replace(MHA, dtype="float16"),)),
    "fixed scales of 8-bit keys or values that differ": Case(
        replace(MHA, dtype="int8", k_scale=0.5), (replace(MHA, dtype="int8", k_scale=0.25),)
    ),
    "scales that travel with the pages, on one side only": Case(
        replace(MHA, dtype="int8"), (replace(MHA, dtype="int8", v_scale="page"),)
    ),
    "scales a page at different TP sizes": Case(
        replace(MHA, dtype="int8", v_scale="page"), (replace(HALF, dtype="int8", v_scale="page"),)
    ),
    "other numbers of KV heads in the model": Case(MHA, (replace(MHA, kv_heads=2),)),
    "a layer that no source sends": Case(replace(MHA, layers=3), (MHA,)),
    "heads that no source sends": Case(MHA, (HALF,)),
    "no draft from prefill where decode's pool requires one": Case(
        replace(MHA, draft=DraftSpec(layers=1), optional_components=()), (MHA,)
    ),
    "another draft model": Case(
        replace(MHA, draft=DraftSpec(layers=1)), (replace(MHA, draft=DraftSpec(layers=1, head_dim=32)),)
    ),
    "one layer from two stages": Case(replace(MHA, layers=3), (MHA, replace(MHA, first_layer=1))),
    "ranks with the same heads or latents, but without `replicas`": Case(MLA, (MLA, MLA), is_open=True),
    "more pools that send than the transfer expects": Case(
        replace(MHA, layers=6),
        (MHA, replace(MHA, first_layer=2), replace(MHA, first_layer=4)),
        expected=2,
        is_open=True,
    ),
    "a window page that prefill has not": Case(WINDOWS, (WINDOWS,), first_page=WINDOW_START + 1),
    "no state from prefill": Case(STATES, (STATES,), no_state=True),
    "prompts of different lengths": Case(MHA, (MHA,), tokens=TOKENS - 1),
}
"""What is refused on a SEND; the heads that do not divide never get that far."""


class Party(Engine):
    """One side's pool, with what it names of it."""

    def __init__(self, harness: TransferHarness, spec: PoolSpec, case: Case, *, is_source: bool) -> None:
        session, pool = harness.session(), harness.pool_of(f"pool{len(harness.pools)}", manifest_of(spec))
        super().__init__(harness, session, pool, np.empty(0, np.int64))
        self.lists: list[tuple[PageList, PageIds]] = []
        tokens, first_page = (case.tokens, case.first_page) if is_source else (TOKENS, WINDOW_START)
        for one in pool.manifest.components:
            none = one.kind == "state" and is_source and case.no_state
            count = 0 if none else 1 if one.kind == "state" else -(-TOKENS // (spec.page_size or TOKENS))
            listed = PageList(
                component=one.name,
                first_page=None if none else first_page if one.kind == "window" else 0,
                pages=count,
                tokens=tokens if one.kind == "paged" else None,
                none=none,
            )
            if one.name != "draft":
                self.lists.append(
                    (listed, pool.allocator_of(one.name).allocate(session, count) if count else self.pages)
                )

    @property
    def busy(self) -> list[int]:
        return [one.busy_count for one in self.pool.allocators.values()]


def refused(case: Case, first: str) -> KvferryError:
    """Return the error of the last message, from either side; the messages before it are accepted and wait."""
    harness = TransferHarness()
    decode = Party(harness, case.receive_request, case, is_source=False)
    sources = [Party(harness, spec, case, is_source=True) for spec in case.sources]

    def speak(speaker: Party) -> None:
        if speaker is decode:
            decode.receive(ids=decode.lists, sources=case.expected or len(sources))
        else:
            speaker.send(ids=speaker.lists, last=speaker is sources[-1] or not case.is_open)

    speakers = [decode, *sources] if first == "receive" else [*sources, decode]
    for speaker in speakers[:-1]:
        speak(speaker)
    before = [(one.busy, one.told) for one in speakers]
    with pytest.raises(KvferryError) as caught:
        speak(speakers[-1])
    assert [(one.busy, one.told) for one in speakers] == before
    harness.pass_time(1000)
    harness.transport.finish_all()
    assert [one.told for one in speakers] == ["DEADLINE settled"] * (len(speakers) - 1) + [""]
    return caught.value


@FIRST
@pytest.mark.parametrize("refusal", [one for one in REFUSALS if one.name in CASES], ids=lambda one: one.name)
def test_what_does_not_fit_is_refused(refusal: Refusal, first: str) -> None:
    assert refused(CASES[refusal.name], first).code == refusal.code


@FIRST
@pytest.mark.parametrize(
    ("stages", "code", "entry"),
    [
        ([(1, 2)], "UNCOVERED_ENTRY", "main/k/0"),
        ([(0, 2)], "UNCOVERED_ENTRY", "main/k/2"),
        ([(0, 1), (2, 1)], "UNCOVERED_ENTRY", "main/k/1"),
        ([(0, 2), (1, 2)], "PAGE_OVERLAP", "main/k/1"),
    ],
    ids=["starts too late", "ends too early", "gap", "overlap"],
)
def test_a_layer_that_no_stage_or_a_second_one_sends_is_named(
    stages: list[tuple[int, int]], code: str, entry: str, first: str
) -> None:
    sources = tuple(replace(MHA, first_layer=start, layers=count) for start, count in stages)
    error = refused(Case(replace(MHA, layers=3), sources), first)
    assert error.code == code
    assert re.search(rf"\b{entry}\b", error.detail)


def test_heads_that_do_not_divide_are_refused_before_there_is_a_pool() -> None:
    (refusal,) = [one for one in REFUSALS if one.name not in CASES]
    for heads, ranks in ((4, 3), (3, 2), (8, 3), (6, 4)):
        with pytest.raises(KvferryError, match=f"{heads} KV heads over {ranks} ranks") as error:
            rank_heads(total_heads=heads, tp_size=ranks, rank=0)
        assert error.value.code == refusal.code


def test_the_document_says_what_is_tested() -> None:
    text = DOCUMENT.read_text()
    assert {found[2] for found in TABLES.finditer(text)} == {"covered", "models", "refused"}
    assert with_tables(text) == text, "python -m tests.identity.topologies --write"
    assert len({one.name for one in TOPOLOGIES}) == len(TOPOLOGIES)
    assert {one.model for one in TOPOLOGIES} == {name for name in MODELS if not name.startswith("draft-")}
