"""What an engine registers, compared with the spec before a word of it goes to the daemon, which compares it again.

Knows what torch says of a tensor; how one is shared is ``devices``' business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvferry.clients.arguments import mapping, pool_spec
from kvferry.clients.elements import import_torch
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.arrays import Held, arrays_of, check_apart, check_form, check_storage
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.pool_messages import RegisteredArrays

if TYPE_CHECKING:
    import torch


def registered_tensors(
    spec: PoolSpec, tensors: Mapping[tuple[Any, ...], torch.Tensor]
) -> tuple[tuple[RegisteredArrays, ...], dict[str, torch.Tensor]]:
    """Return what to say of the tensors of ``register_pool``, and the tensors by their arrays' names.

    Args:
        spec: the pool's.
        tensors: by (component, role), or by (component, role, layer).

    Raises:
        InvalidFieldError: a tensor is not exactly what the spec needs, or shares bytes with another one.
        DuplicateEntryError, UncoveredEntryError: some layer is in two tensors, or in none.
        TorchMissingError: torch is not installed, so they are no tensors.
    """
    keys = [_parts(key) for key in mapping(tensors, "(component, role) to tensor", "tensors")]
    arrays = arrays_of(manifest_of(pool_spec(spec)), keys)
    said = []
    held = []
    for array, (component, role, layer), tensor in zip(arrays, keys, tensors.values(), strict=True):
        shape, strides, dtype = _form(array.name, tensor)
        check_form(array, shape, strides, dtype)
        offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
        check_storage(array, offset_bytes, tensor.untyped_storage().nbytes())
        start = int(tensor.data_ptr())
        held.append(Held(start, start + array.size_bytes, array.name))
        said.append(
            RegisteredArrays(component=component, role=role, layer=layer, shape=shape, strides=strides, dtype=dtype)
        )
    check_apart(held)
    return tuple(said), {array.name: tensor for array, tensor in zip(arrays, tensors.values(), strict=True)}


def _form(name: str, tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...], str]:  # noqa: ANN401  an engine may give anything
    backend = import_torch()
    if not isinstance(tensor, backend.Tensor) or tensor.layout is not backend.strided:
        raise InvalidFieldError(f"{name} is {type(tensor).__name__}, not a strided torch.Tensor", field=name)
    if tensor.is_neg() or tensor.is_conj():
        raise InvalidFieldError(
            f"{name} negates or conjugates what is in memory: register the result of resolve_neg() or resolve_conj() "
            "returns",
            field=name,
        )
    return tuple(tensor.shape), tuple(tensor.stride()), str(tensor.dtype).removeprefix("torch.")


def _parts(key: tuple[Any, ...]) -> tuple[str, str, int | None]:
    match key:
        case (str(component), str(role)):
            return component, role, None
        case (str(component), str(role), int(layer)):
            return component, role, layer
        case _:
            raise InvalidFieldError(f"{key!r} is no (component, role) or (component, role, layer)", field="tensors")
