"""Blocks that are not written yet stay the prompt's own, whatever their engine does with them."""

from __future__ import annotations

import pytest

from kvferry.errors import LocalProtocolError
from kvferry.protocol.messages import Registered
from tests.unit.connector.conftest import READER, TRANSFER, World, make_world
from tests.unit.connector.test_push_sender import (
    TARGETS,
    begin,
    complete,
    ended,
    make_register,
    names,
    writes,
)


def test_blocks_that_nobody_registered_for_are_not_reused_while_they_are_known(
    world: World,
) -> None:
    blocks = begin(world)
    world.planner.advance_send(TRANSFER, blocks, 32)
    world.pool.drop(blocks)  # without a word
    assert world.pool.num_free == 12
    _, effects = world.planner.answer(READER, make_register())
    (write,) = writes(effects)
    assert write.local_blocks == tuple(blocks[:2])
    world.planner.withdraw(TRANSFER)
    world.planner.handle(ended(write))
    world.assert_idle()


def test_a_preempted_push_gives_its_blocks_up_and_is_written_from_the_next_ones(
    world: World,
) -> None:
    blocks = begin(world)
    world.planner.advance_send(TRANSFER, blocks, 32)
    world.planner.pause_send(TRANSFER)
    world.pool.drop(blocks)
    assert world.pool.num_free == 16
    others = world.pool.allocate(16)
    reply, effects = world.planner.answer(READER, make_register())
    assert (reply, writes(effects)) == (Registered(0), [])
    mine = others[8:12]
    (write,) = writes(world.planner.advance_send(TRANSFER, mine, 48))
    assert (write.local_blocks, write.remote_blocks) == (tuple(mine[:3]), TARGETS[:3])
    world.planner.handle(ended(write))
    (last,) = writes(complete(world, mine))
    assert names(world.planner.handle(ended(last))) == ["Written"]
    world.pool.drop(others[:8] + others[12:])
    world.assert_idle()


def test_what_runs_as_a_prefill_is_preempted_is_kept_and_not_written_again() -> None:
    world = make_world(max_inflight_bytes=2 * 4096)
    blocks = begin(world)
    world.planner.answer(READER, make_register())
    (first,) = writes(world.planner.advance_send(TRANSFER, blocks, 48))
    assert first.remote_blocks == TARGETS[:2]
    world.planner.pause_send(TRANSFER)
    world.pool.drop(blocks)
    assert [world.pool.num_references(b) for b in blocks] == [1, 1, 0, 0]
    assert writes(world.planner.handle(ended(first))) == []
    mine = world.pool.allocate(4)
    (second,) = writes(complete(world, mine))
    assert (second.local_blocks, second.remote_blocks) == (tuple(mine[2:]), TARGETS[2:])
    assert names(world.planner.handle(ended(second))) == ["Written"]
    world.assert_idle()


def test_other_blocks_without_a_pause_take_the_place_of_the_first(world: World) -> None:
    blocks = begin(world)
    world.planner.advance_send(TRANSFER, blocks, 32)
    others = world.pool.allocate(4)
    world.planner.advance_send(TRANSFER, others, 32)
    world.pool.drop(blocks)
    assert [world.pool.num_references(b) for b in blocks] == [0, 0, 0, 0]
    _, effects = world.planner.answer(READER, make_register())
    assert writes(effects)[0].local_blocks == tuple(others[:2])
    world.planner.withdraw(TRANSFER)
    world.planner.handle(ended(writes(effects)[0]))
    world.pool.drop(others)
    world.assert_idle()


def test_blocks_without_a_reference_of_the_callers_are_refused(world: World) -> None:
    blocks = begin(world)
    world.pool.drop(blocks)
    with pytest.raises(LocalProtocolError, match="no reference"):
        world.planner.advance_send(TRANSFER, blocks, 32)
    blocks = world.pool.allocate(4)
    with pytest.raises(LocalProtocolError, match="3 blocks for a prompt of 4"):
        world.planner.complete_send(TRANSFER, blocks[:3], None)
    world.planner.withdraw(TRANSFER)
    world.pool.drop(blocks)
    world.assert_idle()
