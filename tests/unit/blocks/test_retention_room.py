"""How much may be retained, and how it gives way."""

from __future__ import annotations

import pytest

from kvferry.blocks.lease import LeaseTable
from kvferry.blocks.retention import RetentionLimits
from kvferry.errors import CapacityError
from tests.support.block_integrity import assert_whole, check_integrity
from tests.unit.blocks.retaining_instance import DURATION_S, MAX_BLOCKS, NUM_BLOCKS, Instance, chain


@pytest.fixture
def instance() -> Instance:
    return Instance()


# -- the cap ----------------------------------------------------------------------------------


def test_the_oldest_conversation_gives_up_its_tail_first(instance: Instance) -> None:
    instance.turn("abcd")
    instance.turn("xyz")
    instance.turn("pqr")
    assert instance.retained("abcd", "xyz", "pqr") == ["ab", "xyz", "pqr"]
    instance.turn("stu")
    assert instance.retained("abcd", "xyz", "pqr", "stu") == ["", "xy", "pqr", "stu"]
    assert instance.ends() == {"cap": 1}
    assert instance.pool.match(chain("abcd")) == 4, "still there while nobody needs the room"


def test_blocks_that_another_conversation_covers_stay(instance: Instance) -> None:
    instance.turn("abcd")
    instance.turn("abxy")
    instance.turn("pqrs")
    assert instance.retained("abcd", "abxy", "pqrs") == ["ab", "abxy", "pqrs"]
    assert instance.table.num_conversations == 2, "one has nothing of its own any more"
    assert instance.ends() == {"cap": 1}
    instance.turn("st")
    assert instance.retained("abxy", "pqrs", "st") == ["ab", "pqrs", "st"]


def test_a_conversation_that_is_larger_than_the_cap_retains_its_head(instance: Instance) -> None:
    instance.turn("xyz")
    assert instance.turn("abcdefghij") == MAX_BLOCKS
    assert instance.retained("xyz", "abcdefghij") == ["", "abcdefgh"]
    instance.turn("abcdefghijk")
    assert instance.table.num_conversations == 1, "its next turn supersedes it all the same"
    assert instance.ends() == {"cap": 1, "superseded": 1}


def test_conversations_that_share_a_head_beyond_the_cap(instance: Instance) -> None:
    for tail in "xyz":
        instance.turn("abcdefgh" + tail)
    assert instance.table.num_blocks == MAX_BLOCKS
    assert instance.table.num_conversations == 3
    instance.turn("pq")
    assert instance.retained("abcdefgh", "pq") == ["abcdef", "pq"]
    assert instance.table.num_conversations == 2


@pytest.mark.parametrize(("share", "num_retained"), [(0.01, 0), (0.25, 4), (1.0, 16)])
def test_the_cap_is_a_share_of_the_pool(share: float, num_retained: int) -> None:
    instance = Instance(RetentionLimits(max_share=share))
    assert instance.turn("abcdefghijklmnop") == num_retained
    assert instance.table.num_blocks == instance.table.max_blocks == num_retained
    assert instance.table.num_conversations == (1 if num_retained else 0)


# -- allocation -------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_retention_never_makes_an_admissible_request_wait(share: float) -> None:
    """Every block without a reference can be allocated, however much is retained."""
    instance = Instance(RetentionLimits(max_share=share))
    instance.turn("abcdefgh")
    instance.turn("pqrstuvw")
    in_use = instance.compute("abcd")
    assert instance.pool.num_free == NUM_BLOCKS - len(in_use)
    blocks = instance.pool.allocate(NUM_BLOCKS - len(in_use))
    assert instance.retained("abcdefgh", "pqrstuvw")[1] == ""
    with pytest.raises(CapacityError):
        instance.pool.allocate(1)
    instance.pool.drop(blocks)
    instance.pool.drop(in_use)
    assert_whole(instance.pool)


def test_a_pool_under_pressure_gives_the_oldest_conversations_tail_first(
    instance: Instance,
) -> None:
    instance.turn("abcd")
    instance.turn("xyz")
    free = instance.pool.allocate(NUM_BLOCKS - 7)
    assert instance.retained("abcd", "xyz") == ["abcd", "xyz"]
    seen = []
    for _ in range(7):
        free += instance.pool.allocate(1)
        seen.append("".join(instance.retained("abcd", "xyz")))
    assert seen == ["abcxyz", "abxyz", "axyz", "xyz", "xy", "x", ""]
    assert instance.table.num_conversations == 0
    assert instance.ends() == {"evicted": 2}
    assert instance.pool.num_retained_evicted == 7
    assert instance.table.next_expiry_s() is None


def test_blocks_under_a_readers_lease_are_skipped(instance: Instance) -> None:
    leases = LeaseTable[str](instance.pool, instance.clock, max_duration_s=480, max_share=1.0)
    instance.turn("abcd")
    instance.turn("xyz")
    found = instance.pool.acquire_cached(chain("abc"))
    leases.grant("reader", "history", found, 30)
    instance.pool.drop(found)
    instance.pool.allocate(instance.pool.num_free)
    check_integrity(instance.pool, leases)
    assert instance.retained("abcd", "xyz") == ["abc", ""]
    with pytest.raises(CapacityError):
        instance.pool.allocate(1)
    assert leases.release("reader", "history")
    assert instance.pool.allocate(1) == [found[2]]


def test_a_conversation_left_with_a_shared_head_is_over(instance: Instance) -> None:
    instance.turn("abcd")
    instance.turn("abxy")
    instance.pool.allocate(NUM_BLOCKS - 6 + 2)
    assert instance.retained("abcd", "abxy") == ["ab", "abxy"]
    assert instance.table.num_conversations == 1
    assert instance.ends() == {"evicted": 1}


def test_what_was_evicted_and_computed_again_is_retained_again(instance: Instance) -> None:
    instance.turn("abcd")
    instance.pool.drop(instance.pool.allocate(NUM_BLOCKS - 1))
    assert instance.retained("abcd") == ["a"]
    assert instance.turn("abcd") == 4
    assert instance.table.num_conversations == 1
    instance.clock.advance(DURATION_S)
    assert instance.table.expire() == 1
    assert instance.table.num_blocks == 0
