"""The last block of a history, filled in part: leased by the holder, taken by content only."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest

from kvferry.connector.effects import PostRead
from kvferry.connector.events import AcquireAnswered, ReadEnded, ReadStatus
from kvferry.connector.ports import HistoryRequest, ReceiveOutcome
from kvferry.protocol.hashing import PartialContent, partial_content
from kvferry.protocol.ids import BlockHash, BlockNumber, TransferId
from kvferry.protocol.messages import MAX_PARTIALS, Granted, PartialBlock
from tests.unit.connector.conftest import PEER, World, grant, make_world
from tests.unit.connector.test_history import TOKENS, ask, fill, hashes_of, only_result, release


def end_in(world: World, content: PartialContent) -> BlockNumber:
    (block,) = world.pool.allocate(1)
    world.pool.publish_partial(block, content)
    world.pool.drop([block])
    return block


def own(num_full: int, count: int) -> PartialContent:
    return partial_content(hashes_of()[num_full - 1], TOKENS[16 * num_full :][:count])


def as_offered(content: PartialContent, block: int) -> PartialBlock:
    return PartialBlock(BlockNumber(block), content.num_tokens, content.block_hash)


# -- the holder -------------------------------------------------------------------------------


def test_what_follows_the_last_full_block_is_leased_too(world: World) -> None:
    blocks = fill(world, hashes_of(count=3))
    content = own(3, 5)
    last = end_in(world, content)
    reply, _ = ask(world, hashes_of(), want_partials=True)
    assert isinstance(reply, Granted)
    assert reply.blocks == tuple(blocks)
    assert reply.partials == (as_offered(content, last),)
    assert world.pool.num_references(last) == 1
    release(world)
    world.assert_idle()


def test_who_does_not_ask_for_it_gets_full_blocks_only(world: World) -> None:
    fill(world, hashes_of(count=3))
    last = end_in(world, own(3, 5))
    reply, _ = ask(world, hashes_of())
    assert isinstance(reply, Granted)
    assert reply.partials == ()
    assert world.pool.num_references(last) == 0
    release(world)
    world.assert_idle()


def test_a_partial_block_alone_is_not_worth_a_lease(world: World) -> None:
    end_in(world, partial_content(BlockHash(b"r" * 32), TOKENS[:5]))
    reply, _ = ask(world, hashes_of(), want_partials=True)
    assert not isinstance(reply, Granted)
    world.assert_idle()


def test_many_that_may_follow_are_cut_to_the_newest(world: World) -> None:
    world = make_world(num_blocks=32)
    fill(world, hashes_of(count=3))
    ends = [partial_content(hashes_of()[2], [n]) for n in range(MAX_PARTIALS + 2)]
    for content in ends:
        end_in(world, content)
    reply, _ = ask(world, hashes_of(), want_partials=True)
    assert isinstance(reply, Granted)
    newest = [content.block_hash for content in reversed(ends)][:MAX_PARTIALS]
    assert [partial.block_hash for partial in reply.partials] == newest
    release(world)
    world.assert_idle()


def test_they_count_for_the_readers_share_of_the_pool() -> None:
    world = make_world(num_blocks=8, max_history_share=0.5)
    fill(world, hashes_of(count=3))
    for count in (1, 2, 3):
        end_in(world, own(3, count))
    reply, _ = ask(world, hashes_of(), want_partials=True)
    assert isinstance(reply, Granted)
    assert (len(reply.blocks), len(reply.partials)) == (3, 1)


def test_a_share_that_full_blocks_fill_has_no_room_for_them() -> None:
    """They are the least that a reader asks for: no reason to decline the rest."""
    world = make_world(num_blocks=16, max_history_share=0.5)
    others = fill(world, hashes_of(salt="other", count=4))
    fill(world, hashes_of(count=4))
    end_in(world, own(4, 5))
    ask(world, hashes_of(salt="other"), transfer_id=TransferId("history-7-2"))
    reply, _ = ask(world, hashes_of(), want_partials=True)
    assert isinstance(reply, Granted)
    assert (len(others), len(reply.blocks), len(reply.partials)) == (4, 4, 0)


def test_a_partial_block_asked_for_as_a_full_one_is_leased_once(world: World) -> None:
    """Only a reader that lies does so: it may get what it asked for, and nobody else is hurt."""
    (full,) = fill(world, hashes_of(count=1))
    content = own(1, 5)
    partial = end_in(world, content)
    reply, _ = ask(world, [content.block_hash, hashes_of()[0]], want_partials=True)
    assert isinstance(reply, Granted)
    assert (reply.blocks, reply.partials) == ((partial, full), ())
    assert world.pool.num_references(partial) == 1
    release(world)
    world.assert_idle()


# -- the reader -------------------------------------------------------------------------------


def begin(world: World) -> tuple[TransferId, list[BlockNumber]]:
    """A prompt of six full blocks and two tokens of use."""
    blocks = world.pool.allocate(7)
    history_request = HistoryRequest(tuple(hashes_of()), tuple(blocks), TOKENS[:98], 16, 4)
    name, _ = world.planner.read_history(PEER, history_request)
    return name, blocks


def granted(num_full: int, *partials: PartialBlock, digests: int = 0) -> Granted:
    numbers = range(1, num_full + 1)
    block_digests = tuple(bytes([n]) * 32 for n in range(digests))
    return msgspec.structs.replace(grant(*numbers), partials=partials, block_digests=block_digests)


def finish(world: World, name: TransferId, blocks: list[BlockNumber]) -> tuple[int, int]:
    world.planner.handle(ReadEnded(name, ReadStatus.DONE, 101.0, 600))
    result = only_result(world)
    assert result.outcome is ReceiveOutcome.RECEIVED
    world.pool.drop(blocks)
    world.assert_idle()
    return result.num_blocks, result.num_partial_tokens


@pytest.mark.parametrize(("num_full", "count"), [(4, 15), (6, 2), (6, 1)])
def test_ones_own_partial_block_is_read_after_the_full_ones(
    world: World, num_full: int, count: int
) -> None:
    name, blocks = begin(world)
    reply = granted(num_full, as_offered(own(num_full, count), 9))
    (read,) = world.planner.handle(AcquireAnswered(name, 100.0, reply))
    assert isinstance(read, PostRead)
    assert read.local_blocks == tuple(blocks[: num_full + 1])
    assert read.remote_blocks == (*range(1, num_full + 1), 9)
    assert [world.pool.num_references(b) for b in blocks[num_full + 1 :]] == [1] * (6 - num_full)
    assert finish(world, name, blocks) == (num_full + 1, count)


def test_anothers_is_left_alone(world: World) -> None:
    name, blocks = begin(world)
    other = partial_content(hashes_of()[3], [7, 7])
    reply = granted(4, as_offered(other, 9), as_offered(own(5, 3), 10))
    (read,) = world.planner.handle(AcquireAnswered(name, 100.0, reply))
    assert isinstance(read, PostRead)
    assert (read.local_blocks, read.remote_blocks) == (tuple(blocks[:4]), (1, 2, 3, 4))
    assert finish(world, name, blocks) == (4, 0)


def test_all_blocks_and_one_more_than_were_asked_for_make_no_sense(world: World) -> None:
    name, blocks = begin(world)
    world.planner.handle(AcquireAnswered(name, 100.0, granted(7)))
    assert only_result(world).outcome is ReceiveOutcome.FAILED
    world.pool.drop(blocks)
    world.assert_idle()


@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        ((0, 1, 2, 3, 5), ReceiveOutcome.RECEIVED),
        ((0, 1, 2, 3, 4), ReceiveOutcome.CORRUPT),
        ((0, 1, 2, 9, 5), ReceiveOutcome.CORRUPT),
    ],
)
def test_the_digest_is_that_of_the_block_which_is_read(
    content: tuple[int, ...], outcome: ReceiveOutcome
) -> None:
    world = make_world(digests_of=lambda read: told(content[: len(read)]))
    name, blocks = begin(world)
    other = as_offered(partial_content(hashes_of()[3], [7, 7]), 9)
    reply = granted(4, other, as_offered(own(4, 3), 10), digests=6)
    world.planner.handle(AcquireAnswered(name, 100.0, reply))
    world.planner.handle(ReadEnded(name, ReadStatus.DONE, 100.0, 300))
    assert only_result(world).outcome is outcome
    world.pool.drop(blocks)
    world.assert_idle()


def test_digests_of_blocks_that_are_not_read_are_left_out() -> None:
    world = make_world(digests_of=lambda read: told(range(len(read))))
    name, blocks = begin(world)
    other = as_offered(partial_content(hashes_of()[3], [7, 7]), 9)
    world.planner.handle(AcquireAnswered(name, 100.0, granted(4, other, digests=5)))
    assert finish(world, name, blocks) == (4, 0)


def told(numbers: Iterable[int]) -> tuple[bytes, ...]:
    return tuple(bytes([n]) * 32 for n in numbers)
