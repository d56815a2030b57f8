"""``RoleContext``: what every role of an instance decides with, and what it decides into."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.machine.effects import CountDropped, Effect
from kvferry.connector.machine.table import ActionT, EventT, StateT, Subject, Table
from kvferry.connector.ports import BlockPort
from kvferry.protocol.ids import BlockNumber
from kvferry.protocol.layout import KVLayout

BlockDigests = Callable[[Sequence[BlockNumber]], tuple[bytes, ...]]
"""32 bytes per block, over its memory as it is now."""


@dataclass(slots=True)
class RoleContext:
    """Not locked: ``Planner`` is. ``digests_of`` is there where transfers are verified."""

    config: ExchangeConfig
    layout: KVLayout
    blocks: BlockPort
    clock: Clock
    transport: str = ""
    digests_of: BlockDigests | None = None
    effects: deque[Effect] = field(default_factory=deque)
    """What is decided and not executed yet, in the order in which it was decided."""
    outcomes: Counter[str] = field(default_factory=Counter)

    def emit(self, *effects: Effect) -> None:
        """Have ``effects`` executed after all that was decided before."""
        self.effects.extend(effects)

    def now_s(self) -> float:
        """Return the monotonic time."""
        return self.clock.monotonic_s()

    def run(
        self,
        table: Table[StateT, EventT, ActionT],
        subject: Subject[StateT],
        event: EventT,
        act: Callable[[ActionT, EventT], None],
    ) -> bool:
        """See ``Table.run``; an event that has no rule is counted."""
        is_known = table.run(subject, event, act)
        if not is_known:
            self.emit(CountDropped(table.name, str(event), str(subject.state)))
        return is_known

    def count(self, kind: str, outcome: StrEnum | str) -> None:
        """Count one end for the snapshot."""
        self.outcomes[f"{kind}_{outcome}"] += 1
