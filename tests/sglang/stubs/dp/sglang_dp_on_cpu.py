"""What SGLang's attention in torch lacks for data-parallel attention, as a plugin of the test environment."""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Have it say how long the requests are that pad a batch to those of other ranks."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    backend = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    HookRegistry.register(f"{backend}.__init__", _pad_with_one_token, HookType.AFTER)


def _pad_with_one_token(_: None, backend: Any, *__: object, **___: object) -> None:  # noqa: ANN401  SGLang's object
    backend.get_cpu_graph_seq_len_fill_value = lambda: 1
