"""Requests as values: what is read from a reply, and what is refused, without a daemon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.clients import calls
from kvferry.clients.calls import Pages
from kvferry.clients.core.client_core import ReplyArrived
from kvferry.protocol.base import PageList
from kvferry.protocol.errors import InvalidFieldError, MalformedError
from kvferry.protocol.pool_messages import DeletePool, Free, PoolDeleted
from kvferry.protocol.session_messages import Ping


def test_a_reply_of_another_kind_is_not_taken_for_it() -> None:
    reply = ReplyArrived(1, PoolDeleted(pool="decode"), (), None)
    with pytest.raises(MalformedError, match="answered with PoolDeleted, not Pong"):
        calls.asked(Ping()).read(reply)
    assert calls.asked(DeletePool(pool="decode")).read(reply) == PoolDeleted(pool="decode")


def test_pages_made_by_hand_are_checked() -> None:
    for head, field in ((PageList(pages=1, component="Main"), "component"), (PageList(pages=1, tokens=0), "tokens")):
        with pytest.raises(InvalidFieldError) as refused:
            Pages(head, bytes(8))
        assert refused.value.field == field
    with pytest.raises(InvalidFieldError, match="no PageList"):
        Pages(None, bytes(8))  # type: ignore[arg-type]
    ids: Any = [4, 5]
    assert Pages(PageList(pages=2), ids).ids == calls.pages(ids).ids
    for ids in (np.arange(2).reshape(2, 1), ["x"], None, b"odd"):
        with pytest.raises(InvalidFieldError) as refused:
            Pages(PageList(pages=2), ids)
        assert refused.value.field == "ids"


def test_lists_of_a_call_are_those_that_its_body_announces() -> None:
    body = Free(pool="decode", pages=3)
    calls.check_ids(calls.asked(body, ids=(bytes(24),)))
    wrong: Any = ((bytes(16),), (bytes(24), bytes(8)), (np.arange(3),), (bytes(25),))
    for ids in wrong:
        with pytest.raises(InvalidFieldError) as refused:
            calls.check_ids(calls.asked(body, ids=ids))
        assert refused.value.field.startswith("ids")
