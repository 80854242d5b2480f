"""KV cache groups: layers that share a block table, in a pool whose groups take their pages from one allocator.

Each group is a component: ``main``, ``group1``, ``group2`` and so on. A page is one group's at a time, so one array
holds a layer of each: those at the same place of their groups. Source: vLLM's hybrid KV cache manager, whose
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
    """Return the manifest of a pool whose layers are in these groups, or all in ``main`` without any.

    Args:
        groups: the layers of each; a group without layers here is no component, unless a draft lies on its pages.
        part: the component ``main``, with all layers.
        entries: of all layers, as of ``main``.
        drafts: the draft's entries and components.
        optional_components: those that no source of a transfer has to cover.

    Raises:
        InvalidFieldError: a layer is in no group, in two, or not of the pool; or see ``lay_out``.
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
    """Return each layer's group and its place in it."""
    found: dict[int, tuple[int, int]] = {}
    for number, group in enumerate(groups):
        field = f"groups[{number}]"
        check_ascending(group, field)
        for place, layer in enumerate(group):
            if layer not in layers:
                raise InvalidFieldError(f"layer {layer} is not one of {layers[0]}..{layers[-1]}", field=field)
            if layer in found:
                raise InvalidFieldError(f"layer {layer} is in group {found[layer][0]} too", field=field)
            found[layer] = (number, place)
    left = [layer for layer in layers if layer not in found]
    if left:
        raise InvalidFieldError(f"layer {left[0]} is in no group", field="groups")
    return found
