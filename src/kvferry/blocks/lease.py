"""``LeaseTable``: a holder's promises not to reuse blocks, their durations and caps.

Time comes from the clock that was passed in. No threads: the caller serialises calls under its own
lock. Knows neither messages nor why a peer wants the blocks. Also owns what such tables are made
of: ``ReferencePool`` and ``Cover``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvferry.clock import Clock
from kvferry.errors import CapacityError, LocalProtocolError
from kvferry.protocol.ids import BlockNumber, LeaseId

READER_MARGIN_S = 0.05
"""How long before the end of a lease its reader stops, at least."""
READER_MARGIN_SHARE = 0.001
"""The same as a share of a long lease: the clocks of two hosts need not run equally fast."""

SubjectT = TypeVar("SubjectT", bound=Hashable)


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


class ReferencePool(Protocol):
    """The reference-counting part of a block pool: an engine may have a pool of its own."""

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        ...

    def hold(self, blocks: Sequence[BlockNumber]) -> None:
        """Add one reference to each block, which must have at least one already."""
        ...

    def drop(self, blocks: Sequence[BlockNumber]) -> None:
        """Take one reference from each block."""
        ...


class Cover:
    """How many times a table has taken each block; ``len`` is the number of distinct blocks."""

    def __init__(self) -> None:
        self._counts: dict[BlockNumber, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def __contains__(self, block: BlockNumber) -> bool:
        return block in self._counts

    def add(self, blocks: Iterable[BlockNumber]) -> None:
        """Count each of ``blocks`` once more."""
        for block in blocks:
            self._counts[block] = self._counts.get(block, 0) + 1

    def remove(self, blocks: Iterable[BlockNumber]) -> None:
        """Count each of ``blocks`` once less. Raises ``LocalProtocolError`` below zero."""
        for block in blocks:
            count = self._counts.get(block, 0)
            if count == 0:
                raise LocalProtocolError(f"block {block} is not covered")
            if count == 1:
                del self._counts[block]
            else:
                self._counts[block] = count - 1

    def counts(self) -> dict[BlockNumber, int]:
        """Return a copy of the counts; none is zero."""
        return dict(self._counts)


@dataclass(frozen=True, slots=True)
class Lease(Generic[SubjectT]):
    """One promise: ``blocks`` are not reused before ``ends_at_s`` on the holder's clock."""

    lease_id: LeaseId
    owner: str
    subject: SubjectT
    """What the owner has it on; it has one lease on each."""
    blocks: tuple[BlockNumber, ...]
    ends_at_s: float


class LeaseTable(Generic[SubjectT]):
    """Leases that one instance has granted; each has its own reference on its blocks.

    The leases of one owner cover at most ``max_share`` of the pool, 0 to 1, together.
    """

    def __init__(
        self, pool: ReferencePool, clock: Clock, *, max_duration_s: float, max_share: float
    ) -> None:
        self._pool = pool
        self._clock = clock
        self._max_duration_s = max_duration_s
        self._leases: dict[tuple[str, SubjectT], Lease[SubjectT]] = {}
        self._cover = Cover()
        self._cover_by_owner: dict[str, Cover] = {}
        self._max_per_owner = int(max_share * pool.num_blocks)
        self._next_id = 1

    @property
    def num_leases(self) -> int:
        """Leases that have not been released."""
        return len(self._leases)

    @property
    def num_blocks_leased(self) -> int:
        """Distinct blocks that at least one lease covers."""
        return len(self._cover)

    def room(self, owner: str, blocks: Sequence[BlockNumber]) -> int:
        """Return how many more blocks ``owner`` could have beside its leases and ``blocks``.

        Below 0, ``blocks`` alone are too many.
        """
        cover = self._cover_by_owner.get(owner, Cover())
        num_covered = len(cover) + sum(1 for block in blocks if block not in cover)
        return self._max_per_owner - num_covered

    def grant(
        self, owner: str, subject: SubjectT, blocks: Sequence[BlockNumber], duration_s: float
    ) -> Lease[SubjectT]:
        """Promise ``blocks`` to ``owner`` for ``duration_s`` from now, capped by the limit.

        Takes one reference on each block, which must have one already. Several leases may cover a
        block. Raises ``CapacityError`` if the owner's leases would cover too much of the pool.
        """
        if not duration_s >= 0:  # NaN compares false with everything
            raise LocalProtocolError(f"a lease cannot last {duration_s} s")
        if len(set(blocks)) != len(blocks):
            raise LocalProtocolError("a lease names each block once")
        if (owner, subject) in self._leases:
            raise LocalProtocolError(f"{owner} has a lease on {subject} already")
        room = self.room(owner, blocks)
        if room < 0:
            raise CapacityError(
                f"leases of {owner} would cover {self._max_per_owner - room} blocks, "
                f"{self._max_per_owner} are allowed"
            )
        self._pool.hold(blocks)
        ends_at_s = self._clock.monotonic_s() + min(duration_s, self._max_duration_s)
        lease = Lease(LeaseId(self._next_id), owner, subject, tuple(blocks), ends_at_s)
        self._next_id += 1
        self._leases[owner, subject] = lease
        self._cover.add(lease.blocks)
        self._cover_by_owner.setdefault(owner, Cover()).add(lease.blocks)
        return lease

    def release(self, owner: str, subject: SubjectT) -> bool:
        """End a lease and drop its references; return whether there was one."""
        lease = self._leases.pop((owner, subject), None)
        if lease is None:
            return False
        self._pool.drop(lease.blocks)
        self._cover.remove(lease.blocks)
        cover = self._cover_by_owner.setdefault(owner, Cover())
        cover.remove(lease.blocks)
        if len(cover) == 0:
            del self._cover_by_owner[owner]
        return True

    def past_their_time(self) -> list[Lease[SubjectT]]:
        """Return the leases whose time is over: they are to be released."""
        now_s = self._clock.monotonic_s()
        return [lease for lease in self._leases.values() if lease.ends_at_s <= now_s]

    def next_expiry_s(self) -> float | None:
        """Return when the next lease ends, on the clock; None without leases."""
        return min((lease.ends_at_s for lease in self._leases.values()), default=None)

    def references_taken(self) -> Mapping[BlockNumber, int]:
        """How many leases cover each block."""
        return self._cover.counts()
