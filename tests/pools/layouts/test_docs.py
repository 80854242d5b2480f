"""``docs/layouts.md`` says what the code does."""

from __future__ import annotations

import numpy as np

from kvferry.pools.layouts import manifest_of
from kvferry.protocol.manifests import HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec
from tests.pools.layouts.docs_tables import DOCUMENT, specs, with_tables


def test_the_tables_are_current() -> None:
    text = DOCUMENT.read_text()
    assert with_tables(text) == text, "python -m tests.pools.layouts.docs_tables"


def test_there_is_a_spec_of_every_kind() -> None:
    assert [type(one) for one in specs(DOCUMENT.read_text())] == [MhaSpec, MlaSpec, HybridSwaSpec, MambaSpec, MhaSpec]


def test_the_spec_with_scales_has_them_where_the_text_says() -> None:
    manifest = manifest_of(specs(DOCUMENT.read_text())[-1])
    fixed = [one.scales for one in manifest.entries if one.role == "k"]
    assert np.array_equal(np.array(fixed), np.array([(0.02, 0.03), (0.01, 0.04)], np.float32))
    assert [(one.shape, one.dtype) for one in manifest.entries if one.role == "v_scale"] == [((513, 2), "float32")] * 2
    assert not any(one.role == "k_scale" for one in manifest.entries)
