"""``docs/walk.md`` against a walk of today."""

from __future__ import annotations

from tests import walk


def test_each_command_prints_what_the_page_says() -> None:
    page = walk.PAGE.read_text()
    assert len(page.split("$ kvferry ")) > 10
    assert walk.shape(walk.page(walk.walk())) == walk.shape(page), "python -m tests.walk"
