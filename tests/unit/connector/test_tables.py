"""The tables themselves: every state can end, and what may still be touched is never dropped."""

from __future__ import annotations

import dataclasses
from enum import StrEnum

import pytest

from kvferry.connector.pull.table import (
    RECEIVER,
    SENDER,
    OfferAction,
    ReceiveAction,
    ReceiveEvent,
    ReceiveState,
)
from kvferry.connector.push.table import (
    PUSH_RECEIVER,
    PUSH_SENDER,
    IncomingAction,
    IncomingEvent,
    IncomingState,
    OutgoingEvent,
    OutgoingState,
)
from kvferry.connector.table import Table
from kvferry.errors import LocalProtocolError

AnyTable = Table[StrEnum, StrEnum, StrEnum]
TABLES = [RECEIVER, SENDER, PUSH_RECEIVER, PUSH_SENDER]


@pytest.mark.parametrize("table", TABLES)
def test_every_state_is_reachable_and_leads_to_the_end(table: AnyTable) -> None:
    successors: dict[StrEnum, set[StrEnum]] = {}
    for state, _, rule in table.all_rules():
        successors.setdefault(state, set()).add(rule.next_state)

    def reachable(state: StrEnum) -> set[StrEnum]:
        seen: set[StrEnum] = set()
        todo = [state]
        while todo:
            current = todo.pop()
            if current not in seen:
                seen.add(current)
                todo += successors.get(current, set())
        return seen

    states: set[StrEnum] = set(type(table.initial))
    assert reachable(table.initial) == states
    assert all(table.final in reachable(state) for state in states)


@pytest.mark.parametrize("table", TABLES)
def test_every_event_and_action_is_used(table: AnyTable) -> None:
    events = [event for _, event, _ in table.all_rules()]
    assert set(events) == set(type(events[0]))
    assert table.local <= set(events)
    actions = [action for *_, rule in table.all_rules() for action in rule.actions]
    assert set(actions) == set(type(actions[0]))


def test_blocks_of_a_posted_read_are_dropped_only_when_it_is_terminal() -> None:
    terminal = {e for e in ReceiveEvent if e.value.startswith("read_")}
    for (state, event), rule in RECEIVER.rules.items():
        gives_back = {ReceiveAction.DROP_BLOCKS, ReceiveAction.LEAVE_QUARANTINE} & set(rule.actions)
        if state in (ReceiveState.READING, ReceiveState.QUARANTINED) and gives_back:
            assert event in terminal


def test_a_held_offer_that_closes_gives_its_hold_back_once() -> None:
    for (state, _), rule in SENDER.rules.items():
        closes = state is SENDER.initial and rule.next_state is SENDER.final
        assert closes == (OfferAction.LET_GO in rule.actions)


def test_registered_blocks_are_dropped_only_when_nothing_can_land() -> None:
    quiet = {
        IncomingEvent.WRITTEN,
        IncomingEvent.WRITTEN_CORRUPT,
        IncomingEvent.MISMATCHED,
        IncomingEvent.DECLINED,
        IncomingEvent.FAILED_QUIET,
        IncomingEvent.QUIET,
    }
    for (state, event), rule in PUSH_RECEIVER.rules.items():
        gives_back = {IncomingAction.DROP_BLOCKS, IncomingAction.LEAVE_QUARANTINE} & set(
            rule.actions
        )
        if state in (IncomingState.FILLING, IncomingState.ENDED) and gives_back:
            assert event in quiet


def test_a_sender_that_may_have_posted_closes_only_when_all_is_terminal() -> None:
    posting = {OutgoingState.FOLLOWING, OutgoingState.FLUSHING, OutgoingState.DRAINING}
    for state, event, rule in PUSH_SENDER.all_rules():
        if state in posting and rule.next_state is OutgoingState.CLOSED:
            assert event in (OutgoingEvent.IS_WRITTEN, OutgoingEvent.IS_DRAINED)


def test_who_may_still_be_written_to_closes_only_when_all_is_quiet() -> None:
    for _, event, rule in PUSH_RECEIVER.all_rules():
        if rule.next_state is IncomingState.CLOSED:
            assert event is IncomingEvent.IS_QUIET


@dataclasses.dataclass
class Door:
    state: ReceiveState = ReceiveState.READING
    done: list[str] = dataclasses.field(default_factory=list)

    def act(self, action: ReceiveAction, event: ReceiveEvent) -> None:
        self.done.append(f"{event}: {action}")


def test_what_others_say_where_no_rule_is_changes_nothing() -> None:
    door = Door(ReceiveState.CLOSED)
    assert not RECEIVER.run(door, ReceiveEvent.GRANTED, door.act)
    assert (door.state, door.done) == (ReceiveState.CLOSED, [])


def test_a_call_of_our_own_where_no_rule_is_raises() -> None:
    door = Door()
    with pytest.raises(LocalProtocolError, match="pull receiver: blocks_given in state reading"):
        RECEIVER.run(door, ReceiveEvent.BLOCKS_GIVEN, door.act)
    assert (door.state, door.done) == (ReceiveState.READING, [])


def test_actions_are_taken_in_order_and_told_what_for() -> None:
    door = Door()
    assert RECEIVER.run(door, ReceiveEvent.DEADLINE, door.act)
    assert door.state is ReceiveState.QUARANTINED
    actions = ("quarantine_blocks", "start_grace", "report")
    assert door.done == [f"deadline: {action}" for action in actions]
