"""Pushes that may never come, and a pool whose content is void: what the scheduler half does."""

from __future__ import annotations

import pytest

from kvferry.protocol.ids import RequestId
from kvferry.vllm_plugin.orders import (
    AdvanceSend,
    Answer,
    BeginSend,
    Blocks,
    FillEnd,
    Forget,
    StepReport,
)
from kvferry.vllm_plugin.retention import MAX_FORGET_TRIES
from tests.unit.vllm_plugin.fake_engine import BLOCK, FakeRequest, blocks
from tests.unit.vllm_plugin.scheduler_rig import (
    NOTHING,
    PEER_FIELDS,
    SchedulerRig,
    add_decode,
    add_prefill,
    answered,
)


def test_pushes_that_may_never_come_have_a_share_of_the_pool_only() -> None:
    rig = SchedulerRig(max_registered_share=0.25)
    fields = {"role": "decode", "mode": "push", "peer": PEER_FIELDS}
    legs = [rig.add(name, 5 * BLOCK, **fields) for name in "ab"]
    assert rig.half.count_external(legs[0], 0) == 5 * BLOCK
    rig.allocate(legs[0], 0, 5, external=5 * BLOCK)
    assert rig.half.count_external(legs[1], 0) is None, "8 blocks are the share"
    assert rig.half.count_external(legs[1], 2 * BLOCK) == 3 * BLOCK
    assert rig.half.plan_step(NOTHING).is_waiting
    assert not rig.half.plan_step(NOTHING).is_waiting
    rig.report(StepReport(1, admitted=(RequestId("a"),)))
    assert rig.half.count_external(legs[1], 0) == 5 * BLOCK


def test_a_push_beyond_the_share_waits_until_its_prefill_is_at_work() -> None:
    rig = SchedulerRig(max_registered_share=0.25)
    request = add_decode(rig, num_tokens=20 * BLOCK, mode="push")
    assert rig.half.count_external(request, 0) is None
    rig.report(StepReport(1, admitted=(RequestId("d"), RequestId("unknown"))))
    assert rig.half.count_external(request, 0) == 20 * BLOCK


def _take_share() -> tuple[SchedulerRig, FakeRequest, FakeRequest]:
    """Return a push that has the whole share, and another that waits for it."""
    rig = SchedulerRig(max_registered_share=0.25)
    request = add_decode(rig, num_tokens=8 * BLOCK, mode="push")
    other = rig.add("o", 8 * BLOCK, role="decode", mode="push", peer=PEER_FIELDS)
    rig.allocate(request, 0, 8, external=8 * BLOCK)
    assert rig.half.count_external(other, 0) is None
    return rig, request, other


def test_a_push_that_has_failed_leaves_its_share_to_others() -> None:
    rig, _, other = _take_share()
    rig.report(StepReport(1, (), (FillEnd(RequestId("d"), "slow"),)))
    assert rig.half.count_external(other, 0) == 8 * BLOCK


def test_a_push_that_has_ended_leaves_its_share_to_others() -> None:
    rig, request, other = _take_share()
    rig.end(request, ended_well=False)
    assert rig.half.count_external(other, 0) == 8 * BLOCK


def test_nothing_of_a_content_that_is_void_is_kept_or_sent() -> None:
    rig = SchedulerRig()
    rig.end(answered(rig))
    request = add_prefill(rig, mode="push")
    rig.allocate(request, 20, 3, external=0)
    rig.half.plan_step({"p": 6})
    rig.orders.take()
    rig.orders.answer = Answer(returned=blocks(0, 1))
    rig.half.forget_content()
    assert rig.orders.take() == [Forget()]
    assert rig.pool.held() == {20: 1, 21: 1, 22: 1}
    rig.report(StepReport(1))
    rig.half.plan_step(NOTHING)
    assert rig.orders.take() == [], "neither sent, nor let go of twice"


class _Answers:
    """Tells at each question what has come back since."""

    def __init__(self, *returned: Blocks) -> None:
        self.num_asked = 0
        self._returned = list(returned)

    def __call__(self) -> Answer:
        self.num_asked += 1
        return Answer(returned=self._returned.pop(0) if self._returned else ())


def test_a_reset_waits_for_what_a_peer_reads_at_that_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = SchedulerRig()
    rig.end(answered(rig))
    answers = _Answers(blocks(1), (), blocks(0))
    monkeypatch.setattr(rig.orders, "take_answer", answers)
    rig.half.forget_content()
    assert answers.num_asked == 3
    assert rig.pool.held() == {}


def test_a_reset_does_not_wait_for_a_peer_that_reads_on_and_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = SchedulerRig()
    rig.end(answered(rig))
    answers = _Answers(blocks(1))
    monkeypatch.setattr(rig.orders, "take_answer", answers)
    rig.half.forget_content()
    assert answers.num_asked == MAX_FORGET_TRIES
    assert rig.pool.held() == {0: 1}
    rig.report(StepReport(1, blocks(0)))
    assert rig.pool.held() == {}


def test_a_push_that_begins_anew_sends_nothing_of_steps_from_before() -> None:
    rig = SchedulerRig()
    request = add_prefill(rig, mode="push")
    rig.allocate(request, 0, 3, external=0)
    rig.half.plan_step({"p": 4})
    rig.report(StepReport(1))
    rig.half.plan_step({"p": 8})
    rig.half.forget_content()
    # Preempted, and not scheduled again in the same step.
    rig.half.plan_step({}, {"p"})
    rig.orders.take()
    rig.allocate(request, 20, 3, external=0)
    assert [type(order) for order in rig.orders.take()] == [BeginSend]
    rig.report(StepReport(3))
    assert rig.orders.take() == []
    rig.half.plan_step({"p": 8})
    rig.report(StepReport(4))
    (advance,) = rig.orders.take()
    assert isinstance(advance, AdvanceSend)
    assert advance.blocks == blocks(20, 21)
