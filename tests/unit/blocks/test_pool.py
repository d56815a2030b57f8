from __future__ import annotations

import threading

import pytest

from kvferry.blocks.pool import BlockPool, PoolSnapshot
from kvferry.errors import CapacityError, LocalProtocolError
from kvferry.protocol.ids import BlockHash, BlockNumber
from tests.support.block_integrity import assert_whole, check_integrity


def hashes(*names: str) -> list[BlockHash]:
    return [BlockHash(name.encode().ljust(32, b".")) for name in names]


def fill(pool: BlockPool, *names: str) -> list[BlockNumber]:
    """Allocate one block per name and publish them."""
    blocks = pool.allocate(len(names))
    for block, block_hash in zip(blocks, hashes(*names), strict=True):
        pool.publish(block, block_hash)
    return blocks


def test_a_fresh_pool_is_handed_out_from_block_zero_in_order() -> None:
    pool = BlockPool(5)
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]
    assert pool.num_free == 0


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    pool.allocate(1)
    with pytest.raises(CapacityError, match="3 blocks wanted, 2 of 3 are free"):
        pool.allocate(3)
    assert pool.num_free == 2
    check_integrity(pool)


def test_allocated_blocks_come_in_ascending_order_after_scattered_frees() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(8)
    for index in (5, 1, 6, 2):
        pool.drop([blocks[index]])
    assert pool.allocate(4) == [1, 2, 5, 6]


@pytest.mark.parametrize("count", [-1, -100])
def test_a_negative_count_is_refused(count: int) -> None:
    pool = BlockPool(3)
    with pytest.raises(LocalProtocolError):
        pool.allocate(count)
    assert pool.num_free == 3


def test_allocating_none_gives_none() -> None:
    assert BlockPool(1).allocate(0) == []


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(LocalProtocolError):
        BlockPool(0)


def test_blocks_without_a_hash_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached = fill(pool, "a", "b")
    pool.drop(cached)
    assert pool.allocate(2) == [2, 3]
    assert pool.match(hashes("a", "b")) == 2


def test_the_least_recently_freed_cached_block_is_evicted_first() -> None:
    pool = BlockPool(3)
    for name in ("a", "b", "c"):
        fill(pool, name)
    for block in (1, 0, 2):
        pool.drop([BlockNumber(block)])
    assert pool.allocate(1) == [1]
    assert pool.allocate(1) == [0]
    assert pool.allocate(1) == [2]


def test_the_tail_of_a_dropped_sequence_is_evicted_before_its_head() -> None:
    pool = BlockPool(4)
    sequence = fill(pool, "a", "b", "c", "d")
    pool.drop(sequence)
    for left in (3, 2, 1, 0):
        pool.allocate(1)
        assert pool.match(hashes("a", "b", "c", "d")) == left


def test_use_renews_a_cached_block() -> None:
    pool = BlockPool(2)
    first, second = fill(pool, "a", "b")
    pool.drop([first])
    pool.drop([second])
    pool.drop(pool.acquire_cached(hashes("a")))
    assert pool.allocate(1) == [second]


def test_a_block_that_is_allocated_again_loses_its_hash() -> None:
    pool = BlockPool(1)
    blocks = fill(pool, "a")
    pool.drop(blocks)
    assert pool.dump().hash_by_block.get(blocks[0]) == hashes("a")[0]
    pool.allocate(1)
    assert pool.dump().hash_by_block.get(blocks[0]) is None
    assert pool.match(hashes("a")) == 0


def test_match_counts_the_leading_run_and_grants_nothing() -> None:
    pool = BlockPool(4)
    pool.drop(fill(pool, "a", "b", "d"))
    assert pool.match(hashes("a", "b", "c", "d")) == 2
    assert pool.match(hashes("x", "a")) == 0
    assert pool.match([]) == 0
    assert pool.num_free == 4


def test_acquire_cached_takes_a_free_block_out_of_the_free_order() -> None:
    pool = BlockPool(2)
    pool.drop(fill(pool, "a", "b"))
    assert pool.acquire_cached(hashes("a", "b", "c")) == [0, 1]
    assert pool.num_free == 0
    with pytest.raises(CapacityError):
        pool.allocate(1)


def test_acquire_cached_shares_a_block_in_use() -> None:
    pool = BlockPool(2)
    blocks = fill(pool, "a")
    assert pool.acquire_cached(hashes("a")) == blocks
    assert pool.num_references(blocks[0]) == 2
    pool.drop(blocks)
    assert pool.num_free == 1
    pool.drop(blocks)
    assert_whole(pool)


def test_publishing_a_hash_that_another_block_carries_keeps_the_first() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    (block_hash,) = hashes("a")
    pool.publish(first, block_hash)
    pool.publish(second, block_hash)
    assert pool.acquire_cached([block_hash]) == [first]
    assert pool.dump().hash_by_block.get(second) is None
    pool.drop([first])
    pool.drop([first, second])
    assert_whole(pool)
    assert pool.allocate(2) == [1, 2], "the copy without a hash goes before the cached one"


def test_publishing_twice_is_harmless() -> None:
    pool = BlockPool(1)
    blocks = fill(pool, "a")
    pool.publish(blocks[0], hashes("a")[0])
    assert pool.snapshot() == PoolSnapshot(
        1, 0, num_cached=1, num_retained=0, num_retained_evicted=0
    )


def test_publishing_a_block_under_another_hash_is_refused() -> None:
    pool = BlockPool(1)
    blocks = fill(pool, "a")
    with pytest.raises(LocalProtocolError, match="is published as"):
        pool.publish(blocks[0], hashes("b")[0])
    assert pool.match(hashes("b")) == 0
    assert pool.match(hashes("a")) == 1


def test_publishing_a_free_block_is_refused() -> None:
    pool = BlockPool(1)
    with pytest.raises(LocalProtocolError, match="no reference"):
        pool.publish(BlockNumber(0), hashes("a")[0])
    assert pool.match(hashes("a")) == 0


def test_clear_cache_forgets_hashes_but_no_reference() -> None:
    pool = BlockPool(4)
    used = fill(pool, "a", "b")
    pool.drop(fill(pool, "c", "d"))
    pool.clear_cache()
    assert [pool.match(hashes(name)) for name in "abcd"] == [0, 0, 0, 0]
    assert pool.snapshot() == PoolSnapshot(
        4, 2, num_cached=0, num_retained=0, num_retained_evicted=0
    )
    pool.drop(used)
    assert_whole(pool)


def test_dropping_below_zero_changes_nothing() -> None:
    pool = BlockPool(3)
    used = pool.allocate(2)
    pool.drop([used[1]])
    before = pool.dump()
    with pytest.raises(LocalProtocolError, match="block 1 is dropped 1 times but has 0"):
        pool.drop(used)
    assert pool.dump() == before


def test_dropping_a_block_twice_at_once_needs_two_references() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    with pytest.raises(LocalProtocolError, match="dropped 2 times but has 1"):
        pool.drop([block, block])
    pool.hold([block])
    pool.drop([block, block])
    assert_whole(pool)


def test_holding_a_block_without_a_reference_changes_nothing() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    with pytest.raises(LocalProtocolError, match="held but has no reference"):
        pool.hold([block, BlockNumber(1)])
    assert pool.num_references(block) == 1


@pytest.mark.parametrize("number", [-1, 2, 1000])
def test_a_block_out_of_range_changes_nothing(number: int) -> None:
    pool = BlockPool(2)
    used = pool.allocate(2)
    wrong = BlockNumber(number)
    before = pool.dump()
    for act in (pool.hold, pool.drop):
        with pytest.raises(LocalProtocolError, match=f"block {number} is not in a pool of 2"):
            act([used[0], wrong])
    with pytest.raises(LocalProtocolError):
        pool.publish(wrong, hashes("a")[0])
    with pytest.raises(LocalProtocolError):
        pool.num_references(wrong)
    assert pool.dump() == before


def test_threads_share_a_pool_without_losing_blocks() -> None:
    pool = BlockPool(64)
    names = hashes(*[str(number) for number in range(8)])
    failures: list[BaseException] = []
    start = threading.Barrier(4)

    def work() -> None:
        try:
            start.wait(timeout=10)
            for turn in range(300):
                blocks = pool.allocate(8)
                pool.publish(blocks[0], names[turn % 8])
                cached = pool.acquire_cached(names[turn % 8 : turn % 8 + 1])
                pool.hold(blocks)
                pool.drop(blocks)
                pool.drop(blocks)
                pool.drop(cached)
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert failures == []
    assert_whole(pool)
