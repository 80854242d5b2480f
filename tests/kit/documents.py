"""Pages of the documentation: their code, and one engine that runs it as a reader does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import torch

from kvferry import clients
from kvferry.protocol.errors import KvferryError
from kvferry.protocol.ids import HOST

ROOT: Final = Path(__file__).parents[2]


def page(name: str) -> str:
    return (ROOT / "docs" / name).read_text()


def section(text: str, title: str) -> str:
    [found] = [one for one in re.split(r"^## ", text, flags=re.MULTILINE) if one.startswith(f"{title}\n")]
    return found


def blocks(text: str, title: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", section(text, title), re.MULTILINE | re.DOTALL)


def unknown_codes(text: str, title: str) -> set[str]:
    """Return which codes of errors a section names that there are not; it must name some."""
    named = set(re.findall(r"`([A-Z_]{4,})`", section(text, title))) - {"LOOKUP"}
    assert len(named) > 5
    return named - KvferryError.by_code.keys()


class Reader:
    """One engine that does what the text says; ``names`` are those that its code has."""

    def __init__(self, client: clients.Client, device: str = HOST) -> None:
        self.client = client
        self._device = device
        self.names: dict[str, Any] = {name: getattr(clients, name) for name in clients.__all__}
        self.names |= {"client": client, "torch": torch, "request_id": clients.new_request_id()}

    def run(self, code: str) -> None:
        """Run a block of the text, on this device instead of npu:0."""
        exec(compile(code.replace("npu:0", self._device), "docs", "exec"), self.names)  # noqa: S102  our own text
