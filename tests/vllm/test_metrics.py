"""What the connector counts, as vLLM adds it up over ranks and steps, and as its log line."""

from __future__ import annotations

from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging

from kvferry.clients.vllm.metrics import Moved

MIB = 1 << 20


def moved() -> Moved:
    """Return two loads, a store, and three failures."""
    one = Moved()
    one.record("load", 3 * MIB, 0.002)
    one.record("load", 1 * MIB, 0.004)
    one.record("store", MIB // 2, 0.1)
    one.failed("receive", "PEER_LOST")
    one.failed("receive", "DEADLINE")
    one.failed("receive", "DEADLINE")
    return one


LINE = {
    "loads": 2,
    "load MiB": 4.0,
    "load avg ms": 3.0,
    "stores": 1,
    "store MiB": 0.5,
    "store avg ms": 100.0,
    "receive failures": 3,
}


def test_what_was_taken_is_counted_once() -> None:
    one = moved()
    taken = one.taken()
    assert taken is not None
    assert (taken.reduce(), one.taken()) == (LINE, None)
    one.record("send", MIB, 1.0)
    again = one.taken()
    assert again is not None
    assert (again.reduce(), taken.reduce()) == ({"sends": 1, "send MiB": 1.0, "send avg ms": 1000.0}, LINE)


def test_ranks_and_steps_add_up() -> None:
    one = moved().aggregate(moved())
    sums = {"loads": 4, "load MiB": 8.0, "stores": 2, "store MiB": 1.0, "receive failures": 6}
    assert one.reduce() == {**LINE, **sums}
    assert one.data["receive_failures"] == {"PEER_LOST": 2, "DEADLINE": 4}


SUMMED = "load MiB=8.0; load avg ms=3.0; stores=2; store MiB=1.0; store avg ms=100.0; receive failures=6"


def test_line_of_vllms_log() -> None:
    told = KVTransferConfig(
        kv_connector="KvferryConnector", kv_connector_module_path="kvferry.clients.vllm.connector", kv_role="kv_both"
    )
    logging = KVConnectorLogging(told)
    lines: list[str] = []

    def say(text: str, *arguments: Any) -> None:  # noqa: ANN401  of a logger
        lines.append(text % arguments)

    for _ in range(2):
        logging.observe(moved().data)
    logging.log(say)
    logging.log(say)
    assert lines == [", ".join(["KV Transfer metrics: loads=4", *SUMMED.split("; ")])]
