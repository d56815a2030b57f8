"""What growing conversations ask, under which arm, in which order. Pure.

A conversation is asked turn by turn: each prompt is the one before, its answer, and something new.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from kvferry.bench.client import StreamedAnswer
from kvferry.errors import ConfigError
from kvferry.protocol.client_headers import READ_BACK_HEADER

Item = TypeVar("Item")
SESSION_HEADER = "X-Session-ID"
"""Tells a router which conversation a request belongs to."""


class TurnArm(enum.StrEnum):
    """Where a later turn's prefill has the conversation from."""

    RECOMPUTE = "recompute"
    """From nowhere: prefill has lost its cache, and reads nothing back."""
    WARM = "warm"
    """From its own cache."""
    READ_BACK = "read-back"
    """From the instance that answered; prefill has lost its cache."""
    READ_BACK_PUSH = "read-back+push"
    """The same, and what is new is pushed."""

    @property
    def mode(self) -> str:
        """The mode that is asked of the router for the handoff."""
        return "push" if self is TurnArm.READ_BACK_PUSH else "pull"

    @property
    def reads_back(self) -> bool:
        """Whether prefill is to read the history back."""
        return self in (TurnArm.READ_BACK, TurnArm.READ_BACK_PUSH)

    @property
    def loses_cache(self) -> bool:
        """Whether prefill's cache is emptied before every turn."""
        return self is not TurnArm.WARM


class Script(Protocol):
    """What one conversation asks, whatever is answered."""

    @property
    def path(self) -> str:
        """Where it is posted to."""
        ...

    @property
    def num_turns(self) -> int:
        """How often it asks."""
        ...

    def fields(self, answers: Sequence[StreamedAnswer]) -> dict[str, object]:
        """Return the body fields of the turn that follows ``answers``, all there have been."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Lengths of one conversation, in tokens."""

    first_tokens: int
    """Of the first prompt."""
    later_tokens: tuple[int, ...]
    """New ones of each later turn, beside the answer before it."""
    answer_tokens: int
    """Of every answer."""

    def __post_init__(self) -> None:
        """Refuse a shape with nothing to reuse. Raises ``ConfigError``."""
        if not self.later_tokens:
            raise ConfigError("a conversation needs at least two turns")
        if min(self.first_tokens, self.answer_tokens, *self.later_tokens) < 1:
            raise ConfigError("every prompt, every later turn and every answer needs a token")


def growing(
    *, num_turns: int, first_tokens: int, turn_tokens: int, answer_tokens: int
) -> tuple[Shape]:
    """Return the shape of one conversation that grows by ``turn_tokens`` and an answer a turn."""
    shape = Shape(
        first_tokens=first_tokens,
        later_tokens=(turn_tokens,) * (num_turns - 1),
        answer_tokens=answer_tokens,
    )
    return (shape,)


def with_histories(
    histories: Sequence[int], *, new_tokens: int, answer_tokens: int
) -> tuple[Shape, ...]:
    """Return two-turn shapes whose second turn has just so many tokens of history.

    Raises ``ConfigError`` for a history that is no longer than an answer.
    """
    for history in histories:
        if history <= answer_tokens:
            raise ConfigError(
                f"a history of {history} tokens has no room for an answer of {answer_tokens}"
            )
    return tuple(
        Shape(
            first_tokens=history - answer_tokens,
            later_tokens=(new_tokens,),
            answer_tokens=answer_tokens,
        )
        for history in histories
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnsPlan:
    """What is asked, and how often."""

    shapes: tuple[Shape, ...]
    arms: tuple[TurnArm, ...] = tuple(TurnArm)
    repeats: int = 5
    """Conversations of each shape and arm that count."""
    warmups: int = 1
    """Further ones before, of each shape and arm, that do not."""
    first_token_id: int = 1_000
    last_token_id: int = 40_000
    """Prompts are drawn from this range, both ends included."""

    def __post_init__(self) -> None:
        """Refuse a plan that measures nothing. Raises ``ConfigError``."""
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise ConfigError("arms must be one or more, each of them once")
        if not self.shapes or len(set(self.shapes)) < len(self.shapes):
            raise ConfigError("histories must be one or more, each of them once")
        if self.repeats < 1 or self.warmups < 0:
            raise ConfigError("repeats must be at least 1, warm-ups at least 0")
        if not 0 <= self.first_token_id < self.last_token_id:
            raise ConfigError("the range of token ids is empty")

    @property
    def num_requests(self) -> int:
        """How many requests the plan sends."""
        num_turns = sum(1 + len(shape.later_tokens) for shape in self.shapes)
        return num_turns * len(self.arms) * (self.warmups + self.repeats)


@dataclass(frozen=True, slots=True)
class TokenScript:
    """A conversation of token ids; every answer has the length that is asked for."""

    user_tokens: tuple[tuple[int, ...], ...]
    """The new ones of each turn."""
    answer_tokens: int

    @property
    def path(self) -> str:
        """See ``Script``."""
        return "/v1/completions"

    @property
    def num_turns(self) -> int:
        """See ``Script``."""
        return len(self.user_tokens)

    def fields(self, answers: Sequence[StreamedAnswer]) -> dict[str, object]:
        """See ``Script``."""
        prompt = list(self.user_tokens[0])
        for answer, tokens in zip(answers, self.user_tokens[1:], strict=False):
            prompt += [*answer.token_ids, *tokens]
        return {"prompt": prompt, "max_tokens": self.answer_tokens, "ignore_eos": True}


def draw_scripts(plan: TurnsPlan, rng: random.Random) -> list[TokenScript]:
    """Return one conversation of each shape, of random token ids."""

    def draw(count: int) -> tuple[int, ...]:
        return tuple(rng.randint(plan.first_token_id, plan.last_token_id) for _ in range(count))

    return [
        TokenScript(
            tuple(draw(count) for count in (shape.first_tokens, *shape.later_tokens)),
            shape.answer_tokens,
        )
        for shape in plan.shapes
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One script under one arm."""

    name: str
    """Its session id and its cache salt: it shares no block with any other conversation."""
    arm: TurnArm
    repeat: int
    """Below 0 it does not count."""
    number: int
    """Of the script among those of its repeat."""
    script: Script

    def headers(self) -> dict[str, str]:
        """Return the headers of each of its requests, beside the mode's."""
        read_back = "auto" if self.arm.reads_back else "off"
        return {SESSION_HEADER: self.name, READ_BACK_HEADER: read_back}

    def body(self, answers: Sequence[StreamedAnswer]) -> dict[str, object]:
        """Return the body of the turn that follows ``answers``."""
        return {
            **self.script.fields(answers),
            "temperature": 0,
            "cache_salt": self.name,
            "stream_options": {"include_usage": True},
        }


def plan_conversations(
    arms: Sequence[TurnArm],
    repeats: range,
    draw: Callable[[], Sequence[Script]],
    rng: random.Random,
    run_id: str,
) -> list[Conversation]:
    """Return every conversation in the order in which they are held.

    Within a repeat all arms have the same scripts, so their turns are pairs. ``run_id`` must be
    another for every run against the same deployment: it keeps apart what they leave in caches.
    """
    orders = arm_rotations(arms, rng)
    planned = []
    for repeat, order in zip(repeats, orders, strict=False):
        for number, script in enumerate(draw()):
            planned += [
                Conversation(
                    name=f"{run_id}-{arm}-{repeat}-{number}",
                    arm=arm,
                    repeat=repeat,
                    number=number,
                    script=script,
                )
                for arm in order
            ]
    return planned


def arm_rotations(arms: Sequence[Item], rng: random.Random) -> Iterator[tuple[Item, ...]]:
    """Yield orders without end: in as many as there are arms, each arm has every place once."""
    while True:
        base = list(arms)
        rng.shuffle(base)
        for start in range(len(base)):
            yield (*base[start:], *base[:start])
