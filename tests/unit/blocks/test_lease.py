from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from kvferry.blocks.lease import Lease, LeaseTable, reader_deadline_s
from kvferry.blocks.pool import BlockPool
from kvferry.errors import CapacityError, LocalProtocolError
from kvferry.protocol.ids import BlockNumber
from tests.support.block_integrity import assert_whole, check_integrity
from tests.support.fake_clock import FakeClock


class Holder:
    """A pool whose blocks 0 to 5 are in use, and its leases."""

    def __init__(self) -> None:
        self.clock = FakeClock(100.0)
        self.pool = BlockPool(10)
        self.used = self.pool.allocate(6)
        self.leases: LeaseTable[int] = LeaseTable(
            self.pool, self.clock, max_duration_s=30, max_share=0.5
        )
        self.num_granted = 0

    def grant(self, owner: str, blocks: Sequence[BlockNumber], duration_s: float) -> Lease[int]:
        self.num_granted += 1
        return self.leases.grant(owner, self.num_granted, blocks, duration_s)

    def release(self, lease: Lease[int]) -> bool:
        return self.leases.release(lease.owner, lease.subject)

    def expire(self) -> list[Lease[int]]:
        ended = self.leases.past_their_time()
        assert all(self.release(lease) for lease in ended)
        return ended


@pytest.fixture
def holder() -> Holder:
    return Holder()


def test_a_leased_block_outlives_its_first_owner(holder: Holder) -> None:
    lease = holder.grant("reader", holder.used[:3], 10)
    assert lease.ends_at_s == 110.0
    assert lease.blocks == (0, 1, 2)
    holder.pool.drop(holder.used)
    assert holder.pool.num_free == 7
    check_integrity(holder.pool, holder.leases)
    holder.release(lease)
    assert_whole(holder.pool, holder.leases)


def test_several_leases_cover_one_block(holder: Holder) -> None:
    first = holder.grant("one", holder.used[:2], 10)
    second = holder.grant("two", holder.used[:2], 10)
    assert first.lease_id != second.lease_id
    assert holder.leases.num_blocks_leased == 2
    assert holder.leases.references_taken() == {0: 2, 1: 2}
    holder.release(first)
    assert holder.leases.num_blocks_leased == 2
    holder.pool.drop(holder.used)
    assert holder.pool.num_free == 8
    holder.release(second)
    assert holder.leases.num_blocks_leased == 0
    assert_whole(holder.pool)


def test_durations_are_capped(holder: Holder) -> None:
    assert holder.grant("reader", holder.used[:1], 3600).ends_at_s == 130.0


@pytest.mark.parametrize("duration_s", [-1.0, math.nan])
def test_a_duration_that_is_none_is_a_bug(holder: Holder, duration_s: float) -> None:
    with pytest.raises(LocalProtocolError):
        holder.grant("reader", holder.used[:1], duration_s)
    assert holder.leases.num_leases == 0


def test_a_peer_gets_no_more_than_its_share(holder: Holder) -> None:
    holder.grant("greedy", holder.used[:4], 10)
    with pytest.raises(CapacityError, match="greedy would cover 6 blocks, 5 are allowed"):
        holder.grant("greedy", holder.used[4:6], 10)
    assert holder.pool.num_references(holder.used[4]) == 1
    holder.grant("greedy", holder.used[1:5], 10)
    holder.grant("modest", holder.used[4:6], 10)


def test_a_released_lease_gives_its_share_back(holder: Holder) -> None:
    lease = holder.grant("reader", holder.used[:5], 10)
    holder.release(lease)
    holder.grant("reader", holder.used[1:6], 10)


def test_a_lease_on_free_blocks_is_refused_and_leaves_no_trace(holder: Holder) -> None:
    with pytest.raises(LocalProtocolError):
        holder.grant("reader", [holder.used[0], BlockNumber(9)], 10)
    assert holder.leases.num_leases == 0
    assert holder.leases.num_blocks_leased == 0
    assert holder.pool.num_references(holder.used[0]) == 1


def test_a_lease_names_each_block_once(holder: Holder) -> None:
    with pytest.raises(LocalProtocolError, match="once"):
        holder.grant("reader", [holder.used[0], holder.used[0]], 10)


def test_an_owner_has_one_lease_on_a_subject(holder: Holder) -> None:
    lease = holder.grant("reader", holder.used[:2], 10)
    with pytest.raises(LocalProtocolError, match="already"):
        holder.leases.grant("reader", lease.subject, holder.used[2:3], 10)
    assert holder.leases.num_blocks_leased == 2
    holder.leases.grant("another", lease.subject, holder.used[2:3], 10)
    assert holder.leases.num_leases == 2


def test_release_is_safe_to_repeat(holder: Holder) -> None:
    lease = holder.grant("reader", holder.used[:2], 10)
    assert holder.release(lease)
    assert not holder.release(lease)
    assert not holder.leases.release("reader", 999)
    holder.pool.drop(holder.used)
    assert_whole(holder.pool)


def test_only_leases_past_their_time_expire(holder: Holder) -> None:
    short = holder.grant("reader", holder.used[:2], 5)
    long = holder.grant("reader", holder.used[1:3], 6)
    assert holder.leases.next_expiry_s() == 105.0
    holder.clock.advance(4.999)
    assert holder.expire() == []
    holder.clock.advance(0.002)
    assert holder.expire() == [short]
    assert holder.leases.next_expiry_s() == long.ends_at_s
    assert holder.leases.references_taken() == {1: 1, 2: 1}
    holder.clock.advance(10)
    assert holder.expire() == [long]
    assert holder.leases.next_expiry_s() is None
    holder.pool.drop(holder.used)
    assert_whole(holder.pool, holder.leases)


def test_a_lease_of_no_blocks_is_as_good_as_any(holder: Holder) -> None:
    empty = [holder.grant("reader", [], 10) for _ in range(2)]
    lease = holder.grant("reader", holder.used[:5], 10)
    for ended in (lease, *empty):
        holder.release(ended)
    lease = holder.grant("reader", holder.used[:5], 10)
    assert holder.release(lease)
    assert holder.leases.num_leases == 0


@pytest.mark.parametrize("duration_s", [0.0, 0.01, 1.0, 30.0, 480.0, 86_400.0])
@pytest.mark.parametrize("answer_delay_s", [0.0, 0.5, 100.0])
def test_the_reader_always_stops_before_the_holder(
    duration_s: float, answer_delay_s: float
) -> None:
    sent_at_s = 1000.0
    holder_ends_at_s = sent_at_s + answer_delay_s + duration_s
    deadline_s = reader_deadline_s(sent_at_s, duration_s)
    assert sent_at_s <= deadline_s <= holder_ends_at_s
    if duration_s > 0:
        assert deadline_s < holder_ends_at_s


def test_the_readers_margin_grows_with_the_lease() -> None:
    assert reader_deadline_s(0.0, 10.0) == pytest.approx(9.95)
    assert reader_deadline_s(0.0, 1000.0) == pytest.approx(999.0)
    assert reader_deadline_s(0.0, 10.0, margin_s=2.0) == pytest.approx(8.0)
