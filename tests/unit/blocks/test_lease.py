from __future__ import annotations

import math

import pytest

from kvferry.blocks.integrity import assert_whole, check_integrity
from kvferry.blocks.lease import LeaseLimits, LeaseTable, reader_deadline_s
from kvferry.blocks.pool import BlockPool
from kvferry.errors import CapacityError, ConfigError, LeaseNotFoundError, LocalProtocolError
from kvferry.protocol.ids import BlockNumber, LeaseId
from tests.support.fake_clock import FakeClock


class Holder:
    """A pool whose blocks 0 to 5 are in use, and its leases."""

    def __init__(self, limits: LeaseLimits | None = None) -> None:
        self.clock = FakeClock(100.0)
        self.pool = BlockPool(10)
        self.used = self.pool.allocate(6)
        limits = limits or LeaseLimits(max_duration_s=30, max_renewals=2, max_share_per_peer=0.5)
        self.leases = LeaseTable(self.pool, self.clock, limits)


@pytest.fixture
def holder() -> Holder:
    return Holder()


def test_a_leased_block_outlives_its_first_owner(holder: Holder) -> None:
    lease = holder.leases.grant("reader", holder.used[:3], 10)
    assert lease.ends_at_s == 110.0
    assert lease.blocks == (0, 1, 2)
    holder.pool.drop(holder.used)
    assert holder.pool.num_free == 7
    check_integrity(holder.pool, holder.leases)
    holder.leases.release(lease.lease_id)
    assert_whole(holder.pool, holder.leases)


def test_several_leases_cover_one_block(holder: Holder) -> None:
    first = holder.leases.grant("one", holder.used[:2], 10)
    second = holder.leases.grant("two", holder.used[:2], 10)
    assert first.lease_id != second.lease_id
    assert holder.leases.num_blocks_leased == 2
    assert holder.leases.references_taken() == {0: 2, 1: 2}
    holder.leases.release(first.lease_id)
    assert holder.leases.num_blocks_leased == 2
    holder.pool.drop(holder.used)
    assert holder.pool.num_free == 8
    holder.leases.release(second.lease_id)
    assert holder.leases.num_blocks_leased == 0
    assert_whole(holder.pool)


def test_durations_are_capped(holder: Holder) -> None:
    assert holder.leases.grant("reader", holder.used[:1], 3600).ends_at_s == 130.0


@pytest.mark.parametrize("duration_s", [-1.0, math.nan])
def test_a_duration_that_is_none_is_a_bug(holder: Holder, duration_s: float) -> None:
    with pytest.raises(LocalProtocolError):
        holder.leases.grant("reader", holder.used[:1], duration_s)
    assert holder.leases.num_leases == 0


def test_a_peer_gets_no_more_than_its_share(holder: Holder) -> None:
    holder.leases.grant("greedy", holder.used[:4], 10)
    with pytest.raises(CapacityError, match="greedy would cover 6 blocks, 5 are allowed"):
        holder.leases.grant("greedy", holder.used[4:6], 10)
    assert holder.pool.num_references(holder.used[4]) == 1
    holder.leases.grant("greedy", holder.used[1:5], 10)
    holder.leases.grant("modest", holder.used[4:6], 10)


def test_a_released_lease_gives_its_share_back(holder: Holder) -> None:
    lease = holder.leases.grant("reader", holder.used[:5], 10)
    holder.leases.release(lease.lease_id)
    holder.leases.grant("reader", holder.used[1:6], 10)


def test_a_lease_on_free_blocks_is_refused_and_leaves_no_trace(holder: Holder) -> None:
    with pytest.raises(LocalProtocolError):
        holder.leases.grant("reader", [holder.used[0], BlockNumber(9)], 10)
    assert holder.leases.num_leases == 0
    assert holder.leases.num_blocks_leased == 0
    assert holder.pool.num_references(holder.used[0]) == 1


def test_a_lease_names_each_block_once(holder: Holder) -> None:
    with pytest.raises(LocalProtocolError, match="once"):
        holder.leases.grant("reader", [holder.used[0], holder.used[0]], 10)


def test_renewal_counts_from_now_and_never_shortens(holder: Holder) -> None:
    lease = holder.leases.grant("reader", holder.used[:1], 10)
    holder.clock.advance(4)
    assert holder.leases.renew(lease.lease_id, 1) == 6.0
    assert holder.leases.renew(lease.lease_id, 20) == 20.0
    assert holder.leases.renew(lease.lease_id, 3600) == 30.0
    assert holder.leases.get(lease.lease_id).ends_at_s == 134.0


def test_renewals_that_lengthen_are_bounded(holder: Holder) -> None:
    lease = holder.leases.grant("reader", holder.used[:1], 10)
    for _ in range(2):
        holder.clock.advance(1)
        holder.leases.renew(lease.lease_id, 10)
    holder.clock.advance(1)
    with pytest.raises(CapacityError, match="renewed 2 times"):
        holder.leases.renew(lease.lease_id, 10)
    assert holder.leases.renew(lease.lease_id, 5) == 9.0


def test_a_lease_past_its_time_is_not_renewed_even_before_it_is_collected(holder: Holder) -> None:
    lease = holder.leases.grant("reader", holder.used[:1], 10)
    holder.clock.advance(10)
    with pytest.raises(LeaseNotFoundError):
        holder.leases.renew(lease.lease_id, 10)
    assert [ended.lease_id for ended in holder.leases.expire()] == [lease.lease_id]


def test_an_unknown_lease_is_not_renewed(holder: Holder) -> None:
    with pytest.raises(LeaseNotFoundError):
        holder.leases.renew(LeaseId(7), 10)


def test_release_is_safe_to_repeat(holder: Holder) -> None:
    lease = holder.leases.grant("reader", holder.used[:2], 10)
    holder.leases.release(lease.lease_id)
    holder.leases.release(lease.lease_id)
    holder.leases.release(LeaseId(999))
    holder.pool.drop(holder.used)
    assert_whole(holder.pool)


def test_an_owner_that_is_gone_loses_all_its_leases_and_nobody_elses(holder: Holder) -> None:
    gone = [holder.leases.grant("gone", holder.used[index : index + 1], 10) for index in (0, 1)]
    kept = holder.leases.grant("kept", holder.used[:1], 10)
    assert holder.leases.release_owner("gone") == gone
    assert holder.leases.release_owner("gone") == []
    assert holder.leases.get(kept.lease_id) == kept
    holder.pool.drop(holder.used)
    assert holder.pool.num_free == 9


def test_only_leases_past_their_time_expire(holder: Holder) -> None:
    short = holder.leases.grant("reader", holder.used[:2], 5)
    long = holder.leases.grant("reader", holder.used[1:3], 6)
    assert holder.leases.next_expiry_s() == 105.0
    holder.clock.advance(4.999)
    assert holder.leases.expire() == []
    holder.clock.advance(0.002)
    assert holder.leases.expire() == [short]
    assert holder.leases.next_expiry_s() == long.ends_at_s
    assert holder.leases.references_taken() == {1: 1, 2: 1}
    holder.clock.advance(10)
    assert holder.leases.expire() == [long]
    assert holder.leases.next_expiry_s() is None
    holder.pool.drop(holder.used)
    assert_whole(holder.pool, holder.leases)


def test_a_lease_of_no_blocks_is_as_good_as_any(holder: Holder) -> None:
    empty = [holder.leases.grant("reader", [], 10) for _ in range(2)]
    lease = holder.leases.grant("reader", holder.used[:5], 10)
    for ended in (lease, *empty):
        holder.leases.release(ended.lease_id)
    holder.leases.grant("reader", holder.used[:5], 10)
    assert len(holder.leases.release_owner("reader")) == 1


@pytest.mark.parametrize(
    "limits",
    [
        {"max_duration_s": 0},
        {"max_renewals": -1},
        {"max_share_per_peer": 0},
        {"max_share_per_peer": 1.1},
    ],
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        LeaseLimits(
            **{"max_duration_s": 30, "max_renewals": 2, "max_share_per_peer": 0.5, **limits}  # type: ignore[arg-type]
        )


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
