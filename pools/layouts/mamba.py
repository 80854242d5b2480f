"""State of Mamba and gated delta nets: one slot per request in each state layer, with or without attention layers.

Device arrays are conv ``(layers, slots, conv_window, conv_channels)``, or with the channels first, and ssm ``(layers,
slots, heads, ...)``; a page is one slot, slot 0 is padding. In a host cache a slot holds all layers, ``(slots, layers,
...)``. Source: SGLang's ``MambaPool`` and ``MambaPoolHost``; its channels are first, in KDA's layers the window.
"""

from __future__ import annotations

import math
from typing import TypeVar

import msgspec

from kvferry.pools.layouts.parts import (
    FRACTAL_BYTES,
    ND,
    PAGE_FIRST_FORMATS,
    Paged,
    attention_entries,
    check_apart,
    check_ascending,
    check_view,
    entry_of,
    heads_of,
    main_components,
    main_part,
    mha_draft_entries,
    shard_of,
)
from kvferry.pools.planning.geometry import CHANNELS_FIRST, CONV, MAX_PAGES, RankHeads, dtype_bytes
from kvferry.pools.planning.manifest import lay_out
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import Component, Entry, MambaSpec, Manifest

MAMBA = "mamba"
T = TypeVar("T")


def manifest_of(spec: MambaSpec) -> Manifest:
    """Return the manifest: k and v of the attention layers, the draft's, then conv and ssm of the state layers.

    Raises:
        InvalidFieldError: the layers, shapes, heads, dtypes or sizes are invalid.
    """
    check_view(spec)
    check_ascending(spec.state_layers, "state_layers")
    check_ascending(spec.attention_layers, "attention_layers")
    check_apart(spec.state_layers, spec.attention_layers, "attention_layers")
    if not spec.state_layers and not spec.attention_layers:
        raise InvalidFieldError("neither state nor attention layers given", field="state_layers")
    has_main = bool(spec.attention_layers or spec.draft)
    part, head_dim = _attention(spec if has_main else _completed(spec))
    components = main_components(part.pages, spec.draft) if has_main else []
    entries = attention_entries(part, head_dim, spec.v_head_dim)
    entries += mha_draft_entries(spec.draft, part, head_dim, spec.v_head_dim)
    if spec.state_layers:
        slots = _slots(spec)
        components.append(Component(name=MAMBA, space=MAMBA, pages=slots, kind="state"))
        entries += _state_entries(spec, slots)
    return lay_out(entries, components, spec.optional_components)


def _attention(spec: MambaSpec) -> tuple[Paged, int]:
    page_size, tokens = _required(spec.page_size, "page_size"), _required(spec.tokens, "tokens")
    part = main_part(spec, spec.attention_layers, tokens, page_size, _required(spec.kv_heads, "kv_heads"))
    return part, _required(spec.head_dim, "head_dim")


def _completed(spec: MambaSpec) -> MambaSpec:
    """Return the spec of a stage without attention layers, completed so that its given fields can be checked."""
    page_size = spec.page_size or spec.tokens or 1
    return msgspec.structs.replace(
        spec,
        page_size=page_size,
        tokens=spec.tokens or page_size,
        kv_heads=spec.kv_heads or 1,
        head_dim=spec.head_dim or FRACTAL_BYTES,
    )


def _slots(spec: MambaSpec) -> int:
    if spec.slots >= MAX_PAGES:
        raise InvalidFieldError(f"{spec.slots} slots; at most {MAX_PAGES - 1}", field="slots")
    return spec.slots + 1


def _state_entries(spec: MambaSpec, slots: int) -> list[Entry]:
    if (spec.conv_window is None) != (spec.conv_channels is None):
        missing = "conv_window" if spec.conv_window is None else "conv_channels"
        raise InvalidFieldError("conv needs both conv_window and conv_channels", field=missing)
    entries: list[Entry] = []
    heads = _state_heads(spec)
    if spec.conv_window is not None and spec.conv_channels is not None:
        _check_parts(spec, heads)
        shape = (spec.conv_window, spec.conv_channels)
        form = CHANNELS_FIRST if spec.conv_channels_first else CONV if spec.conv_parts else ND
        form += "".join(f"_{part // heads.count}" for part in spec.conv_parts or ())
        entries += _entries(
            spec,
            "conv",
            shape[::-1] if spec.conv_channels_first else shape,
            spec.conv_dtype or spec.dtype,
            slots,
            heads if spec.conv_parts else shard_of(heads, "state_head_start"),
            form,
        )
    if spec.ssm_shape is not None:
        entries += _entries(spec, "ssm", spec.ssm_shape, spec.ssm_dtype, slots, heads, ND)
    if not entries:
        raise InvalidFieldError("state layers need conv, ssm or both", field="ssm_shape")
    return entries


def _state_heads(spec: MambaSpec) -> RankHeads:
    held = (spec.ssm_shape or spec.conv_parts or (1,))[0]
    return heads_of(spec.state_head_start, held, spec.state_total_heads, spec.state_replicas, prefix="state_")


def _check_parts(spec: MambaSpec, heads: RankHeads) -> None:
    if spec.conv_parts is None:
        return
    if sum(spec.conv_parts) != spec.conv_channels:
        raise InvalidFieldError(
            f"{' + '.join(map(str, spec.conv_parts))} are not conv_channels, {spec.conv_channels}", field="conv_parts"
        )
    uneven = [part for part in spec.conv_parts if part % heads.count]
    if uneven:
        raise InvalidFieldError(f"{uneven[0]} channels of {heads.count} heads", field="conv_parts")


def _entries(
    spec: MambaSpec, role: str, shape: tuple[int, ...], dtype: str, slots: int, heads: RankHeads, form: str
) -> list[Entry]:
    layers = spec.state_layers
    if spec.view in PAGE_FIRST_FORMATS:  # numbered as the last one, see ``paged_entries``
        form = f"{PAGE_FIRST_FORMATS[spec.view]}_{len(layers)}_{form}"
        layers, shape = layers[-1:], (len(layers), *shape)
    return [
        entry_of(
            (MAMBA, role, layer),
            pages=slots,
            page_bytes=dtype_bytes(dtype) * math.prod(shape),
            heads=heads,
            dtype=dtype,
            shape=(slots, *shape),
            form=form,
        )
        for layer in layers
    ]


def _required(value: T | None, field: str) -> T:
    if value is None:
        raise InvalidFieldError("required for attention layers", field=field)
    return value
