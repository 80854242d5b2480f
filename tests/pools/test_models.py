"""Ready specs: well-known figures, what a rank and a stage hold, and what cannot be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from kvferry.pools.layouts import manifest_of
from kvferry.pools.layouts.models import MODELS, model_spec
from kvferry.pools.planning.manifest import SpaceSize, space_sizes
from kvferry.protocol.errors import HeadsIndivisibleError, InvalidFieldError, KvferryError


def sizes_of(name: str, **options: Any) -> dict[str, SpaceSize]:  # noqa: ANN401  any option of model_spec
    options.setdefault("tokens", 1024)
    return {one.space: one for one in space_sizes(manifest_of(model_spec(name, **options)))}


def test_other_forms_windows_and_states() -> None:
    """What each model's tokens take is in the tables of docs/layouts.md, which are compared with the code."""
    assert sizes_of("llama-3-8b", dtype="int8")["main"].token_bytes == 64 << 10
    assert sizes_of("deepseek-v3", packed="ds_mla")["main"].token_bytes == 61 * 656
    assert sizes_of("DeepSeek-V3.2", packed="ascend")["main"].token_bytes == 61 * (656 + 128 + 4)
    assert sizes_of("deepseek-v3", joined=True) == sizes_of("deepseek-v3")
    gemma = sizes_of("gemma-3-27b", requests=10)["swa"]
    assert gemma.token_bytes == 52 * 2 * 16 * 128 * 2
    assert gemma.pages == 10 * (1024 // 128 + 1)
    state = sizes_of("qwen3-next-80b-a3b", requests=10)["mamba"]
    assert state.pages == 10
    assert state.page_bytes == 36 * (3 * 8192 * 2 + 32 * 128 * 128 * 4)


@pytest.mark.parametrize("name", MODELS)
def test_the_ranks_hold_each_head_once_or_as_replicas(name: str) -> None:
    seen: dict[tuple[str, int], int] = {}
    specs = [model_spec(name, tokens=1024, tp_size=tp_of(name), tp_rank=rank) for rank in range(tp_of(name))]
    for spec in specs:
        for entry in manifest_of(spec).entries:
            if entry.role == "conv":
                continue
            for head in range(entry.head_start or 0, (entry.head_start or 0) + (entry.heads or 0)):
                key = (entry.name, head)
                seen[key] = seen.get(key, 0) + 1
                assert entry.replicas in {None, tp_of(name)} or len(specs) % entry.replicas == 0
    expected = {
        entry.name: (entry.total_heads, entry.replicas or 1)
        for entry in manifest_of(specs[0]).entries
        if entry.role != "conv"
    }
    assert seen == {(key, head): count for key, (total, count) in expected.items() for head in range(total or 0)}


def tp_of(name: str) -> int:
    return {"smollm2-135m": 3}.get(name, 8)


@pytest.mark.parametrize("name", MODELS)
def test_stages_hold_each_layer_once(name: str) -> None:
    layers = MODELS[name].layers
    cuts = [0, 1, layers // 2, layers]
    stages = [
        manifest_of(model_spec(name, tokens=1024, first_layer=start, layers=end - start))
        for start, end in itertools.pairwise(cuts)
    ]
    whole = manifest_of(model_spec(name, tokens=1024))
    assert sorted(one.name for stage in stages for one in stage.entries) == sorted(one.name for one in whole.entries)


@pytest.mark.parametrize("name", [name for name, facts in MODELS.items() if facts.draft_layers])
def test_the_draft_is_on_the_last_stage(name: str) -> None:
    layers = MODELS[name].layers
    assert model_spec(name, tokens=1024, layers=layers - 1, draft=True).draft is None
    last = manifest_of(model_spec(name, tokens=1024, first_layer=layers - 1, draft=True))
    main = {entry.role for entry in last.entries if entry.component == "main"}
    assert {entry.role for entry in last.entries if entry.component == "draft"} == main


@pytest.mark.parametrize(
    ("error", "field", "name", "options"),
    [
        (InvalidFieldError, "model", "llama-4-9b", {}),
        (InvalidFieldError, "layers", "llama-3-8b", {"first_layer": 32}),
        (InvalidFieldError, "layers", "llama-3-8b", {"layers": 0}),
        (InvalidFieldError, "tp_rank", "llama-3-8b", {"tp_size": 2, "tp_rank": 2}),
        (InvalidFieldError, "tp_rank", "deepseek-v3", {"tp_size": 0}),
        (InvalidFieldError, "tokens", "llama-3-8b", {"tokens": 0}),
        (InvalidFieldError, "page_size", "gemma-3-1b", {"page_size": 0}),
        (InvalidFieldError, "window_tokens", "gemma-3-1b", {"requests": 0}),
        (InvalidFieldError, "slots", "qwen3-next-80b-a3b", {"requests": 0}),
        (InvalidFieldError, "draft", "llama-3-8b", {"draft": True}),
        (InvalidFieldError, "packed", "llama-3-8b", {"packed": "ascend"}),
        (HeadsIndivisibleError, "tp_size", "llama-3-8b", {"tp_size": 3}),
        (HeadsIndivisibleError, "tp_size", "qwen3-next-80b-a3b", {"tp_size": 32}),
    ],
)
def test_what_cannot_be(error: type[KvferryError], field: str, name: str, options: dict[str, Any]) -> None:
    with pytest.raises(error) as refused:
        model_spec(name, **{"tokens": 1024, **options})
    assert refused.value.field == field
