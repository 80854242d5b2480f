"""What both engines of the demo do first: read their arguments, load the model, map their pool."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvferry.clients.demo.messages import Ready, tell
from kvferry.clients.demo.model import load_model
from kvferry.clients.demo.prompts import PAGE_SIZE
from kvferry.clients.pool import AttachedPool
from kvferry.clients.sync_client import Client
from kvferry.protocol.manifests import MhaSpec

if TYPE_CHECKING:
    from transformers import LlamaConfig


class Engine(NamedTuple):
    """A client with one pool, and a model."""

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
    return parser.parse_args()


def start(options: argparse.Namespace) -> Engine:
    """Load the model, open a session, create and map the pool, and tell the router."""
    started = time.monotonic()
    model = load_model(options.model, options.threads)
    client = Client.connect(options.runtime_dir, name=options.pool)
    pool = client.create_pool(options.pool, pool_spec(model.config, options.pool_tokens))
    tell(Ready(load_s=time.monotonic() - started))
    return Engine(client, pool, model)


def pool_spec(config: LlamaConfig, tokens: int) -> MhaSpec:
    """Return the spec of a pool for this model."""
    return MhaSpec(
        layers=config.num_hidden_layers,
        tokens=tokens,
        page_size=PAGE_SIZE,
        kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_dim=config.head_dim or config.hidden_size // config.num_attention_heads,
        dtype="float32",
    )
