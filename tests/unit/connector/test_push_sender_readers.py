"""Pushes whose receiver changes or connects anew: whose blocks are written, whose word counts."""

from __future__ import annotations

from kvferry.protocol.ids import BlockNumber, Epoch, InstanceId
from kvferry.protocol.messages import (
    Declined,
    DeclineReason,
    Failed,
    FailureReason,
    Register,
    Registered,
    Release,
    ReleaseOutcome,
    Written,
)
from tests.unit.connector.conftest import READER, TRANSFER, World
from tests.unit.connector.test_push_sender import (
    begin,
    complete,
    ended,
    make_register,
    names,
    notices,
    release,
    writes,
)

OTHER_READER = "decode-1/9"
OTHER_TARGETS = tuple(BlockNumber(b) for b in (30, 31, 32, 33))


def other_register(generation: int = 0) -> Register:
    changes = {"instance_id": "decode-1", "epoch": 9, "blocks": OTHER_TARGETS}
    return make_register(generation, changes=changes)


def test_of_two_receivers_the_last_is_written_to(world: World) -> None:
    """The first may have died: a decode leg was begun again elsewhere."""
    blocks = begin(world)
    world.planner.answer(READER, make_register(5))
    (lost,) = writes(world.planner.advance_send(TRANSFER, blocks, 32))
    reply, effects = world.planner.answer(OTHER_READER, other_register(0))
    assert reply == Registered(0)
    (again,) = writes(effects)
    assert (again.reader, again.remote_blocks) == (OTHER_READER, OTHER_TARGETS[:2])
    assert notices(world.planner.handle(ended(lost, False))) == []
    (rest,) = writes(complete(world, blocks))
    world.planner.handle(ended(again))
    (written,) = notices(world.planner.handle(ended(rest)))
    assert isinstance(written, Written)
    assert written.generation == 0
    world.assert_idle()


def test_of_two_early_registrations_the_last_receivers_is_kept(world: World) -> None:
    world.planner.answer(READER, make_register(5))
    assert world.planner.answer(OTHER_READER, other_register(0))[0] == Registered(0)
    world.planner.answer(READER, release())
    (write,) = writes(complete(world, begin(world)))
    assert write.remote_blocks == OTHER_TARGETS
    assert names(world.planner.handle(ended(write))) == ["Written"]
    world.assert_idle()


def test_a_release_by_another_than_who_registered_ends_nothing(world: World) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    other = Release(InstanceId("decode-1"), Epoch(9), TRANSFER, Epoch(5), ReleaseOutcome.CANCELLED)
    released, _ = world.planner.answer(OTHER_READER, other)
    assert released.is_quiet
    assert world.planner.take_stopped_sends() == []
    (write,) = writes(complete(world, blocks))
    assert names(world.planner.handle(ended(write))) == ["Written"]
    world.assert_idle()


def test_who_registers_after_a_release_is_served(world: World) -> None:
    world.planner.answer(READER, release())
    world.planner.answer(READER, make_register())
    (write,) = writes(complete(world, begin(world)))
    assert names(world.planner.handle(ended(write))) == ["Written"]
    world.assert_idle()


def test_who_registers_while_the_last_write_runs_out_is_declined(world: World) -> None:
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (write,) = writes(world.planner.advance_send(TRANSFER, blocks, 32))
    world.planner.withdraw(TRANSFER)
    reply, _ = world.planner.answer(READER, make_register(1))
    assert isinstance(reply, Declined)
    assert reply.reason is DeclineReason.GONE
    world.planner.handle(ended(write))
    world.pool.drop(blocks)
    world.assert_idle()


def test_nothing_is_written_to_blocks_that_were_registered_before_a_reconnection(
    world: World,
) -> None:
    """The receiver has lost us meanwhile: the blocks may be another request's by now."""
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (write,) = writes(world.planner.advance_send(TRANSFER, blocks, 32))
    (failed,) = notices(world.planner.lose_reader(READER))
    assert isinstance(failed, Failed)
    assert (failed.reason, failed.is_quiet) == (FailureReason.TRANSPORT, False)
    assert names(world.planner.handle(ended(write, False))) == ["Quiet"]
    assert writes(complete(world, blocks)) == []
    world.assert_idle()


def test_an_early_registration_does_not_outlive_a_reconnection(world: World) -> None:
    world.planner.answer(READER, make_register())
    assert world.planner.lose_reader(READER) == []
    assert writes(complete(world, begin(world))) == []
    world.planner.withdraw(TRANSFER)
    world.assert_idle()
