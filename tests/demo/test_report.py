"""The demo's report: it says identical only where every token of every request is."""

from __future__ import annotations

from typing import Any

import pytest

from examples.demo.messages import Arrived, Done, Message, Prefilled, Reference, Restored, Retracted, Token
from examples.demo.report import Report, RequestFigures, Totals


class Letters:
    """A tokenizer: token 0 is a, token 1 is b."""

    def decode(self, tokens: list[int], **_options: bool) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def report_of(count: int, *, retracts: bool = False) -> Report:
    letters: Any = Letters()
    figures = {str(n): RequestFigures(number=n, shows="a page", prompt_tokens=128) for n in range(1, count + 1)}
    return Report(figures, letters, retracts=retracts)


def serve(report: Report, request_id: str, tokens: list[int], expected: list[int] | None) -> None:
    for token in tokens:
        report.take(Token(request_id, token))
    report.take(Done(request_id, decode_s=2.0))
    if expected is not None:
        report.take(Reference(request_id, tuple(expected)))


@pytest.mark.parametrize(
    ("decoded", "expected", "ok"),
    [
        ([4, 5], [4, 5], True),
        ([4, 5], [4, 6], False),
        ([4], [4, 5], False),
        ([4, 5], [4], False),
        ([], [], False),
        ([], [4], False),
        ([1, 2], None, False),
    ],
    ids=["equal", "another token", "too few", "too many", "none at all", "none decoded", "never compared"],
)
def test_a_difference_is_no_success(
    decoded: list[int],
    expected: list[int] | None,
    ok: bool,  # noqa: FBT001  a column of the table
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = report_of(2)
    serve(report, "1", [1, 2, 3], [1, 2, 3])
    serve(report, "2", decoded, expected)
    totals = report.totals(5.0)
    assert (totals.ok, totals.identical, totals.prompts, totals.tokens) == (ok, ok, 2, 3 + len(decoded))
    said = f" 2 DIFFERENT: {decoded} decoded, {expected} expected" in capsys.readouterr().out
    assert said is (not ok and expected is not None)


@pytest.mark.parametrize("prefill_first", [True, False])
def test_transfer_runs_from_the_last_send_to_the_arrival(*, prefill_first: bool) -> None:
    report = report_of(1)
    sent = Prefilled("1", prefill_s=0.5, sent_at=10.0, chunks=3, reused_pages=2)
    messages: list[Message] = [sent, Arrived("1", arrived_at=10.25, moved_bytes=3 << 20)]
    for message in messages if prefill_first else reversed(messages):
        report.take(message)
    totals = report.totals(1.0)
    figures = totals.requests[0]
    assert (figures.prefill_ms, figures.transfer_ms, figures.moved_bytes) == (500.0, 250.0, 3 << 20)
    assert (figures.chunks, figures.reused_pages) == (3, 2)
    assert (totals.moved_bytes, totals.transfer_ms_median) == (3 << 20, 250.0)


def turns(report: Report, retracted: int, restored: int) -> Totals:
    """Return the totals of a request with the right tokens that went and came back so often."""
    for _ in range(retracted):
        report.take(Retracted("1", tokens=3, pages=2, moved_bytes=3 << 20, offload_s=0.004))
    for _ in range(restored):
        report.take(Restored("1", pages=2, other_pages=1, moved_bytes=3 << 20, restore_s=0.002))
    serve(report, "1", [1, 2], [1, 2])
    return report.totals(5.0)


def test_every_retraction_counts_and_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    totals = turns(report_of(1, retracts=True), 2, 2)
    assert (totals.ok, totals.retracted, totals.restored) == (True, 2, 2)
    assert (totals.requests[0].offload_ms, totals.requests[0].restore_ms) == (8.0, 4.0)
    assert totals.moved_bytes == totals.requests[0].moved_bytes == 4 * 3 << 20
    printed = capsys.readouterr().out
    assert printed.count("   1 <- retracted after 3 tokens: 2 pages to the host tier\n") == 2
    assert printed.count("   1 -> restored: 2 pages, 1 of them other ones\n") == 2


def test_a_run_must_show_the_retractions_that_it_is_for() -> None:
    """That is: some, each of which came back once; and one without retraction has none."""
    assert [turns(report_of(1, retracts=True), *one).ok for one in ((0, 0), (2, 1), (1, 2))] == [False] * 3
    assert turns(report_of(1), 0, 0).ok
    assert not turns(report_of(1), 1, 1).ok
