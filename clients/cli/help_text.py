"""How help looks. By itself, for ``kvferry --help`` needs nothing else of ours."""

from __future__ import annotations

import argparse
import os

PIPE_COLUMNS = 80


class Help(argparse.RawDescriptionHelpFormatter):
    """argparse's help as wide as the terminal; by itself it loads shutil and four compressors to learn the width."""

    def __init__(self, prog: str) -> None:
        """Ask the terminal for its width."""
        try:
            columns = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size().columns
        except (OSError, ValueError):
            columns = PIPE_COLUMNS
        super().__init__(prog, width=columns - 2)
