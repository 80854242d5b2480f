"""The dtypes of a pool's elements in an engine's process: in numpy always, and in torch if it is installed.

The client imports torch only here, and only when a tensor is requested: until then an engine can choose its backend,
and an engine that needs no torch never loads it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvferry.pools.planning.geometry import dtype_bytes
from kvferry.protocol.errors import TorchMissingError

if TYPE_CHECKING:
    import torch

NUMPY_DTYPES: Final = frozenset({"float64", "float32", "float16", "int8", "uint8"})
"""Dtypes that numpy has under the same name as torch."""


def array_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for an entry's dtype; the unsigned integer of the same width if numpy has none.

    Raises:
        InvalidFieldError: there is no dtype of that name.
    """
    size_bytes = dtype_bytes(dtype)
    return np.dtype(dtype if dtype in NUMPY_DTYPES else f"u{size_bytes}")


def import_torch() -> Any:  # noqa: ANN401  the module
    """Return torch.

    Raises:
        TorchMissingError: torch is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as cause:
        if cause.name != "torch":  # torch is installed, but one of its dependencies is not
            raise
        raise TorchMissingError("a tensor was requested, but torch is not installed") from cause


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype of that name.

    Raises:
        TorchMissingError: torch is not installed, or does not have the dtype.
    """
    backend = import_torch()
    found: torch.dtype | None = getattr(backend, dtype, None)
    if found is None:
        raise TorchMissingError(f"torch {backend.__version__} has no {dtype}")
    return found
