"""The committed AsyncAPI document is current: ``python -m kvferry.protocol.schema > docs/asyncapi.json``."""

from __future__ import annotations

from pathlib import Path

from kvferry.protocol.envelope import REQUEST_TYPES
from kvferry.protocol.schema import asyncapi, document

COMMITTED = Path(__file__).parents[2] / "docs" / "asyncapi.json"


def test_the_committed_document_is_current() -> None:
    assert COMMITTED.read_bytes() == document(), "regenerate it: see this module's docstring"


def test_every_request_is_an_operation_and_every_reference_resolves() -> None:
    made = asyncapi()
    assert set(REQUEST_TYPES) < set(made["operations"])
    for reference in _references(made):
        at = made
        for part in reference.removeprefix("#/").split("/"):
            at = at[part]
        assert at


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        found = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return found + [one for value in node.values() for one in _references(value)]
    return [one for value in node for one in _references(value)] if isinstance(node, list) else []
