"""What the KV of a request depends on, by content: what vLLM's hashes of blocks know by a name only, or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from kvferry.clients.model_weights import adapter_revision
from kvferry.protocol.errors import InvalidFieldError
from kvferry.protocol.tier_messages import HASH_BYTES

if TYPE_CHECKING:
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)

MOST_ADAPTERS: Final = 4096
"""That are remembered; of more, the oldest are not."""

MOST_LABELS: Final = 65536
"""Names with contents that are remembered."""

_OF_CONTENT: Final = re.compile(r"[0-9a-f]{64}(?:[0-9a-f]{64})?")
"""How vLLM writes its hashes of media; anything else is a name that a client or a counter gave them."""


def digest_of(told: object) -> bytes:
    """Return a digest of texts, numbers, bytes and lists of these; where each ends is a part of it."""
    return hashlib.blake2b(msgspec.msgpack.encode(told), digest_size=HASH_BYTES).digest()


class _Seen(NamedTuple):
    """What a LoRA's number stood for: its folder, the content, and the state of its files then."""

    path: str
    revision: str
    files: tuple[tuple[str | int, ...], ...]


class Adapters:
    """Which content the LoRAs of requests have.

    vLLM does not say when it loads one: it does so when it first needs a LoRA's number, again after it has dropped it
    for others, and with ``load_inplace`` at each step. So a number stands for what its folder had when a request first
    named it, or last named it with ``load_inplace``. Where the folder has something else meanwhile, vLLM may have the
    one or the other, and nobody knows which.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._seen: dict[int, _Seen] = {}
        self._told: set[tuple[str, str]] = set()

    def __repr__(self) -> str:
        """Show how many are known."""
        return f"<Adapters: {len(self._seen)}>"

    def of(self, adapter: LoRARequest | None) -> bytes | None:
        """Return what stands for an adapter's content; empty: there is no adapter; None: it is not known."""
        if adapter is None:
            return b""
        try:
            now = _read(adapter)
        except (InvalidFieldError, OSError) as error:
            self._say(adapter, str(error))
            return None
        before = self._seen.pop(adapter.lora_int_id, now)
        is_known = before == now or adapter.load_inplace
        self._seen[adapter.lora_int_id] = now if is_known else before
        while len(self._seen) > MOST_ADAPTERS:
            del self._seen[next(iter(self._seen))]
        if not is_known:
            self._say(adapter, "its files have changed since vLLM loaded it: load it in place, or from another folder")
            return None
        return _digest(now, adapter)

    def is_still(self, adapter: LoRARequest, content: bytes) -> bool:
        """Return whether an adapter is what ``of`` has returned, as far as its files and later requests say."""
        seen = self._seen.get(adapter.lora_int_id)
        try:
            return seen is not None and _digest(seen, adapter) == content and _states(seen.path) == seen.files
        except OSError:
            return False

    def _say(self, adapter: LoRARequest, why: str) -> None:
        if (adapter.lora_name, why) not in self._told:
            if len(self._told) == MOST_ADAPTERS:
                self._told.clear()
            self._told.add((adapter.lora_name, why))
            logger.warning("kvferry: KV of the adapter %s is not shared: %s", adapter.lora_name, why)


def _read(adapter: LoRARequest) -> _Seen:
    """Return what an adapter's folder has now.

    Raises:
        InvalidFieldError: it has none, or it changes.
        OSError: it cannot be looked at.
    """
    path = os.path.expanduser(adapter.lora_path)  # noqa: PTH111  as vLLM does; the name of a repository stays one
    files = _states(path)
    revision = adapter_revision(path)
    if _states(path) != files:
        raise InvalidFieldError("its files change while they are read", field="adapter")
    return _Seen(path, revision, files)


def _digest(seen: _Seen, adapter: LoRARequest) -> bytes:
    return digest_of([seen.revision, getattr(adapter, "is_3d_lora_weight", False)])


def _states(path: str) -> tuple[tuple[str | int, ...], ...]:
    """Return what changes where a file of a folder does; nothing of a repository's name.

    Raises:
        OSError: they cannot be looked at.
    """
    folder = Path(path)
    if not folder.exists():
        return ()
    found = []
    for file in sorted(folder.iterdir()):
        state = file.stat()
        times = state.st_mtime_ns, state.st_ctime_ns
        found.append((file.name, state.st_dev, state.st_ino, state.st_size, *times))
    return tuple(found)


class Labels:
    """Which contents this engine has met under vLLM's names, since vLLM's own prefix cache was last reset.

    That cache keeps blocks by the name: where a name has had two contents, blocks that it finds may be of either.
    """

    def __init__(self) -> None:
        """Begin without any."""
        self._contents: dict[object, bytes | None] = {}

    def __repr__(self) -> str:
        """Show how many are known."""
        return f"<Labels: {len(self._contents)}>"

    def mix(self, labels: Mapping[object, bytes | None], weights: bytes | None) -> bool:
        """Take note of names with their contents; return whether one of them has had another, or an unknown one.

        ``weights``: as one more; None: they are being looked at.
        """
        mixed = weights is None
        for label, content in (*labels.items(), *([] if weights is None else [("weights", weights)])):
            before = self._contents.pop(label, content)  # the last one used is the last one dropped
            self._contents[label] = content if before == content else None
            mixed |= self._contents[label] is None
        while len(self._contents) > MOST_LABELS:
            del self._contents[next(iter(self._contents))]
        return mixed

    def forget(self) -> None:
        """Take note that vLLM has dropped all blocks."""
        self._contents.clear()


def labels_of(request: Request, adapter: bytes | None) -> dict[object, bytes | None]:
    """Return what vLLM's hashes of a request know by a name only, with what stands for its content; None: unknown."""
    lora = request.lora_request
    labels: dict[object, bytes | None] = {} if lora is None else {("lora", lora.lora_name, lora.lora_path): adapter}
    for one in request.mm_features or ():
        if not _is_of_content(one):
            told, found = ("media", one.identifier), media_of(one)
            content = None if found is None else digest_of(found)
            labels[told] = content if labels.get(told, content) == content else None
    return labels


def key_of(labels: Mapping[object, bytes | None], weights: bytes) -> bytes | None:
    """Return what keeps a request's blocks from others that vLLM gives the same hashes.

    Args:
        labels: what these know by a name only.
        weights: what stands for the weights that it is computed with, if not for those of the start.

    Returns:
        Empty: vLLM's hashes say all. None: the content of something is not known, and nothing of it may be shared.
    """
    if None in labels.values():
        return None
    return digest_of([weights, list(labels.values())]) if weights or labels else b""


def name_of(block_hash: bytes, key: bytes = b"") -> bytes:
    """Return a block's name: of vLLM's hash the last 16 bytes, by which its events name it too; or with a key."""
    if key or len(block_hash) < HASH_BYTES:
        return hashlib.blake2b(block_hash, digest_size=HASH_BYTES, key=key).digest()
    return block_hash[-HASH_BYTES:]


def prompt_digest(request: Request, adapter: bytes | None, tokens: int) -> bytes:
    """Return what tells the first tokens of a prompt from others': these, embeddings, media, the adapter's content.

    What is not known by its content equals nothing, itself neither.
    """
    media = [
        (media_of(one), one.mm_position.offset, one.mm_position.length, one.modality)
        for one in request.mm_features or ()
    ]
    if adapter is None or any(content is None for content, *_ in media):
        return os.urandom(HASH_BYTES)
    embeddings = getattr(request, "prompt_embeds", None)
    return digest_of(
        [
            list(request.prompt_token_ids or ())[:tokens],
            [int(one) for one in getattr(request, "prompt_is_token_ids", None) or ()][:tokens],
            b"" if embeddings is None else _tensor_digest(embeddings[:tokens]),
            adapter,
            media,
        ]
    )


def media_of(feature: MultiModalFeatureSpec) -> str | bytes | None:
    """Return what stands for the content of an image or the like; None: vLLM has a name of it only.

    vLLM's hash of it, where there is one: not where a client has named it (``multi_modal_uuids``), nor where both of
    vLLM's caches are off, when it counts them.
    """
    if _is_of_content(feature):
        return _name(feature)
    try:
        return None if feature.data is None else digest_of(_told(feature.data))
    except TypeError:
        return None


def _name(feature: MultiModalFeatureSpec) -> str:
    return str(getattr(feature, "mm_hash", None) or feature.identifier)


def _is_of_content(feature: MultiModalFeatureSpec) -> bool:
    return _OF_CONTENT.fullmatch(_name(feature)) is not None


def _told(data: Any) -> object:  # noqa: ANN401  what vLLM's processors return
    """Return processed media as lists, with a digest in place of each tensor.

    Raises:
        TypeError: of a kind that is not known.
    """
    if isinstance(data, Mapping):
        return [[str(name), _told(data[name])] for name in sorted(data)]
    if hasattr(data, "field") and hasattr(data, "data"):  # vLLM's element: how items are batched is no content
        return _told(data.data)
    if data is None or isinstance(data, bool | int | float | str | bytes):
        return data
    if isinstance(data, Sequence):
        return [_told(one) for one in data]
    if hasattr(data, "detach"):
        return _tensor_digest(data)
    raise TypeError(type(data).__name__)


def _tensor_digest(tensor: torch.Tensor) -> bytes:
    import torch  # noqa: PLC0415  of the engine

    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return digest_of([str(tensor.dtype), list(tensor.shape), hashlib.blake2b(content.data).digest()])
