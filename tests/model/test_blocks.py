"""Pool, leases, quarantine and retention against plain lists, under any order of calls."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
)

from kvferry.blocks.lease import Lease, LeaseTable
from kvferry.blocks.pool import BlockPool
from kvferry.blocks.quarantine import Quarantine
from kvferry.blocks.retention import RetentionLimits, RetentionTable
from kvferry.errors import CapacityError, LocalProtocolError
from kvferry.protocol.ids import BlockHash, BlockNumber
from tests.support.block_integrity import assert_whole, check_integrity
from tests.support.fake_clock import FakeClock

from .blocks_model import NUM_BLOCKS, ModelPool, ModelRetention

MAX_LEASE_S = 10.0
MAX_LEASED_PER_PEER = 6
PEERS = st.sampled_from(["one", "two"])
RETENTION = RetentionLimits(duration_s=10, max_share=0.5, renews_on_use=True)
MAX_RETAINED = 6
HASHES = tuple(BlockHash(bytes([number]) * 32) for number in range(12))
CHAINS = st.sampled_from(
    [
        HASHES[:8],
        HASHES[:2] + HASHES[8:10],
        HASHES[:1] + HASHES[10:],
    ]
)
"""Three sequences that share their heads."""


class BlocksMachine(RuleBasedStateMachine):
    sequences: Bundle[tuple[BlockNumber, ...]] = Bundle("sequences")
    leases: Bundle[Lease[int]] = Bundle("leases")
    transfers: Bundle[int] = Bundle("transfers")

    def __init__(self) -> None:
        super().__init__()
        self.clock = FakeClock()
        self.pool = BlockPool(NUM_BLOCKS)
        self.lease_table: LeaseTable[int] = LeaseTable(
            self.pool, self.clock, max_duration_s=MAX_LEASE_S, max_share=0.5
        )
        self.quarantine = Quarantine(self.pool, max_share=0.25)
        self.retention = RetentionTable(self.pool, self.clock, RETENTION)
        self.model = ModelPool()
        self.retained = ModelRetention(self.model, MAX_RETAINED)
        self.owned: list[tuple[BlockNumber, ...]] = []
        self.live_leases: dict[int, Lease[int]] = {}
        self.num_granted = 0
        self.entries: dict[int, tuple[str, tuple[BlockNumber, ...]]] = {}
        self.next_transfer = 0

    # -- engine -------------------------------------------------------------------------------
    @rule(target=sequences, count=st.integers(1, 5))
    def allocate(
        self, count: int
    ) -> tuple[BlockNumber, ...] | MultipleResults[tuple[BlockNumber, ...]]:
        free = self.model.free()
        if count > len(free):
            with pytest.raises(CapacityError):
                self.pool.allocate(count)
            return multiple()
        order = self.model.cached_order + self.model.retained_order
        num_evicted = max(0, count - (len(free) - len(order)))
        evicted = order[:num_evicted]
        num_before = self.pool.num_retained_evicted
        num_retained = len(set(evicted) & set(self.model.retained_order))
        blocks = self.pool.allocate(count)
        assert blocks == sorted(set(blocks))
        assert set(blocks) <= free
        assert set(blocks) & set(order) == set(evicted)
        assert self.pool.num_retained_evicted == num_before + num_retained
        for block in evicted:
            self._evicted(block)
        return self._own(blocks)

    def _evicted(self, block: BlockNumber) -> None:
        if block in self.model.retained:
            self.model.retained.remove(block)
            self.retained.lose(self.model.hashes[block])
        del self.model.hashes[block]

    @rule(target=sequences, chain=CHAINS, start=st.integers(0, 4), count=st.integers(0, 4))
    def acquire_cached(
        self, chain: tuple[BlockHash, ...], start: int, count: int
    ) -> tuple[BlockNumber, ...]:
        hashes = chain[start : start + count]
        expected = self.model.find_leading(hashes)
        assert self.pool.match(hashes) == len(expected)
        assert self.pool.acquire_cached(hashes) == expected
        return self._own(expected)

    @rule(blocks=sequences, chain=CHAINS, start=st.integers(0, 3), count=st.integers(1, 5))
    def publish(
        self, blocks: tuple[BlockNumber, ...], chain: tuple[BlockHash, ...], start: int, count: int
    ) -> None:
        if blocks in self.owned:
            for block, block_hash in zip(blocks[:count], chain[start:], strict=False):
                self._publish(block, block_hash)

    def _publish(self, block: BlockNumber, block_hash: BlockHash) -> None:
        present = self.model.hashes.get(block)
        if present is not None and present != block_hash:
            with pytest.raises(LocalProtocolError):
                self.pool.publish(block, block_hash)
            return
        self.pool.publish(block, block_hash)
        if self.model.find(block_hash) is None:
            self.model.hashes[block] = block_hash

    @rule(blocks=consumes(sequences))
    def drop(self, blocks: tuple[BlockNumber, ...]) -> None:
        if blocks in self.owned:
            self.owned.remove(blocks)
            self.pool.drop(blocks)
            self.model.drop(blocks)

    @rule()
    def clear_cache(self) -> None:
        self.pool.clear_cache()
        for block in list(self.model.hashes):
            self._evicted(block)
        self.model.cached_order.clear()
        self.model.retained_order.clear()

    @rule(block=st.integers(-2, NUM_BLOCKS + 1).map(BlockNumber))
    def misuse(self, block: BlockNumber) -> None:
        before = self.pool.dump()
        used = [other for other, count in self.model.references.items() if count]
        with pytest.raises(LocalProtocolError):
            self.pool.drop([*used, *[block] * (self.model.references[block] + 1)])
        if not self.model.references[block]:
            with pytest.raises(LocalProtocolError):
                self.pool.hold([*used, block])
        assert self.pool.dump() == before

    # -- retention ----------------------------------------------------------------------------
    @rule(
        target=sequences,
        chain=CHAINS,
        length=st.integers(1, 8),
        duration_s=st.sampled_from([None, 3.0, 20.0, 0.0]),
        is_dropped_before=st.booleans(),
    )
    def finish_turn(
        self,
        chain: tuple[BlockHash, ...],
        length: int,
        duration_s: float | None,
        is_dropped_before: bool,
    ) -> tuple[BlockNumber, ...] | MultipleResults[tuple[BlockNumber, ...]]:
        """A whole request, so that conversations are long and frequent; its blocks stay or go."""
        hashes = chain[:length]
        cached = self._own(self.pool.acquire_cached(hashes))
        lacking = len(hashes) - len(cached)
        computed = self._allocate_up_to(lacking)
        for block, block_hash in zip(computed, hashes[len(cached) :], strict=False):
            self._publish(block, block_hash)
        self.owned.remove(cached)
        self.owned.remove(computed)
        blocks = (*cached, *computed)
        self.owned.append(blocks)
        if is_dropped_before:
            self.drop(blocks)
        self.retain(hashes, len(hashes), duration_s)
        return blocks

    def _allocate_up_to(self, count: int) -> tuple[BlockNumber, ...]:
        blocks = self.allocate(min(count, len(self.model.free())))
        assert isinstance(blocks, tuple)
        return blocks

    @rule(
        chain=CHAINS, length=st.integers(0, 8), duration_s=st.sampled_from([None, 3.0, 20.0, 0.0])
    )
    def retain(self, chain: tuple[BlockHash, ...], length: int, duration_s: float | None) -> None:
        hashes = chain[:length]
        lasts_s = RETENTION.duration_s if duration_s is None else min(duration_s, 10.0)
        expected = self.retained.retain(hashes, self.clock.monotonic_s(), lasts_s)
        assert self.retention.retain(hashes, duration_s) == expected

    @rule(chain=CHAINS, length=st.integers(0, 8))
    def use(self, chain: tuple[BlockHash, ...], length: int) -> None:
        self.retention.renew(chain[:length])
        self.retained.renew(chain[:length], self.clock.monotonic_s())

    @rule()
    def expire_retained(self) -> None:
        assert self.retention.expire() == self.retained.expire(self.clock.monotonic_s())

    @rule()
    def release_all_retained(self) -> None:
        self.retention.release_all()
        self.retained.release_all()

    # -- peers --------------------------------------------------------------------------------
    @rule(
        target=leases,
        owner=PEERS,
        blocks=sequences,
        skip=st.integers(0, 2),
        duration_s=st.floats(0.5, 20),
    )
    def grant(
        self, owner: str, blocks: tuple[BlockNumber, ...], skip: int, duration_s: float
    ) -> Lease[int] | MultipleResults[Lease[int]]:
        if blocks not in self.owned:
            return multiple()
        wanted = blocks[skip:]
        self.num_granted += 1
        covered = {
            block
            for lease in self.live_leases.values()
            if lease.owner == owner
            for block in lease.blocks
        }
        if len(covered | set(wanted)) > MAX_LEASED_PER_PEER:
            with pytest.raises(CapacityError):
                self.lease_table.grant(owner, self.num_granted, wanted, duration_s)
            return multiple()
        lease = self.lease_table.grant(owner, self.num_granted, wanted, duration_s)
        self.model.take(wanted)
        end_s = self.clock.monotonic_s() + min(duration_s, MAX_LEASE_S)
        assert lease.ends_at_s == end_s
        self.live_leases[lease.lease_id] = lease
        return lease

    @rule(lease=leases)
    def release(self, lease: Lease[int]) -> None:
        is_live = lease.lease_id in self.live_leases
        assert self.lease_table.release(lease.owner, lease.subject) is is_live
        self._forget_lease(lease)

    @rule(seconds=st.floats(0, 12))
    def time_passes(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def expire(self) -> None:
        now_s = self.clock.monotonic_s()
        due = [lease for lease in self.live_leases.values() if lease.ends_at_s <= now_s]
        expired = self.lease_table.past_their_time()
        assert expired == due
        for lease in expired:
            assert self.lease_table.release(lease.owner, lease.subject)
            self._forget_lease(lease)

    # -- transfers ----------------------------------------------------------------------------
    @rule(target=transfers, peer=PEERS, blocks=sequences)
    def enter_quarantine(self, peer: str, blocks: tuple[BlockNumber, ...]) -> int:
        self.next_transfer += 1
        if blocks in self.owned:
            self.quarantine.enter(self.next_transfer, peer, blocks)
            self.model.take(blocks)
            self.entries[self.next_transfer] = (peer, blocks)
        return self.next_transfer

    @rule(transfer=transfers)
    def leave_quarantine(self, transfer: int) -> None:
        self.quarantine.leave(transfer)
        self._forget_entry(transfer)

    # -- what always holds --------------------------------------------------------------------
    @invariant()
    def nothing_contradicts(self) -> None:
        check_integrity(self.pool, self.lease_table, self.quarantine)

    @invariant()
    def pool_is_as_modelled(self) -> None:
        state = self.pool.dump()
        assert {n: c for n, c in enumerate(state.references) if c} == dict(+self.model.references)
        assert list(state.free_cached) == self.model.cached_order
        assert list(state.free_retained) == self.model.retained_order
        assert state.retained == self.model.retained
        assert dict(state.hash_by_block) == self.model.hashes
        assert self.pool.num_free == len(self.model.free())
        assert self.pool.snapshot().num_cached == len(self.model.hashes)

    @invariant()
    def tables_are_as_modelled(self) -> None:
        leased = {block for lease in self.live_leases.values() for block in lease.blocks}
        kept = {block for _, blocks in self.entries.values() for block in blocks}
        assert self.lease_table.num_blocks_leased == len(leased)
        assert self.lease_table.num_leases == len(self.live_leases)
        ends_s = [lease.ends_at_s for lease in self.live_leases.values()]
        assert self.lease_table.next_expiry_s() == min(ends_s, default=None)
        assert self.quarantine.num_blocks == len(kept)
        is_full = len(kept) >= NUM_BLOCKS // 4
        for peer in ("one", "two"):
            has_some = any(owner == peer for owner, _ in self.entries.values())
            assert self.quarantine.is_closed_to(peer) is (is_full and has_some)
        assert not (leased | kept) & self.model.free()

    @invariant()
    def retention_is_as_modelled(self) -> None:
        assert self.retention.num_blocks == len(self.model.retained) <= MAX_RETAINED
        conversations = self.retained.conversations
        assert self.retention.num_conversations == len(conversations)
        ends_s = [conversation.ends_at_s for conversation in conversations]
        assert self.retention.next_expiry_s() == min(ends_s, default=None)
        assert sum(self.retention.ends.values()) + len(conversations) == self.retained.num_begun

    def teardown(self) -> None:
        for blocks in self.owned:
            self.pool.drop(blocks)
        for lease in self.live_leases.values():
            self.lease_table.release(lease.owner, lease.subject)
        for transfer in self.entries:
            self.quarantine.leave(transfer)
        assert_whole(self.pool, self.lease_table, self.quarantine)
        self.clock.advance(RETENTION.duration_s)
        self.retention.expire()
        assert self.pool.num_retained == self.retention.num_conversations == 0

    def _own(self, blocks: list[BlockNumber]) -> tuple[BlockNumber, ...]:
        self.model.take(blocks)
        owned = tuple(blocks)
        self.owned.append(owned)
        return owned

    def _forget_lease(self, lease: Lease[int]) -> None:
        entry = self.live_leases.pop(lease.lease_id, None)
        if entry is not None:
            self.model.drop(entry.blocks)

    def _forget_entry(self, transfer: int) -> None:
        entry = self.entries.pop(transfer, None)
        if entry is not None:
            self.model.drop(entry[1])


TestBlocks = BlocksMachine.TestCase
TestBlocks.settings = settings(max_examples=150, stateful_step_count=50)
