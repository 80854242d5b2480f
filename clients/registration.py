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


class _Form(NamedTuple):
    """How an array or a tensor lies in memory: strides in elements, the address of its first one."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    start: int


def registered(
    spec: PoolSpec,
    tensors: Mapping[tuple[Any, ...], torch.Tensor | npt.NDArray[Any]],
    device: str,
    export: Callable[[str, Mapping[str, torch.Tensor], int], Sequence[ShareFollows]],
) -> Registered:
    """Return how to register a pool's arrays.

    Args:
        spec: the pool's.
        tensors: by (component, role), or by (component, role, layer). On the host numpy arrays or CPU tensors.
        device: where they are.
        export: returns the shares of a device's tensors, by name, for a message.

    Raises:
        InvalidFieldError: an array is not exactly what the spec needs, shares bytes with another one, or lies, on the
            host, outside of the ``SharedMemory`` of the others.
        DuplicateEntryError, UncoveredEntryError: some layer is in two arrays, or in none.
        TorchMissingError: torch is not installed, so they are no tensors.
    """
    keys = [_parts(key) for key in mapping(tensors, "(component, role) to tensor", "tensors")]
    arrays = arrays_of(manifest_of(pool_spec(spec)), keys)
    memory: SharedMemory | None = None
    said, held = [], []
    for array, (component, role, layer), one in zip(arrays, keys, tensors.values(), strict=True):
        form = _on_host(array, one) if device == HOST else _of_tensor(array.name, one)
        check_form(array, form.shape, form.strides, form.dtype)
        at = Held(form.start, form.start + array.size_bytes, array.name)
        if device == HOST:
            memory = check_memory(array.name, at.start, at.stop, memory)
        else:
            tensor = cast("torch.Tensor", one)
            offset_bytes = int(tensor.storage_offset()) * tensor.element_size()
            check_storage(array, offset_bytes, tensor.untyped_storage().nbytes())
        held.append(at)
        said.append(
            RegisteredArrays(
                component=component,
                role=role,
                layer=layer,
                shape=form.shape,
                strides=form.strides,
                dtype=form.dtype,
                offset_bytes=form.start - memory.address if memory else None,
            )
        )
    check_apart(held)
    if memory is not None:
        return Registered(tuple(said), lambda number: [MemoryFollows(message_id=number)], (memory.region.fd,))
    by_name = {array.name: cast("torch.Tensor", one) for array, one in zip(arrays, tensors.values(), strict=True)}
    return Registered(tuple(said), lambda number: export(device, by_name, number))


def _on_host(array: Array, one: object) -> _Form:
    if not isinstance(one, np.ndarray):
        form = _of_tensor(array.name, one)
        where = cast("torch.Tensor", one).device
        if where.type != "cpu":
            raise InvalidFieldError(f"{array.name} is on {where}, not on the host", field=f"{array.name}.device")
        return form
    if any(stride % one.itemsize for stride in one.strides):
        raise InvalidFieldError(f"{array.name} has strides inside its elements", field=f"{array.name}.strides")
    dtype = array.dtype if one.dtype == array_dtype(array.dtype) else str(one.dtype)
    return _Form(one.shape, tuple(stride // one.itemsize for stride in one.strides), dtype, int(one.ctypes.data))


def _of_tensor(name: str, tensor: Any) -> _Form:  # noqa: ANN401  an engine may give anything
    backend = import_torch()
    if not isinstance(tensor, backend.Tensor) or tensor.layout is not backend.strided:
        raise InvalidFieldError(f"{name} is {type(tensor).__name__}, not a strided torch.Tensor", field=name)
    if tensor.is_neg() or tensor.is_conj():
        raise InvalidFieldError(
            f"{name} negates or conjugates what is in memory: register what resolve_neg() or resolve_conj() returns",
            field=name,
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    return _Form(tuple(tensor.shape), tuple(tensor.stride()), dtype, int(tensor.data_ptr()))


def _parts(key: tuple[Any, ...]) -> tuple[str, str, int | None]:
    match key:
        case (str(component), str(role)):
            return component, role, None
        case (str(component), str(role), int(layer)):
            return component, role, layer
        case _:
            raise InvalidFieldError(f"{key!r} is no (component, role) or (component, role, layer)", field="tensors")
