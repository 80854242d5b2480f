"""The committed AsyncAPI document is current: ``python -m kvferry.protocol.schema > docs/asyncapi.json``."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from kvferry.protocol.envelope import REQUEST_TYPES
from kvferry.protocol.schema import asyncapi, document

COMMITTED = Path(__file__).parents[2] / "docs" / "asyncapi.json"


def test_the_committed_document_is_current() -> None:
    assert COMMITTED.read_bytes() == document(), "regenerate it: see this module's docstring"


def test_every_request_is_an_operation_and_every_reference_resolves() -> None:
    made = asyncapi()
    assert set(REQUEST_TYPES) < set(made["operations"])
    for reference in re.findall(r'"\$ref":"#/([^"]+)"', msgspec.json.encode(made).decode()):
        at = made
        for part in reference.split("/"):
            at = at[part]
        assert at
