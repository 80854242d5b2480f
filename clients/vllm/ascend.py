"""vllm-ascend's KV memory: on an NPU, a layer at a time, a tensor of each role, which its runner allocates one by one.

It has no hook for memory of others: where the daemon is to have it, the runner's own function gives out the daemon's.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.parts import DRAFT
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import MAIN

if TYPE_CHECKING:
    import torch

    from kvferry.clients.engine_pool import EnginePool
    from kvferry.protocol.manifests import PoolSpec

NPU: Final = "npu"
"""Its device, by vLLM's name."""

RUNNER: Final = "vllm_ascend.worker.model_runner_v1"
ALLOCATES: Final = "_allocate_int8_cache_tensor"
"""Its runner's function for each tensor of the KV cache: (runner, bytes, alignment) to a tensor of int8."""


def roles_of(spec: PoolSpec) -> tuple[str, ...]:
    """Return of what a layer has a tensor, in their order."""
    return tuple(dict.fromkeys(one.role for one in manifest_of(spec).entries))


def by_layer(spec: PoolSpec, layers: Iterable[Sequence[torch.Tensor]]) -> dict[tuple[str, str, int], torch.Tensor]:
    """Return the tensors of layers, the model's and then a draft model's, as REGISTER_POOL names them."""
    numbers = dict.fromkeys((one.component, one.layer) for one in manifest_of(spec).entries)
    in_order = sorted(numbers, key=lambda one: (one[0] == DRAFT, one[1]))
    return {
        (component, role, layer): tensor
        for (component, layer), tensors in zip(in_order, layers, strict=True)
        for role, tensor in zip(roles_of(spec), tensors, strict=True)
    }


class Allocations:
    """While they are given out, vllm-ascend's KV cache is the memory of a pool."""

    def __init__(self, pool: EnginePool, tensors: Iterable[Any], names: Sequence[str]) -> None:
        """Give them out from now on, once.

        Args:
            pool: of the daemon's.
            tensors: vLLM's ``KVCacheTensor``, in the order in which they are allocated.
            names: of all layers, in the pool's order.

        Raises:
            InvalidFieldError: this vllm-ascend allocates its KV cache in another way.
        """
        numbers = {name: number for number, name in enumerate(names)}
        arrays = list(_arrays(pool))
        shared: list[Sequence[str]] = [getattr(one, "shared_by", ()) for one in tensors]
        runner = getattr(_runner(), "NPUModelRunner", None)
        is_known = all(len(of) == 1 and of[0] in numbers for of in shared) and len(shared) == len(numbers)
        if not hasattr(runner, ALLOCATES) or not is_known:
            raise InvalidFieldError(
                "memory 'owned' is not possible here: this vllm-ascend allocates its KV cache in another way than that "
                'of vLLM 0.23: say "memory": "registered"',
                field="memory",
            )
        self._left = [part for (name,) in shared for part in arrays[numbers[name]]]
        self._runner, self._original = runner, getattr(runner, ALLOCATES)
        setattr(runner, ALLOCATES, lambda _, size, _alignment: self._next(size))

    def __repr__(self) -> str:
        """Show how many are left."""
        return f"<Allocations {len(self._left)} left>"

    def _next(self, size: int) -> torch.Tensor:
        one = self._left.pop(0) if self._left else None
        if one is None or one.numel() != size:
            found = "nothing" if one is None else f"{one.numel()} bytes"
            raise InvalidFieldError(
                f"vllm-ascend allocates {size} bytes of KV cache, where the daemon has {found}: "
                'say "memory": "registered"',
                field="memory",
            )
        return one

    def end(self) -> bool:
        """Give out no more; return whether all were."""
        setattr(self._runner, ALLOCATES, self._original)
        return not self._left


def _runner() -> object:
    try:
        return importlib.import_module(RUNNER)
    except ImportError:
        return None


def _arrays(pool: EnginePool) -> Iterator[list[torch.Tensor]]:
    """Yield of each layer the bytes of each role, int8."""
    import torch  # noqa: PLC0415  of the engine

    components = [MAIN, *([DRAFT] if pool.spec.draft is not None else [])]
    for component in components:
        for parts in zip(*(pool.tensor(role, component) for role in roles_of(pool.spec)), strict=True):
            yield [one.reshape(-1).view(torch.int8) for one in parts]
