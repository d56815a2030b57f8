"""Several ranks under one scheduler half: nothing counts before all of them have said it."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import pytest

from kvferry.errors import EngineError
from kvferry.protocol.ids import RequestId, TransferId
from kvferry.vllm_plugin.orders import (
    Answer,
    CompleteSend,
    FillEnd,
    Forget,
    MakeRoom,
    Offer,
    Order,
    PartialFill,
    StepReport,
    Withdraw,
)
from kvferry.vllm_plugin.ranks import (
    RankOrders,
    RankPins,
    RankReports,
    check_hellos,
    joined_end,
)
from tests.unit.vllm_plugin.fake_engine import HELLO, blocks
from tests.unit.vllm_plugin.scheduler_rig import SchedulerRig, add_decode, add_prefill

_A = RequestId("a")
_OFFER = Offer(TransferId("x"), 4, b"d" * 32, blocks(1))


@dataclass
class _Link:
    answer: Answer = field(default_factory=lambda: Answer(lease_s=30.0))
    sent: list[Order] = field(default_factory=list)

    def send(self, order: Order) -> None:
        self.sent.append(order)

    def take_answer(self) -> Answer:
        return self.answer


def _reports(num_ranks: int = 2) -> RankReports:
    return RankReports(num_ranks, RankPins(num_ranks), lambda _: True)


def _end(outcome: str = "received", num_blocks: int = 3, num_partial_tokens: int = 0) -> FillEnd:
    return FillEnd(_A, outcome, "why", num_blocks, num_partial_tokens, 10, "pull")


# -- pins ---------------------------------------------------------------------------------------


def test_a_pin_goes_back_when_the_last_rank_returns_it() -> None:
    pins = RankPins(3)
    assert pins.give_back(0, blocks(1, 2)) == []
    assert pins.give_back(2, blocks(2, 1)) == []
    assert pins.give_back(1, blocks(2)) == [2]
    assert pins.num_awaited == 1
    assert pins.give_back(1, blocks(1)) == [1]
    assert pins.num_awaited == 0


def test_every_pin_on_a_block_is_counted() -> None:
    pins = RankPins(2)
    assert pins.give_back(0, blocks(5, 5, 5)) == []
    assert pins.give_back(1, blocks(5, 5)) == [5, 5]
    assert pins.give_back(1, blocks(5, 5)) == [5]
    assert pins.give_back(0, blocks(5)) == [5]


# -- orders -------------------------------------------------------------------------------------


def test_an_order_goes_to_all_ranks() -> None:
    links = [_Link(), _Link()]
    RankOrders(links, RankPins(2)).send(MakeRoom(1))
    assert [link.sent for link in links] == [[MakeRoom(1)], [MakeRoom(1)]]


def test_an_answer_has_the_shortest_lease() -> None:
    links = [_Link(), _Link(Answer(lease_s=12.0))]
    assert RankOrders(links, RankPins(2)).ask(_OFFER) == Answer(lease_s=12.0)


@pytest.mark.parametrize(
    "order", [_OFFER, CompleteSend(_A, TransferId("x"), blocks(1), first_token_id=3)]
)
def test_what_one_rank_refuses_the_others_give_up(order: Offer | CompleteSend) -> None:
    links = [_Link(), _Link(Answer(error="in use"))]
    answer = RankOrders(links, RankPins(2)).ask(order)
    assert answer.error == "rank 1: in use"
    sender = order.request_id if isinstance(order, CompleteSend) else RequestId("")
    assert links[0].sent == [order, Withdraw(sender, order.transfer_id)]
    # Another request's handoff may have that name there.
    assert links[1].sent == [order]


def test_pins_in_answers_and_reports_are_counted_together() -> None:
    pins = RankPins(2)
    links = [_Link(Answer(returned=blocks(1, 2))), _Link(Answer(returned=blocks(2)))]
    assert RankOrders(links, pins).ask(Forget()).returned == (2,)
    reports = RankReports(2, pins, lambda _: True)
    assert reports.join({1: StepReport(4, blocks(1))}).returned == (1,)


# -- ends ---------------------------------------------------------------------------------------


def test_a_fill_has_ended_when_it_has_on_all_ranks() -> None:
    reports = _reports()
    assert reports.join({0: StepReport(1, ends=(_end(),)), 1: StepReport(1)}).ends == ()
    (end,) = reports.join({1: StepReport(2, ends=(_end(),))}).ends
    assert (end.outcome, end.num_blocks, end.num_bytes) == ("received", 3, 20)
    assert reports.num_awaited == 0


def test_of_a_history_counts_what_all_ranks_have() -> None:
    end = joined_end({0: _end(num_blocks=3), 1: _end(num_blocks=2), 2: _end(num_blocks=4)})
    assert (end.outcome, end.num_blocks, end.num_partial_tokens) == ("received", 2, 0)


@pytest.mark.parametrize(
    ("others", "expected"), [((3, 5), 5), ((3, 4), 0), ((3, 0), 0), ((4, 5), 0), ((2, 5), 0)]
)
def test_a_partial_block_counts_if_all_ranks_have_the_same_of_it(
    others: tuple[int, int], expected: int
) -> None:
    end = joined_end({0: _end("received", 3, 5), 1: _end("received", *others)})
    assert end.num_partial_tokens == expected
    assert end.num_blocks == min(3, others[0])


def test_one_rank_that_fails_fails_the_fill() -> None:
    end = joined_end({1: _end("slow", 0), 0: _end()})
    assert not end.is_received
    assert (end.outcome, end.detail, end.mode) == ("slow", "rank 1: why", "pull")


def test_a_rank_that_ends_twice_does_not_end_for_another() -> None:
    reports = _reports()
    first = StepReport(1, ends=(_end("gone", 0),))
    assert reports.join({0: first}).ends == ()
    assert reports.join({0: first}).ends == ()
    assert len(reports.join({1: StepReport(2, ends=(_end(),))}).ends) == 1


def test_nothing_is_kept_of_a_request_that_has_ended() -> None:
    reports = RankReports(2, RankPins(2), lambda _: False)
    partial = PartialFill(_A, 1, 3)
    reports.join({0: StepReport(1, ends=(_end(),), partials=(partial,))})
    assert reports.num_awaited == 0


def test_partial_fills_are_told_once_all_ranks_have_told_vllm() -> None:
    reports, partial = _reports(), PartialFill(_A, 1, 3)
    assert reports.join({0: StepReport(1, partials=(partial,))}).partials == ()
    assert reports.join({1: StepReport(2, partials=(partial,))}).partials == (partial,)


def test_different_partial_fills_are_not_told() -> None:
    reports = _reports()
    both = {rank: StepReport(1, partials=(PartialFill(_A, 1, 3 + rank),)) for rank in range(2)}
    assert reports.join(both).partials == ()


def test_a_push_is_admitted_when_one_rank_hears_of_it() -> None:
    joined = _reports().join({1: StepReport(7, admitted=(_A,)), 0: StepReport(7, admitted=(_A,))})
    assert (joined.step, joined.admitted) == (7, (_A,))


# -- who they are -------------------------------------------------------------------------------


def test_ranks_are_one_instance_on_ports_in_a_row() -> None:
    second = msgspec.structs.replace(HELLO, address=HELLO.address.of_rank(1))
    check_hellos([HELLO, second])
    for wrong in (HELLO, msgspec.structs.replace(second, num_blocks=7)):
        with pytest.raises(EngineError, match="rank 1"):
            check_hellos([HELLO, wrong])


# -- under the scheduler half -------------------------------------------------------------------


class _Ranks:
    """Two ranks that count what the scheduler half has pinned for them."""

    def __init__(self, rig: SchedulerRig) -> None:
        self.rig = rig
        self.reports = RankReports(2, RankPins(2), rig.half.is_tracked)

    def tell(self, **reports: StepReport) -> None:
        by_rank = {int(name.removeprefix("rank_")): report for name, report in reports.items()}
        self.rig.half.note_step_done(self.reports.join(by_rank))


def test_blocks_that_one_rank_may_still_touch_are_not_free() -> None:
    rig = SchedulerRig()
    ranks = _Ranks(rig)
    request = add_decode(rig)
    numbers = rig.allocate(request, 0, 3, external=10)
    fill = FillEnd(RequestId("d"), "slow")
    returned = blocks(*numbers)
    ranks.tell(rank_0=StepReport(1, returned, (fill,)), rank_1=StepReport(1, (), (fill,)))
    rig.end(request, ended_well=False)
    assert rig.pool.held() == dict.fromkeys(numbers, 1)
    ranks.tell(rank_1=StepReport(2, returned))
    assert rig.pool.held() == {}


def test_a_history_counts_partial_tokens_that_all_ranks_have() -> None:
    rig = SchedulerRig()
    ranks = _Ranks(rig)
    history = msgspec.to_builtins(HELLO.address)
    request = add_prefill(rig, num_tokens=11, history=history)
    rig.allocate(request, 0, 3, external=10)
    request.num_computed_tokens = 8
    end = FillEnd(RequestId("p"), "received", num_blocks=2, num_partial_tokens=2)
    report = StepReport(1, (), (end,), (), (PartialFill(RequestId("p"), 2, 2),))
    ranks.tell(rank_0=report)
    assert request.num_computed_tokens == 8
    ranks.tell(rank_1=report)
    assert request.num_computed_tokens == 10
