"""Coroutines that take their first step at once, and go on as a task only if they wait for something.

Python 3.12 has ``asyncio.eager_task_factory`` for it. So a request holds its pages before the next one is looked at,
its copy begins before its reply is written, and what waits for nothing costs no task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


def begin(work: Coroutine[Any, Any, T]) -> asyncio.Future[T]:
    """Take the first step; return a task that takes the others, or what is done already.

    What it does before its first ``await`` is not a task's: ``asyncio.timeout`` cannot be entered there.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()
    try:
        waits_for = work.send(None)
    except StopIteration as end:
        done.set_result(end.value)
    except Exception as error:  # noqa: BLE001  the awaiter gets it
        done.set_exception(error)
    else:
        if waits_for is not None:
            waits_for._asyncio_future_blocking = False  # noqa: SLF001  others may await it until the task does
        return loop.create_task(_Rest(work, waits_for))
    return done


class _Rest(Coroutine[Any, Any, T]):
    """All steps but the first one, after which it waits for a future, or (None) for the loop's next turn."""

    def __init__(self, work: Coroutine[Any, Any, T], waits_for: asyncio.Future[Any] | None) -> None:
        self._work = work
        self._waits_for = waits_for
        self._is_begun = False

    def __repr__(self) -> str:
        """Show what it is the rest of."""
        return repr(self._work)

    def send(self, value: None) -> object:
        """Hand the task what it has to wait for, at first that of the first step unless it is there by now."""
        if self._is_begun or self._waits_for is None or self._waits_for.done():
            self._is_begun = True
            return self._work.send(value)
        self._is_begun = True
        self._waits_for._asyncio_future_blocking = True  # noqa: SLF001  as ``await`` does
        return self._waits_for

    def throw(
        self,
        error: type[BaseException] | BaseException,
        value: BaseException | object = None,
        traceback: TracebackType | None = None,
    ) -> object:
        """Raise where it waits, mostly that it is cancelled."""
        del value, traceback
        if not self._is_begun and self._waits_for is not None:
            self._waits_for.cancel()  # as a task does with what it waits for; this one did not get to that
        self._is_begun = True
        return self._work.throw(error)

    def close(self) -> None:
        """Have it raise GeneratorExit where it waits."""
        self._work.close()

    def __await__(self) -> Any:  # noqa: ANN401  nobody awaits it: it is a task's
        raise NotImplementedError
