"""What the planner has decided and nobody has executed yet, in the order in which it was decided.

The engine's threads and the mover's both have the planner decide. Were the effects of a later
decision executed first, a link's stop could come before its start, and the start last for good.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

from kvferry.connector.machine.effects import Effect

Question = ParamSpec("Question")
Answer = TypeVar("Answer")


class Decisions:
    """A queue of effects. Any thread may add; one takes them out and executes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._effects: deque[Effect] = deque()

    def __len__(self) -> int:
        """Return how many effects wait to be executed."""
        return len(self._effects)

    def add(self, effects: Sequence[Effect]) -> None:
        """Add what needed no decision."""
        with self._lock:
            self._effects.extend(effects)

    def make(
        self,
        decide: Callable[Question, Sequence[Effect]],
        *args: Question.args,
        **kwargs: Question.kwargs,
    ) -> None:
        """Have ``decide`` called, and add what it returns before anybody else decides."""
        with self._lock:
            self._effects.extend(decide(*args, **kwargs))

    def answer(
        self,
        decide: Callable[Question, tuple[Answer, Sequence[Effect]]],
        *args: Question.args,
        **kwargs: Question.kwargs,
    ) -> Answer:
        """Like ``make``, for a decision that is also an answer; return that."""
        with self._lock:
            answer, effects = decide(*args, **kwargs)
            self._effects.extend(effects)
        return answer

    def take(self) -> Effect | None:
        """Take out the oldest effect; None if there is none."""
        return self._effects.popleft() if self._effects else None
