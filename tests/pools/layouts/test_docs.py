"""``docs/layouts.md`` says what the code does."""

from __future__ import annotations

from kvferry.protocol.manifests import HybridSwaSpec, MambaSpec, MhaSpec, MlaSpec
from tests.pools.layouts.docs_tables import DOCUMENT, specs, with_tables


def test_the_tables_are_current() -> None:
    text = DOCUMENT.read_text()
    assert with_tables(text) == text, "python -m tests.pools.layouts.docs_tables"


def test_there_is_a_spec_of_every_kind() -> None:
    assert [type(one) for one in specs(DOCUMENT.read_text())] == [MhaSpec, MlaSpec, HybridSwaSpec, MambaSpec]
