"""Finished prefills that wait for their receiver: one hold each, together bounded in share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvferry.blocks.lease import LeaseLimits, LeaseTable
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.machine.effects import Effect
from kvferry.connector.ports import BlockPort
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockNumber, LeaseId, TransferId

MakeRoom = Callable[[int], list[Effect]]
"""Gives up oldest holds that nobody uses, worth that many blocks where there are so many."""


class HandoffLeases:
    """The holds of both modes. ``make_room`` is set by the planner, which knows both."""

    def __init__(self, config: ExchangeConfig, blocks: BlockPort, clock: Clock) -> None:
        self._lease_s = config.handoff_lease_s
        self._max_blocks = int(config.max_held_share * blocks.num_blocks)
        limits = LeaseLimits(config.max_lease_s, config.max_renewals, 1.0)
        self._leases = LeaseTable(blocks, clock, limits)
        self._transfer_of: dict[LeaseId, TransferId] = {}
        self._lease_of: dict[TransferId, LeaseId] = {}
        self.make_room: MakeRoom = lambda num_blocks: []

    @property
    def num_blocks(self) -> int:
        """Distinct blocks under a hold."""
        return self._leases.num_blocks_leased

    def __contains__(self, transfer_id: TransferId) -> bool:
        """Return whether ``transfer_id`` has a hold."""
        return transfer_id in self._lease_of

    def take(self, transfer_id: TransferId, blocks: Sequence[BlockNumber]) -> list[Effect]:
        """Hold ``blocks``; what is oldest gives way where the share would be exceeded.

        Raises ``LocalProtocolError`` for a second hold: each would be taken for the other.
        """
        if transfer_id in self._lease_of:
            raise LocalProtocolError(f"transfer id {transfer_id} has a hold already")
        excess = self.num_blocks + len(blocks) - self._max_blocks
        effects = self.make_room(excess) if excess > 0 else []
        lease = self._leases.grant("handoffs", blocks, self._lease_s)
        self._transfer_of[lease.lease_id] = transfer_id
        self._lease_of[transfer_id] = lease.lease_id
        return effects

    def renew(self, transfer_id: TransferId, duration_s: float) -> float:
        """Lengthen a hold; return how long it now lasts. Raises as ``LeaseTable.renew`` does."""
        return self._leases.renew(self._lease_of[transfer_id], duration_s)

    def release(self, transfer_id: TransferId) -> None:
        """End a hold. Safe to repeat."""
        lease_id = self._lease_of.pop(transfer_id, None)
        if lease_id is not None:
            self._leases.release(lease_id)
            del self._transfer_of[lease_id]

    def expire(self) -> list[TransferId]:
        """End the holds that are past their time; return whose they were."""
        expired = [self._transfer_of.pop(lease.lease_id) for lease in self._leases.expire()]
        for transfer_id in expired:
            del self._lease_of[transfer_id]
        return expired

    def next_expiry_s(self) -> float | None:
        """Return when the next hold ends (monotonic seconds), or None."""
        return self._leases.next_expiry_s()
