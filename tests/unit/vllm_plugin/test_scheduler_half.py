"""The scheduler half: hooks in vLLM's order, orders and references out."""

from __future__ import annotations

import pytest

from kvferry.protocol.hashing import PartialContent, next_block_hash
from kvferry.protocol.ids import RequestId
from kvferry.protocol.params import parse_params
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
    LetGo,
    MakeRoom,
    Offer,
    RestartSend,
    Retain,
    StepReport,
    Withdraw,
)
from tests.unit.vllm_plugin.fake_engine import HELLO, PEER, FakeRequest, blocks
from tests.unit.vllm_plugin.scheduler_rig import (
    NOTHING,
    PEER_FIELDS,
    SchedulerRig,
    add_decode,
    add_prefill,
    answered,
    begin_id,
)


def test_a_decode_request_is_announced_when_it_arrives() -> None:
    rig = SchedulerRig()
    add_decode(rig)
    (begin,) = rig.orders.take()
    assert isinstance(begin, Begin)
    assert (begin.request_id, begin.transfer_id, begin.prompt.num_tokens) == ("d", "x-d", 10)


def test_all_that_is_not_cached_is_filled_partial_tail_too() -> None:
    rig = SchedulerRig()
    request = add_decode(rig)
    rig.orders.take()
    assert rig.half.count_external(request, 4) == 6
    rig.allocate(request, 8, 3, external=6)
    assert rig.orders.take() == [Fill(RequestId("d"), begin_id(request), blocks(9, 10), 1)]
    assert rig.pool.held() == {8: 1, 9: 2, 10: 2}
    assert rig.half.plan_step(NOTHING).loads == {"d": blocks(9, 10)}


def test_asking_for_matches_again_and_again_changes_nothing() -> None:
    rig = SchedulerRig()
    request = add_decode(rig)
    rig.orders.take()
    assert [rig.half.count_external(request, 0) for _ in range(3)] == [10, 10, 10]
    assert rig.orders.take() == []
    assert rig.pool.held() == {}


def test_what_is_below_the_threshold_is_computed_and_the_peer_is_let_go() -> None:
    rig = SchedulerRig()
    request = add_decode(rig)
    rig.orders.take()
    assert rig.half.count_external(request, 8) == 0
    rig.allocate(request, 0, 3, external=0)
    assert rig.orders.take() == [End(RequestId("d"), False)]


def test_a_request_is_filled_once_only() -> None:
    rig = SchedulerRig()
    request = add_decode(rig)
    rig.allocate(request, 0, 3, external=10)
    rig.orders.take()
    rig.report(StepReport(1, (), (FillEnd(RequestId("d"), "slow"),)))
    assert rig.half.count_external(request, 0) == 0
    rig.half.note_allocated(request, [4, 5, 6], 0)
    assert rig.orders.take() == []


def test_a_push_that_fails_before_there_are_blocks_is_not_parked_for_it() -> None:
    rig = SchedulerRig()
    request = add_decode(rig, mode="push")
    rig.report(StepReport(1, (), (FillEnd(RequestId("d"), "gone"),)))
    assert rig.half.count_external(request, 0) == 0
    rig.orders.take()
    rig.allocate(request, 0, 3, external=0)
    rig.end(request)
    assert rig.orders.take() == [End(RequestId("d"), True)]


def test_returned_pins_are_given_back_to_the_pool_tails_first() -> None:
    rig = SchedulerRig()
    request = add_decode(rig)
    rig.allocate(request, 0, 3, external=10)
    rig.report(StepReport(1, blocks(0, 1, 2)))
    assert rig.pool.freed == [2, 1, 0]
    assert rig.pool.held() == {0: 1, 1: 1, 2: 1}
    orders = rig.half.plan_step({})
    assert orders.pool.num_free_blocks == rig.pool.get_num_free_blocks()
    assert orders.pool.num_given_back == 3


def test_the_end_of_a_request_tells_what_its_blocks_leave_free() -> None:
    rig = SchedulerRig()
    request = add_decode(rig)
    rig.allocate(request, 0, 3, external=10)
    rig.report(StepReport(1, blocks(0, 1)))
    rig.end(request, ended_well=False)
    (told,) = rig.orders.pools
    # vLLM has let go by now; one block is filled, and pinned, still.
    assert told.num_free_blocks == rig.pool.get_num_free_blocks() == rig.pool.num_blocks - 1
    assert told.number < rig.half.plan_step({}).pool.number


def test_an_abort_while_blocks_are_filled_ends_the_receive_and_retains_nothing() -> None:
    rig = SchedulerRig()
    request = add_decode(rig)
    rig.allocate(request, 0, 3, external=10)
    request.num_computed_tokens = 10
    request.answer = [1]
    rig.orders.take()
    assert rig.end(request, ended_well=False) is None
    assert rig.orders.take() == [End(RequestId("d"), True)]
    assert not rig.half._requests


def test_a_prefill_ends_after_one_token_whatever_was_asked() -> None:
    rig = SchedulerRig()
    request = add_prefill(rig)
    assert request.max_tokens == 1
    assert request.sampling_params is not None
    assert request.sampling_params.min_tokens == 0


def test_a_finished_prefill_is_offered_with_all_blocks_of_its_prompt() -> None:
    rig = SchedulerRig()
    request = add_prefill(rig)
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
    rig = SchedulerRig()
    request = add_prefill(rig)
    rig.orders.answer = Answer(error="in use")
    rig.allocate(request, 0, 3, external=0)
    request.answer = [99]
    assert rig.end(request) is None


def test_an_aborted_prefill_offers_nothing() -> None:
    rig = SchedulerRig()
    request = add_prefill(rig)
    rig.allocate(request, 0, 3, external=0)
    assert rig.end(request, ended_well=False) is None
    assert rig.orders.take() == []


def test_a_push_advances_by_full_blocks_once_a_step_is_done() -> None:
    rig = SchedulerRig()
    request = add_prefill(rig, mode="push")
    rig.allocate(request, 0, 3, external=0)
    assert isinstance(rig.orders.take()[0], BeginSend)
    rig.half.plan_step({"p": 6})
    assert rig.orders.take() == []
    rig.report(StepReport(1))
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
    rig = SchedulerRig()
    request = add_prefill(rig, mode="push")
    rig.allocate(request, 0, 3, external=0)
    rig.half.plan_step({"p": 4})
    rig.report(StepReport(1))
    rig.half.plan_step({"p": 4})
    rig.orders.take()
    rig.half.plan_step({}, {"p"})
    assert rig.orders.take() == [RestartSend(RequestId("p"), begin_id(request))]
    # The output of a step from before the preemption says nothing of the new blocks.
    rig.report(StepReport(2))
    assert rig.orders.take() == []
    request.num_computed_tokens = 0
    rig.allocate(request, 20, 3, external=0)
    rig.half.plan_step({"p": 8})
    rig.report(StepReport(4))
    (advance,) = rig.orders.take()
    assert isinstance(advance, AdvanceSend)
    assert advance.blocks == blocks(20, 21)


def test_a_push_that_is_aborted_is_withdrawn_begun_or_not() -> None:
    rig = SchedulerRig()
    request = add_prefill(rig, mode="push")
    rig.end(request, ended_well=False)
    assert rig.orders.take() == [Withdraw(RequestId("p"), begin_id(request))]


def test_a_history_is_read_into_the_blocks_after_the_cached_ones() -> None:
    rig = SchedulerRig()
    request = add_prefill(rig, num_tokens=14, history=PEER_FIELDS)
    assert rig.orders.take() == [Contact(PEER)]
    # The last token is always computed; what is in the last block may be found.
    assert rig.half.count_external(request, 4) == 9
    rig.allocate(request, 0, 4, external=9)
    (fill,) = rig.orders.take()
    assert isinstance(fill, FillHistory)
    assert (fill.wanted.blocks, len(fill.wanted.hashes), fill.wanted.min_blocks) == (
        blocks(1, 2, 3),
        2,
        1,
    )
    assert fill.wanted.tokens == tuple(range(4, 13))
    assert rig.pool.held() == {0: 1, 1: 2, 2: 2, 3: 2}


def test_a_history_that_was_read_ends_with_its_request() -> None:
    rig = SchedulerRig()
    request = add_prefill(rig, num_tokens=14, history=PEER_FIELDS)
    rig.allocate(request, 0, 4, external=rig.half.count_external(request, 4) or 0)
    end = FillEnd(RequestId("p"), "received", num_blocks=2)
    rig.report(StepReport(1, blocks(1, 2, 3), (end,)))
    rig.orders.take()
    rig.end(request, ended_well=False)
    assert rig.orders.take() == [End(RequestId("p"), True)]


@pytest.mark.parametrize(("num_tokens", "external"), [(8, 0), (9, 8), (12, 11), (13, 12)])
def test_only_full_blocks_make_a_history_worth_asking_for(num_tokens: int, external: int) -> None:
    rig = SchedulerRig(recompute_threshold_tokens=8)
    request = add_prefill(rig, num_tokens=num_tokens, history=PEER_FIELDS)
    assert rig.half.count_external(request, 0) == external


def test_a_history_that_ends_with_a_block_needs_no_other() -> None:
    rig = SchedulerRig()
    request = add_prefill(rig, num_tokens=13, history=PEER_FIELDS)
    rig.orders.take()
    rig.allocate(request, 0, 3, external=rig.half.count_external(request, 4) or 0)
    (fill,) = rig.orders.take()
    assert isinstance(fill, FillHistory)
    assert (fill.wanted.blocks, len(fill.wanted.hashes)) == (blocks(1, 2), 2)


def _filled(num_blocks: int, num_partial_tokens: int) -> FillEnd:
    return FillEnd(RequestId("p"), "received", "", num_blocks, num_partial_tokens)


def _filled_in_part(rig: SchedulerRig) -> FakeRequest:
    """vLLM has been told of one full block after the cached one."""
    request = add_prefill(rig, num_tokens=14, history=PEER_FIELDS)
    rig.allocate(request, 0, 4, external=rig.half.count_external(request, 4) or 0)
    request.num_computed_tokens = 8
    return request


def test_what_came_of_a_partial_block_is_added_to_what_vllm_counts() -> None:
    rig = SchedulerRig()
    request = _filled_in_part(rig)
    rig.report(StepReport(1, ends=(_filled(1, 3),)))
    assert request.num_computed_tokens == 11


def test_it_is_not_added_to_any_other_count() -> None:
    rig = SchedulerRig()
    request = _filled_in_part(rig)
    request.num_computed_tokens = 13
    report = StepReport(1, ends=(_filled(1, 3),))
    rig.report(report)
    assert request.num_computed_tokens == 13
    rig.end(request, ended_well=False)
    rig.report(report)


def test_an_answer_is_retained_by_references_without_what_was_never_computed() -> None:
    rig = SchedulerRig()
    rig.end(answered(rig))
    (retain,) = rig.orders.take()
    assert isinstance(retain, Retain)
    assert retain.blocks == blocks(0, 1)
    assert (len(retain.hashes), retain.partial) == (2, None)
    assert rig.pool.held() == {0: 1, 1: 1}


def test_an_answer_that_ends_within_a_block_is_retained_to_its_last_token() -> None:
    rig = SchedulerRig()
    request = rig.add("r", 6)
    rig.allocate(request, 0, 3, external=0)
    request.answer, request.num_computed_tokens = [1, 2, 3, 4, 5], 10
    rig.end(request)
    (retain,) = rig.orders.take()
    assert isinstance(retain, Retain)
    assert retain.blocks == blocks(0, 1, 2)
    end = next_block_hash(retain.hashes[1], [3, 4])
    assert retain.hashes[2] == end
    assert retain.partial == PartialContent(retain.hashes[1], 2, end)


def test_of_the_next_turn_only_the_new_blocks_are_retained() -> None:
    """The earlier ones are found already, in the blocks that vLLM may have given to it too."""
    rig = SchedulerRig()
    rig.end(answered(rig))
    rig.orders.take()
    request = rig.add("s", 6)
    rig.allocate(request, 8, 4, external=0)
    request.answer, request.num_computed_tokens = [1, 2, 3, 4, 5, 6, 7], 12
    rig.end(request)
    (retain,) = rig.orders.take()
    assert isinstance(retain, Retain)
    assert (retain.blocks, len(retain.hashes)) == (blocks(10), 1)
    assert rig.pool.held() == {0: 1, 1: 1, 10: 1}


def test_nothing_is_retained_of_less_than_a_block() -> None:
    rig = SchedulerRig()
    request = rig.add("r", 2)
    rig.allocate(request, 0, 1, external=0)
    request.answer, request.num_computed_tokens = [1], 2
    rig.end(request)
    assert rig.orders.take() == []


def test_a_step_in_flight_is_not_counted_as_computed() -> None:
    rig = SchedulerRig()
    request = rig.add("r", 6)
    rig.allocate(request, 0, 3, external=0)
    request.answer = [1, 2, 3]
    request.num_computed_tokens, request.num_in_flight_tokens = 8, 1
    rig.end(request)
    (retain,) = rig.orders.take()
    assert isinstance(retain, Retain)
    assert retain.blocks == blocks(0, 1)
    assert retain.partial is not None
    assert retain.partial.num_tokens == 3


def test_retention_gives_way_to_the_largest_prompt_that_waits() -> None:
    rig = SchedulerRig()
    request = rig.add("r", 40)
    rig.allocate(request, 0, 11, external=0)
    request.answer = [1, 2]
    request.num_computed_tokens = 41
    rig.end(request)
    rig.orders.take()
    rig.add("next", 4 * 25)
    rig.half.plan_step(NOTHING)
    (let_go,) = rig.orders.take()
    assert isinstance(let_go, LetGo)
    assert len(let_go.hashes) == 11 + 25 - 32


def test_unread_handoffs_give_way_once_nothing_is_retained() -> None:
    rig = SchedulerRig()
    rig.pool.allocate(range(20))
    rig.add("next", 4 * 16)
    rig.half.plan_step(NOTHING)
    assert rig.orders.take() == [MakeRoom(4)]
    rig.half.plan_step(NOTHING)
    assert rig.orders.take() == [], "what was given up may be on its way back"


def test_nothing_is_retained_of_a_conversation_that_has_ended() -> None:
    rig = SchedulerRig()
    request = rig.add("d", 10, role="decode", peer=PEER_FIELDS, retention_s=0)
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
    rig = SchedulerRig()
    request = FakeRequest("r", [1, 2, 3, 4, 5], params)
    rig.half.add(request, is_supported=True)
    assert rig.half.count_external(request, 0) == 0
    assert rig.orders.take() == []
    assert request.max_tokens == 16
