"""The start of every engine of the demo: read the arguments, load the model, map the pool."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from examples.demo.messages import Ready, notify
from examples.demo.model import load_model
from examples.demo.prompts import PAGE_SIZE
from examples.demo.stages import cut_stage, split_layers
from kvferry.clients.pool import AttachedPool
from kvferry.clients.sync_client import Client
from kvferry.protocol.ids import ModelIdentity
from kvferry.protocol.manifests import MhaSpec

if TYPE_CHECKING:
    from transformers import LlamaConfig


class Engine(NamedTuple):
    """A client with one pool, and a model or one pipeline stage of it."""

    client: Client
    pool: AttachedPool
    model: Any


def arguments() -> argparse.Namespace:
    """Return an engine's arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--runtime-dir", type=Path)
    parser.add_argument("--pool", default="")
    parser.add_argument("--pool-tokens", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--stage", type=int, default=0, help="which pipeline stage of the model, from 0")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--listen", help="where the previous stage connects to")
    parser.add_argument("--next-stage", help="where the next stage listens")
    parser.add_argument("--sources", type=int, default=1, help="how many pools send to decode")
    parser.add_argument("--source-daemon", action="append", default=[], help="where a source's daemon listens")
    return parser.parse_args()


def start(options: argparse.Namespace) -> Engine:
    """Load the model, open a session, create and map the pool, and notify the router."""
    started = time.monotonic()
    model = load_model(options.model, options.threads)
    layers = split_layers(model.config.num_hidden_layers, options.stages)[options.stage]
    cut_stage(model, layers)
    client = Client.connect(options.runtime_dir, name=options.pool)
    spec = pool_spec(model.config, options.pool_tokens, layers.start)
    pool = client.create_pool(options.pool, spec, model=ModelIdentity(name=Path(options.model).resolve().name))
    notify(Ready(load_s=time.monotonic() - started))
    return Engine(client, pool, model)


def pool_spec(config: LlamaConfig, tokens: int, first_layer: int = 0) -> MhaSpec:
    """Return the spec of a pool for this model, or for its stage that begins with ``first_layer``."""
    return MhaSpec(
        layers=config.num_hidden_layers,
        first_layer=first_layer,
        tokens=tokens,
        page_size=PAGE_SIZE,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        dtype="float32",
    )
