"""The commands as the tests of this folder run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.cli.json_commands import JsonCommands


@pytest.fixture
def commands(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> JsonCommands:
    """Return the commands that take and print JSON."""
    return JsonCommands(capsys, tmp_path)
