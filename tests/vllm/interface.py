"""What of vLLM a connector meets: the members of classes, read from its source.

Of each release that kvferry knows, a file in the folder ``interfaces`` has them. That of another release is written by
``python -m tests.vllm.interface FILE``, in the environment that has it. With the folder ``vllm`` of an unpacked wheel
behind it, that one is read.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from pathlib import Path
from typing import Final

_KV_TRANSFER: Final = "distributed/kv_transfer/kv_connector/"
CLASSES: Final = {
    f"{_KV_TRANSFER}v1/base.py": (
        "KVConnectorBase_V1",
        "KVConnectorMetadata",
        "KVConnectorRole",
        "KVConnectorTransferResults",
        "KVConnectorWorkerMetadata",
        "SupportsHMA",
    ),
    f"{_KV_TRANSFER}v1/metrics.py": ("KVConnectorPromMetrics", "KVConnectorStats"),
    f"{_KV_TRANSFER}factory.py": ("KVConnectorFactory",),
    f"{_KV_TRANSFER}utils.py": ("KVOutputAggregator",),
    "distributed/parallel_state.py": ("get_tensor_model_parallel_rank",),
    "utils/network_utils.py": ("get_ip",),
    "v1/attention/backends/cpu_attn.py": ("_get_attn_isa",),
    "lora/request.py": ("LoRARequest",),
    "multimodal/inputs.py": ("MultiModalFeatureSpec", "PlaceholderRange"),
    "v1/core/block_pool.py": ("BlockPool",),
    "v1/worker/worker_base.py": ("WorkerBase",),
    "v1/core/kv_cache_utils.py": ("DEFAULT_NONE_HASH_SEED", "NONE_HASH", "maybe_convert_block_hash"),
    "v1/metrics/utils.py": ("create_metric_per_engine",),
    "config/kv_transfer.py": ("KVTransferConfig",),
    "config/speculative.py": ("SpeculativeConfig.method", "SpeculativeConfig.use_eagle_block_drop"),
    "config/vllm.py": ("VllmConfig.num_prefill_lookahead_tokens",),
    "distributed/kv_events.py": ("AllBlocksCleared", "BlockRemoved", "BlockStored", "KVConnectorKVEvents"),
    "v1/core/kv_cache_manager.py": ("KVCacheBlocks",),
    "v1/core/sched/scheduler.py": ("Scheduler._request_blocks_can_be_freed",),
    "v1/core/sched/output.py": ("CachedRequestData", "NewRequestData", "SchedulerOutput"),
    "v1/kv_cache_interface.py": (
        "AttentionSpec",
        "ChunkedLocalAttentionSpec",
        "FullAttentionSpec",
        "KVCacheConfig",
        "KVCacheGroupSpec",
        "KVCacheSpec",
        "KVCacheTensor",
        "MLAAttentionSpec",
        "MambaSpec",
        "SlidingWindowSpec",
    ),
    "v1/outputs.py": ("KVConnectorOutput",),
    "v1/request.py": ("Request", "RequestStatus"),
}
"""What a connector derives from, is handed, returns or calls, by the file in vLLM's package: classes with all of their
members, or single members."""
PRIVATE: Final = ("__init__", "_registry", "_request_blocks_can_be_freed")
"""Names with an underscore that are looked at all the same."""


def read_interface(package: Path) -> dict[str, str]:
    """Return what of the vLLM in a folder a connector meets.

    By "Class.name" or "file.name", which is "field", "constant", or a method's or function's signature.
    """
    found: dict[str, str] = {}
    for file, names in CLASSES.items():
        for node in ast.parse((package / file).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                members = {f"{node.name}.{name}": what for name, what in _members(node).items()}
                found |= {name: what for name, what in members.items() if node.name in names or name in names}
            elif isinstance(node, ast.FunctionDef) and node.name in names:
                found[f"{Path(file).stem}.{node.name}"] = f"function({', '.join(_parameters(node.args))})"
            else:
                found |= {f"{Path(file).stem}.{name}": "constant" for name in _names(node) if name in names}
    return dict(sorted(found.items()))


def differences(known: dict[str, str], found: dict[str, str]) -> list[str]:
    """Return what differs, a line for each method or field; nothing where two interfaces are the same."""
    return [
        f"{name}: {found.get(name, 'not there')}, known is {known.get(name, 'nothing of this name')}"
        for name in sorted({*known, *found})
        if known.get(name) != found.get(name)
    ]


def _members(node: ast.ClassDef) -> dict[str, str]:
    methods = {}
    fields = set()
    for one in node.body:
        if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef):
            if not one.name.startswith("_") or one.name in PRIVATE:
                methods[one.name] = f"{_kind(one)}({', '.join(_parameters(one.args))})"
            if one.name == "__init__":
                fields |= _assigned(one)
        fields |= _names(one)
    return dict.fromkeys((one for one in fields if not one.startswith("_") or one in PRIVATE), "field") | methods


def _names(node: ast.stmt) -> set[str]:
    """Return the names that a statement gives values or types to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return {one.id for one in targets if isinstance(one, ast.Name)}


def _assigned(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    targets = []
    for node in ast.walk(function):
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return {
        one.attr
        for one in targets
        if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self"
    }


def _kind(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    names = {one.id if isinstance(one, ast.Name) else ast.unparse(one) for one in function.decorator_list}
    kinds = [
        one for one in ("abstractmethod", "classmethod", "staticmethod", "property", "cached_property") if one in names
    ]
    return " ".join(kinds) or "method"


def _parameters(arguments: ast.arguments) -> list[str]:
    """Return the names of a function's parameters, with "=" behind those that have a default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    found = [one.arg + "=" * (i >= required) for i, one in enumerate(positional)]
    if arguments.vararg:
        found.append(f"*{arguments.vararg.arg}")
    elif arguments.kwonlyargs:
        found.append("*")
    found += [
        one.arg + "=" * (default is not None)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        found.append(f"**{arguments.kwarg.arg}")
    return found


def installed_package() -> Path:
    """Return the folder of the vLLM of this environment, which is not imported."""
    found = importlib.util.find_spec("vllm")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent


def overridden(file: Path, name: str) -> dict[str, str]:
    """Return the public members of a class in a file, as ``read_interface`` has them."""
    nodes = ast.parse(file.read_text(encoding="utf-8")).body
    (node,) = [one for one in nodes if isinstance(one, ast.ClassDef) and one.name == name]
    return _members(node)


if __name__ == "__main__":
    members = read_interface(Path(sys.argv[2]) if len(sys.argv) > 2 else installed_package())
    Path(sys.argv[1]).write_text(f"{json.dumps(members, indent=1)}\n", encoding="utf-8")
