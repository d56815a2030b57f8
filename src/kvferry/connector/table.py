"""Table-driven state machines: what happens on which event is data, in one place.

A table maps (state, event) to the next state and the actions to take. Where a state is left by
itself, as soon as something is true of the transfer, that is a rule too. Messages may be lost, late
or repeated: what a peer, a transfer or a clock says where no rule is, is dropped, and the caller
counts it. What this process itself asks for where no rule is, is a bug and raises. Knows no time,
no sockets, no threads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from kvferry.errors import LocalProtocolError

StateT = TypeVar("StateT", bound=StrEnum)
EventT = TypeVar("EventT", bound=StrEnum)
ActionT = TypeVar("ActionT", bound=StrEnum)


class Subject(Protocol[StateT]):
    """What a table moves from state to state."""

    state: StateT


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
    local: frozenset[EventT]
    """Events that this process itself causes by its calls."""
    automatic: Mapping[StateT, tuple[EventT, Rule[StateT, ActionT]]] = field(default_factory=dict)
    """Of a state that is left by itself: the event is the name of a property of the subject, and
    happens as soon as that is true."""

    def run(
        self, subject: Subject[StateT], event: EventT, act: Callable[[ActionT, EventT], None]
    ) -> bool:
        """Follow the rule for ``event``, and what follows by itself; return whether there is one.

        ``act`` is called with each action and the event it is for. Raises ``LocalProtocolError``
        for an event of a call of ours without a rule; nothing has happened then.
        """
        rule = self.rules.get((subject.state, event))
        if rule is None:
            if event in self.local:
                raise LocalProtocolError(f"{self.name}: {event!s} in state {subject.state!s}")
            return False
        self._follow(subject, event, rule, act)
        while (ahead := self.automatic.get(subject.state)) and getattr(subject, ahead[0].value):
            self._follow(subject, *ahead, act)
        return True

    def _follow(
        self,
        subject: Subject[StateT],
        event: EventT,
        rule: Rule[StateT, ActionT],
        act: Callable[[ActionT, EventT], None],
    ) -> None:
        subject.state = rule.next_state
        for action in rule.actions:
            act(action, event)

    def all_rules(self) -> list[tuple[StateT, EventT, Rule[StateT, ActionT]]]:
        """Return the rules of both kinds."""
        rules = [(state, event, rule) for (state, event), rule in self.rules.items()]
        return rules + [(state, event, rule) for state, (event, rule) in self.automatic.items()]
