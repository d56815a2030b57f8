"""The deciding half of the connector: engine's calls and peers' messages in, effects out.

Owns the lock around both roles' tables. No I/O, no tensor, no transport. Every method returns at
once, so a peer is answered while the engine is in a long step or idle.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

from kvferry.blocks.quarantine import Quarantine
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.effects import Effect
from kvferry.connector.events import Event
from kvferry.connector.ports import (
    BlockPort,
    ConnectorSnapshot,
    PromptIdentity,
    ReceiveResult,
)
from kvferry.connector.receiver import ReceivePlanner
from kvferry.connector.sender import OfferPlanner
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import (
    Acquire,
    Declined,
    DeclineReason,
    Granted,
    Release,
    Released,
    Renew,
    Renewed,
    decline,
)
from kvferry.protocol.params import PeerAddress


class Planner:
    """Receives and offers of one instance, behind one lock held for microseconds."""

    def __init__(self, config: ExchangeConfig, blocks: BlockPort, clock: Clock) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._quarantine = Quarantine(blocks, config.max_quarantine_share)
        self._receiver = ReceivePlanner(config, blocks, self._quarantine, clock)
        self._sender = OfferPlanner(config, blocks, clock)

    def begin_receive(
        self, transfer_id: TransferId, peer: PeerAddress, prompt: PromptIdentity
    ) -> list[Effect]:
        """See ``ConnectorPort.begin_receive``."""
        with self._lock:
            return self._receiver.begin(transfer_id, peer, prompt)

    def receive(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], first_block: int
    ) -> list[Effect]:
        """See ``ConnectorPort.receive``."""
        with self._lock:
            return self._receiver.receive(transfer_id, blocks, first_block)

    def end_receive(self, transfer_id: TransferId, *, needed: bool) -> list[Effect]:
        """See ``ConnectorPort.end_receive``."""
        with self._lock:
            return self._receiver.end(transfer_id, needed=needed)

    def take_results(self) -> list[ReceiveResult]:
        """See ``ConnectorPort.take_results``."""
        with self._lock:
            return self._receiver.take_results()

    def offer(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], prompt: PromptIdentity
    ) -> list[Effect]:
        """See ``ConnectorPort.offer``."""
        with self._lock:
            return self._sender.offer(transfer_id, blocks, prompt)

    def withdraw(self, transfer_id: TransferId) -> list[Effect]:
        """See ``ConnectorPort.withdraw``."""
        with self._lock:
            return self._sender.withdraw(transfer_id)

    def give_up_oldest(self, num_blocks: int) -> tuple[int, list[Effect]]:
        """See ``ConnectorPort.give_up_oldest``."""
        with self._lock:
            return self._sender.give_up_oldest(num_blocks)

    def handle(self, event: Event) -> list[Effect]:
        """Take in what the mover reports."""
        with self._lock:
            return self._receiver.handle(event)

    def answer_acquire(
        self, reader: str, message: Acquire
    ) -> tuple[Granted | Declined, list[Effect]]:
        """Answer a reader that shook hands with this epoch."""
        if message.holder_epoch != self._config.epoch:
            return self._decline_epoch(), []
        with self._lock:
            return self._sender.acquire(reader, message)

    def answer_renew(self, message: Renew) -> Renewed | Declined:
        """Answer a heartbeat."""
        if message.holder_epoch != self._config.epoch:
            return self._decline_epoch()
        with self._lock:
            return self._sender.renew(message)

    def answer_release(self, reader: str, message: Release) -> tuple[Released, list[Effect]]:
        """Answer a release; one of an earlier epoch has nothing to release."""
        if message.holder_epoch != self._config.epoch:
            return Released(), []
        with self._lock:
            return self._sender.release(reader, message)

    def tick(self) -> list[Effect]:
        """Act on all deadlines that have passed."""
        with self._lock:
            return self._receiver.tick() + self._sender.tick()

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do (monotonic seconds), or None."""
        with self._lock:
            deadlines = (self._receiver.next_deadline_s(), self._sender.next_deadline_s())
        return min((d for d in deadlines if d is not None), default=None)

    def snapshot(self) -> ConnectorSnapshot:
        """Return counts for metrics and tests."""
        with self._lock:
            outcomes = Counter({f"receive_{k}": v for k, v in self._receiver.outcomes.items()})
            outcomes.update({f"offer_{k}": v for k, v in self._sender.outcomes.items()})
            return ConnectorSnapshot(
                num_handoffs_held=self._sender.num_offers,
                num_blocks_leased=self._sender.num_blocks_leased,
                num_receives=self._receiver.num_receives,
                num_blocks_quarantined=self._quarantine.num_blocks,
                outcomes=dict(outcomes),
            )

    def _decline_epoch(self) -> Declined:
        return decline(DeclineReason.GONE, "this instance has restarted since")
