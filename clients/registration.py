"""What an engine registers, compared with the spec before a word of it goes to the daemon, which compares it again.

Knows what torch says of a tensor; how one is shared is ``devices``' business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvferry.clients.arguments import mapping, pool_spec
from kvferry.clients.elements import array_dtype, import_torch
from kvferry.clients.shared_memory import SharedMemory, check_memory
from kvferry.pools.layouts import manifest_of
from kvferry.pools.planning.arrays import Array, Held, arrays_of, check_apart, check_form, check_storage
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.ids import HOST
from kvferry.protocol.manifests import PoolSpec
from kvferry.protocol.pool_messages import RegisteredArrays
from kvferry.protocol.session_stream import MemoryFollows, ShareFollows

if TYPE_CHECKING:
    import torch


class Registered(NamedTuple):
    """What a REGISTER_POOL says of its arrays; what the session socket says before, by the message's number."""

    arrays: tuple[RegisteredArrays, ...]
    said: Callable[[int], Sequence[ShareFollows | MemoryFollows]]
    fds: tuple[int, ...] = ()


def registered(
    spec: PoolSpec,
    tensors: Mapping[tuple[Any, ...], torch.Tensor | npt.NDArray[Any]],
    device: str,
    export: Callable[[str, Mapping[str, torch.Tensor], int], Sequence[ShareFollows]],
) -> Registered:
    """Return how to register a pool's tensors; see ``registered_tensors`` and ``registered_memory``.

    Args:
        spec: the pool's.
        tensors: see there.
        device: where they are.
        export: returns the shares of a device's tensors, by name, for a message.
    """
    if device == HOST:
        on_host, memory = registered_memory(spec, tensors)
        return Registered(on_host, lambda message_id: [MemoryFollows(message_id=message_id)], (memory.region.fd,))
    arrays, by_name = registered_tensors(spec, cast("Mapping[tuple[Any, ...], torch.Tensor]", tensors))
    return Registered(arrays, lambda message_id: export(device, by_name, message_id))


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


def registered_memory(
    spec: PoolSpec, arrays: Mapping[tuple[Any, ...], Any]
) -> tuple[tuple[RegisteredArrays, ...], SharedMemory]:
    """Return what to say of the arrays of ``register_pool`` on the host, and the memory that they lie in.

    Args:
        spec: the pool's.
        arrays: numpy arrays or CPU tensors, by (component, role), or by (component, role, layer).

    Raises:
        InvalidFieldError: an array is not exactly what the spec needs, shares bytes with another one, or lies outside
            of the ``SharedMemory`` of the others.
        DuplicateEntryError, UncoveredEntryError: some layer is in two arrays, or in none.
    """
    keys = [_parts(key) for key in mapping(arrays, "(component, role) to array", "tensors")]
    wanted = arrays_of(manifest_of(pool_spec(spec)), keys)
    memory: SharedMemory | None = None
    said, held = [], []
    for array, (component, role, layer), one in zip(wanted, keys, arrays.values(), strict=True):
        shape, strides, dtype, start = _on_host(array, one)
        check_form(array, shape, strides, dtype)
        memory = check_memory(array.name, start, start + array.size_bytes, memory)
        held.append(Held(start, start + array.size_bytes, array.name))
        said.append(
            RegisteredArrays(
                component=component, role=role, layer=layer, shape=shape, strides=strides, dtype=dtype,
                offset_bytes=start - memory.region.address,
            )
        )  # fmt: skip
    check_apart(held)
    assert memory is not None, "a pool has arrays"
    return tuple(said), memory


def _on_host(array: Array, one: Any) -> tuple[tuple[int, ...], tuple[int, ...], str, int]:  # noqa: ANN401  an engine may give anything
    """Return shape, strides in elements, dtype and address of an array of numpy's or torch's."""
    if isinstance(one, np.ndarray):
        dtype = array.dtype if one.dtype == array_dtype(array.dtype) else str(one.dtype)
        if any(stride % one.itemsize for stride in one.strides):
            raise InvalidFieldError(f"{array.name} has strides inside its elements", field=f"{array.name}.strides")
        strides = tuple(stride // one.itemsize for stride in one.strides)
        return one.shape, strides, dtype, int(one.ctypes.data)
    shape, strides, dtype = _form(array.name, one)
    if one.device.type != "cpu":
        raise InvalidFieldError(f"{array.name} is on {one.device}, not on the host", field=f"{array.name}.device")
    return shape, strides, dtype, int(one.data_ptr())


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
