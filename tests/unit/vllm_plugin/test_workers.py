"""Several ranks under one scheduler half: nothing counts before all of them have said it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import msgspec
import pytest

from kvferry.connector.ports import PromptIdentity
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
    StepReport,
    Withdraw,
)
from kvferry.vllm_plugin.worker_link import OrderClient, Workers, joined_end
from tests.unit.vllm_plugin.fake_engine import HELLO, blocks
from tests.unit.vllm_plugin.scheduler_rig import SchedulerRig, add_decode, add_prefill

_A = RequestId("a")
_OFFER = Offer(_A, TransferId("x"), PromptIdentity(4, b"d" * 32), blocks(1))


@dataclass
class _Link(OrderClient):
    answer: Answer = field(default_factory=lambda: Answer(lease_s=30.0))
    sent: list[Order] = field(default_factory=list)

    def send(self, order: Order) -> None:
        self.sent.append(order)

    def take_answer(self) -> Answer:
        return self.answer


def _workers(num_ranks: int = 2) -> Workers:
    return Workers(HELLO, [_Link() for _ in range(num_ranks)])


def _join(
    workers: Workers, reports: dict[int, StepReport], known: Container[str] = (_A,)
) -> StepReport:
    return workers.join(reports, known)


def _give_back(workers: Workers, rank: int, *numbers: int) -> list[int]:
    return list(_join(workers, {rank: StepReport(1, blocks(*numbers))}).returned)


def _end(outcome: str = "received", num_blocks: int = 3, num_partial_tokens: int = 0) -> FillEnd:
    return FillEnd(_A, outcome, "why", num_blocks, num_partial_tokens, 10, "pull")


# -- pins ---------------------------------------------------------------------------------------


def test_a_pin_goes_back_when_the_last_rank_returns_it() -> None:
    workers = _workers(3)
    assert _give_back(workers, 0, 1, 2) == []
    assert _give_back(workers, 2, 2, 1) == []
    assert _give_back(workers, 1, 2) == [2]
    assert sum(map(len, workers._returned)) == 2, "one block, on two ranks"
    assert _give_back(workers, 1, 1) == [1]
    assert not any(workers._returned)


def test_every_pin_on_a_block_is_counted() -> None:
    workers = _workers()
    assert _give_back(workers, 0, 5, 5, 5) == []
    assert _give_back(workers, 1, 5, 5) == [5, 5]
    assert _give_back(workers, 1, 5, 5) == [5]
    assert _give_back(workers, 0, 5) == [5]


def test_one_rank_tells_for_itself() -> None:
    workers, report = _workers(1), StepReport(1, blocks(5), (_end(),), (_A,))
    assert _join(workers, {0: report}, known=()) == report
    assert workers.ask(_OFFER) == Answer(lease_s=30.0)
    assert not workers._ends


# -- orders -------------------------------------------------------------------------------------


def test_an_order_goes_to_all_ranks() -> None:
    links = [_Link(), _Link()]
    Workers(HELLO, links).send(MakeRoom(1))
    assert [link.sent for link in links] == [[MakeRoom(1)], [MakeRoom(1)]]


def test_an_answer_has_the_shortest_lease() -> None:
    links = [_Link(), _Link(Answer(lease_s=12.0))]
    assert Workers(HELLO, links).ask(_OFFER) == Answer(lease_s=12.0)


@pytest.mark.parametrize(
    "order", [_OFFER, CompleteSend(_A, TransferId("x"), blocks(1), first_token_id=3)]
)
def test_what_one_rank_refuses_the_others_give_up(order: Offer | CompleteSend) -> None:
    links = [_Link(), _Link(Answer(error="in use"))]
    answer = Workers(HELLO, links).ask(order)
    assert answer.error == "rank 1: in use"
    assert links[0].sent == [order, Withdraw(order.request_id, order.transfer_id)]
    # Another request's handoff may have that name there.
    assert links[1].sent == [order]


def test_pins_in_answers_and_reports_are_counted_together() -> None:
    links = [_Link(Answer(returned=blocks(1, 2))), _Link(Answer(returned=blocks(2)))]
    workers = Workers(HELLO, links)
    assert workers.ask(Forget()).returned == (2,)
    assert _give_back(workers, 1, 1) == [1]


# -- ends ---------------------------------------------------------------------------------------


def test_a_fill_has_ended_when_it_has_on_all_ranks() -> None:
    workers = _workers()
    both = {0: StepReport(1, ends=(_end(),)), 1: StepReport(1)}
    assert _join(workers, both).ends == ()
    (end,) = _join(workers, {1: StepReport(2, ends=(_end(),))}).ends
    assert (end.outcome, end.num_blocks, end.num_bytes) == ("received", 3, 20)
    assert not workers._ends


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
    workers = _workers()
    first = {0: StepReport(1, ends=(_end("gone", 0),))}
    assert _join(workers, first).ends == ()
    assert _join(workers, first).ends == ()
    assert len(_join(workers, {1: StepReport(2, ends=(_end(),))}).ends) == 1


def test_nothing_is_kept_of_a_request_that_has_ended() -> None:
    workers = _workers()
    _join(workers, {0: StepReport(1, ends=(_end(),))}, known=())
    assert not workers._ends


def test_a_push_is_admitted_when_one_rank_hears_of_it() -> None:
    report = StepReport(7, admitted=(_A,))
    joined = _join(_workers(), {1: report, 0: report})
    assert (joined.step, joined.admitted) == (7, (_A,))


# -- who they are -------------------------------------------------------------------------------


def test_ranks_are_one_instance_on_ports_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvferry.vllm_plugin.worker_link.OrderClient", lambda path: _Link())
    second = msgspec.structs.replace(HELLO, address=HELLO.address.of_rank(1))
    assert Workers.connect([HELLO, second]).hello == HELLO
    for wrong in (HELLO, msgspec.structs.replace(second, num_blocks=7)):
        with pytest.raises(EngineError, match="rank 1"):
            Workers.connect([HELLO, wrong])


# -- under the scheduler half -------------------------------------------------------------------


def test_blocks_that_one_rank_may_still_touch_are_not_free() -> None:
    rig = SchedulerRig(num_ranks=2)
    request = add_decode(rig)
    numbers = rig.allocate(request, 0, 3, external=10)
    fill = FillEnd(RequestId("d"), "slow")
    returned = blocks(*numbers)
    rig.half.note_step_done({0: StepReport(1, returned, (fill,)), 1: StepReport(1, (), (fill,))})
    rig.end(request, ended_well=False)
    assert rig.pool.held() == dict.fromkeys(numbers, 1)
    rig.half.note_step_done({1: StepReport(2, returned)})
    assert rig.pool.held() == {}


@pytest.mark.parametrize(("other", "expected"), [(2, 10), (1, 8), (0, 8)])
def test_a_history_counts_partial_tokens_that_all_ranks_have(other: int, expected: int) -> None:
    rig = SchedulerRig(num_ranks=2)
    request = add_prefill(rig, num_tokens=11, history=msgspec.to_builtins(HELLO.address))
    rig.allocate(request, 0, 3, external=10)
    request.num_computed_tokens = 8
    for rank, num_partial_tokens in enumerate((2, other)):
        assert request.num_computed_tokens == 8
        end = FillEnd(RequestId("p"), "received", "", 2, num_partial_tokens)
        rig.half.note_step_done({rank: StepReport(1, ends=(end,))})
    assert request.num_computed_tokens == expected
