"""How long a receiver of pushes waits, for what, and with how many blocks."""

from __future__ import annotations

from kvferry.connector.effects import NotifyEngine
from kvferry.connector.events import ReleaseAnswered, RenewAnswered
from kvferry.connector.ports import ReceiveOutcome
from kvferry.protocol.messages import (
    Admitted,
    Declined,
    DeclineReason,
    FirstTokenReady,
    Quiet,
    Renewed,
)
from tests.unit.connector.conftest import (
    PROMPT,
    TRANSFER,
    World,
    make_world,
    renewing,
)
from tests.unit.connector.test_push_receiver import (
    TOKEN,
    WRITTEN,
    acknowledge,
    begin,
    give_blocks,
    notice,
    only_outcome,
    start,
)


def test_heartbeats_bound_the_wait_for_a_sender_that_forgot(world: World) -> None:
    blocks = start(world)
    gone = RenewAnswered(TRANSFER, Declined(DeclineReason.GONE, "who?"))
    assert world.planner.handle(gone) == []  # the prefill leg may be on its way
    world.planner.handle(RenewAnswered(TRANSFER, Renewed(30.0)))
    world.planner.handle(gone)
    assert only_outcome(world) is ReceiveOutcome.GONE
    world.pool.drop(blocks)
    notice(world, Quiet(TRANSFER, 0))
    world.assert_idle()


def test_a_prefill_that_was_preempted_is_admitted_no_more_until_it_goes_on() -> None:
    """Its receiver's blocks may be what it waits for: they count, and may be taken back."""
    world = make_world(max_registered_share=0.25)
    blocks = start(world)
    acknowledge(world)
    for is_admitted in (True, False, True):
        world.planner.handle(RenewAnswered(TRANSFER, Renewed(30.0, is_admitted)))
        assert world.planner.may_receive(TRANSFER, 1000) is is_admitted
    notice(world, FirstTokenReady(TRANSFER, TOKEN, PROMPT.digest))
    world.planner.handle(RenewAnswered(TRANSFER, Renewed(30.0)))
    assert world.planner.may_receive(TRANSFER, 1000), "it needs no blocks any more"
    world.planner.end_receive(TRANSFER, needed=True)
    world.planner.handle(ReleaseAnswered(TRANSFER, True))
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_heartbeat_is_sent_every_second_until_the_end(world: World) -> None:
    blocks = start(world)
    for _ in range(3):
        world.clock.advance(1.0)
        assert world.planner.tick() == [renewing()]
    notice(world, WRITTEN)
    world.clock.advance(1.0)
    assert world.planner.tick() == []
    world.pool.drop(blocks)


def test_after_the_first_token_the_blocks_must_come_in_time(world: World) -> None:
    blocks = start(world)
    world.clock.advance(100.0)
    notice(world, FirstTokenReady(TRANSFER, TOKEN, PROMPT.digest))
    world.clock.advance(10.0)
    world.planner.tick()
    assert only_outcome(world) is ReceiveOutcome.SLOW
    world.pool.drop(blocks)
    notice(world, Quiet(TRANSFER, 0))
    world.assert_idle()


def test_a_prefill_that_is_complete_waits_for_its_turn_to_have_blocks(world: World) -> None:
    begin(world)
    notice(world, FirstTokenReady(TRANSFER, TOKEN, PROMPT.digest))
    world.clock.advance(100.0)
    world.planner.tick()
    blocks = give_blocks(world, 0)
    world.clock.advance(9.9)
    world.planner.tick()
    assert world.planner.take_results() == []
    assert world.planner.give_back(TRANSFER)[0]
    world.pool.drop(blocks)
    world.clock.advance(100.0)
    world.planner.tick()
    assert world.planner.take_results() == [], "from the last blocks on the time begins anew"
    blocks = give_blocks(world, 1)
    world.clock.advance(10.0)
    world.planner.tick()
    assert only_outcome(world) is ReceiveOutcome.SLOW
    world.pool.drop(blocks)
    notice(world, Quiet(TRANSFER, 1))
    world.assert_idle()


def test_registrations_before_admission_have_a_share_only() -> None:
    world = make_world(num_blocks=16, max_registered_share=0.25)
    begin(world)
    assert world.planner.may_receive(TRANSFER, 4)
    assert not world.planner.may_receive(TRANSFER, 5)
    assert notice(world, Admitted(TRANSFER)) == [NotifyEngine()]
    assert world.planner.may_receive(TRANSFER, 16)
