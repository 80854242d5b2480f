"""What another daemon says of its pool is checked before anything is reckoned with it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvferry.daemon.transfer.peer_transfers import check_manifest
from kvferry.pools.layouts import manifest_of
from kvferry.protocol.errors import GeometryMismatchError, InvalidFieldError, KvferryError
from kvferry.protocol.manifests import MhaSpec

MANIFEST = manifest_of(MhaSpec(layers=2, tokens=64, page_size=16, kv_heads=2, head_dim=8, dtype="float16"))


@pytest.mark.parametrize(
    ("error", "field", "changes"),
    [
        (GeometryMismatchError, ".page_bytes", {"dtype": "float32"}),
        (GeometryMismatchError, ".page_bytes", {"page_bytes": 256}),
        (GeometryMismatchError, ".shape", {"page_tokens": 32}),
        (GeometryMismatchError, ".shape", {"heads": 1}),
        (InvalidFieldError, ".heads", {"head_start": 1}),
        (InvalidFieldError, ".dtype", {"dtype": "float12"}),
        (InvalidFieldError, "", {"base": MANIFEST.region_bytes}),
        (InvalidFieldError, "", {"component": "draft"}),
    ],
)
def test_an_entry_that_contradicts_itself_or_its_manifest(
    error: type[KvferryError], field: str, changes: dict[str, Any]
) -> None:
    check_manifest(MANIFEST)
    first, *others = MANIFEST.entries
    wrong = msgspec.structs.replace(first, **changes)
    with pytest.raises(error) as refused:
        check_manifest(msgspec.structs.replace(MANIFEST, entries=(*others, wrong)))
    assert refused.value.field == f"manifest.entries[{len(others)}]{field}"
