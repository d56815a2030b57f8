"""Leases of readers: a promise not to reuse blocks while a peer READs them.

A reader's link is progressed while it has any lease, of whatever kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from kvferry.blocks.lease import LeaseLimits, LeaseTable
from kvferry.connector.machine.effects import StartServing, StopServing
from kvferry.connector.transfers.context import RoleContext
from kvferry.protocol.ids import BlockNumber, LeaseId
from kvferry.protocol.messages import Acquire, AcquireHistory, Granted, PartialBlock

SubjectT = TypeVar("SubjectT", bound=Hashable)


class ActiveReaders:
    """Counts leases by reader, and has the links of those that have any progressed."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._num_leases: Counter[str] = Counter()

    def begin(self, reader: str) -> None:
        """One more lease of ``reader``."""
        self._num_leases[reader] += 1
        if self._num_leases[reader] == 1:
            self._context.emit(StartServing(reader))

    def end(self, reader: str) -> None:
        """One lease less."""
        self._num_leases[reader] -= 1
        if self._num_leases[reader] == 0:
            del self._num_leases[reader]
            self._context.emit(StopServing(reader))


class ReaderLeases(Generic[SubjectT]):
    """Leases of one kind: at most one of a reader on a subject, in all a share of the pool each."""

    def __init__(self, context: RoleContext, active: ActiveReaders, max_share: float) -> None:
        self._context = context
        self._active = active
        limits = LeaseLimits(context.config.max_lease_s, 0, max_share)
        self._leases = LeaseTable(context.blocks, context.clock, limits)
        self._of: dict[tuple[str, SubjectT], LeaseId] = {}
        self._subjects: dict[LeaseId, SubjectT] = {}

    @property
    def num_leases(self) -> int:
        """Leases in force."""
        return self._leases.num_leases

    @property
    def num_blocks_leased(self) -> int:
        """Distinct blocks under a lease."""
        return self._leases.num_blocks_leased

    def has(self, reader: str, subject: SubjectT) -> bool:
        """Return whether ``reader`` has a lease on ``subject``."""
        return (reader, subject) in self._of

    def room(self, reader: str, blocks: Sequence[BlockNumber]) -> int:
        """See ``LeaseTable.room``."""
        return self._leases.room(reader, blocks)

    def grant(
        self,
        reader: str,
        subject: SubjectT,
        blocks: Sequence[BlockNumber],
        message: Acquire | AcquireHistory,
        partials: tuple[PartialBlock, ...] = (),
    ) -> Granted:
        """Promise ``blocks``, and those of ``partials``, which must have a reference each.

        Raises ``CapacityError`` if the reader's leases would cover too much of the pool.
        """
        leased = [*blocks, *(partial.block for partial in partials)]
        lease = self._leases.grant(reader, leased, message.duration_s)
        self._of[reader, subject] = lease.lease_id
        self._subjects[lease.lease_id] = subject
        self._active.begin(reader)
        duration_s = min(message.duration_s, self._context.config.max_lease_s)
        digests_of = self._context.digests_of if message.want_block_digests else None
        digests = digests_of(lease.blocks) if digests_of is not None else ()
        return Granted(lease.lease_id, duration_s, tuple(blocks), digests, partials)

    def release(self, reader: str, subject: SubjectT) -> bool:
        """End a lease; return whether there was one."""
        lease_id = self._of.pop((reader, subject), None)
        if lease_id is None:
            return False
        del self._subjects[lease_id]
        self._leases.release(lease_id)
        self._active.end(reader)
        return True

    def take_expired(self) -> list[tuple[str, SubjectT]]:
        """Return the leases whose time is over: they are to be released. Their blocks are free."""
        return [(lease.owner, self._subjects[lease.lease_id]) for lease in self._leases.expire()]

    def next_expiry_s(self) -> float | None:
        """Return when the next lease ends (monotonic seconds), or None."""
        return self._leases.next_expiry_s()
