"""Whether a worker's vLLM still computes with the weights of its start: they are looked at in memory, when told to.

vLLM tells nobody of new weights: a reload, an update by a trainer, sleep with level 2, and whatever ``collective_rpc``
and ``apply_model`` do. Whoever changes them has to reset its prefix cache, which is what they are looked at for.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.v1.worker.worker_base import WorkerBase

from kvferry.protocol.tier_messages import HASH_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

ROW_BYTES: Final = 4096
CHUNK_ROWS: Final = {"cpu": 64}
"""Of which a device sums at once: on a CPU what its cache holds."""

MOST_ROWS: Final = 1 << 16


class _Read(NamedTuple):
    """What weights were when they were read: a digest, and of those in a kernel's own memory what stands for them."""

    digest: bytes
    packed: tuple[object, ...]
    """Functions that compute with weights which only they have. vLLM makes new ones of new weights."""


class Weights:
    """Of this process's worker.

    Attributes:
        now: what stands for them, when last looked at; empty: they are those of the start.
    """

    def __init__(self, vllm_config: VllmConfig) -> None:
        """Look at them, once they are loaded."""
        self.now = b""
        self._worker = next(
            (one for one in gc.get_objects() if issubclass(type(one), WorkerBase) and one.vllm_config is vllm_config),
            None,
        )  # vLLM gives a connector no way to its worker
        if vllm_config.model_config.quantization is not None and vllm_config.device_config.device_type == "cpu":
            self._worker = None  # kernels have them, and say nothing
        self._first = self._last = self._read()

    def __repr__(self) -> str:
        """Show whether they have changed."""
        return f"<Weights {self.now.hex() or 'of the start'}>"

    def look(self) -> bytes:
        """Look at them again; return what stands for them: where they cannot be read, something new each time."""
        before, self._last = self._last, self._read()
        found, first = self._last, self._first
        if found is None or first is None:
            self.now = os.urandom(HASH_BYTES)
        elif found != before:
            changed = found.digest if found.packed == first.packed else os.urandom(HASH_BYTES)
            self.now = b"" if found == first else changed
            logger.warning("kvferry: this server's weights have changed: it shares KV with equal ones only")
        return self.now

    def _read(self) -> _Read | None:
        """Read all weights; None: they cannot be read."""
        if self._worker is None:
            return None
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        packed = []
        try:
            for where, module in self._worker.get_model().named_modules():
                kernel = getattr(module, "cpu_linear", None)
                packed += [] if kernel is None else [kernel]
                for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                    if kernel is None and name.endswith("weight") and not tensor.numel():
                        raise TypeError(f"{where}.{name} is elsewhere")  # noqa: TRY301  as torch raises
                    for part in _parts(tensor):
                        digest.update(f"{where}.{name} {part.dtype} {tuple(part.shape)}\n".encode())
                        for sums in _sums_anywhere(part.detach()):
                            digest.update(sums.cpu().contiguous().numpy().data)
        except (RuntimeError, TypeError) as error:  # of a device's own formats
            logger.warning("kvferry: this server's weights cannot be looked at: %s", error)
            return None
        return _Read(digest.digest(), tuple(packed))


def _parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield what has a tensor's bytes: of a quantized one several."""
    inner: Any = tensor
    if isinstance(getattr(inner, "partitions", None), Mapping):  # vLLM's SharedWeightParameter
        for part in inner.partitions.values():
            yield from _parts(part)
    elif is_traceable_wrapper_subclass(inner):
        for name in inner.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))
    else:
        yield tensor


def _sums_anywhere(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the same sums where a device has a tensor in a format of its own, too: of a copy on the host."""
    try:
        return list(_sums(tensor))
    except RuntimeError:
        if tensor.device.type == "cpu":
            raise
        return list(_sums(tensor.cpu()))


def _sums(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield sums of a tensor's bytes, taken as numbers of 64 bits: of rows of 4 KiB, and of columns; and what is left.

    They are made where the tensor is, as fast as memory is read. None of the numbers alone can change, and no two can
    change places, without another sum.
    """
    content = tensor.contiguous().reshape(-1).view(torch.uint8)
    whole = len(content) // ROW_BYTES * ROW_BYTES
    yield content[whole:]
    if not whole:
        return
    words = content[:whole] if content.storage_offset() % 8 == 0 else content[:whole].clone()
    rows = words.view(torch.int64).view(-1, ROW_BYTES // 8)
    columns = torch.zeros_like(rows[0])
    count = CHUNK_ROWS.get(tensor.device.type, MOST_ROWS)
    for start in range(0, len(rows), count):
        chunk = rows[start : start + count]
        columns += chunk.sum(dim=0)
        yield chunk.sum(dim=1)
    yield columns
