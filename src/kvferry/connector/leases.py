"""Leases of readers: a promise not to reuse blocks while a peer READs them.

A reader's link is progressed while it has any lease, of whatever kind: on an offer (``PullSender``)
or on a conversation's blocks, for a read-back (``HistoryHolder``). The holder grants nothing by
name: a reader that asks with the hashes of its own prompt can get no other prompt's blocks, however
old or wrong the hint was that sent it here. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvferry.blocks.lease import LeaseTable, SubjectT
from kvferry.connector.effects import ActivateReader, DeactivateReader
from kvferry.connector.transfers import RoleContext
from kvferry.errors import CapacityError
from kvferry.protocol import messages
from kvferry.protocol.ids import BlockNumber, TransferId


class ActiveReaders:
    """Counts leases by reader, and has the links of those that have any progressed."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._num_leases: Counter[str] = Counter()

    def begin(self, reader: str) -> None:
        """One more lease of ``reader``."""
        self._num_leases[reader] += 1
        if self._num_leases[reader] == 1:
            self._context.emit(ActivateReader(reader))

    def end(self, reader: str) -> None:
        """One lease less."""
        self._num_leases[reader] -= 1
        if self._num_leases[reader] == 0:
            del self._num_leases[reader]
            self._context.emit(DeactivateReader(reader))


class ReaderLeases(LeaseTable[SubjectT]):
    """Leases of one kind: at most one of a reader on a subject, in all a share of the pool each."""

    def __init__(self, context: RoleContext, active: ActiveReaders, max_share: float) -> None:
        max_duration_s = context.config.max_lease_s
        super().__init__(
            context.blocks, context.clock, max_duration_s=max_duration_s, max_share=max_share
        )
        self._context = context
        self._active = active

    def answer(
        self,
        reader: str,
        subject: SubjectT,
        blocks: Sequence[BlockNumber],
        message: messages.Acquire | messages.AcquireHistory,
        partials: tuple[messages.PartialBlock, ...] = (),
    ) -> messages.Granted:
        """Promise ``blocks``, and those of ``partials``, which must have a reference each.

        Raises ``CapacityError`` if the reader's leases would cover too much of the pool.
        """
        leased = [*blocks, *(partial.block for partial in partials)]
        lease = self.grant(reader, subject, leased, message.duration_s)
        self._active.begin(reader)
        duration_s = min(message.duration_s, self._context.config.max_lease_s)
        digests_of = self._context.digests_of if message.want_block_digests else None
        digests = digests_of(lease.blocks) if digests_of is not None else ()
        return messages.Granted(lease.lease_id, duration_s, tuple(blocks), digests, partials)

    def release(self, owner: str, subject: SubjectT) -> bool:
        """End a lease; return whether there was one."""
        was_there = super().release(owner, subject)
        if was_there:
            self._active.end(owner)
        return was_there


class HistoryHolder:
    """All leases of peers that read a conversation back from here, by the reader's own id."""

    def __init__(self, context: RoleContext, active: ActiveReaders) -> None:
        self._context = context
        max_share = context.config.max_history_share
        self._max_blocks = int(max_share * context.blocks.num_blocks)
        self.leases = ReaderLeases[TransferId](context, active, max_share)

    def acquire(
        self, reader: str, message: messages.AcquireHistory
    ) -> messages.Granted | messages.Declined:
        """Answer a reader: a lease on the leading blocks that are here, up to the share's cap.

        A second acquire by the same id replaces the first.
        """
        if len(set(message.block_hashes)) != len(message.block_hashes):
            return messages.decline(messages.DeclineReason.MALFORMED, "a block hash is named twice")
        self._end(reader, message.transfer_id, "replaced")
        blocks = self._context.blocks
        found = blocks.acquire_cached(message.block_hashes[: self._max_blocks])
        partials = self._acquire_partials(message, found)
        held = [*found, *(partial.block for partial in partials)]
        try:
            if len(found) < max(1, message.min_blocks):
                wanted = f"{max(1, message.min_blocks)} of {len(message.block_hashes)} were wanted"
                detail = f"{len(found)} leading blocks are here, at least {wanted}"
                return messages.decline(messages.DeclineReason.GONE, detail)
            partials = partials[: max(0, self.leases.room(reader, found))]
            return self.leases.answer(reader, message.transfer_id, found, message, partials)
        except CapacityError as error:
            return messages.decline(messages.DeclineReason.PRESSURE, str(error))
        finally:
            blocks.drop(held)

    def _acquire_partials(
        self, message: messages.AcquireHistory, found: Sequence[BlockNumber]
    ) -> tuple[messages.PartialBlock, ...]:
        """What may follow the last full block that was found; the reader sees what does."""
        if not message.want_partials or not found:
            return ()
        parent = message.block_hashes[len(found) - 1]
        acquired = self._context.blocks.acquire_partials(parent, messages.MAX_PARTIALS)
        # A reader may ask for anything: also for a partial block's hash, as if it were a full one.
        self._context.blocks.drop([block for _, block in acquired if block in found])
        return tuple(
            messages.PartialBlock(block, content.num_tokens, content.block_hash)
            for content, block in acquired
            if block not in found
        )

    def release(self, reader: str, message: messages.Release) -> bool:
        """The reader is done; return whether it had such a lease."""
        return self._end(reader, message.transfer_id, message.outcome)

    def tick(self) -> None:
        """End the leases whose time is over."""
        for lease in self.leases.past_their_time():
            self._end(lease.owner, lease.subject, "expired")

    def _end(self, reader: str, transfer_id: TransferId, outcome: str) -> bool:
        if not self.leases.release(reader, transfer_id):
            return False
        self._context.count_end("history", outcome)
        return True
