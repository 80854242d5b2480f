"""Requests as values: what is read from a reply, without a daemon."""

from __future__ import annotations

import numpy as np
import pytest

from kvferry.clients import calls
from kvferry.protocol.client_core import ReplyArrived
from kvferry.protocol.errors import MalformedError
from kvferry.protocol.ids import MAIN
from kvferry.protocol.pool_messages import DeletePool, PoolDeleted
from kvferry.protocol.session_messages import Ping


def test_a_reply_of_another_kind_is_not_taken_for_it() -> None:
    reply = ReplyArrived(1, PoolDeleted(pool="decode"), (), None)
    with pytest.raises(MalformedError, match="answered with PoolDeleted, not Pong"):
        calls.asked(Ping()).read(reply)
    assert calls.asked(DeletePool(pool="decode")).read(reply) == PoolDeleted(pool="decode")


def test_ids_of_a_free_are_its_own() -> None:
    """An engine uses its array for something else, while what it has given back is kept until the reply."""
    ids = np.arange(3)
    call = calls.free("decode", ids, MAIN, None)
    ids[:] = 7
    assert call.ids[0].tolist() == [0, 1, 2]
