"""A planner that tests call as its engine, its peers and its mover do, and what it decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvferry.blocks.pool import BlockPool
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.effects import CountDropped, CountReceive, Effect
from kvferry.connector.planner import Planner
from kvferry.protocol.compatibility import KVLayout


class Driven:
    """A planner whose every call also gives what it has decided."""

    ANSWERING = ("give_back", "read_history", "give_up_oldest", "answer")
    ASKING = (
        *("take_results", "take_first_tokens", "take_stopped_sends", "is_send_wanted"),
        *("may_receive", "next_deadline_s", "snapshot"),
    )

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.planner, name)
        if name in self.ASKING:
            return method
        if name in self.ANSWERING:
            return lambda *args, **kwargs: (method(*args, **kwargs), take_all(self.planner))
        return lambda *args, **kwargs: (method(*args, **kwargs), take_all(self.planner))[1]


def take_all(planner: Planner) -> list[Effect]:
    """Take out what is decided; counts of single ends are of no interest to most tests."""
    taken: list[Effect] = []
    while (effect := planner.take_effect()) is not None:
        if not isinstance(effect, CountReceive | CountDropped):
            taken.append(effect)
    return taken


def driven(config: ExchangeConfig, layout: KVLayout, pool: BlockPool, clock: Clock) -> Driven:
    """Return a planner to be driven."""
    return Driven(Planner(config, layout, pool, clock))
