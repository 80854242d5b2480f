"""Which kvferry this is: the version in pyproject.toml, without asking the package's metadata, which takes longer."""

from typing import Final

VERSION: Final = "0.1.0"
