"""When a conversation's history is read, and what becomes of requests that wait for one."""

from __future__ import annotations

from kvferry.engine.live_request import LiveRequest, Phase
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import KvTransferParams, Role
from tests.unit.engine.desk import Desk, shape
from tests.unit.engine.rig import PEER

READING = KvTransferParams(transfer_id=TransferId("turn-2"), role=Role.PREFILL, history=PEER)


def arrive(desk: Desk, num_prompt: int, *, first: int = 0) -> LiveRequest:
    return desk.arrive(num_prompt, transfer=READING, first=first)


def test_a_history_is_asked_for_with_all_blocks_in_hand() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    request = arrive(desk, 30)
    plan = desk.scheduler.schedule()
    (start,) = plan.histories
    # Blocks of 4: the last token is always computed, so 7 of 8 blocks may come, and one token.
    assert start.history_request.blocks == tuple(request.blocks)
    assert list(start.history_request.hashes) == request.hashes_of(7, 4)
    assert list(start.history_request.tokens) == request.token_ids[:29]
    assert start.history_request.min_blocks == 2
    assert (len(request.blocks), request.phase, plan.chunks) == (8, Phase.RECEIVING, [])


def test_the_rest_is_computed_once_it_is_there() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    request = arrive(desk, 30)
    desk.scheduler.schedule()
    desk.scheduler.note_history_ended(request, 20)
    assert shape(desk.scheduler.schedule()) == [("r1", 20, 10, True)]
    assert desk.pool.match(request.hashes_of(5, 4)) == 5


def test_what_came_of_a_partial_block_is_not_computed_again() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    request = arrive(desk, 30)
    desk.scheduler.schedule()
    desk.scheduler.note_history_ended(request, 22)
    assert shape(desk.work()) == [("r1", 22, 8, True)]
    assert desk.pool.match(request.hashes_of(7, 4)) == 7


def test_a_failed_read_leaves_its_blocks_and_computes_in_others() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    request = arrive(desk, 30)
    (start,) = desk.scheduler.schedule().histories
    desk.pool.hold(start.history_request.blocks)  # the connector's, while a READ may land
    desk.scheduler.note_history_ended(request, 0)
    plan = desk.scheduler.schedule()
    assert shape(plan) == [("r1", 0, 16, False)]
    assert plan.histories == []
    assert set(request.blocks).isdisjoint(start.history_request.blocks)


def test_what_is_cached_here_may_leave_too_little_to_ask_for() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    for _ in range(3):
        desk.arrive(24, max_tokens=1)
        desk.work()
        desk.work()
    request = arrive(desk, 30)
    plan = desk.scheduler.schedule()
    assert plan.histories == []
    assert request.num_computed == 24
    assert shape(plan) == [("r4", 24, 6, True)]


def test_without_blocks_nothing_is_asked_yet() -> None:
    desk = Desk(num_blocks=10, recompute_threshold_tokens=8)
    desk.arrive(20)
    desk.work()
    request = arrive(desk, 30, first=50)
    plan = desk.scheduler.schedule()
    assert plan.histories == []
    assert (request.phase, request.wants_history) == (Phase.WAITING, True)


def test_a_full_step_does_not_keep_a_history_waiting() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    desk.arrive(64)
    desk.scheduler.schedule()
    request = arrive(desk, 30, first=100)
    plan = desk.scheduler.schedule()
    assert shape(plan) == [("r1", 0, 16, False)]
    assert [start.request for start in plan.histories] == [request]


def test_a_prompt_that_is_not_worth_asking_waits_for_its_turn_in_a_full_step() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    desk.arrive(64)
    desk.work()
    request = arrive(desk, 6, first=100)
    plan = desk.work()
    assert [name for name, *_ in shape(plan)] == ["r1"]
    assert request.phase is Phase.RUNNING
    for _ in range(4):
        plan = desk.work()
    assert "r2" in [name for name, *_ in shape(plan)]


def test_who_was_preempted_after_a_read_computes_again() -> None:
    desk = Desk(num_blocks=12, prefix_caching=False, recompute_threshold_tokens=8)
    older = desk.arrive(14, max_tokens=20)
    desk.work()
    request = arrive(desk, 22, first=50)
    desk.work()
    desk.scheduler.note_history_ended(request, 20)
    while request.report.num_preemptions == 0:
        assert older.phase is Phase.RUNNING
        desk.work()
    while request.phase is not Phase.RUNNING:
        desk.work()
    assert request.history is not None
    assert not request.wants_history


def test_a_reading_request_is_never_taken_back_for_others() -> None:
    desk = Desk(num_blocks=8, recompute_threshold_tokens=8)
    reading = arrive(desk, 20)
    desk.work()
    desk.arrive(20, first=50)
    plan = desk.work()
    assert plan.is_short_of_blocks
    assert reading.phase is Phase.RECEIVING
    assert desk.peer.given_back == []
