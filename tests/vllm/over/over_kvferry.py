"""A plugin of pytest: where vLLM's own tests create NIXL's, the example's or an idle mock connector, kvferry's is made.

Its runtime directory is KVFERRY_RUNTIME_DIR's. A mock that is told to find tokens stays: no daemon has them.
"""

from __future__ import annotations

import copy
import os
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

REPLACED = ("NixlConnector", "ExampleConnector", "MockKVConnector")

_create = KVConnectorFactory.create_connector


def _create_kvferry(config: Any, *arguments: Any, **more: Any) -> Any:  # noqa: ANN401  vLLM's
    told = config.kv_transfer_config
    finds = any(told.kv_connector_extra_config.get(one) for one in ("matched_tokens", "num_defers_before_matching"))
    if told.kv_connector in REPLACED and not finds:
        config = copy.copy(config)
        config.scheduler_config = copy.copy(config.scheduler_config)
        config.scheduler_config.disable_hybrid_kv_cache_manager = True  # as vLLM itself does where it may choose
        config.kv_transfer_config = copy.copy(told)
        if told.kv_connector == "NixlConnector":  # which does not heed it
            config.kv_transfer_config.kv_role = "kv_both"
        config.kv_transfer_config.kv_connector = "KvferryConnector"
        config.kv_transfer_config.kv_connector_module_path = "kvferry.clients.vllm.connector"
        config.kv_transfer_config.kv_connector_extra_config = {
            "runtime_dir": os.environ["KVFERRY_RUNTIME_DIR"],
            "cache": False,  # a store would hold blocks until a worker says that it is done, and there is none
        }
    return _create(config, *arguments, **more)


KVConnectorFactory.create_connector = _create_kvferry
