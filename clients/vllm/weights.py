"""Whether a worker's vLLM still computes with the weights of its start: they are looked at in memory, when told to.

vLLM tells nobody of new weights: a reload, an update by a trainer, sleep with level 2, and whatever ``collective_rpc``
and ``apply_model`` do. Whoever changes them has to reset its prefix cache, which is what they are looked at for.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from vllm.v1.worker.worker_base import WorkerBase

from kvferry.clients.vllm.configuration import draft_digest
from kvferry.protocol.tier_messages import HASH_BYTES

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = logging.getLogger(__name__)

ROW_BYTES: Final = 4096
CHUNK_ROWS: Final = {"cpu": 64}
"""Of which a device sums at once: on a CPU what its cache holds."""

MOST_ROWS: Final = 1 << 16

ABSORBED: Final = ("W_UK_T", "W_UV")
"""What latent attention makes of the weight of its ``kv_b_proj``; vllm-ascend's sparse one then empties that."""


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
        self._draft = draft_digest(vllm_config)
        self._worker = next(
            (one for one in gc.get_objects() if issubclass(type(one), WorkerBase) and one.vllm_config is vllm_config),
            None,
        )  # vLLM gives a connector no way to its worker
        draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
        quantized = any(one is not None and one.quantization is not None for one in (vllm_config.model_config, draft))
        if quantized and vllm_config.device_config.device_type == "cpu":
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

    def told(self, prompt: bytes) -> bytes:
        """Return what prefill says beside a prompt's blocks: of which prompt, weights and draft model they are."""
        return b"".join(part.ljust(HASH_BYTES, b"\0") for part in (prompt, self.now, self._draft))

    def difference(self, theirs: bytes, prompt: bytes) -> str:
        """Return what a prompt's blocks have been computed with that this server has not; empty: nothing."""
        ours, both = self.told(prompt), 2 * HASH_BYTES
        if len(theirs) != len(ours) or theirs[:both] != ours[:both]:
            return "another prompt, or the same one with another adapter or other weights"
        drafts = {theirs[both:], ours[both:]} - {bytes(HASH_BYTES)}
        return "the prompt with another draft model" if len(drafts) > 1 else ""

    def _modules(self, worker: WorkerBase) -> Iterator[tuple[str, torch.nn.Module]]:
        """Yield the modules of the model and of its draft model, those that both have once."""
        seen: set[torch.nn.Module] = set()
        yield from worker.get_model().named_modules(memo=seen)
        runner: Any = worker.model_runner
        draft = getattr(getattr(runner, "drafter", None), "model", None)
        if isinstance(draft, torch.nn.Module):
            yield from draft.named_modules(memo=seen, prefix="draft")

    def _read(self) -> _Read | None:
        """Read all weights; None: they cannot be read."""
        if self._worker is None:
            return None
        digest = hashlib.blake2b(digest_size=HASH_BYTES)
        packed = []
        try:
            modules = dict(self._modules(self._worker))
            absorbed = _absorbed(modules.values())
            for where, module in modules.items():
                kernel = getattr(module, "cpu_linear", None)
                packed += [] if kernel is None else [kernel]
                for name, tensor in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)):
                    is_empty = kernel is None and name.endswith("weight") and not tensor.numel()
                    if is_empty and module not in absorbed:
                        raise TypeError(f"{where}.{name} is elsewhere")  # noqa: TRY301  as torch raises
                    for part in absorbed[module] if is_empty else _parts(tensor):
                        digest.update(f"{where}.{name} {part.dtype} {tuple(part.shape)}\n".encode())
                        for sums in _sums_anywhere(part.detach()):
                            digest.update(sums.cpu().contiguous().numpy().data)
        except (RuntimeError, TypeError) as error:  # of a device's own formats
            logger.warning("kvferry: this server's weights cannot be looked at: %s", error)
            return None
        return _Read(digest.digest(), tuple(packed))


def _absorbed(modules: Iterable[torch.nn.Module]) -> dict[torch.nn.Module, list[torch.Tensor]]:
    """Return what has the weights of modules that may have been emptied."""
    by_attention: list[Any] = [getattr(one, "impl", None) for one in modules]
    return {
        one.kv_b_proj: [getattr(one, name) for name in ABSORBED]
        for one in by_attention
        if all(hasattr(one, name) for name in ("kv_b_proj", *ABSORBED))
    }


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
