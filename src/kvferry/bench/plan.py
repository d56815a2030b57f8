"""What all plans of measurements share: orders of arms, random prompts, refusals. Pure."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import TypeVar

from kvferry.errors import ConfigError
from kvferry.options import option

Item = TypeVar("Item")
LAST_TOKEN_ID = 40_000
MIN_ANSWER_TOKENS = 4
"""A decode step is measured after two tokens."""
_FIRST_TOKEN_ID = 1_000


def last_token_id_option() -> int:
    """Return a plan's field: its prompts are drawn up to this id."""
    return option(LAST_TOKEN_ID, "Prompts are of ids up to this.")


def require(is_met: bool, refusal: str) -> None:
    """Raise ``ConfigError`` with the words of ``refusal`` unless ``is_met``."""
    if not is_met:
        raise ConfigError(refusal)


def require_sane(arms: Sequence[object], repeats: int, warmups: int, last_token_id: int) -> None:
    """Refuse what would measure nothing. Raises ``ConfigError``."""
    require(len(arms) == len(set(arms)) > 0, "arms must be one or more, each of them once")
    require(repeats >= 1 and warmups >= 0, "repeats must be at least 1, warm-ups at least 0")
    require(last_token_id > 1, "the range of token ids is empty")


def require_lengths(lengths_tokens: Sequence[int], max_tokens: int) -> None:
    """Refuse prompts and answers that are too short. Raises ``ConfigError``."""
    enough = f"max tokens must be at least {MIN_ANSWER_TOKENS}: a decode step is measured after two"
    require(min(lengths_tokens, default=0) > 0, "lengths must be one or more positive token counts")
    require(max_tokens >= MIN_ANSWER_TOKENS, enough)


def draw_tokens(rng: random.Random, count: int, last_token_id: int) -> list[int]:
    """Return random token ids up to ``last_token_id``, so that no cache has them.

    The lowest ids are left out: often they are special tokens.
    """
    first = min(_FIRST_TOKEN_ID, last_token_id // 2)
    return [rng.randint(first, last_token_id) for _ in range(count)]


def tokens_body(prompt: Sequence[int], max_tokens: int) -> dict[str, object]:
    """Return the body of a request for just ``max_tokens`` tokens."""
    return {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }


def arm_orders(arms: Sequence[Item], rng: random.Random) -> Iterator[tuple[Item, ...]]:
    """Yield orders without end: every order of ``arms``, shuffled, again and again."""
    orders = list(itertools.permutations(arms))
    rng.shuffle(orders)
    return itertools.cycle(orders)


def arm_rotations(arms: Sequence[Item], rng: random.Random) -> Iterator[tuple[Item, ...]]:
    """Yield orders without end: in as many as there are arms, each arm has every place once."""
    while True:
        base = list(arms)
        rng.shuffle(base)
        for start in range(len(base)):
            yield (*base[start:], *base[:start])
