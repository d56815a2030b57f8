"""The holder's half of a read-back: leases on what block hashes find in this instance's pool.

Grants nothing by name: a reader that asks with the hashes of its own prompt can get no other
prompt's blocks, however old or wrong the hint was that sent it here. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvferry.connector.leases.readers import ActiveReaders, ReaderLeases
from kvferry.connector.machine.effects import CountHistoryEnd
from kvferry.connector.transfers.context import RoleContext
from kvferry.errors import CapacityError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import (
    MAX_PARTIALS,
    AcquireHistory,
    Declined,
    DeclineReason,
    Granted,
    PartialBlock,
    Release,
    decline,
)


class HistoryHolder:
    """All leases of peers that read a conversation back from here, by the reader's own id."""

    def __init__(self, context: RoleContext, active: ActiveReaders) -> None:
        self._context = context
        max_share = context.config.max_history_share
        self._max_blocks = int(max_share * context.blocks.num_blocks)
        self.leases = ReaderLeases[TransferId](context, active, max_share)

    def acquire(self, reader: str, message: AcquireHistory) -> Granted | Declined:
        """Answer a reader: a lease on the leading blocks that are here, up to the share's cap.

        A second acquire by the same id replaces the first.
        """
        if len(set(message.block_hashes)) != len(message.block_hashes):
            return decline(DeclineReason.MALFORMED, "a block hash is named twice")
        self._end(reader, message.transfer_id, "replaced")
        blocks = self._context.blocks
        found = blocks.acquire_cached(message.block_hashes[: self._max_blocks])
        partials = self._acquire_partials(message, found)
        held = [*found, *(partial.block for partial in partials)]
        try:
            if len(found) < max(1, message.min_blocks):
                wanted = f"{max(1, message.min_blocks)} of {len(message.block_hashes)} were wanted"
                detail = f"{len(found)} leading blocks are here, at least {wanted}"
                return decline(DeclineReason.GONE, detail)
            partials = partials[: max(0, self.leases.room(reader, found))]
            return self.leases.grant(reader, message.transfer_id, found, message, partials)
        except CapacityError as error:
            return decline(DeclineReason.PRESSURE, str(error))
        finally:
            blocks.drop(held)

    def _acquire_partials(
        self, message: AcquireHistory, found: Sequence[BlockNumber]
    ) -> tuple[PartialBlock, ...]:
        """What may follow the last full block that was found; the reader sees what does."""
        if not message.want_partials or not found:
            return ()
        parent = message.block_hashes[len(found) - 1]
        acquired = self._context.blocks.acquire_partials(parent, MAX_PARTIALS)
        # A reader may ask for anything: also for a partial block's hash, as if it were a full one.
        self._context.blocks.drop([block for _, block in acquired if block in found])
        return tuple(
            PartialBlock(block, content.num_tokens, content.block_hash)
            for content, block in acquired
            if block not in found
        )

    def release(self, reader: str, message: Release) -> bool:
        """The reader is done; return whether it had such a lease."""
        return self._end(reader, message.transfer_id, message.outcome)

    def tick(self) -> None:
        """End the leases whose time is over."""
        for reader, transfer_id in self.leases.take_expired():
            self._end(reader, transfer_id, "expired")

    def _end(self, reader: str, transfer_id: TransferId, outcome: str) -> bool:
        if not self.leases.release(reader, transfer_id):
            return False
        self._context.count("history", outcome)
        self._context.emit(CountHistoryEnd(outcome))
        return True
