"""What tests of the tiers begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kit.tiers import Engine, Harness


@pytest.fixture
async def engine(tiers: Harness) -> Engine:
    """Return a session of the first user."""
    return tiers.engine()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return an empty folder for blocks."""
    path = tmp_path / "blocks"
    path.mkdir(mode=0o700)
    return path
