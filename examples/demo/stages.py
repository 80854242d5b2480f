"""Pipeline stages of the demo's model: the layers of each stage, and reducing a whole model to one stage."""

from __future__ import annotations

import itertools
from typing import Any

import torch


def split_layers(layers: int, stages: int) -> list[range]:
    """Return each stage's layers, in order; the first stages get one more if the layers do not divide evenly.

    Raises:
        ValueError: fewer layers than stages, or no stages.
    """
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers cannot be split into {stages} stages")
    each, more = divmod(layers, stages)
    ends = [each * number + min(number, more) for number in range(stages + 1)]
    return [range(start, end) for start, end in itertools.pairwise(ends)]


def cut_stage(model: Any, layers: range) -> None:  # noqa: ANN401  transformers' types miss half of a model
    """Reduce a whole Llama model to the stage with these layers, renumbered from 0 like its cache.

    All stages but the last return hidden states instead of logits: the final norm and the head are in the last one.

    Raises:
        ValueError: the model does not have these layers.
    """
    whole = model.config.num_hidden_layers
    if not 0 <= layers.start < layers.stop <= whole:
        raise ValueError(f"layers {layers.start} to {layers.stop - 1} of a model that has {whole}")
    model.model.layers = model.model.layers[layers.start : layers.stop]
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = number
    model.config.num_hidden_layers = len(layers)
    if layers.stop < whole:
        model.model.norm = torch.nn.Identity()
        model.lm_head = torch.nn.Identity()


def compute(
    model: Any,  # noqa: ANN401  see cut_stage
    inputs: torch.Tensor,
    cache: Any,  # noqa: ANN401
    first_position: int,
    *,
    only_last: bool,
) -> torch.Tensor:
    """Compute a stage, or a whole model, for tokens that follow those in the cache.

    Args:
        model: reduced by ``cut_stage``, or a whole model.
        inputs: token ids ``(n,)`` int64 for the first stage, hidden states ``(n, width)`` float32 for the others.
        cache: of this stage's layers.
        first_position: the position of the first one.
        only_last: return the output of the last one only.

    Returns:
        Hidden states ``(n, width)`` or logits ``(n, vocabulary)``, one row where ``only_last``.
    """
    name = "inputs_embeds" if inputs.is_floating_point() else "input_ids"
    positions = torch.arange(first_position, first_position + len(inputs))
    with torch.inference_mode():
        output: torch.Tensor = model(
            **{name: inputs[None]},
            position_ids=positions[None],
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=int(only_last),
        ).logits
    return output[0]
