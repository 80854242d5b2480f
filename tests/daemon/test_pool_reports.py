"""A pool that exists is the one that is asked for, or the answer says in what it is another one."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import pytest

from kvferry.daemon.services.pool_reports import check_same
from kvferry.pools.layouts import manifest_of
from kvferry.protocol.errors import PoolExistsError
from kvferry.protocol.ids import HOST
from kvferry.protocol.manifests import DraftSpec, HybridSwaSpec, MhaSpec

SPEC: Final = MhaSpec(
    layers=2, tokens=8, page_size=4, kv_heads=1, head_dim=4, dtype="float8_e4m3fn", k_scale=0.5, v_scale=0.5,
    draft=DraftSpec(layers=1),
)  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"layers": 3}, "main/k/2 is not in the pool"),
        ({"layers": 1}, "main/k/1 is only in the pool"),
        ({"dtype": "float8_e5m2"}, "dtype of main/k/0 is float8_e4m3fn, asked for float8_e5m2"),
        ({"k_scale": 0.25}, r"scales of main/k/0 is \(0.5,\), asked for \(0.25,\)"),
        ({"tokens": 12}, "3 pages.*asked for 4"),
        ({"optional_components": ()}, "a transfer may leave out draft, asked for one that may leave out nothing"),
    ],
)
def test_another_pool_is_refused(changes: dict[str, Any], said: str) -> None:
    existing, wanted = manifest_of(SPEC), manifest_of(msgspec.structs.replace(SPEC, **changes))
    with pytest.raises(PoolExistsError, match=said) as caught:
        check_same(existing, wanted, "decode", HOST, HOST)
    assert caught.value.field == "spec"


def test_a_pool_of_another_window_is_refused() -> None:
    spec = HybridSwaSpec(
        full_layers=(0,), window_layers=(1,), tokens=8, window_tokens=8, window=4, page_size=4, kv_heads=1, head_dim=4,
        dtype="float16",
    )  # fmt: skip
    existing, wanted = manifest_of(spec), manifest_of(msgspec.structs.replace(spec, window=8))
    assert existing.layout_digest == wanted.layout_digest, "pages of one are pages of the other"
    with pytest.raises(PoolExistsError, match="a window of 4 tokens in swa, asked for with a window of 8") as caught:
        check_same(existing, wanted, "decode", HOST, HOST)
    assert caught.value.field == "spec"
    stage = msgspec.structs.replace(spec, window_layers=())
    check_same(manifest_of(stage), manifest_of(msgspec.structs.replace(stage, window=8)), "decode", HOST, HOST)


@pytest.mark.parametrize(
    "changes", [{}, {"view": "fia"}, {"k_scale": ((0.5,), (0.5,))}, {"optional_components": ("draft",)}], ids=str
)
def test_what_makes_no_other_bytes_makes_no_other_pool(changes: dict[str, Any]) -> None:
    spec = msgspec.structs.replace(SPEC, draft=None, optional_components=())
    check_same(manifest_of(spec), manifest_of(msgspec.structs.replace(spec, **changes)), "decode", HOST, HOST)
