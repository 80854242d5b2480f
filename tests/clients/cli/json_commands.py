"""Commands that take and print JSON, run in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest

from kvferry.clients.cli.main import main

SPEC: Final[dict[str, Any]] = {
    "kind": "mha", "layers": 3, "first_layer": 0, "tokens": 256, "page_size": 128, "kv_heads": 2, "head_dim": 8,
    "v_head_dim": 8, "dtype": "float16", "view": "paged",
}  # fmt: skip


class JsonCommands:
    """``kvferry layout`` and ``kvferry plan`` in this process, on a file with what they are given."""

    def __init__(self, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        self._capsys = capsys
        self._file = folder / "input.json"

    def run(self, command: str, given: object, *flags: str) -> tuple[int, str]:
        """Return the exit status and what was printed: for programs all of it goes to one place."""
        self._file.write_text(given if isinstance(given, str) else json.dumps(given))
        status = main([command, *flags, str(self._file)])
        printed = self._capsys.readouterr()
        assert not (printed.out and printed.err)
        assert "--json" not in flags or printed.err == ""
        return status, printed.out or printed.err

    def made(self, command: str, given: object, *flags: str) -> dict[str, Any]:
        """Return what the command printed as JSON; its status must be 2 where that is an error, else 0."""
        status, text = self.run(command, given, "--json", *flags)
        made: dict[str, Any] = json.loads(text)
        assert status == (2 if "error" in made else 0)
        return made

    def refused(self, command: str, given: object, *flags: str) -> tuple[str, str | None]:
        """Return the code and the field of the error, which must have a text."""
        error = self.made(command, given, *flags)["error"]
        assert error["detail"]
        return error["code"], error.get("field")
