"""What a model has cached, as plain arrays: taken out of a transformers cache, and made into one again.

Arrays are named as a pool's entries are, ``(component, role, layer)``, and hold all heads. Knows no pool and no page.
"""

from __future__ import annotations

import functools
from typing import Any, Final, NamedTuple, TypeAlias

import torch
import transformers
from transformers.cache_utils import (
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from tests.identity.models import MODELS

Key: TypeAlias = tuple[str, str, int]
Arrays: TypeAlias = dict[Key, torch.Tensor]
"""Paged ``(tokens, heads, dim)``, of windows the last tokens; conv ``(window, channels)``; ssm ``(heads, ...)``."""

STEPS: Final = 3
"""Tokens that are decoded."""


class Reference(NamedTuple):
    """A prompt computed by one model alone."""

    arrays: Arrays  # cached after the prompt
    tokens: torch.Tensor  # decoded after it, (STEPS,) int64
    logits: torch.Tensor  # after each of these tokens, (STEPS, vocabulary)


@functools.cache
def instance(name: str, _copy: str) -> Any:  # noqa: ANN401  transformers' types miss half of a model
    """Return a model with random weights, in fp32: every copy of a name has the same."""
    tiny = MODELS[name]
    config_class = getattr(transformers, f"{tiny.library_class}{'Text' if name == 'gemma3' else ''}Config")
    torch.manual_seed(7)
    return getattr(transformers, f"{tiny.library_class}ForCausalLM")(config_class(**tiny.config)).eval()


@functools.cache
def reference(name: str, tokens: int) -> Reference:
    """Return what the prefill side's copy computes, and decodes without any transfer."""
    model = instance(name, "prefill")
    prompt = torch.randint(3, 97, (tokens,), generator=torch.Generator().manual_seed(tokens))
    cache = DynamicCache(config=model.config)
    logits = [_forward(model, prompt, cache)]
    arrays = arrays_of(cache)
    for _ in range(STEPS):
        logits.append(_forward(model, logits[-1].argmax()[None], cache))
    stacked = torch.stack(logits)
    return Reference(arrays, stacked[:-1].argmax(-1), stacked[1:])


def decoded(name: str, arrays: Arrays, known: Reference, tokens: int, steps: int = STEPS) -> torch.Tensor:
    """Return the logits of decode's copy, which finds ``arrays`` in its pools, after each of the known tokens."""
    model = instance(name, "decode")
    cache = cache_of(model.config, arrays, tokens)
    return torch.stack([_forward(model, token[None], cache) for token in known.tokens[:steps]])


def arrays_of(cache: DynamicCache) -> Arrays:
    """Return copies of all that a cache holds: states are changed in place later."""
    arrays: Arrays = {}
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            conv, ssm = layer.conv_states[0], layer.recurrent_states[0]
            assert conv is not None
            assert ssm is not None
            arrays["mamba", "conv", number] = conv[0].T.clone()
            arrays["mamba", "ssm", number] = ssm[0].clone()
            continue
        component = "swa" if isinstance(layer, DynamicSlidingWindowLayer) else "main"
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        arrays[component, "k", number] = layer.keys[0].transpose(0, 1).clone()
        arrays[component, "v", number] = layer.values[0].transpose(0, 1).clone()
        if isinstance(layer, DynamicIndexedLayer):
            assert layer.indexer_keys is not None
            arrays[component, "index_k", number] = layer.indexer_keys[0][:, None].clone()
    return arrays


def cache_of(config: Any, arrays: Arrays, tokens: int) -> DynamicCache:  # noqa: ANN401  a configuration of any model
    """Return a cache that holds these arrays after ``tokens`` tokens."""
    cache = DynamicCache(config=config)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionLayer):
            layer.update_conv_state(arrays["mamba", "conv", number].T[None])
            layer.update_recurrent_state(arrays["mamba", "ssm", number][None])
            continue
        component = "swa" if isinstance(layer, DynamicSlidingWindowLayer) else "main"
        k, v = (arrays[component, role, number].transpose(0, 1)[None].contiguous() for role in ("k", "v"))
        assert isinstance(layer, DynamicLayer)
        layer.update(k, v)
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length = tokens
        if isinstance(layer, DynamicIndexedLayer):
            layer.update_indexer(arrays[component, "index_k", number][:, 0][None])
    return cache


def _forward(model: Any, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:  # noqa: ANN401
    """Return the logits of the last token, ``(vocabulary,)``."""
    with torch.inference_mode():
        logits: torch.Tensor = model(ids[None], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits[0, -1].clone()
