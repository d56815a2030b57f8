"""How long a push took: from the first WRITE that was told of, without the wait for prefill."""

from __future__ import annotations

from kvferry.connector.ports import ReceiveResult
from kvferry.protocol.ids import BlockNumber
from kvferry.protocol.messages import FirstTokenReady, Posting, Written
from tests.unit.connector.conftest import PROMPT, TRANSFER, World
from tests.unit.connector.test_push_receiver import TOKEN, WRITTEN, begin, notice, start


def end(world: World, blocks: list[BlockNumber], written: Written = WRITTEN) -> ReceiveResult:
    notice(world, written)
    (result,) = world.planner.take_results()
    world.pool.drop(blocks)
    world.planner.take_first_tokens()
    world.assert_idle()
    return result


def test_a_push_is_timed_from_its_first_write_on(world: World) -> None:
    begin(world)
    world.clock.advance(5.0)  # until there is room for its blocks
    blocks = world.pool.allocate(3)
    world.planner.receive(TRANSFER, blocks, 0)
    world.clock.advance(7.0)  # while prefill waits and computes
    notice(world, Posting(TRANSFER, 0))
    world.clock.advance(0.25)
    notice(world, FirstTokenReady(TRANSFER, TOKEN, PROMPT.digest))
    notice(world, Posting(TRANSFER, 0))  # of the next WRITEs
    world.clock.advance(0.5)
    result = end(world, blocks)
    assert result.duration_s == 0.75
    assert (result.started_s, result.finished_s) == (112.0, 112.75)


def test_blocks_given_back_and_given_again_are_timed_anew(world: World) -> None:
    first = start(world)
    notice(world, Posting(TRANSFER, 0))
    world.planner.give_back(TRANSFER)
    world.pool.drop(first)
    world.clock.advance(3.0)
    blocks = world.pool.allocate(3)
    world.planner.receive(TRANSFER, blocks, 0)
    notice(world, Posting(TRANSFER, 0))  # late: of the blocks before
    world.clock.advance(2.0)
    notice(world, Posting(TRANSFER, 1))
    world.clock.advance(0.5)
    written = Written(TRANSFER, 1, 0, 3, PROMPT.num_tokens, TOKEN, PROMPT.digest)
    assert end(world, blocks, written).duration_s == 0.5


def test_a_push_whose_writes_were_never_told_of_has_no_time(world: World) -> None:
    blocks = start(world)
    world.clock.advance(4.0)
    result = end(world, blocks)
    assert (result.started_s, result.duration_s) == (None, None)
