"""``kvferry layout`` and ``kvferry plan``: the daemon's own geometry and planning, dry."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from kvferry.pools.layouts import manifest_of
from kvferry.pools.manifest import check_entry
from kvferry.pools.pairing import check_covered, pair_entries
from kvferry.pools.plan import make_plan
from kvferry.pools.runs import PageIds
from kvferry.protocol.codec import invalid_field
from kvferry.protocol.errors import InvalidFieldError, KvferryError
from kvferry.protocol.manifests import Entry, PoolSpec

T = TypeVar("T")
REFUSED = 2


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A JSON object; unknown fields are mistakes."""


class PlanSource(_Strict, frozen=True, kw_only=True):
    """The sending side."""

    entries: tuple[Entry, ...]


class PlanDestination(_Strict, frozen=True, kw_only=True):
    """The receiving side; no source has to cover its optional components."""

    entries: tuple[Entry, ...]
    optional_components: tuple[str, ...] = ("draft",)


class PlanInput(_Strict, frozen=True, kw_only=True):
    """``partial``: this source is one of several, so destination entries may stay uncovered."""

    source: PlanSource
    destination: PlanDestination
    source_pages: tuple[int, ...]
    destination_pages: tuple[int, ...]
    partial: bool = False


class PlanOutput(msgspec.Struct, frozen=True):
    """``blocks``: [source address, destination address, bytes], entry by entry in the destination's order."""

    blocks: list[list[int]]
    skipped_source_entries: int


def layout(options: argparse.Namespace) -> int:
    """Print a spec's manifest."""
    try:
        manifest = manifest_of(_decode(_read(options.file), PoolSpec))
    except KvferryError as error:
        return _refuse(error)
    fields = msgspec.to_builtins(manifest)
    del fields["optional_components"]
    return _print(fields)


def plan(options: argparse.Namespace) -> int:
    """Print the copies between two manifests for two page lists."""
    try:
        return _print(_plan(_decode(_read(options.file), PlanInput)))
    except KvferryError as error:
        return _refuse(error)


def _plan(given: PlanInput) -> PlanOutput:
    for side, entries in (("source", given.source.entries), ("destination", given.destination.entries)):
        for index, entry in enumerate(entries):
            check_entry(entry, f"{side}.entries[{index}]")
    pairing = pair_entries(given.source.entries, given.destination.entries)
    if not given.partial:
        check_covered(pairing, given.destination.optional_components)
    made = make_plan(
        pairing, _page_ids(given.source_pages, "source_pages"), _page_ids(given.destination_pages, "destination_pages")
    )
    return PlanOutput(made.blocks().tolist(), pairing.skipped_source_entries)


def _page_ids(pages: tuple[int, ...], field: str) -> PageIds:
    try:
        return np.array(pages, np.int64)
    except OverflowError as cause:
        raise InvalidFieldError("a page id does not fit in 64 bits", field=field) from cause


def _read(name: str) -> bytes:
    try:
        return sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
    except OSError as cause:
        raise InvalidFieldError(f"{name}: {cause.strerror}", field="FILE") from cause


def _decode(text: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError as cause:
        raise invalid_field(cause) from cause
    except (msgspec.MsgspecError, ValueError, RecursionError) as cause:
        raise InvalidFieldError(f"the input is no JSON object: {cause}") from cause


def _print(value: object) -> int:
    print(msgspec.json.encode(value).decode())
    return 0


def _refuse(error: KvferryError) -> int:
    info = error.info()
    shown = {"code": info.code, "detail": info.detail, "field": info.field, "remedy": info.remedy}
    _print({"error": {name: text for name, text in shown.items() if text}})
    return REFUSED
