"""Pointer lists as today's engines exchange them: the main list and the state list, in SGLang's order.

An engine's connector registers memory by three parallel lists: where each array begins, how long it is, and how long
one of its items is. An item is a page (a slot of a state), also where the array's rows are tokens. Sources:
``get_contiguous_buf_infos`` and ``get_state_buf_infos`` of SGLang's pools, and ``setup_state_kv_args``. Positions in
these lists mean nothing across pools: kvferry itself pairs by (component, role, layer).
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
    """Three parallel lists, an element an array.

    ``data_ptrs`` are addresses, ``data_lens`` and ``item_lens`` bytes; ``names`` are ``component/role/layer``.
    """

    data_ptrs: tuple[int, ...]
    data_lens: tuple[int, ...]
    item_lens: tuple[int, ...]
    names: tuple[str, ...]


class EngineLists(msgspec.Struct, frozen=True):
    """What an engine calls its KV data and its state data; either may be empty."""

    main: PointerList
    state: PointerList


def engine_lists(manifest: Manifest, base_address: int = 0) -> EngineLists:
    """Return a pool's lists.

    The main list is k of all layers, v, scales that travel with pages, index_k and index_scale, then the draft's in the
    same order; an array that layers of several groups share is there once, by the first one's name. The state list is
    the slots of a request (conv, ssm), the window's k and v (and scales), then once more the indexer's arrays, the
    draft's last.

    Args:
        manifest: the pool's.
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
