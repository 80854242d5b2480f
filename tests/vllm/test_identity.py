"""Whose KV an engine's is, as its configuration says it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from kvferry.clients.vllm.configuration import LONGEST_POOL_NAME, model_identity, name_of

LONG: Final = "e" * (LONGEST_POOL_NAME + 1)


def revision(folder: Path, load_format: str = "auto", **more: Any) -> str:  # noqa: ANN401  of vLLM's model configuration
    """Return the revision of the model in a folder."""
    told = {"model": str(folder), "revision": None, "served_model_name": "model", "dtype": "torch.float32", "seed": 0}
    load = SimpleNamespace(download_dir=None, load_format=load_format)
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(**{**told, **more}),
        load_config=load,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=None,
    )
    return model_identity(config).revision


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a folder with a model."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    return tmp_path


def test_a_configuration_that_lies_elsewhere_counts(model: Path) -> None:
    config = model / "elsewhere"
    config.mkdir()
    found = []
    for text in ("{}", '{"rope_theta": 1}'):
        (config / "config.json").write_text(text)
        found.append(revision(model, hf_config_path=str(config)))
    assert len({revision(model), *found}) == len(("none", *found))


@pytest.mark.parametrize(("load_format", "counts"), [("auto", False), ("dummy", True)])
def test_the_seed_of_random_weights_counts(model: Path, load_format: str, *, counts: bool) -> None:
    assert (revision(model, load_format, seed=1) != revision(model, load_format, seed=2)) == counts


@pytest.mark.parametrize(("one", "other"), [("a/b", "a-b"), (LONG, f"{LONG}e"), (LONG, LONG[:-1])])
def test_engines_do_not_share_a_name(one: str, other: str) -> None:
    assert name_of(one) != name_of(other)
    assert max(len(name_of(one)), len(name_of(other))) <= LONGEST_POOL_NAME
