"""The third class of a pool's free blocks: those that go last."""

from __future__ import annotations

import threading

import pytest

from kvferry.blocks.pool import BlockPool
from kvferry.errors import CapacityError, LocalProtocolError
from kvferry.protocol.ids import BlockHash, BlockNumber
from tests.support.block_integrity import assert_whole, check_integrity


def hashes(names: str) -> list[BlockHash]:
    return [BlockHash(name.encode() * 32) for name in names]


def fill(pool: BlockPool, names: str) -> list[BlockNumber]:
    """Allocate one block per letter and publish them."""
    blocks = pool.allocate(len(names))
    for block, block_hash in zip(blocks, hashes(names), strict=True):
        pool.publish(block, block_hash)
    return blocks


def found(pool: BlockPool, names: str) -> str:
    """The letters whose blocks are found by hash."""
    return "".join(name for name in names if pool.match(hashes(name)))


def eviction_order(pool: BlockPool, names: str) -> str:
    """The letters in the order in which one allocation after the other takes their blocks."""
    order = ""
    while left := found(pool, names):
        pool.allocate(1)
        check_integrity(pool)
        order += "".join(name for name in left if not pool.match(hashes(name)))
    return order


def test_plain_blocks_go_first_then_cached_then_retained() -> None:
    pool = BlockPool(6)
    pool.drop(fill(pool, "ab"))
    assert pool.retain(hashes("ab")) == 2
    pool.drop(fill(pool, "cd"))
    assert pool.allocate(2) == [4, 5], "plain"
    assert pool.allocate(2) == [2, 3], "cached, though freed later"
    assert found(pool, "abcd") == "ab"
    assert pool.allocate(2) == [0, 1]
    assert pool.snapshot().num_retained_evicted == 2


@pytest.mark.parametrize("retained_before_drop", [True, False])
def test_the_conversation_freed_first_goes_first_and_its_tail_before_its_head(
    retained_before_drop: bool,
) -> None:
    pool = BlockPool(6)
    used = {names: fill(pool, names) for names in ("abc", "xyz")}
    for names in ("xyz", "abc"):
        if retained_before_drop:
            pool.retain(hashes(names))
        pool.drop(used[names])
        if not retained_before_drop:
            pool.retain(hashes(names))
    assert eviction_order(pool, "abcxyz") == "zyxcba"


def test_blocks_retained_already_go_behind_the_new_tail() -> None:
    pool = BlockPool(4)
    pool.drop(fill(pool, "ab"))
    pool.retain(hashes("ab"))
    pool.drop(fill(pool, "cd"))
    pool.retain(hashes("abcd"))
    assert eviction_order(pool, "abcd") == "dcba"


def test_use_makes_a_retained_block_the_last_to_go() -> None:
    pool = BlockPool(2)
    for name in "ab":
        pool.drop(fill(pool, name))
        pool.retain(hashes(name))
    pool.drop(pool.acquire_cached(hashes("a")))
    assert eviction_order(pool, "ab") == "ba"
    assert pool.num_retained == 0


def test_only_the_leading_run_is_retained() -> None:
    pool = BlockPool(4)
    pool.drop(fill(pool, "abd"))
    assert pool.retain(hashes("abcd")) == 2
    assert pool.retain(hashes("xa")) == 0
    assert pool.retain([]) == 0
    assert pool.num_retained == 2


def test_retaining_counts_blocks_not_calls() -> None:
    pool = BlockPool(3)
    used = fill(pool, "ab")
    assert pool.retain(hashes("ab")) == 2
    assert pool.retain(hashes("a")) == 1
    pool.drop(used)
    assert pool.retain(hashes("ab")) == 2
    assert pool.num_retained == 2
    assert pool.snapshot().num_retained == 2
    check_integrity(pool)


def test_retained_blocks_are_free_blocks() -> None:
    pool = BlockPool(2)
    pool.drop(fill(pool, "ab"))
    pool.retain(hashes("ab"))
    assert pool.num_free == 2
    assert_whole(pool)
    assert pool.allocate(2) == [0, 1]
    assert found(pool, "ab") == ""
    assert pool.num_retained == 0


def test_an_evicted_block_is_not_retained_when_it_carries_another_hash() -> None:
    pool = BlockPool(1)
    pool.drop(fill(pool, "a"))
    pool.retain(hashes("a"))
    pool.drop(fill(pool, "b"))
    assert pool.num_retained == 0
    assert pool.dump().free_cached == (0,)
    pool.stop_retaining(hashes("a"))
    assert found(pool, "ab") == "b"


def test_a_block_in_use_is_never_evicted() -> None:
    pool = BlockPool(2)
    pool.drop(fill(pool, "ab"))
    pool.retain(hashes("ab"))
    reader = pool.acquire_cached(hashes("a"))
    assert pool.allocate(1) == [1]
    with pytest.raises(CapacityError):
        pool.allocate(1)
    assert pool.num_retained == 1
    pool.drop(reader)
    assert pool.dump().free_retained == (0,)


def test_what_is_retained_no_longer_is_an_ordinary_cached_block() -> None:
    pool = BlockPool(5)
    pool.drop(fill(pool, "abc"))
    pool.retain(hashes("abc"))
    pool.drop(fill(pool, "d"))
    pool.stop_retaining(hashes("bc"))
    assert found(pool, "abcd") == "abcd"
    assert pool.num_retained == 1
    assert eviction_order(pool, "abcd") == "dcba", "freed when retention ended, tail first"


def test_a_block_in_use_may_stop_being_retained() -> None:
    pool = BlockPool(2)
    used = fill(pool, "ab")
    pool.retain(hashes("ab"))
    pool.stop_retaining(hashes("b"))
    pool.drop(used)
    state = pool.dump()
    assert (state.free_retained, state.free_cached) == ((0,), (1,))


def test_hashes_that_find_nothing_retained_are_ignored() -> None:
    pool = BlockPool(2)
    pool.drop(fill(pool, "a"))
    before = pool.dump()
    pool.stop_retaining(hashes("xa"))
    assert pool.dump() == before


def test_clearing_the_cache_ends_retention() -> None:
    pool = BlockPool(4)
    used = fill(pool, "ab")
    pool.drop(fill(pool, "cd"))
    pool.retain(hashes("ab"))
    pool.retain(hashes("cd"))
    pool.clear_cache()
    check_integrity(pool)
    assert (pool.num_retained, pool.num_retained_evicted) == (0, 0)
    pool.drop(used)
    assert_whole(pool)
    assert len(pool.dump().free_plain) == 4


def test_the_listener_is_told_what_is_evicted_or_forgotten_and_nothing_else() -> None:
    pool = BlockPool(4)
    lost: list[BlockHash] = []
    pool.tell_retained_lost(lost.append)
    pool.drop(fill(pool, "abcd"))
    pool.retain(hashes("abc"))
    pool.stop_retaining(hashes("c"))
    pool.allocate(2)
    assert lost == []
    pool.allocate(1)
    assert lost == hashes("b")
    pool.clear_cache()
    assert lost == hashes("ba")
    with pytest.raises(LocalProtocolError, match="one listener"):
        pool.tell_retained_lost(lost.append)


def test_threads_retain_and_evict_without_losing_blocks() -> None:
    pool = BlockPool(16)
    failures: list[BaseException] = []
    start = threading.Barrier(3)

    def work(names: str) -> None:
        try:
            start.wait(timeout=30)
            for _ in range(200):
                blocks = fill(pool, names)
                pool.retain(hashes(names))
                pool.drop(blocks)
                pool.drop(pool.acquire_cached(hashes(names)))
                pool.stop_retaining(hashes(names[2:]))
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(names,)) for names in ("abcd", "abxy", "pqrs")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert failures == []
    assert_whole(pool)
