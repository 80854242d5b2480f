"""Of which content this process's KV is: its weights and adapters, also after they were changed in the running server.

SGLang knows an adapter by a number that it makes of name and path, or draws; two servers share neither that nor what
lies behind a name.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

from kvferry.clients.model_weights import adapter_revision, weights_revision
from kvferry.clients.sglang.choice import stores_in_kvferry, transfers_by_kvferry
from kvferry.protocol.errors import InvalidFieldError, ModelMismatchError

logger = logging.getLogger(__name__)

R = TypeVar("R")

PART_BYTES: Final = 16
CONTENT_BYTES: Final = 2 * PART_BYTES
"""Of weights, then of the adapter."""

NO_CONTENT: Final = bytes(CONTENT_BYTES)

_ESCAPED: Final = re.compile(r"lora:|=")


class RunningWeights:
    """The weights of this process, from its start on.

    Attributes:
        start: what tells the weights of the start from others; empty before the start.
        content: the same of those of now; random where nobody knows them.
        version: what they were called by who changed them, where their content is not known.
    """

    def __init__(self) -> None:
        """Begin before the start."""
        self.start = self.content = self.version = ""
        self._is_known = True

    def __repr__(self) -> str:
        """Show what they are."""
        return f"<RunningWeights {self.content}{self.version and f' {self.version!r}'}>"

    @property
    def key(self) -> bytes:
        """Return what is to be in the names of blocks, beside the pool's identity."""
        return b"" if self.content == self.start else self.content.encode()

    @property
    def compared(self) -> bytes:
        """Return what prefill and decode must have alike: content, else who changed both says that they are equal."""
        told = f"version {self.version}" if self.version else self.content
        return hashlib.sha256(told.encode()).digest()[:PART_BYTES]

    def begin(self) -> str:
        """Return what tells the weights that this server was told to load from others.

        Raises:
            InvalidFieldError: a file cannot be read, or changes while it is read.
        """
        from sglang.srt.runtime_context import get_model  # noqa: PLC0415  SGLang need not be there

        model = get_model()
        revision = weights_revision(str(model.model_path), model.revision, model.download_dir)
        if not self.start:
            self.start = self.content = revision
        return revision

    def change(self, content: str = "", version: str = "") -> None:
        """Note that what is computed from now on is another model's KV; SGLang has flushed its own caches."""
        self._is_known = bool(content)
        self.content, self.version = content or uuid.uuid4().hex, "" if content else version
        logger.info(
            "kvferry: the weights were changed: %s",
            f"they are {content} now" if content else "the storage starts empty, for this process alone",
        )

    def name(self, version: str) -> None:
        """Note what they are called, where nothing else tells them from others."""
        if not self._is_known:
            self.version = version


weights: Final = RunningWeights()

_adapters: Final[dict[str, str]] = {}
"""What tells an adapter from others, by SGLang's number of it; random where nobody knows its content."""


def content_of(lora_id: str | None) -> bytes:
    """Return of what a request's KV is, CONTENT_BYTES: what prefill and decode must have alike."""
    return weights.compared + (hashlib.sha256(_adapter(lora_id).encode()).digest()[:PART_BYTES])


def check_content(theirs: bytes, ours: bytes) -> None:
    """Check what prefill has computed with.

    Raises:
        ModelMismatchError: decode has other weights, or another adapter.
    """
    if theirs[:PART_BYTES] != ours[:PART_BYTES]:
        raise ModelMismatchError(
            "prefill has other weights: start both servers with the same, or change them in both; what does not come "
            "from a folder needs the same weight_version at both"
        )
    if theirs != ours:
        raise ModelMismatchError("prefill has another adapter under this name: load the same in both servers")


def draft_revision() -> str:
    """Return what tells this server's draft model from others; empty without one.

    Raises:
        InvalidFieldError: a file cannot be read, or changes while it is read.
    """
    from sglang.srt.runtime_context import get_model, get_spec  # noqa: PLC0415  SGLang need not be there

    told, model = get_spec(), get_model()
    path = told.speculative_draft_model_path
    if not path:
        return ""
    if (path, told.speculative_draft_model_revision) == (model.model_path, model.revision):  # NextN: layers of its own
        return weights.start
    return weights_revision(str(path), told.speculative_draft_model_revision, model.download_dir)


def check_draft(theirs: str, ours: str) -> None:
    """Check which draft model prefill has computed with; either side may have none.

    Raises:
        ModelMismatchError: decode has another one.
    """
    if theirs and ours and theirs != ours:
        raise ModelMismatchError("prefill has another draft model: start both servers with the same, or one without")


def namespaced(extra_key: str | None, lora_id: str | None) -> str | None:
    """Return the key of a request's cache, in which its adapter is by its content.

    SGLang appends ``lora_id`` to what the request says: a request without an adapter could say another one's number.
    """
    if lora_id is None:
        return f"={extra_key}" if extra_key and _ESCAPED.match(extra_key) else extra_key
    return f"lora:{_adapter(lora_id)}:{extra_key or ''}"


def _adapter(lora_id: str | None) -> str:
    return "" if lora_id is None else _adapters.setdefault(lora_id, uuid.uuid4().hex)


# -- what is hooked


def note_weights(original: Callable[..., R], manager: Any, recv_req: Any) -> R:  # noqa: ANN401  SGLang's objects
    """Change the weights, or begin to; note what they are then."""
    if not weights.start:
        return original(manager, recv_req)
    path = getattr(recv_req, "model_path", None)
    if path is None or not recv_req.flush_cache or not _is_loaded_as_at_start(recv_req.load_format):
        path = ""  # the cache has KV of others, or the files are read in another way
    done, content = False, ""
    try:
        result, content = _loaded(lambda: _folder_revision(path), lambda: original(manager, recv_req))
        done = bool(getattr(result, "success", False))
        return result
    finally:
        if done:
            weights.change(content, getattr(recv_req, "weight_version", None) or "")
        else:
            weights.change()


def note_end(result: object, *_: object) -> None:  # noqa: ARG001  SGLang's
    """Note the end of a change of weights: they may have been written in between without a word to SGLang."""
    if weights.start:
        weights.change(version=weights.version)


def note_resumed(_: object, __: object, recv_req: Any) -> None:  # noqa: ANN401  SGLang's object
    """Note that memory is there again; weights without a copy elsewhere are nothing until they are written."""
    from sglang.srt.runtime_context import get_exec  # noqa: PLC0415  SGLang need not be there

    is_restored = get_exec().features.enable_weights_cpu_backup
    if weights.start and not is_restored and "weights" in (recv_req.tags or ["weights"]):
        weights.change()


def note_version(_: object, __: object, recv_req: Any) -> None:  # noqa: ANN401  SGLang's object
    """Note what changed weights are called."""
    weights.name(str(recv_req.new_version))


def note_adapter(original: Callable[..., R], manager: Any, lora_ref: Any) -> R:  # noqa: ANN401  SGLang's objects
    """Load an adapter from its folder; note its content."""
    if not _is_chosen():
        return original(manager, lora_ref)
    result, content = _loaded(lambda: adapter_revision(lora_ref.lora_path), lambda: original(manager, lora_ref))
    _note(manager, lora_ref.lora_id, content)
    return result


def note_adapter_of_tensors(
    original: Callable[..., R],
    manager: Any,  # noqa: ANN401
    lora_ref: Any,  # noqa: ANN401
    tensors: Mapping[str, Any],
    config_dict: Mapping[str, Any],
    added_tokens_config: Mapping[str, Any] | None = None,
) -> R:
    """Load an adapter from tensors; note their content."""
    content = _digest(tensors, config_dict, added_tokens_config) if _is_chosen() else ""
    result = original(manager, lora_ref, tensors, config_dict, added_tokens_config)
    _note(manager, lora_ref.lora_id, content)
    return result


def note_sender(_: object, __: object, req: Any, *___: object, **____: object) -> None:  # noqa: ANN401  SGLang's
    """Tell prefill's half of a request's transfer of what its KV is."""
    _tell(getattr(req, "disagg_kv_sender", None), req)


def note_receiver(made: Any, _: object, req: Any, *__: object, **___: object) -> None:  # noqa: ANN401  SGLang's
    """Tell decode's half."""
    _tell(made.kv_receiver, req)


# -- within


def _tell(half: Any, req: Any) -> None:  # noqa: ANN401
    if hasattr(half, "content"):  # else it is another backend's
        half.content = content_of(req.lora_id)


def _is_chosen() -> bool:
    return transfers_by_kvferry() or stores_in_kvferry()


def _is_loaded_as_at_start(load_format: str | None) -> bool:
    from sglang.srt.runtime_context import get_model  # noqa: PLC0415  SGLang need not be there

    return load_format in {None, "auto", get_model().load_format}


def _loaded(revision: Callable[[], str], load: Callable[[], R]) -> tuple[R, str]:
    """Load something; return what tells it from others, too: nothing where it changed meanwhile, or is not here."""
    before = _revision(revision)
    result = load()
    after = _revision(revision)
    return result, after if before in {"", after} else ""  # what was not here has been fetched for it


def _folder_revision(path: str) -> str:
    return weights_revision(path, None, None) if path and Path(path).exists() else ""


def _revision(revision: Callable[[], str]) -> str:
    try:
        return revision()
    except InvalidFieldError as error:
        logger.debug("kvferry: no content: %s", error)
        return ""


def _note(manager: Any, lora_id: str, content: str) -> None:  # noqa: ANN401  SGLang's object
    for gone in _adapters.keys() - manager.lora_refs.keys():
        del _adapters[gone]
    _adapters[lora_id] = content or uuid.uuid4().hex


def _digest(tensors: Mapping[str, Any], *configs: Mapping[str, Any] | None) -> str:
    import torch  # noqa: PLC0415  it is SGLang's

    digest = hashlib.sha256(json.dumps(configs, sort_keys=True, default=str).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        content = tensor.reshape(-1).view(torch.uint8).numpy()
        head = json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()
        digest.update(len(head).to_bytes(8, "little") + head)
        digest.update(memoryview(content))
    return digest.hexdigest()[:32]
