"""``docs/kvferry.1``, the man page, from the parsers of the commands; ``python -m tests.man_page`` writes it."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any, Final
from unittest import mock

from kvferry.clients.cli.completion import whole_parser
from kvferry.protocol import VERSION

PAGE: Final = Path(__file__).resolve().parents[1] / "docs" / "kvferry.1"


def page() -> str:
    """Return the page, the same on each day and for each terminal."""
    manpage: Any = importlib.import_module("argparse_manpage.manpage")
    told = {"project_name": "kvferry", "version": VERSION, "manual_title": "kvferry", "date": "2026"}
    told["description"] = "the KV-cache daemon of a node, and tools to inspect it"
    with mock.patch.dict(os.environ, COLUMNS="120"):
        return f"{manpage.Manpage(whole_parser(), told)}".rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
