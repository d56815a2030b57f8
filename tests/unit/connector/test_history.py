"""Read-backs: what a holder leases by content, and what the reader makes of the answer."""

from __future__ import annotations

import pytest

from kvferry.connector.effects import (
    ActivateReader,
    CountEnd,
    DeactivateReader,
    Effect,
    NotifyEngine,
    PostRead,
)
from kvferry.connector.events import AcquireAnswered, PeerLost, ReadEnded, ReadStatus
from kvferry.connector.ports import HistoryRequest, ReceiveOutcome, ReceiveResult
from kvferry.protocol.hashing import block_hashes, chain_root
from kvferry.protocol.ids import BlockHash, BlockNumber, Epoch, InstanceId, TransferId
from kvferry.protocol.messages import (
    AcquireHistory,
    Declined,
    DeclineReason,
    Granted,
    Release,
    ReleaseOutcome,
)
from tests.unit.connector.conftest import (
    PEER,
    READER,
    World,
    asked,
    grant,
    make_acquire,
    make_world,
    releasing,
)
from tests.unit.connector.test_sender import offer
from tests.unit.connector.test_sender import release as release_offer

NAME = TransferId("history-7-1")
TOKENS = range(100)


def hashes_of(salt: str = "", count: int = 6) -> list[BlockHash]:
    return block_hashes(chain_root(b"f" * 32, salt=salt), TOKENS, 16)[:count]


def fill(world: World, hashes: list[BlockHash]) -> list[BlockNumber]:
    """Have the pool find blocks by ``hashes``; nobody refers to them."""
    blocks = world.pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        world.pool.publish(block, block_hash)
    world.pool.drop(blocks)
    return blocks


def ask(
    world: World, hashes: list[BlockHash], *, reader: str = READER, **changes: object
) -> tuple[Granted | Declined, list[Effect]]:
    fields: dict[str, object] = {
        "instance_id": "decode-0",
        "epoch": 7,
        "holder_epoch": 5,
        "transfer_id": NAME,
        "block_hashes": tuple(hashes),
        "min_blocks": 1,
        "duration_s": 5.0,
    }
    message = AcquireHistory(**(fields | changes))  # type: ignore[arg-type]
    return world.planner.answer(reader, message)


def release(world: World, reader: str = READER) -> list[Effect]:
    message = Release(InstanceId("decode-0"), Epoch(7), NAME, Epoch(5), ReleaseOutcome.READ)
    return world.planner.answer(reader, message)[1]


# -- the holder -------------------------------------------------------------------------------


def test_what_the_leading_hashes_find_is_leased_until_released(world: World) -> None:
    blocks = fill(world, hashes_of(count=3))
    reply, effects = ask(world, hashes_of())
    assert isinstance(reply, Granted)
    assert reply.blocks == tuple(blocks)
    assert effects == [ActivateReader(READER)]
    assert world.pool.num_free == 13
    assert world.planner.snapshot().num_history_leases == 1
    assert release(world) == [DeactivateReader(READER), CountEnd("history", "read")]
    world.assert_idle()


def test_a_gap_ends_the_run(world: World) -> None:
    hashes = hashes_of()
    fill(world, hashes[:2])
    fill(world, hashes[3:])
    reply, _ = ask(world, hashes)
    assert isinstance(reply, Granted)
    assert len(reply.blocks) == 2
    release(world)
    world.assert_idle()


def test_another_tenants_hashes_find_nothing(world: World) -> None:
    fill(world, hashes_of(salt="theirs"))
    reply, effects = ask(world, hashes_of(salt="ours"))
    assert isinstance(reply, Declined)
    assert reply.reason is DeclineReason.GONE
    assert effects == []
    world.assert_idle()


def test_fewer_than_wanted_is_not_worth_a_lease(world: World) -> None:
    fill(world, hashes_of(count=3))
    reply, _ = ask(world, hashes_of(), min_blocks=4)
    assert isinstance(reply, Declined)
    assert reply.reason is DeclineReason.GONE
    assert "3 leading blocks are here" in reply.detail
    world.assert_idle()


def test_a_hash_named_twice_is_refused(world: World) -> None:
    fill(world, hashes_of())
    reply, effects = ask(world, [*hashes_of(), hashes_of()[0]])
    assert isinstance(reply, Declined)
    assert reply.reason is DeclineReason.MALFORMED
    assert effects == []
    world.assert_idle()


def test_another_epoch_is_gone(world: World) -> None:
    fill(world, hashes_of())
    reply, _ = ask(world, hashes_of(), holder_epoch=4)
    assert isinstance(reply, Declined)
    assert reply.reason is DeclineReason.GONE
    world.assert_idle()


def test_a_readers_leases_have_a_share_of_the_pool() -> None:
    world = make_world(num_blocks=8, max_history_share=0.5)
    fill(world, hashes_of())
    reply, _ = ask(world, hashes_of())
    assert isinstance(reply, Granted)
    assert len(reply.blocks) == 4
    other, _ = ask(world, hashes_of(), transfer_id=TransferId("history-7-2"))
    assert isinstance(other, Granted)  # the same blocks once more
    fill(world, hashes_of(salt="other", count=4))
    refused, _ = ask(world, hashes_of(salt="other"), transfer_id=TransferId("history-7-3"))
    assert isinstance(refused, Declined)
    assert refused.reason is DeclineReason.PRESSURE


def test_several_readers_share_a_history_and_end_apart(world: World) -> None:
    blocks = fill(world, hashes_of())
    ask(world, hashes_of())
    ask(world, hashes_of(), reader="decode-9/1")
    release(world)
    assert world.planner.snapshot().num_history_leases == 1
    assert world.pool.num_references(blocks[0]) == 1
    release(world, "decode-9/1")
    world.assert_idle()


def test_asking_twice_by_one_name_replaces(world: World) -> None:
    fill(world, hashes_of())
    ask(world, hashes_of())
    _, effects = ask(world, hashes_of())
    assert effects == [
        DeactivateReader(READER),
        CountEnd("history", "replaced"),
        ActivateReader(READER),
    ]
    release(world)
    world.assert_idle()


def test_a_lease_whose_reader_vanished_ends_in_time(world: World) -> None:
    fill(world, hashes_of())
    ask(world, hashes_of(), duration_s=3.0)
    assert world.planner.next_deadline_s() == 103.0
    world.clock.advance(3.0)
    assert world.planner.tick() == [DeactivateReader(READER), CountEnd("history", "expired")]
    world.assert_idle()
    assert release(world) == [NotifyEngine()]  # as of a push that was not begun
    world.assert_idle()


def test_serving_goes_on_while_another_kind_of_lease_runs(world: World) -> None:
    fill(world, hashes_of())
    offer(world)
    world.planner.answer(READER, make_acquire())
    assert ask(world, hashes_of())[1] == []
    assert release(world) == [CountEnd("history", "read")]
    assert DeactivateReader(READER) in release_offer(world)
    world.assert_idle()


# -- the reader -------------------------------------------------------------------------------


def wish_for(blocks: list[BlockNumber], count: int = 6) -> HistoryRequest:
    return HistoryRequest(tuple(hashes_of(count=count)), tuple(blocks), TOKENS[:99], 16, 4)


def begin(world: World, count: int = 6) -> tuple[TransferId, list[BlockNumber]]:
    blocks = world.pool.allocate(count)
    name, effects = world.planner.read_history(PEER, wish_for(blocks, count))
    (acquire,) = effects
    acquire = asked(acquire, AcquireHistory)
    assert acquire.block_hashes == tuple(hashes_of(count=count))
    assert acquire.min_blocks == 4
    return name, blocks


def only_result(world: World) -> ReceiveResult:
    (result,) = world.planner.take_results()
    return result


def test_all_of_a_history_is_read(world: World) -> None:
    name, blocks = begin(world)
    (read,) = world.planner.handle(AcquireAnswered(name, 100.0, grant(1, 2, 3, 4, 5, 6)))
    assert isinstance(read, PostRead)
    assert (read.local_blocks, read.remote_blocks) == (tuple(blocks), (1, 2, 3, 4, 5, 6))
    effects = world.planner.handle(ReadEnded(name, ReadStatus.DONE, 101.0, 600))
    assert releasing(ReleaseOutcome.READ, name) in effects
    result = only_result(world)
    assert (result.outcome, result.num_blocks) == (ReceiveOutcome.RECEIVED, 6)
    world.pool.drop(blocks)
    world.assert_idle()


def test_less_than_all_fills_the_first_blocks_only(world: World) -> None:
    name, blocks = begin(world)
    (read,) = world.planner.handle(AcquireAnswered(name, 100.0, grant(1, 2, 3, 4)))
    assert isinstance(read, PostRead)
    assert read.local_blocks == tuple(blocks[:4])
    assert [world.pool.num_references(b) for b in blocks] == [2, 2, 2, 2, 1, 1]
    world.planner.handle(ReadEnded(name, ReadStatus.DONE, 101.0, 400))
    assert only_result(world).num_blocks == 4
    world.pool.drop(blocks)
    world.assert_idle()


@pytest.mark.parametrize("granted", [(), (1, 2, 3, 4, 5, 6, 7)])
def test_a_grant_that_makes_no_sense_is_a_failure(world: World, granted: tuple[int, ...]) -> None:
    name, blocks = begin(world)
    world.planner.handle(AcquireAnswered(name, 100.0, grant(*granted)))
    assert only_result(world).outcome is ReceiveOutcome.FAILED
    world.pool.drop(blocks)
    world.assert_idle()


def test_what_is_gone_is_said(world: World) -> None:
    name, blocks = begin(world)
    world.planner.handle(AcquireAnswered(name, 100.0, Declined(DeclineReason.GONE, "nothing")))
    result = only_result(world)
    assert (result.outcome, result.detail) == (ReceiveOutcome.GONE, "nothing")
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_holder_that_is_lost_is_said(world: World) -> None:
    name, blocks = begin(world)
    world.planner.handle(PeerLost(name, ReceiveOutcome.UNREACHABLE, "no answer"))
    assert only_result(world).outcome is ReceiveOutcome.UNREACHABLE
    world.pool.drop(blocks)
    world.assert_idle()


def test_a_slow_read_ends_in_its_own_time_and_keeps_what_it_may_touch() -> None:
    world = make_world(history_timeout_s=2.0)
    name, blocks = begin(world)
    world.planner.handle(AcquireAnswered(name, 100.0, grant(1, 2, 3, 4)))
    world.clock.advance(2.0)
    world.planner.tick()
    assert only_result(world).outcome is ReceiveOutcome.SLOW
    world.pool.drop(blocks)
    assert world.planner.snapshot().num_blocks_quarantined == 4
    world.planner.handle(ReadEnded(name, ReadStatus.FAILED, 110.0))
    world.assert_idle()


def test_giving_up_in_mid_read_keeps_the_blocks_until_it_ends(world: World) -> None:
    name, blocks = begin(world)
    world.planner.handle(AcquireAnswered(name, 100.0, grant(1, 2, 3, 4, 5, 6)))
    world.planner.end_receive(name, needed=True)
    world.pool.drop(blocks)
    assert world.pool.num_free == 10
    world.planner.handle(ReadEnded(name, ReadStatus.DONE, 101.0, 600))
    assert world.planner.take_results() == []
    world.assert_idle()


def test_names_are_not_used_twice(world: World) -> None:
    first, blocks = begin(world)
    second, more = begin(world)
    assert first != second
    for name in (first, second):
        world.planner.end_receive(name, needed=True)
    world.pool.drop([*blocks, *more])
    world.assert_idle()
