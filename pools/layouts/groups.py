"""KV cache groups: layers that share a block table; all groups of a pool allocate pages from one page space.

Each group is a component: ``main``, ``group1``, ``group2`` and so on. A page belongs to one group at a time, so the
layers at the same index of their groups share one array. Source: vLLM's hybrid KV cache manager, whose
``KVCacheTensor.shared_by`` names these layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kvferry.pools.layouts.parts import Paged, check_ascending, main_component
from kvferry.pools.planning.manifest import lay_out
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.manifests import Component, Entry, Manifest


def lay_out_groups(
    groups: Sequence[Sequence[int]],
    part: Paged,
    entries: Sequence[Entry],
    drafts: tuple[Sequence[Entry], Sequence[Component]],
    optional_components: Sequence[str],
) -> Manifest:
    """Return the manifest of a pool whose layers are in these groups; without groups, all are in ``main``.

    Args:
        groups: the layers of each group. A group without layers in this pool is left out, except the first if there is
            a draft, which uses its pages.
        part: the component ``main``, with all layers.
        entries: the entries of all layers, as of ``main``.
        drafts: the draft's entries and components.
        optional_components: components that no source of a transfer has to cover.

    Raises:
        InvalidFieldError: a layer is in no group, in two groups, or not in the pool; or see ``lay_out``.
    """
    draft_entries, draft_components = drafts
    if not groups:
        main = [main_component(part.pages), *draft_components]
        return lay_out([*entries, *draft_entries], main, optional_components)
    group_of = _check_groups(groups, part.layers)
    roles = list(dict.fromkeys(entry.role for entry in entries))
    places = [(roles.index(entry.role), *reversed(group_of[entry.layer])) for entry in entries]
    ordered = sorted(zip(places, entries, strict=True), key=lambda one: one[0])
    grouped = [msgspec.structs.replace(entry, component=_name(group)) for (_, _, group), entry in ordered]
    components = [
        msgspec.structs.replace(main_component(part.pages), name=_name(number), group=number > 0)
        for number, layers in enumerate(groups)
        if layers or (number == 0 and draft_components)
    ]
    return lay_out(
        [*grouped, *draft_entries],
        [*components, *draft_components],
        optional_components,
        [*((role, place) for (role, place, _), _ in ordered), *range(len(draft_entries))],
    )


def _name(group: int) -> str:
    return f"group{group}" if group else MAIN


def _check_groups(groups: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, tuple[int, int]]:
    """Return each layer's group and its index in the group."""
    found: dict[int, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        field = f"groups[{number}]"
        check_ascending(group, field)
        for place, layer in enumerate(group):
            if layer not in layers:
                raise InvalidFieldError(f"layer {layer} is not one of {layers[0]}..{layers[-1]}", field=field)
            if layer in found:
                raise InvalidFieldError(f"layer {layer} is also in group {found[layer][0]}", field=field)
            found[layer] = (number, place)
    left = [layer for layer in layers if layer not in found]
    if left:
        raise InvalidFieldError(f"layer {left[0]} is in no group", field="groups")
    return found
