"""How little memory the demo's retracting engine gets: a pool for about half of its prompts, the host tier for all.

Knows the prompts' lengths, not the model nor the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from kvferry.clients.demo.messages import Prompt

TURN_TOKENS: Final = 4
"""How many tokens a request makes before it may have to go for one that waits."""
LEAST_NEW_TOKENS: Final = 2 * TURN_TOKENS
"""With fewer, requests would end before anyone had to go."""
MIB: Final = 1 << 20


def most_pages(prompt: Prompt, page_size: int) -> int:
    """Return how many pages a request can come to need; the last token's K and V are never computed."""
    return -(-(len(prompt.tokens) + prompt.max_new_tokens - 1) // page_size)


def too_few_pages(prompts: Sequence[Prompt], page_size: int) -> int:
    """Return the pages of a pool that each prompt fits into, but not all of them: about half of what they need."""
    needed = [most_pages(prompt, page_size) for prompt in prompts]
    return max(*needed, sum(needed) // 2)


def tiers_config(prompts: Sequence[Prompt], page_size: int, page_bytes: int) -> str:
    """Return the configuration of a daemon whose host tier holds all of the prompts' pages, as TOML."""
    size_bytes = sum(most_pages(prompt, page_size) for prompt in prompts) * page_bytes
    return f"[tiers]\nhost_bytes = {-(-size_bytes // MIB) * MIB}\n"
