"""``LeaseTable``: a holder's promises not to reuse blocks, their durations and caps.

Time comes from the clock that was passed in. No threads: the caller serialises calls under its own
lock. Knows neither messages nor why a peer wants the blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.blocks.cover import Cover
from kvferry.blocks.ports import ReferencePool
from kvferry.clock import Clock
from kvferry.errors import CapacityError, ConfigError, LeaseNotFoundError, LocalProtocolError
from kvferry.protocol.ids import BlockNumber, LeaseId

READER_MARGIN_S = 0.05
"""How long before the end of a lease its reader stops, at least."""
READER_MARGIN_SHARE = 0.001
"""The same as a share of a long lease: the clocks of two hosts need not run equally fast."""


def reader_deadline_s(
    sent_at_s: float, duration_s: float, *, margin_s: float = READER_MARGIN_S
) -> float:
    """Return when a reader must have stopped using a lease, on the reader's own clock.

    ``sent_at_s`` is when the reader was about to send its request; the holder counts
    ``duration_s`` from when it answered, which is later, so the reader always stops first. What
    arrives after the deadline is thrown away. Never earlier than ``sent_at_s``.
    """
    margin_s = max(margin_s, duration_s * READER_MARGIN_SHARE)
    return sent_at_s + max(0.0, duration_s - margin_s)


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Caps on what peers may ask for."""

    max_duration_s: float
    max_renewals: int
    """Renewals that lengthen a lease, over its whole life."""
    max_share_per_peer: float
    """Share of the pool, 0 to 1, that the leases of one owner may cover together."""

    def __post_init__(self) -> None:
        if self.max_duration_s <= 0:
            raise ConfigError(f"max_duration_s must be positive, not {self.max_duration_s}")
        if self.max_renewals < 0:
            raise ConfigError(f"max_renewals must not be negative: {self.max_renewals}")
        if not 0 < self.max_share_per_peer <= 1:
            raise ConfigError(
                f"max_share_per_peer must be above 0 and at most 1, not {self.max_share_per_peer}"
            )


@dataclass(frozen=True, slots=True)
class Lease:
    """One promise: ``blocks`` are not reused before ``ends_at_s`` on the holder's clock."""

    lease_id: LeaseId
    owner: str
    blocks: tuple[BlockNumber, ...]
    ends_at_s: float
    num_renewals: int = 0


class LeaseTable:
    """All leases that one instance has granted; each has its own reference on its blocks."""

    def __init__(self, pool: ReferencePool, clock: Clock, limits: LeaseLimits) -> None:
        self._pool = pool
        self._clock = clock
        self._limits = limits
        self._leases: dict[LeaseId, Lease] = {}
        self._cover = Cover()
        self._cover_by_owner: dict[str, Cover] = {}
        self._max_per_owner = int(limits.max_share_per_peer * pool.num_blocks)
        self._next_id = 1

    @property
    def num_leases(self) -> int:
        """Leases in force, and those past their time that ``expire`` has not collected yet."""
        return len(self._leases)

    @property
    def num_blocks_leased(self) -> int:
        """Distinct blocks that at least one lease covers."""
        return len(self._cover)

    def get(self, lease_id: LeaseId) -> Lease:
        """Return a lease. Raises ``LeaseNotFoundError`` if it is unknown or past its time."""
        lease = self._leases.get(lease_id)
        if lease is None or lease.ends_at_s <= self._clock.monotonic_s():
            raise LeaseNotFoundError(f"lease {lease_id} does not exist (any more)")
        return lease

    def room(self, owner: str, blocks: Sequence[BlockNumber]) -> int:
        """Return how many more blocks ``owner`` could have beside its leases and ``blocks``.

        Below 0, ``blocks`` alone are too many.
        """
        cover = self._cover_by_owner.get(owner, Cover())
        num_covered = len(cover) + sum(1 for block in blocks if block not in cover)
        return self._max_per_owner - num_covered

    def grant(self, owner: str, blocks: Sequence[BlockNumber], duration_s: float) -> Lease:
        """Promise ``blocks`` to ``owner`` for ``duration_s`` from now, capped by the limits.

        Takes one reference on each block, which must have one already. Several leases may cover a
        block. Raises ``CapacityError`` if the owner's leases would cover too much of the pool.
        """
        duration_s = self._capped(duration_s)
        if len(set(blocks)) != len(blocks):
            raise LocalProtocolError("a lease names each block once")
        room = self.room(owner, blocks)
        if room < 0:
            raise CapacityError(
                f"leases of {owner} would cover {self._max_per_owner - room} blocks, "
                f"{self._max_per_owner} are allowed"
            )
        self._pool.hold(blocks)
        cover = self._cover_by_owner.setdefault(owner, Cover())
        lease = Lease(
            lease_id=LeaseId(self._next_id),
            owner=owner,
            blocks=tuple(blocks),
            ends_at_s=self._clock.monotonic_s() + duration_s,
        )
        self._next_id += 1
        self._leases[lease.lease_id] = lease
        self._cover.add(lease.blocks)
        cover.add(lease.blocks)
        return lease

    def renew(self, lease_id: LeaseId, duration_s: float) -> float:
        """Let a lease last at least ``duration_s`` from now; return the seconds it now lasts.

        Never shortens. Raises ``LeaseNotFoundError`` for a lease that is unknown or past its time,
        ``CapacityError`` when its renewals are used up.
        """
        duration_s = self._capped(duration_s)
        lease = self.get(lease_id)
        now_s = self._clock.monotonic_s()
        if now_s + duration_s <= lease.ends_at_s:
            return lease.ends_at_s - now_s
        if lease.num_renewals >= self._limits.max_renewals:
            raise CapacityError(f"lease {lease_id} was renewed {lease.num_renewals} times already")
        self._leases[lease_id] = replace(
            lease, ends_at_s=now_s + duration_s, num_renewals=lease.num_renewals + 1
        )
        return duration_s

    def release(self, lease_id: LeaseId) -> None:
        """End a lease and drop its references. Safe to repeat and for unknown ids."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return
        self._pool.drop(lease.blocks)
        del self._leases[lease_id]
        self._cover.remove(lease.blocks)
        self._uncover(lease)

    def release_owner(self, owner: str) -> list[Lease]:
        """End every lease of ``owner`` and return them."""
        return self._release_where(lambda lease: lease.owner == owner)

    def expire(self) -> list[Lease]:
        """End the leases that are past their time and return them."""
        now_s = self._clock.monotonic_s()
        return self._release_where(lambda lease: lease.ends_at_s <= now_s)

    def next_expiry_s(self) -> float | None:
        """Return when the next lease ends, on the clock; None without leases."""
        return min((lease.ends_at_s for lease in self._leases.values()), default=None)

    def references_taken(self) -> Mapping[BlockNumber, int]:
        """How many leases cover each block."""
        return self._cover.counts()

    def _capped(self, duration_s: float) -> float:
        if not duration_s >= 0:  # NaN compares false with everything
            raise LocalProtocolError(f"a lease cannot last {duration_s} s")
        return min(duration_s, self._limits.max_duration_s)

    def _uncover(self, lease: Lease) -> None:
        cover = self._cover_by_owner.get(lease.owner)
        if cover is None:  # only leases of no blocks are left
            return
        cover.remove(lease.blocks)
        if len(cover) == 0:
            del self._cover_by_owner[lease.owner]

    def _release_where(self, chosen: Callable[[Lease], bool]) -> list[Lease]:
        ended = [lease for lease in self._leases.values() if chosen(lease)]
        for lease in ended:
            self.release(lease.lease_id)
        return ended
