from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.live_request import LiveRequest, Phase
from kvferry.protocol.hashing import block_hashes
from tests.support.block_integrity import check_integrity
from tests.unit.engine.desk import ROOT, Desk, shape


def test_a_long_prompt_is_chunked_and_decodes_go_first() -> None:
    desk = Desk()
    desk.arrive(3)
    desk.work()
    desk.arrive(40, first=100)
    assert shape(desk.work()) == [("r1", 3, 1, True), ("r2", 0, 15, False)]
    assert shape(desk.work()) == [("r1", 4, 1, True), ("r2", 15, 15, False)]
    assert shape(desk.work()) == [("r1", 5, 1, True), ("r2", 30, 10, True)]
    assert shape(desk.work()) == [("r1", 6, 1, True), ("r2", 40, 1, True)]


def test_several_prompts_share_one_step() -> None:
    desk = Desk()
    for index in range(3):
        desk.arrive(6, first=index * 100)
    assert shape(desk.work()) == [("r1", 0, 6, True), ("r2", 0, 6, True), ("r3", 0, 4, False)]


def test_no_more_than_the_limit_run_at_once() -> None:
    desk = Desk(max_num_sequences=2)
    requests = [desk.arrive(2, first=index * 100) for index in range(3)]
    desk.work()
    assert [request.phase for request in requests] == [
        Phase.RUNNING,
        Phase.RUNNING,
        Phase.WAITING,
    ]
    desk.scheduler.remove(requests[0])
    desk.work()
    assert requests[2].phase is Phase.RUNNING


def test_admission_waits_for_all_blocks_and_in_order() -> None:
    desk = Desk(num_blocks=10)
    desk.arrive(20, max_tokens=3)
    big = desk.arrive(24, first=100)
    small = desk.arrive(2, first=200)
    desk.work()
    assert desk.work().is_short_of_blocks
    assert desk.asked_room == [6 + 1 - 5], "one block is kept for the running request"
    assert (big.phase, small.phase) == (Phase.WAITING, Phase.WAITING)
    assert big.blocks == []
    while big.phase is Phase.WAITING:
        desk.work()
    assert desk.pool.num_blocks - desk.pool.num_free >= 6


def test_blocks_are_found_only_after_the_step_that_filled_them() -> None:
    desk = Desk()
    request = desk.arrive(9)
    hashes = block_hashes(ROOT, request.token_ids, 4)
    plan = desk.scheduler.schedule()
    assert desk.pool.match(hashes) == 0
    desk.work(plan)
    assert desk.pool.match(hashes) == 2


def test_a_cached_prefix_is_not_computed_but_the_last_token_is() -> None:
    desk = Desk()
    desk.scheduler.remove(_computed(desk, 16))
    again = desk.arrive(16)
    assert shape(desk.work()) == [("r2", 12, 4, True)]
    assert again.report.num_cached_tokens == 12
    longer = desk.arrive(17)
    assert shape(desk.work())[-1] == ("r3", 16, 1, True)
    assert longer.report.num_cached_tokens == 16
    assert again.blocks[:3] == longer.blocks[:3]


def test_prefix_caching_can_be_off() -> None:
    desk = Desk(prefix_caching=False)
    desk.scheduler.remove(_computed(desk, 16))
    desk.arrive(16)
    assert shape(desk.work()) == [("r2", 0, 16, True)]
    assert desk.pool.snapshot().num_cached == 0


def _computed(desk: Desk, num_prompt: int) -> LiveRequest:
    request = desk.arrive(num_prompt)
    while request.num_output_tokens == 0:
        desk.work()
    return request


def test_the_youngest_is_preempted_and_comes_back_first() -> None:
    desk = Desk(num_blocks=6, prefix_caching=False)
    old = desk.arrive(8, max_tokens=16)
    young = desk.arrive(4, max_tokens=12, first=100)
    waiting = desk.arrive(12, first=200)
    preempted = 0
    while not preempted:
        preempted = desk.work().num_preempted
    assert (old.phase, young.phase) == (Phase.RUNNING, Phase.WAITING)
    assert young.blocks == []
    assert young.report.num_preemptions == 1
    assert list(desk.scheduler.waiting) == [young, waiting]
    tokens = list(young.token_ids)
    while young.phase is Phase.WAITING:
        desk.work()
    assert young.token_ids[: len(tokens)] == tokens


def test_a_receive_is_parked_and_blocks_nobody() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    receiver = desk.arrive(10, wants_receive=True)
    other = desk.arrive(3, first=100)
    plan = desk.work()
    (start,) = plan.receives
    assert (start.request, start.first_block, len(start.blocks)) == (receiver, 0, 3)
    assert receiver.phase is Phase.RECEIVING
    assert [chunk.request for chunk in plan.chunks] == [other]
    desk.scheduler.note_received(receiver, 10)
    hashes = block_hashes(ROOT, receiver.token_ids, 4)
    assert desk.pool.match(hashes) == 2
    assert ("r1", 10, 1, True) in shape(desk.work())


def test_only_what_the_own_cache_lacks_is_received() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    desk.scheduler.remove(_computed(desk, 9))
    receiver = desk.arrive(20, wants_receive=True)
    (start,) = desk.work().receives
    assert (start.first_block, len(start.blocks)) == (2, 3)
    assert receiver.report.num_cached_tokens == 8
    assert tuple(receiver.blocks[2:]) == start.blocks


def test_less_than_the_threshold_is_computed() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    desk.scheduler.remove(_computed(desk, 9))
    receiver = desk.arrive(15, wants_receive=True)
    plan = desk.work()
    assert plan.receives == []
    assert plan.not_needed == [receiver]
    assert shape(plan) == [("r2", 8, 8, True)], "seven prompt tokens and the handed-over one"


def test_a_failed_receive_is_computed_on_new_blocks() -> None:
    desk = Desk(recompute_threshold_tokens=8)
    receiver = desk.arrive(10, wants_receive=True)
    blocks = desk.work().receives[0].blocks
    desk.pool.hold(blocks)  # as the connector does while a transfer may touch them
    desk.scheduler.note_receive_failed(receiver)
    plan = desk.work()
    assert plan.receives == []
    assert shape(plan) == [("r1", 0, 11, True)]
    assert not set(receiver.blocks) & set(blocks)
    desk.pool.drop(blocks)


def test_removing_gives_everything_back_in_every_phase() -> None:
    desk = Desk(max_num_sequences=2, recompute_threshold_tokens=1)
    running = desk.arrive(10)
    receiving = desk.arrive(10, wants_receive=True, first=100)
    ready = desk.arrive(10, wants_receive=True, first=200)
    desk.work()
    waiting = [desk.arrive(10, first=300), desk.arrive(10, first=400)]
    desk.work()
    desk.scheduler.note_received(ready, 10)
    for request in (running, receiving, ready, *waiting):
        desk.scheduler.remove(request)
        desk.scheduler.remove(request)
    assert desk.pool.num_free == 100
    check_integrity(desk.pool)


@settings(max_examples=60)
@given(seed=st.integers(0, 10**6), num_blocks=st.integers(8, 20), caching=st.booleans())
def test_random_loads_end_with_every_token_and_a_whole_pool(
    seed: int, num_blocks: int, caching: bool
) -> None:
    source = random.Random(seed)
    desk = Desk(num_blocks, prefix_caching=caching, recompute_threshold_tokens=6)
    requests: list[LiveRequest] = []
    for _ in range(5000):
        if len(requests) < 12 and source.random() < 0.3:
            num_prompt = source.randint(1, 20)
            requests.append(
                desk.arrive(
                    num_prompt,
                    max_tokens=source.randint(2, num_blocks * 4 - num_prompt),
                    wants_receive=source.random() < 0.4,
                    first=source.choice((0, 0, 50, 100)),
                )
            )
        for request in list(desk.scheduler.receiving):
            if source.random() < 0.5:
                if source.random() < 0.5:
                    desk.scheduler.note_received(request, request.num_prompt_tokens)
                else:
                    desk.scheduler.note_receive_failed(request)
        desk.work()
        if len(requests) == 12 and all(r.phase is Phase.FINISHED for r in requests):
            break
    else:
        pytest.fail("the requests never ended")
    for request in requests:
        assert len(request.token_ids) == request.max_total_tokens
    assert desk.pool.num_free == num_blocks
    check_integrity(desk.pool)
