"""How an engine's process sees a pool's elements: as numpy's, always, or as torch's where it has torch.

The client imports torch here and nowhere else, and not before a tensor is asked for: until then an engine can choose
its backend, and one that needs none never loads it. Knows nothing of pools.
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
"""Dtypes that numpy itself has under torch's name."""


def array_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for an entry's; the unsigned integer of as many bits where numpy has none.

    Raises:
        InvalidFieldError: no dtype of that name.
    """
    size_bytes = dtype_bytes(dtype)
    return np.dtype(dtype if dtype in NUMPY_DTYPES else f"u{size_bytes}")


def import_torch() -> Any:  # noqa: ANN401  the module
    """Return torch.

    Raises:
        TorchMissingError: it is not installed.
    """
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as cause:
        if cause.name != "torch":  # it is there, and something that it needs is not
            raise
        raise TorchMissingError("a tensor was asked for, and torch is not installed") from cause


def torch_dtype(dtype: str) -> torch.dtype:
    """Return torch's dtype of that name.

    Raises:
        TorchMissingError: torch is not installed, or older than the dtype.
    """
    backend = import_torch()
    found: torch.dtype | None = getattr(backend, dtype, None)
    if found is None:
        raise TorchMissingError(f"torch {backend.__version__} has no {dtype}")
    return found
