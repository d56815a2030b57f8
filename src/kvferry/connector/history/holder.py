"""The holder's half of a read-back: leases on what block hashes find in this instance's pool.

Grants nothing by name: a reader that asks with the hashes of its own prompt can get no other
prompt's blocks, however old or wrong the hint was that sent it here. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.blocks.lease import LeaseLimits, LeaseTable
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.leases.active_readers import ActiveReaders
from kvferry.connector.machine.effects import CountHistoryEnd, Effect
from kvferry.connector.ports import BlockPort
from kvferry.errors import CapacityError
from kvferry.protocol.ids import BlockNumber, LeaseId, TransferId
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

EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class _ReaderLease:
    """Which lease of which reader; both together name it."""

    reader: str
    transfer_id: TransferId


class HistoryHolder:
    """All leases of peers that read a conversation back from here."""

    def __init__(
        self, config: ExchangeConfig, blocks: BlockPort, serving: ActiveReaders, clock: Clock
    ) -> None:
        self._blocks = blocks
        self._serving = serving
        self._max_lease_s = config.max_lease_s
        self._max_blocks = int(config.max_history_share * blocks.num_blocks)
        limits = LeaseLimits(config.max_lease_s, 0, config.max_history_share)
        self._leases = LeaseTable(blocks, clock, limits)
        self._by_name: dict[_ReaderLease, LeaseId] = {}
        self._name_of: dict[LeaseId, _ReaderLease] = {}
        self.outcomes: Counter[str] = Counter()

    @property
    def num_leases(self) -> int:
        """Leases in force."""
        return self._leases.num_leases

    @property
    def num_blocks_leased(self) -> int:
        """Distinct blocks under such a lease."""
        return self._leases.num_blocks_leased

    def acquire(
        self, reader: str, message: AcquireHistory
    ) -> tuple[Granted | Declined, list[Effect]]:
        """Answer a reader: a lease on the leading blocks that are here, up to the share's cap.

        A second acquire by the same name replaces the first.
        """
        if len(set(message.block_hashes)) != len(message.block_hashes):
            return decline(DeclineReason.MALFORMED, "a block hash is named twice"), []
        name = _ReaderLease(reader, message.transfer_id)
        effects = self._end(name, "replaced")
        found = self._blocks.acquire_cached(message.block_hashes[: self._max_blocks])
        partials = self._acquire_partials(message, found)
        held = [*found, *(partial.block for partial in partials)]
        try:
            if len(found) < max(1, message.min_blocks):
                wanted = f"{max(1, message.min_blocks)} of {len(message.block_hashes)} were wanted"
                detail = f"{len(found)} leading blocks are here, at least {wanted}"
                return decline(DeclineReason.GONE, detail), effects
            partials = partials[: max(0, self._leases.room(reader, found))]
            leased = [*found, *(partial.block for partial in partials)]
            lease = self._leases.grant(reader, leased, message.duration_s)
        except CapacityError as error:
            return decline(DeclineReason.PRESSURE, str(error)), effects
        finally:
            self._blocks.drop(held)
        self._by_name[name] = lease.lease_id
        self._name_of[lease.lease_id] = name
        effects += self._serving.begin(reader)
        duration_s = min(message.duration_s, self._max_lease_s)
        return Granted(lease.lease_id, duration_s, tuple(found), partials=partials), effects

    def _acquire_partials(
        self, message: AcquireHistory, found: Sequence[BlockNumber]
    ) -> tuple[PartialBlock, ...]:
        """What may follow the last full block that was found; the reader sees what does."""
        if not message.want_partials or not found:
            return ()
        parent = message.block_hashes[len(found) - 1]
        acquired = self._blocks.acquire_partials(parent, MAX_PARTIALS)
        # A reader may ask for anything: also for a partial block's hash, as if it were a full one.
        self._blocks.drop([block for _, block in acquired if block in found])
        return tuple(
            PartialBlock(block, content.num_tokens, content.block_hash)
            for content, block in acquired
            if block not in found
        )

    def release(self, reader: str, message: Release) -> list[Effect] | None:
        """The reader is done; None if it has no such lease."""
        name = _ReaderLease(reader, message.transfer_id)
        return self._end(name, message.outcome) if name in self._by_name else None

    def tick(self) -> list[Effect]:
        """End the leases whose time is over."""
        effects: list[Effect] = []
        for lease in self._leases.expire():
            name = self._name_of[lease.lease_id]
            effects += self._end(name, EXPIRED)
        return effects

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do, or None."""
        return self._leases.next_expiry_s()

    def _end(self, name: _ReaderLease, outcome: str) -> list[Effect]:
        lease_id = self._by_name.pop(name, None)
        if lease_id is None:
            return []
        del self._name_of[lease_id]
        self._leases.release(lease_id)
        self.outcomes[outcome] += 1
        return [CountHistoryEnd(outcome), *self._serving.end(name.reader)]
