"""What does not work is refused with the error that ``docs/topologies.md`` names, and the transfer stays as it was."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import pytest
from msgspec.structs import replace

from kvferry.clients import AttachedPool, Client, Pages, new_request_id, no_pages, pages
from kvferry.pools.planning.geometry import rank_heads
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec, PoolSpec
from tests.identity.topologies import REFUSALS, Refusal

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
TOKENS: Final = 8
WINDOW_START: Final = 5
DEADLINE_S: Final = 10.0


class Case(NamedTuple):
    """Pools that do not fit, or lists that do not.

    Attributes:
        transfer: the receiving pool's spec.
        sources: the sending pools' specs; the last one's SEND is the one refused.
        expected: how many sources the transfer is told.
        is_open: whether chunks follow after each SEND but the refused one.
        first_page: of the source's window.
        no_state: whether the source says that it has none.
        tokens: of the source's pages.
    """

    receive_request: PoolSpec
    sources: tuple[PoolSpec, ...]
    expected: int | None = None
    is_open: bool = False
    first_page: int = WINDOW_START
    no_state: bool = False
    tokens: int = TOKENS


CASES: Final = {
    "states, conv or ssm, at different TP sizes": Case(
        STATES, (replace(STATES, conv_channels=12, ssm_shape=(2, 8), state_total_heads=4),)
    ),
    "FIA-NZ pages against ND pages": Case(MHA, (replace(MHA, view="nz"),)),
    "FIA-NZ pages at different TP sizes": Case(replace(MHA, view="nz"), (replace(HALF, view="nz"),)),
    "page sizes that differ": Case(MHA, (replace(MHA, page_size=8),), tokens=TOKENS),
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


class Side:
    """One side's pools, deleted at the end."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._pools: list[AttachedPool] = []
        self._taken: list[tuple[str, PageIds, str]] = []

    def create(self, spec: PoolSpec) -> AttachedPool:
        """Create a pool."""
        pool = self.client.create_pool(f"refused-{id(self)}-{len(self._pools)}", spec)
        self._pools.append(pool)
        return pool

    def lists(self, pool: AttachedPool, case: Case, *, is_source: bool) -> list[Pages]:
        """Return a list for each component of a pool that has lists of its own."""
        lists = []
        for one in pool.manifest.components:
            if one.name == "draft":
                continue
            if one.kind == "state" and is_source and case.no_state:
                lists.append(no_pages(one.name))
                continue
            ids = self.client.allocate(pool.name, 1 if one.kind == "state" else -(-TOKENS // pool.page_size), one.space)
            self._taken.append((pool.name, ids, one.space))
            tokens = case.tokens if is_source else TOKENS
            start = case.first_page if is_source else WINDOW_START
            lists.append(
                pages(ids, tokens=tokens)
                if one.kind == "paged"
                else pages(ids, first_page=start if one.kind == "window" else 0, component=one.name)
            )
        return lists

    def close(self) -> None:
        """Give everything back."""
        for pool, ids, space in self._taken:
            self.client.free(pool, ids, space)
        for one in self._pools:
            one.close()
            self.client.delete_pool(one.name)


@pytest.fixture
def sides(prefill: Client, decode: Client) -> Iterator[tuple[Side, Side]]:
    """Return prefill's side and decode's."""
    made = Side(prefill), Side(decode)
    yield made
    for one in made:
        one.close()


@pytest.mark.parametrize("refusal", [one for one in REFUSALS if one.name in CASES], ids=lambda one: one.name)
def test_what_does_not_fit_is_refused(refusal: Refusal, sides: tuple[Side, Side]) -> None:
    case, request_id = CASES[refusal.name], new_request_id()
    prefill, decode = sides
    pool = decode.create(case.receive_request)
    lists = decode.lists(pool, case, is_source=False)
    receive_request = decode.client.receive(
        pool.name, request_id, lists, sources=case.expected or len(case.sources), deadline_s=DEADLINE_S
    )
    sent = []
    for number, spec in enumerate(case.sources, 1):
        source = prefill.create(spec)
        is_last = number == len(case.sources) or not case.is_open
        ours = prefill.lists(source, case, is_source=True)
        sent.append(prefill.client.send(source.name, request_id, ours, last=is_last, deadline_s=DEADLINE_S))
    with pytest.raises(KvferryError) as error:
        prefill.client.wait_finished(sent[-1])
    assert error.value.code == refusal.code
    assert [one.error for one in sent[:-1]] == [None] * (len(sent) - 1)
    assert decode.client.result(pool.name, request_id, "receive").state == "open"
    decode.client.cancel(receive_request)
    for one in sent:
        prefill.client.wait_settled(one)


def test_heads_that_do_not_divide_are_refused_before_there_is_a_pool() -> None:
    [refusal] = [one for one in REFUSALS if one.name not in CASES]
    with pytest.raises(KvferryError) as error:
        rank_heads(total_heads=4, tp_size=3, rank=0)
    assert error.value.code == refusal.code
