"""What the scheduler does with decode legs of pushes."""

from __future__ import annotations

import dataclasses

import pytest

from kvferry.engine.live_request import LiveRequest, Phase, StepPlan
from kvferry.protocol.ids import Epoch, InstanceId, TransferId
from kvferry.protocol.params import KvTransferParams, Mode, PeerAddress, Role
from tests.unit.engine.desk import Desk, shape


def push_params(number: int) -> KvTransferParams:
    return KvTransferParams(
        transfer_id=TransferId(f"push-{number}"),
        role=Role.DECODE,
        mode=Mode.PUSH,
        peer=PeerAddress(InstanceId("peer"), Epoch(1), "tcp://127.0.0.1:1"),
    )


def pushed(desk: Desk, num_prompt: int, *, first: int = 0) -> LiveRequest:
    """A decode leg of a push whose first token has not come."""
    request = desk.arrive(num_prompt, wants_receive=True, first=first)
    request.request = dataclasses.replace(request.request, transfer=push_params(desk.num_arrivals))
    request.token_ids.pop()
    return request


def test_a_push_that_may_not_have_blocks_is_passed_over() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    first = pushed(desk, 12)
    desk.arrive(6, first=100)
    desk.peer.refused.add("r1")
    plan = desk.work()
    assert shape(plan) == [("r2", 0, 6, True)]
    assert (plan.receives, first.phase, first.blocks) == ([], Phase.WAITING, [])
    assert desk.pool.num_free == 98
    desk.peer.refused.clear()
    assert [len(start.blocks) for start in desk.work().receives] == [3]


def test_one_steps_registrations_count_against_each_other() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    for index in range(3):
        pushed(desk, 12, first=100 * index)
    desk.peer.at_work = False
    desk.work()
    assert desk.peer.asked == [("r1", 3), ("r2", 6), ("r3", 9)]


def test_a_first_token_before_the_blocks_does_not_change_what_is_received() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    request = pushed(desk, 12)
    request.token_ids.append(7)
    assert [len(start.blocks) for start in desk.work().receives] == [3]


def test_what_runs_alone_takes_back_what_a_peer_has_not_filled() -> None:
    desk = Desk(num_blocks=6, prefix_caching=False, recompute_threshold_tokens=4)
    runs = desk.arrive(7, max_tokens=16)
    receives = pushed(desk, 12, first=100)
    desk.work()
    assert receives.phase is Phase.RECEIVING
    plan = StepPlan()
    while not plan.is_short_of_blocks:
        plan = desk.work()
    assert desk.peer.given_back == ["r2"]
    assert (runs.phase, runs.report.num_preemptions) == (Phase.RUNNING, 0)
    assert (receives.phase, receives.wants_receive) == (Phase.WAITING, True)
    while runs.phase is Phase.RUNNING:
        plan = desk.work()
        assert plan.cancelled == []
    assert [start.request for start in desk.work().receives] == [receives]


def test_blocks_that_do_not_come_back_end_the_receive() -> None:
    desk = Desk(num_blocks=6, prefix_caching=False, recompute_threshold_tokens=4)
    runs = desk.arrive(7, max_tokens=16)
    receives = pushed(desk, 12, first=100)
    kept = desk.work().receives[0].blocks
    desk.pool.hold(kept)  # as the connector does until the peer lets go
    while not desk.work().is_short_of_blocks:
        pass
    desk.peer.num_blocks_returning = 3
    plan = desk.work()
    assert (plan.cancelled, receives.wants_receive) == ([receives], False)
    assert desk.work().is_short_of_blocks
    assert (runs.phase, runs.report.num_preemptions) == (Phase.RUNNING, 0), "they are about to come"
    desk.pool.drop(kept)
    while runs.phase is Phase.RUNNING:
        desk.work()
    assert shape(desk.work()) == [("r2", 0, 12, True)]


@pytest.mark.parametrize("at_work", [False, True])
def test_a_registration_does_not_hold_up_the_queue_for_ever(at_work: bool) -> None:
    desk = Desk(num_blocks=6, recompute_threshold_tokens=8)
    receives = pushed(desk, 12)
    first = desk.arrive(20, max_tokens=2, first=100)
    desk.peer.at_work = at_work
    for _ in range(3):
        desk.work()
    assert (first.phase is Phase.WAITING) is at_work, "who is at work comes to an end"
    assert (receives.phase is Phase.RECEIVING) is at_work
    desk.peer.at_work = True
    while receives.phase is Phase.WAITING:
        desk.work()
    assert (receives.phase, first.phase) != (Phase.WAITING, Phase.WAITING)


def test_too_late_to_take_back() -> None:
    desk = Desk(num_blocks=6, prefix_caching=False, recompute_threshold_tokens=4)
    runs = desk.arrive(7, max_tokens=16)
    receives = pushed(desk, 12, first=100)
    desk.peer.takes_back = False
    while runs.report.num_preemptions == 0:
        desk.work()
    assert receives.phase is Phase.RECEIVING
