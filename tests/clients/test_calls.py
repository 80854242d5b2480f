"""Requests as values: what is read from a reply, without a daemon."""

from __future__ import annotations

import pytest

from kvferry.clients import calls
from kvferry.protocol.client_core import ReplyArrived
from kvferry.protocol.errors import MalformedError
from kvferry.protocol.pool_messages import DeletePool, PoolDeleted
from kvferry.protocol.session_messages import Ping


def test_a_reply_of_another_kind_is_not_taken_for_it() -> None:
    reply = ReplyArrived(1, PoolDeleted(pool="decode"), (), None)
    with pytest.raises(MalformedError, match="answered with PoolDeleted, not Pong"):
        calls.asked(Ping()).read(reply)
    assert calls.asked(DeletePool(pool="decode")).read(reply) == PoolDeleted(pool="decode")
