"""Steps that take back what was done, for work that must be done as a whole or not at all.

Like ``contextlib.ExitStack``, which takes several times as long as the little work that is to be undone here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import ParamSpec, Self

Arguments = ParamSpec("Arguments")


class Undo:
    """A block that takes its steps back, the last one first, if it ends with an exception."""

    def __init__(self) -> None:
        self._steps: list[Callable[[], object]] = []

    def by(self, step: Callable[Arguments, object], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        """Note a call that takes back what was just done; it must not fail."""
        self._steps.append(partial(step, *args, **kwargs))

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Take the steps back if there is an error."""
        if kind is not None:
            while self._steps:
                self._steps.pop()()
