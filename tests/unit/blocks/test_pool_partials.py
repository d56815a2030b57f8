"""Blocks that are filled in part: what follows which, and that a pool forgets them in time."""

from __future__ import annotations

import pytest

from kvferry.blocks.pool import BlockPool, PartialBlocks
from kvferry.errors import LocalProtocolError
from kvferry.protocol.hashing import PartialContent, block_hashes, chain_root, partial_content
from kvferry.protocol.ids import BlockHash, BlockNumber
from tests.support.block_integrity import assert_whole, check_integrity
from tests.unit.blocks.retaining_instance import Instance, chain

ROOT = chain_root(b"f" * 32)


def after(names: str) -> list[PartialContent]:
    return [partial_content(ROOT, [ord(name)]) for name in names]


def test_a_partial_blocks_hash_is_no_full_blocks() -> None:
    (full,) = block_hashes(ROOT, [1, 2, 3, 4], 4)
    partials = [partial_content(ROOT, [1, 2, 3, 4][:count]) for count in (1, 2, 3)]
    assert len({full, *(partial.block_hash for partial in partials)}) == 4
    assert [partial.num_tokens for partial in partials] == [1, 2, 3]


def test_what_follows_a_block_is_found_newest_first() -> None:
    index = PartialBlocks()
    a, b, c = after("abc")
    for content in (a, b, c):
        index.add(content)
    assert index.after(ROOT, 8) == [c, b, a]
    assert index.after(ROOT, 2) == [c, b]
    assert index.after(BlockHash(b"x" * 32), 8) == []


def test_what_ends_the_same_way_again_is_the_newest_again() -> None:
    index = PartialBlocks()
    a, b, c = after("abc")
    for content in (a, b, c, a):
        index.add(content)
    assert index.after(ROOT, 2) == [a, c]
    assert len(index) == 3


def test_nothing_is_left_of_what_was_discarded() -> None:
    index = PartialBlocks()
    a, b = after("ab")
    index.add(a)
    index.add(b)
    index.add(b)
    index.discard(b.block_hash)
    assert index.after(ROOT, 8) == [a]
    index.discard(a.block_hash)
    index.discard(BlockHash(b"x" * 32))
    assert (len(index), index.after(ROOT, 8)) == (0, [])


def test_an_empty_block_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="cannot have 0 tokens"):
        PartialBlocks().add(partial_content(ROOT, []))


# -- in a pool --------------------------------------------------------------------------------


def fill(pool: BlockPool, content: PartialContent) -> BlockNumber:
    (block,) = pool.allocate(1)
    pool.publish_partial(block, content)
    return block


def test_a_partial_block_is_found_by_the_block_before_it_and_referenced() -> None:
    pool = BlockPool(2)
    (content,) = after("a")
    block = fill(pool, content)
    assert pool.acquire_partials(ROOT, 8) == [(content, block)]
    assert pool.num_references(block) == 2
    pool.drop([block, block])
    assert pool.acquire_partials(ROOT, 8) == [(content, block)], "free ones are found too"
    pool.drop([block])
    assert_whole(pool)


def test_of_two_with_the_same_content_the_first_is_found() -> None:
    pool = BlockPool(2)
    (content,) = after("a")
    first, second = fill(pool, content), fill(pool, content)
    assert pool.acquire_partials(ROOT, 8) == [(content, first)]
    assert pool.dump().hash_by_block.get(second) is None
    pool.drop([first, first, second])
    assert_whole(pool)


def test_an_evicted_partial_block_is_found_no_more() -> None:
    pool = BlockPool(1)
    pool.drop([fill(pool, after("a")[0])])
    taken = pool.allocate(1)
    assert pool.acquire_partials(ROOT, 8) == []
    pool.drop(taken)
    assert_whole(pool)


def test_a_cleared_cache_has_none() -> None:
    pool = BlockPool(1)
    pool.drop([fill(pool, after("a")[0])])
    pool.clear_cache()
    assert pool.acquire_partials(ROOT, 8) == []
    assert_whole(pool)


# -- retained ---------------------------------------------------------------------------------


def end_turn(instance: Instance, text: str, duration_s: float | None = None) -> PartialContent:
    """A request of a full block per letter and a partial one after them."""
    content = partial_content(chain(text)[-1], [len(text)])
    blocks = instance.compute(text)
    blocks.append(fill(instance.pool, content))
    instance.pool.drop(blocks)
    instance.table.retain(chain(text), duration_s, content.block_hash)
    check_integrity(instance.pool)
    return content


def is_retained(instance: Instance, content: PartialContent) -> bool:
    state = instance.pool.dump()
    return state.block_by_hash.get(content.block_hash) in state.retained


def test_a_conversation_is_retained_to_its_last_token() -> None:
    instance = Instance()
    content = end_turn(instance, "abc")
    assert instance.table.num_blocks == 4
    assert is_retained(instance, content)
    instance.clock.advance(1000.0)
    instance.table.expire()
    assert instance.table.num_blocks == 0


def test_the_next_turn_supersedes_the_partial_block_too() -> None:
    instance = Instance()
    first = end_turn(instance, "abc")
    second = end_turn(instance, "abcde")
    assert (instance.table.num_conversations, instance.table.num_blocks) == (1, 6)
    assert not is_retained(instance, first)
    assert is_retained(instance, second)


def test_a_conversation_that_ends_lets_go_of_it() -> None:
    instance = Instance()
    end_turn(instance, "abc")
    instance.table.retain(chain("abc"), 0)
    assert instance.table.num_blocks == 0


def test_it_goes_before_the_blocks_before_it() -> None:
    instance = Instance()
    content = end_turn(instance, "abc")
    taken = instance.pool.allocate(instance.pool.num_blocks - 3)
    assert not is_retained(instance, content)
    assert instance.retained("abc") == ["abc"]
    instance.pool.drop(taken)


def test_beyond_the_cap_it_is_the_first_to_go() -> None:
    instance = Instance()
    content = end_turn(instance, "abcdefgh")
    assert instance.retained("abcdefgh") == ["abcdefgh"]
    assert not is_retained(instance, content)


def test_nothing_of_less_than_a_block_is_retained() -> None:
    instance = Instance()
    assert instance.table.retain([], None, after("a")[0].block_hash) == 0
    assert instance.table.num_blocks == 0
