"""Table-driven state machines: what happens on which event is data, in one place.

A table maps (state, event) to the next state and the actions to take. A pair that is not in the
table is ignored: messages may be lost, late or repeated, and the tables say which of those matter.
Knows no time, no sockets, no threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)
ActionT = TypeVar("ActionT", bound=StrEnum)


@dataclass(frozen=True, slots=True)
class Rule(Generic[StateT, ActionT]):
    """Where an event leads and what is done on the way, in order."""

    next_state: StateT
    actions: tuple[ActionT, ...] = ()


@dataclass(frozen=True, slots=True)
class Table(Generic[StateT, EventT, ActionT]):
    """All rules of one role."""

    name: str
    initial: StateT
    final: StateT
    rules: Mapping[tuple[StateT, EventT], Rule[StateT, ActionT]]

    def step(self, state: StateT, event: EventT) -> Rule[StateT, ActionT]:
        """Return the rule for ``event`` in ``state``; without one, nothing happens."""
        return self.rules.get((state, event)) or Rule(state)

    def to_markdown(self) -> str:
        """Return the rules as a Markdown table, for the documentation."""
        lines = ["| state | event | next state | actions |", "|---|---|---|---|"]
        for (state, event), rule in self.rules.items():
            actions = ", ".join(f"`{action}`" for action in rule.actions) or "none"
            lines.append(f"| `{state}` | `{event}` | `{rule.next_state}` | {actions} |")
        return "\n".join(lines)

    def to_mermaid(self) -> str:
        """Return the rules as a Mermaid state diagram, for the documentation."""
        lines = ["stateDiagram-v2", f"    [*] --> {self.initial}"]
        for (state, event), rule in self.rules.items():
            lines.append(f"    {state} --> {rule.next_state}: {event}")
        lines.append(f"    {self.final} --> [*]")
        return "\n".join(lines)
