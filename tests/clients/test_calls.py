"""Requests as values: what is read from a reply, without a daemon."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvferry.clients import calls
from kvferry.clients.calls import Pages
from kvferry.protocol.base import PageList
from kvferry.protocol.client_core import ReplyArrived
from kvferry.protocol.errors import InvalidFieldError, MalformedError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.pool_messages import DeletePool, PoolDeleted
from kvferry.protocol.session_messages import Ping


def test_a_reply_of_another_kind_is_not_taken_for_it() -> None:
    reply = ReplyArrived(1, PoolDeleted(pool="decode"), (), None)
    with pytest.raises(MalformedError, match="answered with PoolDeleted, not Pong"):
        calls.asked(Ping()).read(reply)
    assert calls.asked(DeletePool(pool="decode")).read(reply) == PoolDeleted(pool="decode")


def test_numbers_of_other_libraries_are_sent_as_pythons() -> None:
    page: Any = np.int32(3)
    tokens: Any = np.int64(5)
    head = calls.pages([1, 2], first_page=page, tokens=tokens).head
    assert head == PageList(pages=2, first_page=3, tokens=5)
    assert (type(head.first_page), type(head.tokens)) == (int, int)


def test_pages_made_by_hand_are_checked() -> None:
    for head, field in ((PageList(pages=1, component="Main"), "component"), (PageList(pages=1, tokens=0), "tokens")):
        with pytest.raises(InvalidFieldError) as refused:
            Pages(head, np.arange(1))
        assert refused.value.field == field
    with pytest.raises(InvalidFieldError, match="no PageList"):
        Pages(None, np.arange(1))  # type: ignore[arg-type]


def test_ids_of_a_free_are_its_own() -> None:
    """An engine uses its array for something else, while what it has given back is kept until the reply."""
    ids = np.arange(3)
    call = calls.free("decode", ids, MAIN, None)
    ids[:] = 7
    assert call.ids[0].tolist() == [0, 1, 2]
