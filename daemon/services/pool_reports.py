"""Pools in STATUS, and the errors for a CREATE_POOL that asks for an existing pool with other properties."""

from __future__ import annotations

from typing import Final

from kvferry.daemon.control.sessions import Session, SessionRegistry
from kvferry.daemon.services.holders import owner_text
from kvferry.pools.planning.manifest import bytes_per_page, spaces_of, windows_of
from kvferry.pools.pool import Pool
from kvferry.protocol.errors import PoolExistsError
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.manifests import Manifest
from kvferry.protocol.pool_messages import CreatePool
from kvferry.protocol.session_messages import PoolStatus, SpaceStatus

_COMPARED: Final = (
    "pages", "dtype", "scales", "page_tokens", "heads", "head_start", "total_heads", "shape", "page_bytes", "format"
)  # fmt: skip


def status_of(pool: Pool) -> PoolStatus:
    """Return a pool as STATUS shows it."""
    spaces = tuple(
        SpaceStatus(
            space=space,
            page_bytes=bytes_per_page(pool.manifest, space),
            pages=allocator.capacity,
            free=allocator.free_count,
            busy=allocator.busy_count,
        )
        for space, allocator in pool.allocators.items()
    )
    return PoolStatus(
        pool=pool.name,
        tenant=pool.tenant,
        layout_digest=pool.manifest.layout_digest,
        region_bytes=pool.manifest.region_bytes,
        page_bytes=spaces[0].page_bytes,
        pages=spaces[0].pages,
        free=spaces[0].free,
        busy=spaces[0].busy,
        spaces=spaces if len(spaces) > 1 else (),
        device=pool.region.device,
        registered_by=pool.registered_by,
        lifetime="daemon" if pool.ends_with is None else "instance",
        ends_with=pool.ends_with,
        model=pool.model.public if pool.model else None,
        max_payload_bytes=pool.max_payload_bytes,
    )


def check_same(
    existing: Manifest, wanted: Manifest, name: str, device: str, wanted_device: str, held: str = ""
) -> None:
    """Check that an existing pool has the layout, size and device that are asked for.

    Args:
        existing: the manifest of the pool.
        wanted: the manifest that is asked for.
        name: the pool's name.
        device: the pool's device.
        wanted_device: the device that is asked for.
        held: who holds its pages, for the error's text.

    Raises:
        PoolExistsError: it has another layout, size, window, device or set of optional components.
    """
    if device != wanted_device:
        raise PoolExistsError(
            f"pool {name!r} exists on {device}, asked for on {wanted_device}{held and f'; {held}'}", field="device"
        )
    if (existing.layout_digest, spaces_of(existing)) != (wanted.layout_digest, spaces_of(wanted)):
        raise PoolExistsError(
            f"pool {name!r} exists with {_pages_text(existing)} pages of layout {existing.layout_digest}; "
            f"asked for {_pages_text(wanted)} of {wanted.layout_digest}: {difference(existing, wanted)}"
            f"{held and f'; {held}'}",
            field="spec",
        )
    if windows_of(existing) != windows_of(wanted):
        raise PoolExistsError(
            f"pool {name!r} exists with {_windows_text(existing)}, asked for with {_windows_text(wanted)}"
            f"{held and f'; {held}'}",
            field="spec",
        )
    may, asked = _optional(existing), _optional(wanted)
    if may != asked:
        raise PoolExistsError(
            f"pool {name!r} exists: a transfer may leave out {', '.join(may) or 'nothing'}, asked for one that may "
            f"leave out {', '.join(asked) or 'nothing'}{held and f'; {held}'}",
            field="spec",
        )


def difference(existing: Manifest, wanted: Manifest) -> str:
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


def check_same_payload(existing_bytes: int, wanted_bytes: int, name: str) -> None:
    """Check that a pool has the payload bound, in bytes, that is asked for.

    Raises:
        PoolExistsError: it has another bound.
    """
    if existing_bytes != wanted_bytes:
        raise PoolExistsError(
            f"pool {name!r} exists for payloads of at most {existing_bytes} bytes, asked for {wanted_bytes}",
            field="max_payload_bytes",
        )


def check_same_model(existing: ModelIdentity | None, wanted: ModelIdentity | None, name: str) -> None:
    """Check that a pool has the model identity that is asked for; none only equals none.

    Raises:
        PoolExistsError: it has another one; the error names the field and never shows a salt.
    """
    if existing == wanted:
        return
    fields = () if existing is None or wanted is None else existing.__struct_fields__
    field = next((one for one in fields if getattr(existing, one) != getattr(wanted, one)), "")
    if field == "salt":
        raise PoolExistsError(f"pool {name!r} exists with another cache salt", field="model.salt")
    raise PoolExistsError(
        f"pool {name!r} exists for {_model_text(existing)}, asked for {_model_text(wanted)}",
        field=f"model{field and f'.{field}'}",
    )


def check_same_lifetime(sessions: SessionRegistry, ends_with: int | None, session: Session, body: CreatePool) -> None:
    """Check that a pool has the lifetime that a session asks for.

    Args:
        sessions: for the error's text.
        ends_with: the instance that the pool ends with; None: it ends with the daemon.
        session: which session asks.
        body: its request.

    Raises:
        PoolExistsError: the pool has another lifetime, or ends with another instance.
    """
    if ends_with == (session.owner_id if body.lifetime == "instance" else None):
        return
    end = "the daemon" if ends_with is None else owner_text(sessions, ends_with, session.owner_id)
    raise PoolExistsError(
        f"pool {body.pool!r} exists and ends with {end}, asked for with lifetime {body.lifetime!r}: attach it",
        field="lifetime",
    )


def _model_text(model: ModelIdentity | None) -> str:
    return f"model {model.label!r}" if model else "no model"


def _optional(manifest: Manifest) -> list[str]:
    """Return the pool's optional components, sorted."""
    return sorted({one.name for one in manifest.components} & set(manifest.optional_components))


def _windows_text(manifest: Manifest) -> str:
    return ", ".join(f"a window of {tokens} tokens in {name}" for name, tokens in windows_of(manifest).items())


def _pages_text(manifest: Manifest) -> str:
    spaces = spaces_of(manifest)
    return ", ".join(f"{pages} {space}" for space, pages in spaces.items()) if len(spaces) > 1 else f"{manifest.pages}"
