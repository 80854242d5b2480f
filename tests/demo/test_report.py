"""The demo's report: it says identical only where every token of every request is."""

from __future__ import annotations

from typing import Any

import pytest

from kvferry.clients.demo.messages import Arrived, Done, Prefilled, Token
from kvferry.clients.demo.report import Report, RequestFigures, Totals, table


class Letters:
    """A tokenizer: token 0 is a, token 1 is b."""

    def decode(self, tokens: list[int], **_options: bool) -> str:
        """Return a letter a token."""
        return "".join(chr(ord("a") + token) for token in tokens)


def report_of(count: int) -> Report:
    letters: Any = Letters()
    figures = {str(n): RequestFigures(number=n, shows="a page", prompt_tokens=128) for n in range(1, count + 1)}
    return Report(figures, letters)


def serve(report: Report, request_id: str, tokens: list[int]) -> None:
    for token in tokens:
        report.token(Token(request_id=request_id, token=token))
    report.done(Done(request_id=request_id, decode_s=2.0))


def totals_for(decoded: list[int], expected: list[int]) -> Totals:
    """Return the totals of a request that went well and one with these tokens."""
    report = report_of(2)
    for request_id, ours, theirs in (("1", [1, 2, 3], [1, 2, 3]), ("2", decoded, expected)):
        serve(report, request_id, ours)
        report.reference(Done(request_id=request_id, decode_s=1.0, tokens=tuple(theirs)))
    return report.totals(5.0)


def test_all_equal() -> None:
    totals = totals_for([4, 5], [4, 5])
    assert (totals.ok, totals.identical, totals.prompts, totals.tokens) == (True, True, 2, 5)


@pytest.mark.parametrize(
    ("decoded", "expected"),
    [([4, 5], [4, 6]), ([4], [4, 5]), ([4, 5], [4]), ([], []), ([], [4])],
    ids=["another token", "too few", "too many", "none at all", "none decoded"],
)
def test_a_difference_is_no_success(
    decoded: list[int], expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    totals = totals_for(decoded, expected)
    assert not totals.ok
    assert not totals.identical
    assert f" 2 DIFFERENT: {decoded} decoded, {expected} expected" in capsys.readouterr().out


def test_a_request_that_was_never_compared_is_no_success() -> None:
    report = report_of(1)
    serve(report, "1", [1, 2])
    assert not report.totals(1.0).identical


@pytest.mark.parametrize("prefill_first", [True, False])
def test_hand_off_runs_from_the_last_send_to_the_arrival(*, prefill_first: bool) -> None:
    report = report_of(1)
    sent = Prefilled(request_id="1", prefill_s=0.5, sent_at=10.0, chunks=3, reused_pages=2)
    arrived = Arrived(request_id="1", arrived_at=10.25, first_token=1, moved_bytes=3 << 20)
    steps = [(report.prefilled, sent), (report.arrived, arrived)]
    for take, line in steps if prefill_first else reversed(steps):
        take(line)  # type: ignore[operator]
    totals = report.totals(1.0)
    figures = totals.requests[0]
    assert (figures.prefill_ms, figures.hand_off_ms, figures.moved_bytes) == (500.0, 250.0, 3 << 20)
    assert (figures.chunks, figures.reused_pages) == (3, 2)
    assert (totals.moved_bytes, totals.hand_off_ms_median) == (3 << 20, 250.0)


def test_text_streams_and_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(1)
    serve(report, "1", list(range(20)))
    shown = [line.partition(" | ")[2].strip("'") for line in capsys.readouterr().out.splitlines()]
    assert len(shown) == 3
    assert "".join(shown) == "abcdefghijklmnopqrst" == report.requests["1"].text


def test_the_table_has_a_line_a_request_under_its_head() -> None:
    report = report_of(2)
    serve(report, "1", [1, 2, 3])
    head, first, second, summary = table(report.totals(5.0))
    assert head.split()[:3] == ["nr", "prompt", "tokens"]
    assert len(head) == len(first) == len(second)
    assert " 1.0 " in first  # two tokens after the first one in two seconds
    assert "5 s in all" in summary
