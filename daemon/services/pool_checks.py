"""What a pool must be: the one that an earlier request made, or in the memory that an engine registers for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from kvferry.daemon.process.devices import RegisteredSegment
from kvferry.pools.devices.base import Region
from kvferry.pools.devices.host import HostRegion
from kvferry.pools.planning.arrays import Held, arrays_of, check_apart, check_form, check_free, check_storage, placed_at
from kvferry.pools.planning.manifest import each_array, spaces_of, windows_of
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import InvalidFieldError, PoolExistsError
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.limits import MAX_PAYLOAD_BYTES
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.pool_messages import RegisteredArrays
from kvferry.protocol.session_stream import Share, TorchShare

_COMPARED: Final = (
    "pages", "dtype", "scales", "page_tokens", "heads", "head_start", "total_heads", "shape", "page_bytes", "format"
)  # fmt: skip


class PoolTraits(NamedTuple):
    """What a pool is, besides its memory and pages; see ``Pool``."""

    manifest: Manifest
    device: str
    model: ModelIdentity | None = None
    max_payload_bytes: int = MAX_PAYLOAD_BYTES
    registered_by: int | None = None
    ends_with: int | None = None


def traits_of(pool: Pool) -> PoolTraits:
    """Return what an existing pool is."""
    return PoolTraits(
        pool.manifest, pool.region.device, pool.model, pool.max_payload_bytes, pool.registered_by, pool.ends_with
    )


def check_same(name: str, existing: PoolTraits, wanted: PoolTraits, *, held: str = "", end: str = "") -> None:
    """Check that an existing pool is the one that CREATE_POOL asks for.

    Args:
        name: the pool's name.
        existing: what it is.
        wanted: what is asked for.
        held: who holds its pages, for the error's text.
        end: the instance that it ends with, or the daemon, for the error's text.

    Raises:
        PoolExistsError: it has another device, layout, size, window, set of optional components, model, lifetime or
            bound of payloads; the error names the field, and never shows a salt.
    """

    def differs(field: str, how: str, whose: str = held) -> PoolExistsError:
        return PoolExistsError(f"pool {name!r} exists{how}{whose and f'; {whose}'}", field=field)

    if existing.device != wanted.device:
        raise differs("device", f" on {existing.device}, asked for on {wanted.device}")
    has, asked = existing.manifest, wanted.manifest
    if (has.layout_digest, spaces_of(has)) != (asked.layout_digest, spaces_of(asked)):
        raise differs(
            "spec",
            f" with {_pages_text(has)} pages of layout {has.layout_digest}; "
            f"asked for {_pages_text(asked)} of {asked.layout_digest}: {_difference(has, asked)}",
        )
    if windows_of(has) != windows_of(asked):
        raise differs("spec", f" with {_windows_text(has)}, asked for with {_windows_text(asked)}")
    if _optional(has) != _optional(asked):
        raise differs(
            "spec",
            f": a transfer may leave out {_optional(has) or 'nothing'}, asked for one that may leave out "
            f"{_optional(asked) or 'nothing'}",
        )
    if existing.model != wanted.model:
        field = _model_field(existing.model, wanted.model)
        how = f" for {_model_text(existing.model)}, asked for {_model_text(wanted.model)}"
        raise differs(field, " with another cache salt" if field == "model.salt" else how, "")
    if existing.ends_with != wanted.ends_with:
        lifetime = "daemon" if wanted.ends_with is None else "instance"
        raise differs("lifetime", f" and ends with {end}, asked for with lifetime {lifetime!r}: attach it", "")
    if existing.max_payload_bytes != wanted.max_payload_bytes:
        raise differs(
            "max_payload_bytes",
            f" for payloads of at most {existing.max_payload_bytes} bytes, asked for {wanted.max_payload_bytes}",
            "",
        )


def _difference(existing: Manifest, wanted: Manifest) -> str:
    """Return the first difference between two manifests, for an error's text."""
    theirs, ours = ({(e.component, e.role, e.layer): e for e in one.entries} for one in (existing, wanted))
    for missing, where in (
        (theirs.keys() - ours.keys(), "only in the pool"),
        (ours.keys() - theirs.keys(), "not in the pool"),
    ):
        if missing:
            component, role, layer = min(missing)
            return f"{component}/{role}/{layer} is {where}"
    for key, entry in theirs.items():
        for field in _COMPARED:
            has, asked = getattr(entry, field), getattr(ours[key], field)
            if has != asked:
                return f"{field} of {entry.name} is {has}, asked for {asked}"
    return "the order of the bytes differs"


def _model_field(existing: ModelIdentity | None, wanted: ModelIdentity | None) -> str:
    """Return the first field in which two model identities differ; none only equals none."""
    fields = () if existing is None or wanted is None else existing.__struct_fields__
    return next((f"model.{one}" for one in fields if getattr(existing, one) != getattr(wanted, one)), "model")


def _model_text(model: ModelIdentity | None) -> str:
    return f"model {model.label!r}" if model else "no model"


def _optional(manifest: Manifest) -> str:
    """Return the pool's optional components, sorted, for comparing and for an error's text."""
    return ", ".join(sorted({one.name for one in manifest.components} & set(manifest.optional_components)))


def _windows_text(manifest: Manifest) -> str:
    return ", ".join(f"a window of {tokens} tokens in {name}" for name, tokens in windows_of(manifest).items())


def _pages_text(manifest: Manifest) -> str:
    spaces = spaces_of(manifest)
    return ", ".join(f"{pages} {space}" for space, pages in spaces.items()) if len(spaces) > 1 else f"{manifest.pages}"


# -- memory that engines register: against the manifest, and against other pools in the same memory


class MemoryInUse(NamedTuple):
    """A region and the manifest of a pool whose arrays lie in it; the pool may be coming or leaving."""

    region: Region
    manifest: Manifest


def placed_in(
    region: HostRegion, manifest: Manifest, said: Sequence[RegisteredArrays], in_use: Iterable[MemoryInUse]
) -> Manifest:
    """Return the manifest of a pool in a registered region, with its arrays at the offsets that the engine gives.

    Raises:
        InvalidFieldError: an array is not exactly what the spec needs, does not lie within the memory, or has bytes of
            another array or another pool; the error names the array.
        DuplicateEntryError, UncoveredEntryError: some entry is in two arrays, or in none.
    """
    arrays = arrays_of(manifest, [(one.component, one.role, one.layer) for one in said])
    held, offsets = [], []
    for array, one in zip(arrays, said, strict=True):
        check_form(array, one.shape, one.strides, one.dtype)
        if one.offset_bytes is None:
            raise InvalidFieldError(
                f"{array.name} does not say where in the memory it begins", field=f"{array.name}.offset_bytes"
            )
        check_storage(array, one.offset_bytes, region.size_bytes)
        offsets.append(one.offset_bytes)
        held.append(Held(one.offset_bytes, one.offset_bytes + array.size_bytes, array.name))
    check_apart(held)
    identity = region.identity
    check_free(
        held,
        [
            Held(entry.base, entry.base + entry.pages * entry.page_bytes, entry.name)
            for other in in_use
            if isinstance(other.region, HostRegion) and other.region.identity == identity
            for entry in each_array(other.manifest.entries)
        ],
    )
    return placed_at(manifest, arrays, offsets, region.size_bytes)


def registered_segments(
    manifest: Manifest, said: Sequence[RegisteredArrays], shares: Sequence[Share]
) -> list[RegisteredSegment]:
    """Return the registered tensors, checked against the manifest; the driver checks the memory itself later."""
    arrays = arrays_of(manifest, [(one.component, one.role, one.layer) for one in said])
    parts = []
    for array, one, share in zip(arrays, said, shares, strict=True):
        check_form(array, one.shape, one.strides, one.dtype)
        if not isinstance(share, TorchShare):  # memory by its driver handle could be a pool of ours
            raise InvalidFieldError(
                f"{array.name} is registered by {share!r}, not as a tensor", field=f"{array.name}.share"
            )
        check_storage(array, share.offset_bytes, share.storage_bytes)
        parts.append(RegisteredSegment(array, share))
    return parts
