"""What SGLang's attention in torch lacks for draft models, as a plugin of the test environment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

_LAYERS = "sglang.srt.layers.attention."


def register() -> None:
    """Have it verify what a draft proposes, and be a draft's own."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    HookRegistry.register(
        f"{_LAYERS}torch_native_backend.TorchNativeAttnBackend.forward_extend", verifying, HookType.AROUND
    )
    factory = "sglang.srt.speculative.draft_utils.DraftBackendFactory."
    HookRegistry.register(f"{factory}create_decode_backend", steps_of, HookType.REPLACE)
    HookRegistry.register(f"{factory}create_draft_extend_backend", extending, HookType.REPLACE)


@contextlib.contextmanager
def saying(batch: Any, **fields: Tensor) -> Iterator[None]:  # noqa: ANN401  SGLang's object
    """Have a batch say something else meanwhile."""
    before = {name: getattr(batch, name) for name in fields}
    for name, value in fields.items():
        setattr(batch, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(batch, name, value)


def verifying(
    original: Callable[..., Tensor],
    backend: Any,  # noqa: ANN401  SGLang's object
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: Any,  # noqa: ANN401  SGLang's object
    forward_batch: Any,  # noqa: ANN401  SGLang's object
    *rest: object,
    **more: object,
) -> Tensor:
    """Compute attention; the tokens that are verified follow the requests' own."""
    if not forward_batch.forward_mode.is_target_verify():
        return original(backend, q, k, v, layer, forward_batch, *rest, **more)
    lengths, count = forward_batch.seq_lens, forward_batch.spec_info.draft_token_num
    with saying(
        forward_batch,
        seq_lens=lengths + count,
        extend_prefix_lens=lengths,
        extend_seq_lens=torch.full_like(lengths, count),
    ):
        return original(backend, q, k, v, layer, forward_batch, *rest, **more)


def extending(factory: Any) -> Any:  # noqa: ANN401  SGLang's objects
    """Return what computes a draft's layers over tokens that are known."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: PLC0415

    return _named(TorchNativeAttnBackend(factory.draft_model_runner))


def steps_of(factory: Any) -> Any:  # noqa: ANN401  SGLang's objects
    """Return what computes a draft's steps, each a token after the one before."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: PLC0415

    class Step(TorchNativeAttnBackend):
        def __init__(self, runner: Any, number: int) -> None:  # noqa: ANN401  SGLang's object
            super().__init__(runner)
            self._tokens = number + 1

        def forward_decode(
            self,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            layer: Any,  # noqa: ANN401  SGLang's object
            forward_batch: Any,  # noqa: ANN401  SGLang's object
            save_kv_cache: bool = True,  # noqa: FBT001, FBT002  SGLang's signature
        ) -> Tensor:
            with saying(forward_batch, seq_lens=forward_batch.seq_lens + self._tokens):
                return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

    class Steps:
        def __init__(self) -> None:
            count = factory.speculative_num_steps - 1
            self.attn_backends = [_named(Step(factory.draft_model_runner, number)) for number in range(count)]

        def init_forward_metadata(self, _: object) -> None:
            pass

    return _named(Steps())


def _named(backend: Any) -> Any:  # noqa: ANN401  SGLang's object
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "torch_native"
    return backend
