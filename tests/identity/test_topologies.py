"""``docs/topologies.md`` says what the tests cover."""

from __future__ import annotations

from kvferry.protocol.errors import KvferryError
from tests.identity.models import MODELS
from tests.identity.topologies import DOCUMENT, REFUSALS, TABLES, TOPOLOGIES, with_tables


def test_the_tables_are_current() -> None:
    text = DOCUMENT.read_text()
    assert {found[2] for found in TABLES.finditer(text)} == {"covered", "models", "refused"}
    assert with_tables(text) == text, "python -m tests.identity.topologies --write"


def test_names_are_unique() -> None:
    assert len({one.name for one in TOPOLOGIES}) == len(TOPOLOGIES)
    assert len({one.name for one in REFUSALS}) == len(REFUSALS)


def test_every_model_that_is_no_draft_is_covered() -> None:
    assert {one.model for one in TOPOLOGIES} == {name for name in MODELS if not name.startswith("draft-")}


def test_every_refusal_is_an_error_that_there_is() -> None:
    assert {one.code for one in REFUSALS} <= KvferryError.by_code.keys()
