"""Pointer lists as SGLang exchanges them: the main list and the state list, in SGLang's order.

An engine's connector registers memory with three parallel lists: address, length and item length of each array. An item
is a page (for a state: a slot), even where a row of the array is a token. Sources: ``get_contiguous_buf_infos`` and
``get_state_buf_infos`` of SGLang's pools, and ``setup_state_kv_args``. Positions in these lists mean nothing across
pools: kvferry itself pairs by (component, role, layer).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from kvferry.pools.planning.manifest import each_array
from kvferry.protocol.manifests import Entry, Manifest

INDEX_ROLES = ("index_k", "index_scale")
SCALE_ROLES = ("k_scale", "v_scale")
MAIN_ROLES = ("k", "v", *SCALE_ROLES, *INDEX_ROLES)
STATE_ROLES = ("conv", "ssm", "k", "v", *SCALE_ROLES)


class PointerList(msgspec.Struct, frozen=True):
    """Parallel lists with one element per array.

    ``data_ptrs`` are addresses, ``data_lens`` and ``item_lens`` are in bytes, ``names`` are ``component/role/layer``.
    """

    data_ptrs: tuple[int, ...]
    data_lens: tuple[int, ...]
    item_lens: tuple[int, ...]
    names: tuple[str, ...]


class EngineLists(msgspec.Struct, frozen=True):
    """An engine's lists of KV data and of state data; either may be empty."""

    main: PointerList
    state: PointerList


def engine_lists(manifest: Manifest, base_address: int = 0) -> EngineLists:
    """Return a pool's lists.

    The main list is, component by component: k of all layers, v, the scales that travel with pages, index_k and
    index_scale; main's first, then of each further group those that only it has, then the draft's. An array shared by
    layers of several groups is listed once, under the first one's name.
    The state list is the state slots (conv, ssm), the window's k and v (and scales), then the indexer's arrays again,
    the draft's last.

    Args:
        manifest: the pool's manifest.
        base_address: where its region is mapped; 0 gives offsets.
    """
    paged = [one.name for one in manifest.components if one.kind == "paged"]
    states = [one.name for kind in ("state", "window") for one in manifest.components if one.kind == kind]
    main = _select(manifest, paged, MAIN_ROLES)
    state = [*_select(manifest, states, STATE_ROLES), *_select(manifest, paged, INDEX_ROLES)]
    return EngineLists(main=_pointers(main, base_address), state=_pointers(state, base_address))


def _select(manifest: Manifest, components: Iterable[str], roles: Iterable[str]) -> list[Entry]:
    roles = tuple(roles)
    return [
        entry
        for component in components
        for role in roles
        for entry in manifest.entries
        if (entry.component, entry.role) == (component, role)
    ]


def _pointers(selected: list[Entry], base_address: int) -> PointerList:
    entries = each_array(selected)
    return PointerList(
        data_ptrs=tuple(base_address + entry.base for entry in entries),
        data_lens=tuple(entry.pages * entry.page_bytes for entry in entries),
        item_lens=tuple(entry.page_bytes for entry in entries),
        names=tuple(entry.name for entry in entries),
    )
