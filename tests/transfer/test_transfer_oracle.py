"""Transfers of every layout against a byte-level oracle that knows the model, and nothing of how it is done.

Many sources of unequal stages and ranks fill several receive requests, in any order of messages and copies. What
arrives is compared over the whole memory of each destination: what belongs there is there, and no other byte has
changed. What must be refused is refused with an error that names the cause; nothing else is.

Every element's bytes are computed from (entry, logical page, token, head of the model). What a rank holds is computed
here from the model, head by head; only where an entry lies in its region is read from the pool's manifest.
"""

from __future__ import annotations

import itertools
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.geometry import DTYPE_BYTES
from kvferry.pools.pool import Pool
from kvferry.protocol.base import PageList
from kvferry.protocol.codec import PageIds
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, Manifest, MhaSpec, MlaSpec, PoolSpec
from tests.kit.bytes import fill_region, read_region, write_region
from tests.kit.devices import DEVICE
from tests.kit.transfers import TransferHarness

pytestmark = pytest.mark.any_device

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

    ``heads_first``: in memory it is ``(heads, tokens, head_bytes)``. ``parts``: the bytes of a head in further parts,
    which lie beside the first in each row.
    """

    tokens: int
    heads: int
    head_bytes: int
    heads_first: bool = False
    parts: tuple[int, ...] = ()


class Conv(NamedTuple):
    """A convolution's state: its parts are channels of a head, or of a rank if the parts are not said."""

    window: int
    parts: tuple[int, ...]
    said: bool
    channels_first: bool


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
    conv: Conv | None
    ssm: tuple[int, int] | None
    scales: ScaleForm | None = None
    wrong_scale: bool = False
    """Whether the model's last head has another scale than it should."""
    joined: bool = False
    """Whether latent and rope of a token, or k and v, are one row."""
    heads_first: bool = False
    shared_states: bool = False
    """Whether each rank holds the whole state."""

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
            if model.conv is not None:
                arrays["mamba", "conv", layer] = _conv(model, model.conv, stage.rank, size)
            if model.ssm is not None:
                arrays["mamba", "ssm", layer] = _state(model, model.ssm[0] * model.ssm[1] * 4)
    return arrays


def _conv(model: Model, conv: Conv, rank: Rank, size: int) -> Array:
    if not conv.said:  # a rank's share of it is one transfer op, of no other split
        share = conv.window * sum(conv.parts) * size
        return Array(1, 1, share) if model.shared_states else Array(1, rank.size, share)
    if model.shared_states or conv.channels_first:
        rows, parts = 1, [part * conv.window * size for part in conv.parts]
    else:
        rows, parts = conv.window, [part * size for part in conv.parts]
    return _state(model, sum(parts)) if model.shared_states else Array(rows, model.heads, parts[0], parts=(*parts[1:],))


def _state(model: Model, head_bytes: int) -> Array:
    return Array(1, 1, model.heads * head_bytes) if model.shared_states else Array(1, model.heads, head_bytes)


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
    return MambaSpec(
        state_layers=others, attention_layers=ours, slots=pages, draft=draft, **_states_of(model, stage.rank), **heads
    )


def _states_of(model: Model, rank: Rank) -> dict[str, Any]:
    whole = model.shared_states
    held = list(range(model.heads)) if whole else rank.heads(model.heads)
    fields: dict[str, Any] = {"state_replicas": rank.size if whole else 1}
    if (conv := model.conv) is not None:
        parts = tuple(part * len(held) for part in conv.parts) if conv.said else None
        channels = sum(parts or conv.parts)
        fields |= {"conv_window": conv.window, "conv_channels": channels, "conv_channels_first": conv.channels_first}
        fields |= {"conv_parts": parts}
    if model.ssm is not None:
        unit, first, total = 1, held[0], model.heads
        fields |= {"ssm_shape": (len(held), *model.ssm)}
    elif conv is not None and conv.said:  # it has no heads: its first part's channels count
        unit, first, total = conv.parts[0], held[0], model.heads
    else:
        unit, first, total = 1, 0 if whole else rank.number, 1 if whole else rank.size
    return fields | {"state_head_start": first * unit, "state_total_heads": total * unit}


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
    page_tag = zlib.crc32(f"{key} {logical}".encode())
    parts = []
    for number, head_bytes in enumerate((array.head_bytes, *array.parts)):
        token, head, byte = np.ogrid[: array.tokens, : array.heads, :head_bytes]
        places = ((number << 28) + (token << 24) + (head << 16) + byte).astype(np.uint64)[:, heads]
        tags = places + (np.uint64(page_tag) << np.uint64(32))
        mixed: Memory = ((tags * _MIX) >> np.uint64(56)).astype(np.uint8)
        parts.append((mixed.swapaxes(0, 1) if array.heads_first else mixed).reshape(len(token), -1))
    return np.concatenate(parts, axis=1).reshape(-1)


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
    """One request: what each side has, in which order they speak, and what is wrong with it, if anything."""

    model: Model
    sources: list[Stage]  # every rank of every stage of the sending side
    receive_requests: list[Stage]  # some ranks of some stages of the receiving side
    sent: range  # main's pages at the sources
    wanted: range  # main's pages at the receive requests
    end_tokens: tuple[int | None, int | None]  # the position after the last token, where the sources, receivers say it
    sent_state: Window  # the window's or state's list at the sources
    wanted_state: Window  # the same at the receive requests
    cuts: list[list[int]]  # after how many pages of main each source cuts its chunks
    turns: list[int]  # who speaks next: sources from 0 on, then receive requests
    fault: str  # what is wrong
    seed: int  # of the page maps

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
    conv = draw(st.none() | _convs())
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
        shared_states=draw(st.integers(0, 3)) == 0,
    )


@st.composite
def _convs(draw: st.DrawFn) -> Conv:
    said, channels_first = draw(st.booleans()), draw(st.booleans())
    parts = draw(st.sampled_from([(1,), (2, 2, 4), (1, 3), (3, 3, 3)]))
    return Conv(draw(st.integers(1, 3)), parts, said, channels_first)


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
    prefix = draw(st.integers(0, (tokens if model.kind == "mamba" else tokens - 1) // size))
    start = draw(st.integers(0, min(prefix, pages - 1)))
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


# -- the parties

FIRST_TOKEN = 42
SPARE_PAGES = 8
STRANGER = 999


class Party:
    """One side's rank: its session, its pool, and the pages that it names."""

    def __init__(self, harness: TransferHarness, case: Transfer, number: int, chance: random.Random) -> None:
        self.is_receive_request = number >= len(case.sources)
        self.stage = [*case.sources, *case.receive_requests][number]
        self.session = harness.session()
        model = case.model
        if case.fault == "width" and not self.is_receive_request:
            model = model._replace(dims=(model.dims[0], model.dims[1] + 1))
        if case.fault == "scale" and not self.is_receive_request:
            model = model._replace(wrong_scale=True)
        self.arrays = arrays_of(model, self.stage)
        state = case.wanted_state if self.is_receive_request else case.sent_state
        pages = max(len(case.sent), len(case.wanted), len(state.numbers)) + SPARE_PAGES + chance.randrange(4)
        views: tuple[Literal["paged", "fia"], ...] = ("paged",) if model.kind == "mla" else ("paged", "fia")
        manifest = manifest_of(spec_of(model, self.stage, pages, chance.choice(views)))
        self.pool = harness.pool_of(f"pool{number}", manifest)
        self.components = {one.name for one in manifest.components}
        self.main = self._some_pages("main", case.wanted if self.is_receive_request else case.sent, chance)
        self.state = self._some_pages(model.state or "", state.numbers, chance)
        self.chunks = self._chunks([] if self.is_receive_request else case.cuts[number])

    def _some_pages(self, component: str, numbers: range, chance: random.Random) -> PageIds:
        if component not in self.components:
            return np.empty(0, np.int64)
        allocator = self.pool.allocator_of(component)
        ids = allocator.allocate(self.session, allocator.free_count - 1).tolist()
        return np.array(chance.sample(ids, len(numbers)), np.int64)

    def _chunks(self, cuts: list[int]) -> list[range]:
        bounds = [0, *(cuts if "main" in self.components else ()), len(self.main)]
        return [range(start, stop) for start, stop in itertools.pairwise(bounds)]

    def lists(self, case: Transfer, chunk: range, *, last: bool) -> list[tuple[PageList, PageIds]]:
        named: list[tuple[PageList, PageIds]] = []
        if "main" in self.components:
            ids = self.main[chunk.start : chunk.stop]
            first = (case.wanted if self.is_receive_request else case.sent).start + chunk.start
            end = case.end_tokens[self.is_receive_request]
            tokens = end - first * case.model.page_size if last and end is not None and len(ids) else None
            cut = len(ids) // 2 if case.seed % 3 == 0 else 0  # in one list, or in two without a gap
            if cut:
                named.append((PageList(component="main", first_page=first, pages=cut), ids[:cut]))
                tokens = tokens and tokens - cut * case.model.page_size
            main = PageList(component="main", first_page=first + cut, pages=len(ids) - cut, tokens=tokens)
            named.append((main, ids[cut:]))
            if "draft" in self.components and case.seed % 2:
                named.append((PageList(component="draft", first_page=first, pages=len(ids)), ids))
        if case.model.state in self.components and last:
            state = case.wanted_state if self.is_receive_request else case.sent_state
            where = None if state.plain else state.first
            one = PageList(component=case.model.state, first_page=where, pages=len(self.state), none=state.none)
            named.append((one, self.state))
        return named


class Run:
    """All parties of a transfer in one daemon, and what they say."""

    def __init__(self, case: Transfer) -> None:
        self.case = case
        self.chance = random.Random(case.seed)  # noqa: S311  page maps, no secrets
        self.harness = TransferHarness()
        count = len(case.sources) + len(case.receive_requests)
        self.parties = [Party(self.harness, case, number, self.chance) for number in range(count)]
        self.sources, self.receive_requests = self.parties[: len(case.sources)], self.parties[len(case.sources) :]
        self.said: Counter[int] = Counter()
        for one in self.sources:
            memory = np.random.default_rng(case.seed).integers(0, 256, one.pool.region.size_bytes, np.uint8)
            held = {"main": dict(zip(one.main.tolist(), case.sent, strict=False))}
            held["draft"] = held["main"]
            held[case.model.state or ""] = dict(zip(one.state.tolist(), case.sent_state.numbers, strict=False))
            put_pages(memory, one.pool.manifest, one.arrays, one.stage.rank, held)
            write_region(one.pool.region, memory)
        for one in self.receive_requests:
            fill_region(one.pool.region, UNTOUCHED)
        self.spoilt = self._spoil()

    def _spoil(self) -> set[str]:
        """Put a wrong page in a list, if the fault is one; return what it is refused with."""
        fault = self.case.fault
        if fault == "page twice" and len(self.receive_requests[0].main) > 1:
            self.receive_requests[0].main[1] = self.receive_requests[0].main[0]
            return {"DUPLICATE_PAGE"}
        spoilt = self.chance.choice([self.receive_requests[0], self.sources[0]])
        if fault == "foreign page" and len(spoilt.main):
            (spoilt.main[-1],) = spoilt.pool.allocator_of("main").allocate(STRANGER, 1)
            return {"NOT_OWNER"}
        return set()

    def speak(self, number: int) -> None:
        one, case = self.parties[number], self.case
        turn, self.said[number] = self.said[number], self.said[number] + 1
        if turn >= len(one.chunks):  # it has fewer chunks than pages of main would make
            return
        last = turn == len(one.chunks) - 1
        lists = one.lists(case, one.chunks[turn], last=last)
        if one.is_receive_request:
            self.harness.receive(
                one.session, one.pool, lists, sources=len(self.sources), destinations=len(self.receive_requests)
            )
            return
        carries = last and (number == len(self.sources) - 1 or (case.fault == "token twice" and number == 0))
        token = FIRST_TOKEN if carries else None
        self.harness.send(one.session, one.pool, lists, last=last, first_token=token)

    def copy_some(self) -> None:
        ops = list(self.harness.transport.under_way)
        for op in self.chance.sample(ops, self.chance.randint(0, len(ops))):
            self.harness.transport.finish(op)

    def until_refused(self) -> str:
        for number in self.case.turns:
            try:
                self.speak(number)
            except KvferryError as error:
                return error.code
            self.copy_some()
        self.harness.transport.finish_all()
        return ""


def refusals(case: Transfer) -> set[str]:
    """Return the codes of all that is wrong with a transfer; any of them may be found first."""
    codes = set()
    for receive_request in case.receive_requests:
        codes |= _main_refusals(case, receive_request) | _state_refusals(case, receive_request)
        sent = {layer for one in case.sources for layer in one.layers}
        wanted = set(receive_request.layers) - set(case.model.other_layers if case.wanted_state.none else ())
        if wanted - sent:
            codes.add("UNCOVERED_ENTRY")
    if case.fault == "token twice" and len(case.sources) > 1:
        codes.add("FIRST_TOKEN_TWICE")
    return codes


def _main_refusals(case: Transfer, receive_request: Stage) -> set[str]:
    model, codes = case.model, set()
    stages = [*case.sources, receive_request]
    has_main = [bool({*one.layers} & {*model.layers}) or one.draft_layers > 0 for one in stages]
    if has_main[-1]:
        if {*receive_request.layers} & {*model.layers} and not {*case.wanted} <= {*case.sent}:
            codes |= {"INCOMPLETE", "UNCOVERED_ENTRY"}
        clash = case.sent.stop > case.wanted.stop or case.fault == "tokens"
        of_itself = case.fault == "tokens" and -(-(case.end_tokens[1] or 0) // model.page_size) != case.wanted.stop
        if of_itself or (any(has_main[:-1]) and clash):
            codes.add("LENGTH_MISMATCH")
    if any(
        {*one.layers} & {*receive_request.layers} & {*model.layers}
        or min(one.draft_layers, receive_request.draft_layers)
        for one in case.sources
    ):
        codes |= _array_refusals(case, receive_request)
    return codes


def _array_refusals(case: Transfer, receive_request: Stage) -> set[str]:
    model, codes = case.model, set()
    shards = {min(one.rank.size, model.heads) for one in (case.sources[0], receive_request)}
    if case.fault == "width" or (model.scales == "page" and len(shards) > 1):
        codes.add("GEOMETRY_MISMATCH")
    if case.fault == "scale" and model.scales == "head" and model.heads - 1 in receive_request.rank.heads(model.heads):
        codes.add("SCALE_MISMATCH")
    return codes


def _state_refusals(case: Transfer, receive_request: Stage) -> set[str]:
    model, ours, theirs = case.model, case.sent_state, case.wanted_state
    wanted = {*receive_request.layers} & {*model.other_layers}
    both = [one for one in case.sources if {*one.layers} & {*model.other_layers} and wanted]
    if not both or theirs.none:
        return set()
    shared = any({*one.layers} & wanted for one in both)
    codes = set()
    if not ours.numbers:
        codes.add("EMPTY_STATE")
    elif not (ours.plain or theirs.plain) and not {*theirs.numbers} <= {*ours.numbers}:
        codes.add("WINDOW_MISMATCH")
    if shared and model.kind == "hybrid_swa":
        codes |= _array_refusals(case, receive_request)
    elif shared and both[0].rank.size != receive_request.rank.size and not model.shared_states:
        codes |= {"GEOMETRY_MISMATCH"} if model.conv is not None and not model.conv.said else set()
    return codes


def expected(case: Transfer, receive_request: Party) -> tuple[Memory, int]:
    """Return a destination's memory as it must be in the end, and how many bytes of it must have moved."""
    sent = {key for one in case.sources for key in arrays_of(case.model, one)}
    state = dict(zip(case.wanted_state.numbers, receive_request.state.tolist(), strict=False))
    pages = zip(receive_request.main.tolist(), case.wanted, strict=False)
    held: Held = {"main": {page: number for page, number in pages if number in case.sent}}
    held["draft"] = held["main"]  # optional: where main has no layers here, nobody misses a page of it
    held[case.model.state or ""] = {state[to]: number for number, to in case.state_pairs()} if state else {}
    memory = np.full(receive_request.pool.manifest.region_bytes, UNTOUCHED, np.uint8)
    arrays = {key: array for key, array in receive_request.arrays.items() if key in sent}
    put_pages(memory, receive_request.pool.manifest, arrays, receive_request.stage.rank, held)
    moved = sum(
        len(held[key[0]]) * len(tagged_page(key, array, receive_request.stage.rank, 0)) for key, array in arrays.items()
    )
    return memory, moved


def trims(case: Transfer, source: Stage, receive_request: Stage) -> int:
    heads = {*source.rank.heads(case.model.heads)} & {*receive_request.rank.heads(case.model.heads)}
    meet = bool(heads) or (case.model.kind == "mamba" and case.model.shared_states)
    layers = {*source.layers} & {*receive_request.layers} & {*case.model.other_layers}
    if not (meet and layers and case.lengths_clash):
        return 0
    return abs(len(case.sent_state.numbers) - len(case.wanted_state.numbers))


def named_bytes(pool: Pool, party: Party, case: Transfer) -> npt.NDArray[np.bool_]:
    """Return which bytes of a destination its lists name: ``(region_bytes,)`` bool."""
    named = np.zeros(pool.manifest.region_bytes, np.bool_)
    for entry in pool.manifest.entries:
        for page in (party.state if entry.component == case.model.state else party.main).tolist():
            named[entry.base + page * entry.page_bytes :][: entry.page_bytes] = True
    return named


@DEVICE.examples(300)
@given(transfers())
def test_every_byte_arrives_and_no_other_changes(case: Transfer) -> None:
    run = Run(case)
    must = refusals(case) | run.spoilt
    refused = run.until_refused()
    event(refused or f"{case.model.kind}: {len(case.sources)} to {len(case.receive_requests)}")
    if must or refused:
        assert refused in must, (refused, must)
        for one in run.receive_requests:
            assert (read_region(one.pool.region)[~named_bytes(one.pool, one, case)] == UNTOUCHED).all()
        return
    for source in run.sources:
        assert run.harness.outcomes(source.session) == ["OK", "settled"]
        of_receives = sum(trims(case, source.stage, receive_request.stage) for receive_request in run.receive_requests)
        assert run.harness.finished(source.session).trimmed_pages == of_receives
    for receive_request in run.receive_requests:
        assert run.harness.outcomes(receive_request.session) == ["OK", "settled"]
        memory, moved_bytes = expected(case, receive_request)
        assert (read_region(receive_request.pool.region) == memory).all()
        done = run.harness.finished(receive_request.session)
        assert done.moved_bytes == moved_bytes
        assert done.first_token == FIRST_TOKEN
        assert done.trimmed_pages == sum(trims(case, source.stage, receive_request.stage) for source in run.sources)
    assert len(run.harness.warned) == sum(
        bool(trims(case, s.stage, r.stage)) for s in run.sources for r in run.receive_requests
    )
