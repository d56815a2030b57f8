"""The scheduler half: hooks in vLLM's order, orders and references out."""

from __future__ import annotations

import msgspec
import pytest

from kvferry.protocol.ids import RequestId, TransferId
from kvferry.protocol.params import parse_params
from kvferry.testing.fake_clock import FakeClock
from kvferry.vllm_plugin.orders import (
    AdvanceSend,
    Answer,
    Begin,
    BeginSend,
    CompleteSend,
    Contact,
    End,
    Fill,
    FillEnd,
    FillHistory,
    Forget,
    LetGo,
    MakeRoom,
    Offer,
    RestartSend,
    Retain,
    StepReport,
    Withdraw,
)
from kvferry.vllm_plugin.scheduler_side import SchedulerHalf
from kvferry.vllm_plugin.settings import PluginSettings
from kvferry.vllm_plugin.tracked import StepFacts
from tests.unit.vllm_plugin.fake_engine import (
    BLOCK,
    HELLO,
    PEER,
    FakeOrders,
    FakePool,
    FakeRequest,
    blocks,
)

_PEER_FIELDS = msgspec.to_builtins(PEER)
_NOTHING = StepFacts({})


class _Rig:
    def __init__(self, **options: object) -> None:
        self.pool = FakePool()
        self.orders = FakeOrders()
        self.clock = FakeClock()
        self.table: dict[str, list[int]] = {}
        fields = {"recompute_threshold_tokens": 4, **options}
        settings = msgspec.convert(fields, PluginSettings)
        self.half = SchedulerHalf(settings, BLOCK, self.clock)
        self.half.join(HELLO, self.orders, self.pool, self.table.__getitem__)

    def add(self, request_id: str, num_tokens: int, **params: object) -> FakeRequest:
        request = FakeRequest(request_id, list(range(num_tokens)))
        if params:
            request.kv_transfer_params = {"transfer_id": f"x-{request_id}", **params}
        self.half.add(request, is_supported=True)
        return request

    def allocate(self, request: FakeRequest, first: int, count: int, external: int) -> list[int]:
        numbers = self.pool.allocate(range(first, first + count))
        self.table[request.request_id] = numbers
        self.half.note_allocated(request, numbers, external)
        return numbers

    def end(self, request: FakeRequest, *, ended_well: bool = True) -> dict[str, object] | None:
        numbers = self.table.pop(request.request_id, [])
        answer = self.half.finish(request, numbers, ended_well=ended_well)
        for number in numbers:
            self.pool.references[number] -= 1
        return answer


def _decode(rig: _Rig, num_tokens: int = 10, mode: str = "pull") -> FakeRequest:
    return rig.add("d", num_tokens, role="decode", mode=mode, peer=_PEER_FIELDS)


def _prefill(rig: _Rig, num_tokens: int = 10, **more: object) -> FakeRequest:
    return rig.add("p", num_tokens, role="prefill", **more)


def test_a_decode_request_is_announced_when_it_arrives() -> None:
    rig = _Rig()
    _decode(rig)
    (begin,) = rig.orders.take()
    assert isinstance(begin, Begin)
    assert (begin.request_id, begin.transfer_id, begin.num_tokens) == ("d", "x-d", 10)


def test_all_that_is_not_cached_is_filled_partial_tail_too() -> None:
    rig = _Rig()
    request = _decode(rig)
    rig.orders.take()
    assert rig.half.count_external(request, 4) == 6
    rig.allocate(request, 8, 3, external=6)
    assert rig.orders.take() == [Fill(RequestId("d"), begin_id(request), blocks(9, 10), 1)]
    assert rig.pool.held() == {8: 1, 9: 2, 10: 2}
    (load,) = rig.half.plan_step(_NOTHING).loads
    assert (load.request_id, load.blocks) == ("d", blocks(9, 10))


def test_asking_for_matches_again_and_again_changes_nothing() -> None:
    rig = _Rig()
    request = _decode(rig)
    rig.orders.take()
    assert [rig.half.count_external(request, 0) for _ in range(3)] == [10, 10, 10]
    assert rig.orders.take() == []
    assert rig.pool.held() == {}


def test_what_is_below_the_threshold_is_computed_and_the_peer_is_let_go() -> None:
    rig = _Rig()
    request = _decode(rig)
    rig.orders.take()
    assert rig.half.count_external(request, 8) == 0
    rig.allocate(request, 0, 3, external=0)
    assert rig.orders.take() == [End(RequestId("d"), False)]


def test_a_request_is_filled_once_only() -> None:
    rig = _Rig()
    request = _decode(rig)
    rig.allocate(request, 0, 3, external=10)
    rig.orders.take()
    rig.half.note_step_done(StepReport(1, (), (FillEnd(RequestId("d"), "slow"),)))
    assert rig.half.count_external(request, 0) == 0
    rig.half.note_allocated(request, [4, 5, 6], 0)
    assert rig.orders.take() == []


def test_a_push_that_fails_before_there_are_blocks_is_not_parked_for_it() -> None:
    rig = _Rig()
    request = _decode(rig, mode="push")
    rig.half.note_step_done(StepReport(1, (), (FillEnd(RequestId("d"), "gone"),)))
    assert rig.half.count_external(request, 0) == 0
    rig.orders.take()
    rig.allocate(request, 0, 3, external=0)
    rig.end(request)
    assert rig.orders.take() == [End(RequestId("d"), True)]


def test_returned_pins_are_given_back_to_the_pool_tails_first() -> None:
    rig = _Rig()
    request = _decode(rig)
    rig.allocate(request, 0, 3, external=10)
    rig.half.note_step_done(StepReport(1, blocks(0, 1, 2)))
    assert rig.pool.freed == [2, 1, 0]
    assert rig.pool.held() == {0: 1, 1: 1, 2: 1}


def test_an_abort_while_blocks_are_filled_ends_the_receive_and_retains_nothing() -> None:
    rig = _Rig()
    request = _decode(rig)
    rig.allocate(request, 0, 3, external=10)
    request.num_computed_tokens = 10
    request.answer = [1]
    rig.orders.take()
    assert rig.end(request, ended_well=False) is None
    assert rig.orders.take() == [End(RequestId("d"), True)]
    assert rig.half.num_tracked == 0


def test_a_prefill_ends_after_one_token_whatever_was_asked() -> None:
    rig = _Rig()
    request = _prefill(rig)
    assert request.max_tokens == 1
    assert request.sampling_params is not None
    assert request.sampling_params.min_tokens == 0


def test_a_finished_prefill_is_offered_with_all_blocks_of_its_prompt() -> None:
    rig = _Rig()
    request = _prefill(rig)
    rig.allocate(request, 2, 3, external=0)
    request.answer = [99]
    answer = rig.end(request)
    (offer,) = rig.orders.take()
    assert isinstance(offer, Offer)
    assert offer.blocks == blocks(2, 3, 4)
    assert answer is not None
    params = parse_params(answer)
    assert (params.role, params.peer, params.num_prompt_tokens) == ("decode", HELLO.address, 10)
    assert rig.pool.held() == {2: 1, 3: 1, 4: 1}


def test_an_offer_that_is_refused_is_not_told() -> None:
    rig = _Rig()
    request = _prefill(rig)
    rig.orders.answer = Answer(error="in use")
    rig.allocate(request, 0, 3, external=0)
    request.answer = [99]
    assert rig.end(request) is None


def test_an_aborted_prefill_offers_nothing() -> None:
    rig = _Rig()
    request = _prefill(rig)
    rig.allocate(request, 0, 3, external=0)
    assert rig.end(request, ended_well=False) is None
    assert rig.orders.take() == []


def test_a_push_advances_by_full_blocks_once_a_step_is_done() -> None:
    rig = _Rig()
    request = _prefill(rig, mode="push")
    rig.allocate(request, 0, 3, external=0)
    assert isinstance(rig.orders.take()[0], BeginSend)
    rig.half.plan_step(StepFacts({"p": 6}))
    assert rig.orders.take() == []
    rig.half.note_step_done(StepReport(1))
    (advance,) = rig.orders.take()
    assert isinstance(advance, AdvanceSend)
    assert (advance.blocks, advance.num_tokens) == (blocks(0), 6)
    request.num_computed_tokens = 10
    request.answer = [7]
    rig.end(request)
    (complete,) = rig.orders.take()
    assert isinstance(complete, CompleteSend)
    assert (complete.blocks, complete.first_token_id) == (blocks(1, 2), 7)
    assert rig.pool.held() == {0: 1, 1: 1, 2: 1}


def test_a_preempted_push_starts_again_with_other_blocks() -> None:
    rig = _Rig()
    request = _prefill(rig, mode="push")
    rig.allocate(request, 0, 3, external=0)
    rig.half.plan_step(StepFacts({"p": 4}))
    rig.half.note_step_done(StepReport(1))
    rig.half.plan_step(StepFacts({"p": 4}))
    rig.orders.take()
    rig.half.plan_step(StepFacts({}, frozenset({"p"})))
    assert rig.orders.take() == [RestartSend(RequestId("p"), begin_id(request))]
    # The output of a step from before the preemption says nothing of the new blocks.
    rig.half.note_step_done(StepReport(2))
    assert rig.orders.take() == []
    request.num_computed_tokens = 0
    rig.allocate(request, 20, 3, external=0)
    rig.half.plan_step(StepFacts({"p": 8}))
    rig.half.note_step_done(StepReport(4))
    (advance,) = rig.orders.take()
    assert isinstance(advance, AdvanceSend)
    assert advance.blocks == blocks(20, 21)


def test_a_push_that_is_aborted_is_withdrawn_begun_or_not() -> None:
    rig = _Rig()
    request = _prefill(rig, mode="push")
    rig.end(request, ended_well=False)
    assert rig.orders.take() == [Withdraw(RequestId("p"), begin_id(request))]


def test_a_history_is_read_into_the_blocks_after_the_cached_ones() -> None:
    rig = _Rig()
    request = _prefill(rig, num_tokens=14, history=_PEER_FIELDS)
    assert rig.orders.take() == [Contact(PEER)]
    # The last token is always computed, and only full blocks have a hash.
    assert rig.half.count_external(request, 4) == 8
    rig.allocate(request, 0, 3, external=8)
    (fill,) = rig.orders.take()
    assert isinstance(fill, FillHistory)
    assert (fill.blocks, len(fill.hashes), fill.min_blocks) == (blocks(1, 2), 2, 1)
    assert rig.pool.held() == {0: 1, 1: 2, 2: 2}


def test_an_answer_is_retained_by_references_without_what_was_never_computed() -> None:
    rig = _Rig()
    rig.end(_retained(rig))
    (retain,) = rig.orders.take()
    assert isinstance(retain, Retain)
    assert retain.blocks == blocks(0, 1)
    assert rig.pool.held() == {0: 1, 1: 1}


def test_a_step_in_flight_is_not_counted_as_computed() -> None:
    rig = _Rig()
    request = rig.add("r", 6)
    rig.allocate(request, 0, 3, external=0)
    request.answer = [1, 2, 3]
    request.num_computed_tokens, request.num_in_flight_tokens = 8, 1
    rig.end(request)
    (retain,) = rig.orders.take()
    assert isinstance(retain, Retain)
    assert retain.blocks == blocks(0)


def test_retention_gives_way_to_the_largest_prompt_that_waits() -> None:
    rig = _Rig()
    request = rig.add("r", 40)
    rig.allocate(request, 0, 11, external=0)
    request.answer = [1, 2]
    request.num_computed_tokens = 41
    rig.end(request)
    rig.orders.take()
    rig.add("next", 4 * 25)
    rig.half.plan_step(_NOTHING)
    (let_go,) = rig.orders.take()
    assert isinstance(let_go, LetGo)
    assert len(let_go.hashes) == 10 + 25 - 32


def test_unread_handoffs_give_way_once_nothing_is_retained() -> None:
    rig = _Rig()
    rig.pool.allocate(range(20))
    rig.add("next", 4 * 16)
    rig.half.plan_step(_NOTHING)
    assert rig.orders.take() == [MakeRoom(4)]
    rig.half.plan_step(_NOTHING)
    assert rig.orders.take() == [], "what was given up may be on its way back"


def test_nothing_is_retained_of_a_conversation_that_has_ended() -> None:
    rig = _Rig()
    request = rig.add("d", 10, role="decode", peer=_PEER_FIELDS, retention_s=0)
    rig.allocate(request, 0, 3, external=0)
    request.answer = [1, 2]
    request.num_computed_tokens = 11
    rig.orders.take()
    rig.end(request)
    assert rig.orders.take() == []
    assert rig.pool.held() == {}


@pytest.mark.parametrize(
    "params",
    [{"do_remote_prefill": True}, {"transfer_id": "x", "role": "decode"}, {"role": "prefill"}],
)
def test_a_request_with_wrong_parameters_is_a_plain_one(params: dict[str, object]) -> None:
    rig = _Rig()
    request = FakeRequest("r", [1, 2, 3, 4, 5], params)
    rig.half.add(request, is_supported=True)
    assert rig.half.count_external(request, 0) == 0
    assert rig.orders.take() == []
    assert request.max_tokens == 16


def test_pushes_that_may_never_come_have_a_share_of_the_pool_only() -> None:
    rig = _Rig(max_registered_share=0.25)
    fields = {"role": "decode", "mode": "push", "peer": _PEER_FIELDS}
    legs = [rig.add(name, 5 * BLOCK, **fields) for name in "ab"]
    assert rig.half.count_external(legs[0], 0) == 5 * BLOCK
    rig.allocate(legs[0], 0, 5, external=5 * BLOCK)
    assert rig.half.count_external(legs[1], 0) is None, "8 blocks are the share"
    assert rig.half.count_external(legs[1], 2 * BLOCK) == 3 * BLOCK
    assert rig.half.plan_step(_NOTHING).is_waiting
    assert not rig.half.plan_step(_NOTHING).is_waiting
    rig.half.note_step_done(StepReport(1, admitted=(RequestId("a"),)))
    assert rig.half.count_external(legs[1], 0) == 5 * BLOCK


def test_a_push_beyond_the_share_waits_until_its_prefill_is_at_work() -> None:
    rig = _Rig(max_registered_share=0.25)
    request = _decode(rig, num_tokens=20 * BLOCK, mode="push")
    assert rig.half.count_external(request, 0) is None
    rig.half.note_step_done(StepReport(1, admitted=(RequestId("d"), RequestId("unknown"))))
    assert rig.half.count_external(request, 0) == 20 * BLOCK


def test_a_push_that_has_failed_leaves_its_share_to_others() -> None:
    rig = _Rig(max_registered_share=0.25)
    request = _decode(rig, num_tokens=8 * BLOCK, mode="push")
    other = rig.add("o", 8 * BLOCK, role="decode", mode="push", peer=_PEER_FIELDS)
    rig.allocate(request, 0, 8, external=8 * BLOCK)
    assert rig.half.count_external(other, 0) is None
    rig.half.note_step_done(StepReport(1, (), (FillEnd(RequestId("d"), "slow"),)))
    assert rig.half.count_external(other, 0) == 8 * BLOCK


def test_nothing_of_a_content_that_is_void_is_kept_or_sent() -> None:
    rig = _Rig()
    rig.end(_retained(rig))
    request = _prefill(rig, mode="push")
    rig.allocate(request, 20, 3, external=0)
    rig.half.plan_step(StepFacts({"p": 6}))
    rig.orders.take()
    rig.orders.answer = Answer(returned=blocks(0, 1))
    rig.half.forget_content()
    assert rig.orders.take() == [Forget()]
    assert rig.pool.held() == {20: 1, 21: 1, 22: 1}
    rig.half.note_step_done(StepReport(1))
    rig.half.plan_step(_NOTHING)
    assert rig.orders.take() == [], "neither sent, nor let go of twice"


def _retained(rig: _Rig) -> FakeRequest:
    request = rig.add("r", 6)
    rig.allocate(request, 0, 3, external=0)
    request.answer, request.num_computed_tokens = [1, 2, 3], 8
    return request


def begin_id(request: FakeRequest) -> TransferId:
    assert request.kv_transfer_params is not None
    return TransferId(str(request.kv_transfer_params["transfer_id"]))
