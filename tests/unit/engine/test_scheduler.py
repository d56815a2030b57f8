from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.blocks.integrity import check_integrity
from kvferry.blocks.pool import BlockPool
from kvferry.engine.config import EngineConfig
from kvferry.engine.live_request import LiveRequest, Phase
from kvferry.engine.request import EngineRequest
from kvferry.engine.scheduler import Scheduler, StepPlan
from kvferry.protocol.hashing import block_hashes, chain_root
from kvferry.protocol.ids import Epoch, InstanceId, RequestId, TransferId
from kvferry.protocol.params import KvTransferParams, Mode, PeerAddress, Role

ROOT = chain_root(b"scheduler")


class FakePeer:
    """Answers the scheduler's questions about receives as a test says."""

    def __init__(self) -> None:
        self.refused: set[str] = set()
        self.registered: set[str] = set()
        self.asked: list[tuple[str, int]] = []
        self.at_work = True
        self.takes_back = True
        self.num_blocks_returning = 0
        self.given_back: list[str] = []

    def may_receive(self, request: LiveRequest, num_blocks: int) -> bool:
        self.asked.append((request.request.request_id, num_blocks))
        return request.request.request_id not in self.refused

    def is_peer_at_work(self, request: LiveRequest) -> bool:
        return self.at_work

    def give_back(self, request: LiveRequest) -> bool:
        request_id = request.request.request_id
        if not self.takes_back or request_id not in self.registered:
            return False
        self.registered.discard(request_id)
        self.given_back.append(request_id)
        return True

    def num_returning(self) -> int:
        return self.num_blocks_returning


class Desk:
    """A scheduler with a pool; `work` does what a step does, with made-up tokens."""

    def __init__(self, num_blocks: int = 100, **options: int | bool) -> None:
        defaults = {"block_size_tokens": 4, "prefill_chunk_tokens": 16, "max_num_sequences": 4}
        config = EngineConfig(**{**defaults, **options})  # type: ignore[arg-type]
        self.pool = BlockPool(num_blocks)
        self.asked_room: list[int] = []
        self.peer = FakePeer()
        self.scheduler = Scheduler(self.pool, config, self.make_room, self.peer)
        self.num_arrivals = 0

    def make_room(self, num_blocks: int) -> int:
        self.asked_room.append(num_blocks)
        return 0

    def arrive(
        self, num_prompt: int, *, max_tokens: int = 8, wants_receive: bool = False, first: int = 0
    ) -> LiveRequest:
        self.num_arrivals += 1
        prompt = tuple(range(first, first + num_prompt))
        request = LiveRequest(
            request=EngineRequest(
                request_id=RequestId(f"r{self.num_arrivals}"), prompt_token_ids=prompt
            ),
            on_output=lambda output: None,
            arrival=self.num_arrivals,
            arrived_s=0.0,
            seed=0,
            root=ROOT,
            stop_token_ids=frozenset(),
            max_total_tokens=num_prompt + max_tokens,
            token_ids=list(prompt) + ([7] if wants_receive else []),
            wants_receive=wants_receive,
        )
        self.scheduler.add(request)
        return request

    def work(self, plan: StepPlan | None = None) -> StepPlan:
        plan = plan or self.scheduler.schedule()
        self.peer.registered |= {start.request.request.request_id for start in plan.receives}
        assert sum(chunk.count for chunk in plan.chunks) <= 16
        self.scheduler.note_step_done(plan.chunks)
        for chunk in plan.chunks:
            if chunk.samples:
                chunk.request.token_ids.append(1)
                if len(chunk.request.token_ids) >= chunk.request.max_total_tokens:
                    self.scheduler.remove(chunk.request)
        return plan


def shape(plan: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [
        (chunk.request.request.request_id, chunk.start, chunk.count, chunk.samples)
        for chunk in plan.chunks
    ]


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
    assert again.num_cached_tokens == 12
    longer = desk.arrive(17)
    assert shape(desk.work())[-1] == ("r3", 16, 1, True)
    assert longer.num_cached_tokens == 16
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
    assert young.num_preemptions == 1
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
    assert receiver.num_cached_tokens == 8
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


@settings(deadline=None, max_examples=60)
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
    assert (runs.phase, runs.num_preemptions) == (Phase.RUNNING, 0)
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
    assert (runs.phase, runs.num_preemptions) == (Phase.RUNNING, 0), "they are about to come"
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
    while runs.num_preemptions == 0:
        desk.work()
    assert receives.phase is Phase.RECEIVING
