"""Formatting of help texts. A module by itself, because ``kvferry --help`` imports nothing else of kvferry."""

from __future__ import annotations

import argparse
import os

PIPE_COLUMNS = 80


class Help(argparse.RawDescriptionHelpFormatter):
    """argparse's help, as wide as the terminal; argparse itself imports shutil and four compressors for that."""

    def __init__(self, prog: str) -> None:
        """Ask the terminal for its width."""
        try:
            columns = int(os.environ.get("COLUMNS", "0")) or os.get_terminal_size().columns
        except (OSError, ValueError):
            columns = PIPE_COLUMNS
        super().__init__(prog, width=columns - 2)
