"""The tables themselves: every state can end, and what may still be touched is never dropped."""

from __future__ import annotations

from enum import StrEnum

import pytest

from kvferry.connector.machine.table import Rule, Table
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

AnyTable = Table[StrEnum, StrEnum, StrEnum]
TABLES = [RECEIVER, SENDER, PUSH_RECEIVER, PUSH_SENDER]


@pytest.mark.parametrize("table", TABLES)
def test_every_state_is_reachable_and_leads_to_the_end(table: AnyTable) -> None:
    successors: dict[StrEnum, set[StrEnum]] = {}
    for (state, _), rule in table.rules.items():
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
    events = [event for _, event in table.rules]
    assert set(events) == set(type(events[0]))
    actions = [action for rule in table.rules.values() for action in rule.actions]
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
        assert closes == (OfferAction.RELEASE_HOLD in rule.actions)


def test_registered_blocks_are_dropped_only_when_nothing_can_land() -> None:
    quiet = {
        IncomingEvent.WRITTEN,
        IncomingEvent.DECLINED,
        IncomingEvent.FAILED_QUIET,
        IncomingEvent.QUIET,
    }
    for (state, event), rule in PUSH_RECEIVER.rules.items():
        gives_back = {IncomingAction.DROP_BLOCKS, IncomingAction.LEAVE_QUARANTINE} & set(
            rule.actions
        )
        if state in (IncomingState.FILLING, IncomingState.QUARANTINED) and gives_back:
            assert event in quiet


def test_a_sender_that_may_have_posted_closes_only_when_all_is_terminal() -> None:
    posting = {OutgoingState.FOLLOWING, OutgoingState.FLUSHING, OutgoingState.DRAINING}
    for (state, event), rule in PUSH_SENDER.rules.items():
        if state in posting and rule.next_state is OutgoingState.CLOSED:
            assert event in (OutgoingEvent.ALL_WRITTEN, OutgoingEvent.DRAINED)


def test_a_pair_without_a_rule_changes_nothing() -> None:
    assert RECEIVER.step(ReceiveState.CLOSED, ReceiveEvent.GRANTED) == Rule(ReceiveState.CLOSED)


def test_tables_are_shown_whole() -> None:
    assert len(RECEIVER.to_markdown().splitlines()) == 2 + len(RECEIVER.rules)
    assert len(SENDER.to_mermaid().splitlines()) == 3 + len(SENDER.rules)
