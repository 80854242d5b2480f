"""What counts as a line of code."""

from __future__ import annotations

from tests.census.source import code_lines

SOURCE = '''"""A module's
docstring."""

import a  # counts

# does not count


class B:
    """Its docstring."""

    c = """a text
    that is a value"""  # two lines

    def d(self) -> None:
        """Nothing else: the docstring is its body."""
'''


def test_blanks_comments_and_docstrings_are_no_code() -> None:
    lines = SOURCE.splitlines()
    assert [lines[one - 1].split("  #")[0].strip() for one in sorted(code_lines(SOURCE))] == [
        "import a",
        "class B:",
        'c = """a text',
        'that is a value"""',
        "def d(self) -> None:",
    ]
