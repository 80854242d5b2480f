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


def test_the_docstring_is_the_tree_and_codes_are_unique() -> None:
    documented = re.findall(r"\+-- (\w+)(?: +([A-Z_]+)(?= ))?", errors.__doc__ or "")
    assert documented == [(one.__name__, "" if one in KINDS else one.code) for one in CLASSES]
    assert {one.code: one for one in CONCRETE} == KvferryError.by_code
    assert len(KvferryError.by_code) == len(CONCRETE)


@pytest.mark.parametrize("kind", CONCRETE)
def test_a_class_travels_and_comes_back(kind: type[KvferryError]) -> None:
    assert kind.remedy or kind is CancelledError
    assert len(kind.__mro__) == len(KvferryError.__mro__) + 2, "each is of exactly one kind of fault"
    error = kind("page 3 at position 1", field="lists[0].pages", retryable=not kind.retryable)
    again = raised(error.info())
    assert type(again) is kind
    assert (again.info(), str(again), error.info().code) == (error.info(), str(error), kind.code)
    assert again.retryable is not kind.retryable, "a case may say otherwise"


def test_retryable_is_what_may_pass_later() -> None:
    assert {one.code for one in CONCRETE if one.retryable} == {
        "BUSY", "DAEMON_LOST", "DEADLINE", "DRAINED", "PAGE_BUSY", "PEER_LOST", "POOL_FULL", "POOL_IN_USE",
        "SHUTTING_DOWN", "TABLES_BUSY", "TRANSFER_FAILED",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "kind"),
    [("caller", errors.CallerError), ("peer", errors.PeerError), ("busy", errors.BusyError), ("daemon", InternalError)],
)
def test_whose_fault_it_is_goes_over_the_wire(fault: str, kind: type[KvferryError]) -> None:
    for known in CONCRETE:
        if issubclass(known, kind):
            assert (known.fault, known("").info().fault) == (fault, fault)
    newer = raised(ErrorInfo(code="NEW_CODE", detail="new", fault=fault, field="f", remedy="upgrade"))
    assert isinstance(newer, kind), "who catches errors by their fault catches those of a newer daemon"
    assert (newer.fault, str(newer)) == (fault, "NEW_CODE [f]: new (upgrade)")
    of_the_case = raised(errors.DeadlineError("no answer within 3 s", fault=fault).info())
    assert (type(of_the_case), of_the_case.fault) == (errors.DeadlineError, fault)
    assert errors.DeadlineError.fault == "peer"


@pytest.mark.parametrize(("said_ms", "waited_ms"), [(-7, 5), (1, 5), (300, 300), (1 << 40, 5000)])
def test_when_to_try_again_travels_and_is_neither_at_once_nor_for_ever(said_ms: int, waited_ms: int) -> None:
    info = msgspec.structs.replace(OverloadedError("full").info(), retry_after_ms=said_ms)
    error = raised(info)
    assert error.retry_after_ms == waited_ms
    assert raised(error.info()).retry_after_ms == waited_ms
    assert raised(CancelledError("gone").info()).retry_after_ms == 0
