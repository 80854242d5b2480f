"""Errors: one class a code, and the docstring's tree is the truth."""

from __future__ import annotations

import re

import msgspec
import pytest

from kvferry.protocol import errors
from kvferry.protocol.errors import CancelledError, ErrorInfo, InternalError, KvferryError, OverloadedError, raised

_ERRORS = (one for one in vars(errors).values() if isinstance(one, type) and issubclass(one, KvferryError))
CLASSES = [one for one in _ERRORS if one is not KvferryError]
KINDS = (errors.CallerError, errors.PeerError, errors.BusyError, errors.DaemonError)
CONCRETE = [one for one in CLASSES if one not in KINDS]
LINE = re.compile(r"^    (?P<indent>[| ]*)\+-- (?P<name>\w+)(?: +(?P<code>[A-Z_]+)(?= ))?")


def documented() -> list[tuple[str, str, str]]:
    """Return the docstring's tree as (class, its parent, its code)."""
    parent, rows = "KvferryError", []
    for line in (errors.__doc__ or "").splitlines():
        found = LINE.match(line)
        if found is None:
            continue
        if not found["indent"]:
            parent = found["name"]
            rows.append((parent, "KvferryError", ""))
        else:
            rows.append((found["name"], parent, found["code"]))
    return rows


def test_the_docstring_is_the_tree_and_its_order_the_modules() -> None:
    real = [(one.__name__, one.__bases__[0].__name__, one.code if one not in KINDS else "") for one in CLASSES]
    assert documented() == real


def test_codes_are_unique_and_complete() -> None:
    assert {one.code: one for one in CONCRETE} == KvferryError.by_code
    assert len(KvferryError.by_code) == len(CONCRETE)


@pytest.mark.parametrize("kind", CONCRETE)
def test_a_class_travels_and_comes_back(kind: type[KvferryError]) -> None:
    assert re.fullmatch("[A-Z][A-Z_]*[A-Z]", kind.code)
    assert kind.remedy or kind is CancelledError
    assert kind.__doc__
    assert len(kind.__mro__) == len(KvferryError.__mro__) + 2, "each is of exactly one kind of fault"
    error = kind("page 3 at position 1", field="lists[0].pages")
    again = raised(error.info())
    assert type(again) is kind
    assert (again.info(), str(again), error.info().code) == (error.info(), str(error), kind.code)


def test_retryable_is_what_may_pass_later() -> None:
    assert {one.code for one in CONCRETE if one.retryable} == {
        "BUSY", "DAEMON_LOST", "DEADLINE", "PAGE_BUSY", "PEER_LOST", "POOL_FULL", "POOL_IN_USE", "SHUTTING_DOWN",
        "TABLES_BUSY", "TRANSFER_FAILED",
    }  # fmt: skip


def test_a_remedy_may_be_that_of_the_case() -> None:
    error = errors.ConfigError("another daemon runs here", retryable=True, remedy="stop it")
    assert (error.info().retryable, error.info().remedy) == (True, "stop it")
    assert raised(error.info()).info() == error.info()
    assert not raised(errors.DaemonLostError("gone for good", retryable=False).info()).retryable
    assert (errors.ConfigError.retryable, errors.ConfigError.remedy) == (False, "correct the named key")


def test_a_code_of_a_newer_daemon_keeps_what_it_says() -> None:
    error = raised(ErrorInfo(code="NEW_CODE", detail="new", retryable=True, field="f", remedy="upgrade"))
    assert isinstance(error, InternalError)
    assert str(error) == "NEW_CODE [f]: new (upgrade)"
    assert error.retryable
    assert InternalError.code == "INTERNAL"


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("caller", errors.CallerError), ("peer", errors.PeerError), ("busy", errors.BusyError), ("daemon", InternalError)],
)
def test_whose_fault_it_is_goes_over_the_wire(fault: str, kind: type[KvferryError]) -> None:
    for known in CONCRETE:
        if issubclass(known, kind):
            assert (known.fault, known("").info().fault) == (fault, fault)
    newer = raised(ErrorInfo(code="NEW_CODE", detail="new", fault=fault))
    assert isinstance(newer, kind), "who catches errors by their fault catches those of a newer daemon"
    assert (newer.code, newer.fault) == ("NEW_CODE", fault)
    of_the_case = raised(errors.DeadlineError("no answer within 3 s", fault=fault).info())
    assert (type(of_the_case), of_the_case.fault) == (errors.DeadlineError, fault)
    assert errors.DeadlineError.fault == "peer"


def test_the_text_has_everything_a_log_needs() -> None:
    assert str(errors.PoolFullError("8 pages asked for, 3 of 16 free", field="count")) == (
        "POOL_FULL [count]: 8 pages asked for, 3 of 16 free (free pages, ask for fewer, or wait; kvferry status shows "
        "which sessions hold them)"
    )
    assert str(CancelledError("cancelled")) == "CANCELLED: cancelled"


@pytest.mark.parametrize(("said_ms", "waited_ms"), [(-7, 5), (1, 5), (300, 300), (1 << 40, 5000)])
def test_when_to_try_again_travels_and_is_neither_at_once_nor_for_ever(said_ms: int, waited_ms: int) -> None:
    info = msgspec.structs.replace(OverloadedError("full").info(), retry_after_ms=said_ms)
    error = raised(info)
    assert error.retry_after_ms == waited_ms
    assert raised(error.info()).retry_after_ms == waited_ms
    assert raised(CancelledError("gone").info()).retry_after_ms == 0
