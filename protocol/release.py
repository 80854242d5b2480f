"""kvferry's version, as in pyproject.toml; reading the package's metadata would take longer."""

from typing import Final

VERSION: Final = "0.1.0"
