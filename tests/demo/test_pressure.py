"""How little memory the retracting engine gets: enough for each prompt, not for all, and a host tier for every page."""

from __future__ import annotations

import tomllib

import pytest

from examples.demo.messages import Prompt
from examples.demo.pressure import LEAST_NEW_TOKENS, TURN_TOKENS, most_pages, tiers_config, too_few_pages
from kvferry.protocol.ids import new_request_id


def prompt_of(tokens: int, max_new_tokens: int = 20) -> Prompt:
    return Prompt(request_id=new_request_id(), tokens=tuple(range(tokens)), max_new_tokens=max_new_tokens)


@pytest.mark.parametrize(("tokens", "new", "pages"), [(10, 7, 1), (10, 8, 2), (16, 1, 1), (16, 2, 2), (40, 20, 4)])
def test_the_last_token_needs_no_room(tokens: int, new: int, pages: int) -> None:
    assert most_pages(prompt_of(tokens, new), 16) == pages


@pytest.mark.parametrize(
    ("lengths", "pages"), [((10, 20, 30, 40), 6), ((200, 10), 14), ((5,) * 8, 8)], ids=["half", "the longest", "equal"]
)
def test_each_prompt_fits_and_not_all_of_them(lengths: tuple[int, ...], pages: int) -> None:
    prompts = [prompt_of(length) for length in lengths]
    needed = [most_pages(prompt, 16) for prompt in prompts]
    assert too_few_pages(prompts, 16) == pages
    assert max(needed) <= pages < sum(needed)


def test_the_host_tier_holds_them_all() -> None:
    config = tomllib.loads(tiers_config([prompt_of(10), prompt_of(40)], 16, 700_000))
    assert config == {"tiers": {"host_bytes": 5 << 20}}
    assert 6 * 700_000 <= 5 << 20


def test_a_turn_is_shorter_than_any_run() -> None:
    assert TURN_TOKENS < LEAST_NEW_TOKENS
