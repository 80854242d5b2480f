"""Random models split over stages and ranks on both sides, and what each byte of a destination must be in the end.

Every element's bytes are computed from (entry, logical page, token, head of the model). What a rank holds is computed
here from the model, head by head; only where an entry lies in its region is read from the pool's manifest.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from kvferry.pools.planning.geometry import DTYPE_BYTES
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, Manifest, MhaSpec, MlaSpec, PoolSpec

Memory: TypeAlias = npt.NDArray[np.uint8]
Kind = Literal["mha", "mla", "hybrid_swa", "mamba"]
ScaleForm = Literal["head", "page", "page_head"]
Key: TypeAlias = tuple[str, str, int]
"""(component, role, layer)."""

Held: TypeAlias = dict[str, dict[int, int]]
"""What pages hold: by component and page the logical page's number."""

UNTOUCHED: Final = 0x5A
FIRST_DRAFT: Final = 100
"""The number under which a draft's first layer has scales."""

STATE: Final = 0
"""The logical number of a state's first slot."""

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Array(NamedTuple):
    """What a page of one key is in the whole model: ``(tokens, heads, head_bytes)``, over all ranks.

    ``heads_first``: in memory it is ``(heads, tokens, head_bytes)``.
    """

    tokens: int
    heads: int
    head_bytes: int
    heads_first: bool = False


class Rank(NamedTuple):
    """One rank of a tensor parallelism."""

    size: int
    number: int

    def heads(self, total: int) -> list[int]:
        """Return the model's heads that it holds: all those which its share of the model touches."""
        return [
            head
            for head in range(total)
            if head * self.size < (self.number + 1) * total and (head + 1) * self.size > self.number * total
        ]


class Model(NamedTuple):
    """The facts of a model; layers of its second kind (windows, states) are those in ``other_layers``."""

    kind: Kind
    page_size: int
    layers: tuple[int, ...]
    other_layers: tuple[int, ...]
    heads: int
    dims: tuple[int, int]
    dtype: str
    window: int
    index_dim: int | None
    index_layers: tuple[int, ...]
    index_scale: bool
    conv: tuple[int, int] | None
    ssm: tuple[int, int] | None
    scales: ScaleForm | None = None
    wrong_scale: bool = False
    """Whether the model's last head has another scale than it should."""
    joined: bool = False
    """Whether latent and rope of a token, or k and v, are one row."""
    heads_first: bool = False

    def head_scales(self, layer: int, role: str, heads: list[int]) -> tuple[float, ...]:
        """Return the fixed scales of some heads of a layer; draft layers are numbered from 100."""
        wrong = {self.heads - 1: 0.25 * self.wrong_scale}
        return tuple(100 + 8 * layer + head + 0.5 * (role == "v") + wrong.get(head, 0) for head in heads)

    @property
    def all_layers(self) -> list[int]:
        return sorted({*self.layers, *self.other_layers})

    @property
    def state(self) -> str | None:
        return {"hybrid_swa": "swa", "mamba": "mamba"}.get(self.kind) if self.other_layers else None


class Stage(NamedTuple):
    """One rank of one pipeline stage of one side: its layers, and its draft layers if it runs a draft model."""

    layers: tuple[int, ...]
    rank: Rank
    draft_layers: int


# -- what it is made of


def arrays_of(model: Model, stage: Stage) -> dict[Key, Array]:
    size = DTYPE_BYTES[model.dtype]
    paged = _keys_and_values(model, size)
    if model.scales in {"page", "page_head"}:  # one of a page is a rank's own, over all heads that it holds
        count = model.heads if model.scales == "page_head" else min(stage.rank.size, model.heads)
        paged |= {"k_scale": Array(1, count, 4), "v_scale": Array(1, count, 4)}
    full = [("main", layer) for layer in stage.layers if layer in model.layers]
    full += [("draft", layer) for layer in range(stage.draft_layers)]
    others = [layer for layer in stage.layers if layer in model.other_layers]
    arrays = {(component, role, layer): array for component, layer in full for role, array in paged.items()}
    if model.kind == "hybrid_swa":
        arrays |= {("swa", role, layer): array for layer in others for role, array in paged.items()}
    for layer in stage.layers:
        if model.index_dim is not None and layer in model.index_layers:
            arrays["main", "index_k", layer] = Array(model.page_size, 1, model.index_dim * size)
            if model.index_scale:
                arrays["main", "index_scale", layer] = Array(model.page_size, 1, 4)
    if model.kind == "mamba":
        for layer in others:
            if model.conv is not None:  # a rank's share of it is one transfer op, of no other split
                arrays["mamba", "conv", layer] = Array(1, stage.rank.size, model.conv[0] * model.conv[1] * size)
            if model.ssm is not None:
                arrays["mamba", "ssm", layer] = Array(1, model.heads, model.ssm[0] * model.ssm[1] * 4)
    return arrays


def _keys_and_values(model: Model, size: int) -> dict[str, Array]:
    k_dim, v_dim = model.dims
    if model.joined:
        return {"k": Array(model.page_size, model.heads, (k_dim + v_dim) * size, model.heads_first)}
    widths = {"k": k_dim, "v": v_dim}
    return {role: Array(model.page_size, model.heads, dim * size, model.heads_first) for role, dim in widths.items()}


def spec_of(model: Model, stage: Stage, pages: int, view: Literal["paged", "fia"]) -> PoolSpec:
    held = stage.rank.heads(model.heads)
    draft = _draft_of(model, stage) if stage.draft_layers else None
    tokens = pages * model.page_size
    ours, others = (tuple(one for one in stage.layers if one in some) for some in (model.layers, model.other_layers))
    if model.kind == "mla":
        index_layers = tuple(layer for layer in ours if layer in model.index_layers)
        index = model.index_dim if index_layers else None
        return MlaSpec(
            layers=len(ours), first_layer=ours[0], tokens=tokens, page_size=model.page_size, kv_lora_rank=model.dims[0],
            qk_rope_head_dim=model.dims[1], index_head_dim=index, index_layers=index_layers or None,
            index_scale=model.index_scale and index is not None, dtype=model.dtype, replicas=stage.rank.size,
            draft=draft, joined=model.joined,
        )  # fmt: skip
    heads: dict[str, Any] = {
        "kv_heads": len(held), "head_start": held[0], "total_heads": model.heads, "head_dim": model.dims[0],
        "v_head_dim": model.dims[1], "dtype": model.dtype, "tokens": tokens, "page_size": model.page_size,
        "replicas": max(1, stage.rank.size // model.heads), "view": "hnd" if model.heads_first else view,
        **_scales_of(model, ours, held, ""),
    }  # fmt: skip
    if model.kind == "mha":
        heads["packing"] = "rows" if model.joined and model.heads_first else None
        return MhaSpec(layers=len(ours), first_layer=ours[0], draft=draft, joined=model.joined, **heads)
    if model.kind == "hybrid_swa":
        windows = max(pages, -(-model.window // model.page_size)) * model.page_size
        return HybridSwaSpec(
            full_layers=ours, window_layers=others, window_tokens=windows, window=model.window, draft=draft, **heads,
            **_scales_of(model, others, held, "window_"),
        )  # fmt: skip
    conv = model.conv or (None, None)
    state = (held[0], model.heads) if model.ssm else stage.rank[::-1]
    return MambaSpec(
        state_layers=others, attention_layers=ours, slots=pages, conv_window=conv[0], conv_channels=conv[1],
        draft=draft,
        ssm_shape=None if model.ssm is None else (len(held), *model.ssm), state_head_start=state[0],
        state_total_heads=state[1], **heads,
    )  # fmt: skip


def _draft_of(model: Model, stage: Stage) -> DraftSpec:
    """Return the draft's spec: scales a head are its own, those of pages are as the model's."""
    layers = range(FIRST_DRAFT, FIRST_DRAFT + stage.draft_layers)
    own = _scales_of(model, layers, stage.rank.heads(model.heads), "") if model.scales == "head" else {}
    return DraftSpec(layers=stage.draft_layers, **own)


def _scales_of(model: Model, layers: Sequence[int], heads: list[int], prefix: str) -> dict[str, Any]:
    if model.scales == "head":
        return {
            f"{prefix}{role}_scale": tuple(model.head_scales(layer, role, heads) for layer in layers) or None
            for role in ("k", "v")
        }
    return {f"{prefix}{role}_scale": model.scales for role in ("k", "v")}


# -- what it holds


def tagged_page(key: Key, array: Array, rank: Rank, logical: int) -> Memory:
    """Return the bytes of one page at one rank: ``(page_bytes,)`` uint8."""
    heads = rank.heads(array.heads)
    token, head, byte = np.ogrid[: array.tokens, : array.heads, : array.head_bytes]
    page_tag = zlib.crc32(f"{key} {logical}".encode())
    places = ((token << 24) + (head << 16) + byte).astype(np.uint64)[:, heads]
    tags = places + (np.uint64(page_tag) << np.uint64(32))
    mixed: Memory = ((tags * _MIX) >> np.uint64(56)).astype(np.uint8)
    return (mixed.swapaxes(0, 1) if array.heads_first else mixed).reshape(-1)


def put_pages(memory: Memory, manifest: Manifest, arrays: dict[Key, Array], rank: Rank, held: Held) -> None:
    """Write to a pool's memory, ``(region_bytes,)`` uint8, what its pages hold; only the entries in ``arrays``."""
    for entry in manifest.entries:
        key = (entry.component, entry.role, entry.layer)
        for page, logical in held.get(entry.component, {}).items() if key in arrays else ():
            content = tagged_page(key, arrays[key], rank, logical)
            assert len(content) == entry.page_bytes, entry.name
            start = entry.base + page * entry.page_bytes
            memory[start : start + entry.page_bytes] = content


# -- a transfer


class Window(NamedTuple):
    """Logical numbers ``[first, end)`` of a list, and what the list says of itself."""

    first: int
    end: int
    plain: bool = False
    none: bool = False

    @property
    def numbers(self) -> range:
        return range(self.first, self.end)


class Transfer(NamedTuple):
    """One request: what each side has, in which order they speak, and what is wrong with it, if anything.

    Attributes:
        model: the model.
        sources: every rank of every stage of the sending side.
        receive requests: some ranks of some stages of the receiving side.
        sent: main's pages at the sources.
        wanted: main's pages at the receive requests.
        end_tokens: the position after the last token as the sources and as the receive requests say it; None: they do
            not.
        sent_state: the window's or state's list at the sources.
        wanted_state: the same at the receive requests.
        cuts: after how many pages of main each source cuts its chunks.
        turns: who speaks next: sources from 0 on, then receive requests.
        fault: what is wrong.
        seed: of the page maps.
    """

    model: Model
    sources: list[Stage]
    receive_requests: list[Stage]
    sent: range
    wanted: range
    end_tokens: tuple[int | None, int | None]
    sent_state: Window
    wanted_state: Window
    cuts: list[list[int]]
    turns: list[int]
    fault: str
    seed: int

    @property
    def lengths_clash(self) -> bool:
        """Return whether the state's lists are cut to one length."""
        ours, theirs = self.sent_state, self.wanted_state
        return (ours.plain or theirs.plain) and len(ours.numbers) != len(theirs.numbers) and not theirs.none

    def state_pairs(self) -> list[tuple[int, int]]:
        ours, theirs = self.sent_state.numbers, self.wanted_state.numbers
        if self.sent_state.plain or self.wanted_state.plain:
            return list(zip(ours, theirs, strict=False))
        return [(number, number) for number in theirs]


FAULTS: Final = ("short", "long", "tokens", "layer", "width", "page twice", "foreign page", "token twice", "scale")


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    model = draw(models())
    fault = draw(st.sampled_from([""] * len(FAULTS) + [*FAULTS]))
    sizes = [size for size in range(1, 5) if model.heads % size == 0 or size % model.heads == 0]
    if model.kind == "mamba":  # a state's heads are not replicated
        sizes = [size for size in sizes if model.heads % size == 0]
    size = draw(st.sampled_from(sizes))
    other_size = size if model.state == "mamba" and draw(st.integers(0, 3)) else draw(st.sampled_from(sizes))
    layers = model.all_layers[:-1] if fault == "layer" and len(model.all_layers) > 1 else model.all_layers
    sources = draw(_stages(layers, size))
    receive_requests = draw(st.permutations(draw(_stages(model.all_layers, other_size))))[: draw(st.integers(1, 3))]
    sent, wanted, end_tokens, windows = draw(_lists(model, fault))
    cuts = [draw(_cuts(len(sent))) for _ in sources]
    turns = [n for n, its in enumerate(cuts) for _ in range(1 + len(its))]
    turns += range(len(sources), len(sources) + len(receive_requests))
    return Transfer(
        model, sources, receive_requests, sent, wanted, end_tokens, *windows, cuts, draw(st.permutations(turns)), fault,
        draw(st.integers(0, 99)),
    )  # fmt: skip


@st.composite
def models(draw: st.DrawFn) -> Model:
    kind: Kind = draw(st.sampled_from(["mha", "mla", "hybrid_swa", "mamba"]))
    first, count = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    layers = list(range(first, first + count))
    others = draw(st.sets(st.sampled_from(layers))) if kind in {"hybrid_swa", "mamba"} else set()
    own = tuple(layer for layer in layers if layer not in others)
    indexed = draw(st.sets(st.sampled_from(layers), min_size=1)) if kind == "mla" and draw(st.booleans()) else set()
    conv = draw(st.sampled_from([None, (3, 2), (1, 5)]))
    dtype = draw(st.sampled_from(["int8", "int8", "bfloat16", "float32"]))
    forms: list[ScaleForm | None] = [None, "head", "page", "page_head"]
    scales = draw(st.sampled_from(forms)) if dtype == "int8" and kind != "mla" else None
    return Model(
        kind=kind,
        page_size=draw(st.integers(1, 4)),
        layers=own,
        other_layers=tuple(sorted(others)),
        heads=1 if kind == "mla" else draw(st.sampled_from([1, 2, 3, 4, 6])),
        dims=(draw(st.integers(1, 4)), draw(st.integers(1, 4))),
        dtype=dtype,
        window=draw(st.integers(1, 9)),
        index_dim=draw(st.integers(1, 3)) if indexed else None,
        index_layers=tuple(sorted(indexed)),
        index_scale=bool(indexed) and draw(st.booleans()),
        conv=conv,
        ssm=draw(st.sampled_from([(2, 3), (1, 1)])) if conv is None or draw(st.booleans()) else None,
        scales=scales,
        joined=scales is None and kind in {"mha", "mla"} and draw(st.booleans()),
        heads_first=scales is None and kind == "mha" and draw(st.booleans()),
    )


@st.composite
def _stages(draw: st.DrawFn, layers: Sequence[int], size: int) -> list[Stage]:
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(layers) - 1)), max_size=2))) if len(layers) > 1 else []
    parts = [tuple(layers[start:stop]) for start, stop in itertools.pairwise([0, *cuts, len(layers)])]
    drafts = [0] * (len(parts) - 1) + [draw(st.integers(0, 2))]
    return [
        Stage(part, Rank(size, number), draft)
        for part, draft in zip(parts, drafts, strict=True)
        for number in range(size)
    ]


@st.composite
def _cuts(draw: st.DrawFn, pages: int) -> list[int]:
    return sorted(draw(st.sets(st.integers(1, pages - 1), max_size=2))) if pages > 1 else []


@st.composite
def _lists(
    draw: st.DrawFn, model: Model, fault: str
) -> tuple[range, range, tuple[int | None, int | None], tuple[Window, Window]]:
    size = model.page_size
    tokens = draw(st.integers(1, 7 * size))
    pages = -(-tokens // size)
    prefix = draw(st.integers(0, (tokens - 1) // size))
    start = draw(st.integers(0, prefix))
    end = pages + {"short": -1, "long": 1}.get(fault, 0)
    said, heard = draw(st.booleans()), draw(st.booleans())
    ends = (tokens if said else None, tokens if heard else None)
    if fault == "tokens":
        ends = (tokens, tokens + (1 if tokens % size else -1))
    elif end != pages:
        ends = (None, None)
    return (
        range(min(start, max(end - 1, 0)), max(end, 1)),
        range(prefix, pages),
        ends,
        draw(_states(model, tokens, prefix, start)),
    )


@st.composite
def _states(draw: st.DrawFn, model: Model, tokens: int, prefix: int, start: int) -> tuple[Window, Window]:
    ours, theirs = draw(_one_each(model, tokens, prefix, start))
    plain = draw(st.sampled_from([(False, False), (False, False), (True, True), (True, False), (False, True)]))
    ours, theirs = ours._replace(plain=plain[0]), theirs._replace(plain=plain[1])
    form = draw(st.sampled_from(["both"] * 9 + ["receive requests none", "sources none", "both none", "sources empty"]))
    if form in {"sources none", "both none", "sources empty"}:
        ours = ours._replace(end=ours.first, none=form != "sources empty")
    if form in {"receive requests none", "both none"}:
        theirs = theirs._replace(end=theirs.first, none=True)
    return ours, theirs


@st.composite
def _one_each(draw: st.DrawFn, model: Model, tokens: int, prefix: int, start: int) -> tuple[Window, Window]:
    if model.kind == "mamba":
        return Window(STATE, draw(st.integers(1, 3))), Window(STATE, draw(st.integers(1, 3)))
    size, window = model.page_size, model.window
    seen = max(tokens + draw(st.integers(-4, 4)), 1)
    before = start * size if start * size < seen else 0
    ours = {position // size for position in range(max(before, seen - window), seen)}
    theirs = {position // size for position in range(max(prefix * size, tokens - window), tokens)}
    return Window(min(ours), max(ours) + 1), Window(min(theirs), max(theirs) + 1)
