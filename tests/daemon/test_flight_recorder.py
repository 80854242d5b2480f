"""The flight recorder keeps a fixed number of ended sides; and the log of refusals is bounded, too."""

from __future__ import annotations

from structlog.testing import capture_logs

from kvferry.daemon.control.refusals import Refusals
from kvferry.daemon.services.flight_recorder import FlightRecorder
from kvferry.daemon.transfer.endpoints import EndpointKey
from kvferry.protocol.errors import OverloadedError, PoolFullError
from kvferry.protocol.events import Finished, Settled


def key_of(number: int) -> EndpointKey:
    return EndpointKey(1000, f"{number:032x}", "pool", "send")


def end(recorder: FlightRecorder, number: int, payload: bytes = b"") -> Settled:
    request_id = key_of(number).request_id
    recorder.planned(7, key_of(number), None, 0.001)
    recorder.finished(7, Finished(request_id=request_id, pool="pool", direction="send", payload=payload))
    settled = Settled(request_id=request_id, pool="pool", direction="send")
    recorder.settled(7, settled)
    return settled


def test_the_oldest_goes_first_and_nothing_grows() -> None:
    now_s = 100.0
    recorder = FlightRecorder(recorded=3, clock=lambda: now_s)
    for number in range(100):
        end(recorder, number)
    now_s += 2
    assert [int(one.request_id, 16) for one in recorder.ended()] == [99, 98, 97]
    assert {one.ago_ms for one in recorder.ended()} == {2000}
    assert repr(recorder) == "<FlightRecorder live=0 ended=3>"


def test_each_stage_has_its_time() -> None:
    now_s = 100.0
    recorder = FlightRecorder(clock=lambda: now_s)
    recorder.planned(7, key_of(1), None, 0.001)
    recorder.planned(7, key_of(1), None, 0.002)
    recorder.finished(7, Finished(request_id=key_of(1).request_id, pool="pool", direction="send", waited_us=5))
    now_s += 0.5
    settled = Settled(request_id=key_of(1).request_id, pool="pool", direction="send")
    recorder.settled(7, settled)
    [untold] = recorder.ended()
    assert (untold.planned_us, untold.waited_us, untold.settled_us, untold.told_us) == (3000, 5, 500_000, None)
    now_s += 0.25
    recorder.told(8, settled)
    assert next(recorder.ended()).told_us is None, "another session was told of another side"
    recorder.told(7, settled)
    assert next(recorder.ended()).told_us == 750_000


def test_the_same_request_may_come_again() -> None:
    recorder = FlightRecorder(recorded=2)
    first = end(recorder, 1)
    end(recorder, 1)
    end(recorder, 2)
    recorder.told(7, first)
    assert [one.told_us is None for one in recorder.ended()] == [True, False]


def test_a_line_a_second_for_each_cause_of_refusals() -> None:
    now_s = 100.0
    refusals = Refusals(lambda: now_s)
    full, busy = PoolFullError("3 pages asked for, 0 free", field="count").info(), OverloadedError("too many").info()
    with capture_logs() as logs:
        for _ in range(50):
            refusals.add(full, "7 decode")
            refusals.add(busy, "8 prefill")
        assert [(one["code"], one["count"], one["session"]) for one in logs] == [
            ("POOL_FULL", 1, "7 decode"), ("BUSY", 1, "8 prefill"),
        ]  # fmt: skip
        now_s += 1
        refusals.add(full, "9 other")
    assert (logs[-1]["count"], logs[-1]["detail"], logs[-1]["field"]) == (50, "3 pages asked for, 0 free", "count")
