"""Memory sizes for the demo's retracting engine: a pool for about half of its prompts, a host tier for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from examples.demo.messages import Prompt

TURN_TOKENS: Final = 4
"""Tokens that a request makes before it may be retracted for one that waits."""
LEAST_NEW_TOKENS: Final = 2 * TURN_TOKENS
"""With fewer, requests would end before any was retracted."""
MIB: Final = 1 << 20


def most_pages(prompt: Prompt, page_size: int) -> int:
    """Return the most pages that a request can need; the last token's K and V are never computed."""
    return -(-(len(prompt.tokens) + prompt.max_new_tokens - 1) // page_size)


def too_few_pages(prompts: Sequence[Prompt], page_size: int) -> int:
    """Return the size of a pool that fits each prompt alone, but not all of them: about half of what they need."""
    needed = [most_pages(prompt, page_size) for prompt in prompts]
    return max(*needed, sum(needed) // 2)


def tiers_config(prompts: Sequence[Prompt], page_size: int, page_bytes: int) -> str:
    """Return the configuration of a daemon whose host tier holds all of the prompts' pages, as TOML."""
    size_bytes = sum(most_pages(prompt, page_size) for prompt in prompts) * page_bytes
    return f"[tiers]\nhost_bytes = {-(-size_bytes // MIB) * MIB}\n"
