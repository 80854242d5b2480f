"""vLLM calls this in each of its processes, to register kvferry's connector."""

from __future__ import annotations

from typing import Final

CONNECTOR: Final = "KvferryConnector"


def register() -> None:
    """Let vLLM find the connector by its name; nothing is loaded, and it may be called again."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415

    if CONNECTOR not in KVConnectorFactory._registry:  # noqa: SLF001  it says it no other way
        KVConnectorFactory.register_connector(CONNECTOR, "kvferry.clients.vllm.connector", CONNECTOR)
