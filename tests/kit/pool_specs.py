"""Pool specs: one of each kind, and hypothesis strategies for all that make sense, small enough to be laid out."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.mla import PACKED_DTYPE
from kvferry.pools.planning.geometry import DTYPE_BYTES
from kvferry.pools.planning.scales import EIGHT_BIT_DTYPES
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MambaSpec, Manifest, MhaSpec, MlaSpec, PoolSpec

DTYPES = sorted(DTYPE_BYTES)


# -- one spec of each kind, to be changed in a field.

MHA = MhaSpec(layers=3, tokens=256, page_size=128, kv_heads=2, head_dim=8, v_head_dim=4, dtype="float16")
JOINED_MHA = msgspec.structs.replace(MHA, joined=True)
MLA = MlaSpec(
    layers=4, first_layer=10, tokens=1024, page_size=128, kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128,
    dtype="bfloat16",
)  # fmt: skip
JOINED = msgspec.structs.replace(MLA, joined=True)
PACKED = msgspec.structs.replace(MLA, dtype="float8_e4m3fn", packed="ascend", index_scale=True)
SWA = HybridSwaSpec(
    full_layers=(5, 11), window_layers=(0, 1, 2, 3, 4, 6, 7, 8, 9, 10), tokens=1024, window_tokens=256, window=200,
    page_size=128, kv_heads=4, head_dim=16, v_head_dim=8, dtype="bfloat16",
)  # fmt: skip
MAMBA = MambaSpec(
    state_layers=(0, 1, 2, 4), slots=6, conv_window=3, conv_channels=64, ssm_shape=(4, 8, 16), attention_layers=(3,),
    tokens=256, page_size=128, kv_heads=2, head_dim=16, dtype="bfloat16",
)  # fmt: skip


def changed(spec: PoolSpec, **fields: Any) -> Manifest:  # noqa: ANN401  any field of a spec
    """Return the manifest of a spec with other fields."""
    return manifest_of(msgspec.structs.replace(spec, **fields))


@st.composite
def _heads(draw: st.DrawFn, prefix: str = "") -> dict[str, Any]:
    """Draw heads; those of a part beside others, which may be split otherwise, say of how many."""
    start, count = draw(st.integers(0, 8)), draw(st.integers(1, 4))
    return {
        f"{prefix}kv_heads": count,
        f"{prefix}head_start": start,
        f"{prefix}total_heads": draw(st.integers(start + count, 16) | (st.nothing() if prefix else st.none())),
    }


@st.composite
def _pages(draw: st.DrawFn) -> dict[str, Any]:
    page_size = draw(st.integers(1, 16))
    return {"page_size": page_size, "tokens": page_size * draw(st.integers(1, 5))}


def _view(*views: str) -> st.SearchStrategy[Any]:
    return st.sampled_from(views)


def _width(view: str) -> st.SearchStrategy[int]:
    """Return widths; in the FIA-NZ order those that are fractals of every dtype."""
    return st.integers(1, 2).map(lambda n: n * 32) if view == "nz" else st.integers(1, 9)


@st.composite
def _scaled(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a dtype, and scales where it has 8 bits."""
    dtype = draw(st.sampled_from(DTYPES))
    scales = st.sampled_from([None, 0.5, "page_head"]) if dtype in EIGHT_BIT_DTYPES else st.none()
    return {"dtype": dtype, "k_scale": draw(scales), "v_scale": draw(scales)}


@st.composite
def _draft(draw: st.DrawFn, view: str) -> DraftSpec | None:
    if draw(st.booleans()):
        return None
    return DraftSpec(
        layers=draw(st.integers(1, 2)),
        head_dim=draw(st.none() | _width(view)),
        dtype=draw(st.none() | st.sampled_from(DTYPES)),
        **(
            {name.removeprefix("draft_"): one for name, one in draw(_heads("draft_")).items()}
            if draw(st.booleans())
            else {}
        ),
    )


@st.composite
def mha_specs(draw: st.DrawFn) -> MhaSpec:
    view = draw(_view("paged", "fia", "nz", "hnd"))
    joined = draw(st.booleans())
    return MhaSpec(
        layers=draw(st.integers(1, 4)),
        first_layer=draw(st.integers(0, 40)),
        head_dim=draw(_width(view)),
        v_head_dim=draw(st.none() | _width(view)),
        **({"dtype": draw(st.sampled_from(DTYPES))} if joined else draw(_scaled())),
        joined=joined,
        packing=draw(st.sampled_from([None, "amx"])) if joined and view == "hnd" else None,
        view=view,
        replicas=draw(st.integers(1, 3)),
        draft=draw(_draft(view)),
        index_head_dim=draw(st.none() | _width(view)),
        **draw(_heads()),
        **draw(_pages()),
    )


@st.composite
def mla_specs(draw: st.DrawFn) -> MlaSpec:
    packed: Any = draw(st.sampled_from([None, None, "ds_mla", "ascend"]))
    view: Any = draw(_view("paged", "nz")) if packed is None else "paged"
    layers, first_layer = draw(st.integers(1, 5)), draw(st.integers(0, 40))
    index: dict[str, Any] = {}
    if draw(st.booleans()):
        numbers = st.sets(st.integers(first_layer, first_layer + layers - 1), min_size=1).map(sorted).map(tuple)
        index = {
            "index_head_dim": draw(_width(view)),
            "index_layers": draw(st.none() | st.integers(1, layers) | numbers),
            "index_scale": draw(st.booleans()),
            "index_dtype": draw(st.none() | st.sampled_from(DTYPES)),
        }
    draft = st.builds(
        DraftSpec,
        layers=st.integers(1, 2),
        index_head_dim=st.none() | _width(view),
        qk_rope_head_dim=st.none() | _width(view),
    )
    return MlaSpec(
        layers=layers,
        first_layer=first_layer,
        kv_lora_rank=draw(st.sampled_from([128, 256])),
        qk_rope_head_dim=draw(_width(view)),
        dtype=PACKED_DTYPE if packed else draw(st.sampled_from(DTYPES)),
        packed=packed,
        joined=packed is None and draw(st.booleans()),
        view=view,
        replicas=draw(st.integers(1, 8)),
        draft=draw(st.none() | draft),
        **index,
        **draw(_pages()),
    )


@st.composite
def _two_kinds(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw which of some consecutive layers are of one kind, and which of the other."""
    first = draw(st.integers(0, 40))
    kinds = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    numbered = list(enumerate(kinds, first))
    return tuple(n for n, kind in numbered if kind), tuple(n for n, kind in numbered if not kind)


@st.composite
def hybrid_swa_specs(draw: st.DrawFn) -> HybridSwaSpec:
    full, window = draw(_two_kinds())
    pages = draw(_pages())
    view = draw(_view("paged", "fia", "nz"))
    tokens = pages["page_size"] * draw(st.integers(1, 4))
    other = draw(_heads("window_")) | {"window_head_dim": draw(_width(view))} if draw(st.booleans()) else {}
    return HybridSwaSpec(
        full_layers=full,
        window_layers=window,
        window_tokens=tokens,
        window=draw(st.integers(1, tokens)),
        head_dim=draw(_width(view)),
        v_head_dim=draw(st.none() | _width(view)),
        **draw(_scaled()),
        view=view,
        draft=draw(_draft(view)),
        **other,
        **draw(_heads()),
        **pages,
    )


@st.composite
def mamba_specs(draw: st.DrawFn) -> MambaSpec:
    attention, state = draw(_two_kinds())
    count, rank = draw(st.integers(1, 3)), draw(st.integers(0, 2))
    attention_fields = {"head_dim": draw(st.integers(1, 9)), **draw(_heads()), **draw(_pages())} if attention else {}
    shapes = draw(st.sampled_from(["conv", "ssm", "both"]))
    conv: dict[str, Any] = {"conv_window": draw(st.integers(1, 4)), "conv_channels": draw(st.integers(1, 9))}
    conv["conv_channels_first"] = draw(st.booleans())
    if draw(st.booleans()):
        unit = 1 if shapes == "conv" else count
        conv["conv_parts"] = (unit, *(unit * more for more in draw(st.lists(st.integers(1, 3), max_size=2))))
        conv["conv_channels"] = sum(conv["conv_parts"])
    view = draw(_view("paged", "page_first", "page_first_direct"))
    scaled = draw(_scaled())
    return MambaSpec(
        attention_layers=attention,
        state_layers=state,
        slots=draw(st.integers(1, 5)),
        view=view,
        **(scaled if view == "paged" else {"dtype": scaled["dtype"]}),
        conv_dtype=draw(st.none() | st.sampled_from(DTYPES)),
        ssm_dtype=draw(st.sampled_from(DTYPES)),
        ssm_shape=None if shapes == "conv" else (count, *draw(st.lists(st.integers(1, 4), max_size=2))),
        state_head_start=0 if shapes == "conv" else rank * count,
        state_total_heads=None if shapes == "conv" else count * 3,
        state_replicas=draw(st.integers(1, 2)),
        **attention_fields,
        **({} if shapes == "ssm" else conv),
    )


@st.composite
def page_first_specs(draw: st.DrawFn) -> MhaSpec | MlaSpec:
    """Draw pools of a host cache, whose pages hold all layers."""
    fields: dict[str, Any] = {
        "layers": draw(st.integers(1, 4)),
        "first_layer": draw(st.integers(0, 40)),
        "view": draw(_view("page_first", "page_first_direct")),
        "dtype": draw(st.sampled_from(DTYPES)),
        **draw(_pages()),
    }
    if draw(st.booleans()):
        widths: dict[str, Any] = {"kv_lora_rank": draw(st.integers(1, 9)), "qk_rope_head_dim": draw(st.integers(1, 9))}
        return MlaSpec(joined=draw(st.booleans()), **widths, **fields)
    return MhaSpec(
        head_dim=draw(st.integers(1, 9)), v_head_dim=draw(st.none() | st.integers(1, 9)), **draw(_heads()), **fields
    )


def pool_specs() -> st.SearchStrategy[PoolSpec]:
    """Return specs of every kind."""
    return mha_specs() | mla_specs() | hybrid_swa_specs() | mamba_specs() | page_first_specs()
