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
from kvferry.connector.history.holder import HistoryHolder
from kvferry.connector.leases.active_readers import ActiveReaders
from kvferry.connector.leases.handoff import HandoffLeases
from kvferry.connector.machine.effects import Effect
from kvferry.connector.machine.events import AcquireAnswered, Event, PeerLost, ReadEnded, WriteEnded
from kvferry.connector.ports import (
    BlockPort,
    ConnectorSnapshot,
    FirstTokenArrival,
    PrefillEnd,
    PromptIdentity,
    ReceiveResult,
)
from kvferry.connector.pull.receiver import PullReceiver
from kvferry.connector.pull.sender import PullSender
from kvferry.connector.push.early import NOT_PUSHED
from kvferry.connector.push.receiver import PushReceiver
from kvferry.connector.push.sender import PushSender
from kvferry.connector.wish import HistoryWish
from kvferry.errors import RequestError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.messages import (
    Acquire,
    AcquireHistory,
    Declined,
    DeclineReason,
    Granted,
    Register,
    Registered,
    Release,
    Released,
    Renew,
    Renewed,
    decline,
)
from kvferry.protocol.params import Mode, PeerAddress


class Planner:
    """Receives and offers of one instance, behind one lock held for microseconds."""

    def __init__(
        self, config: ExchangeConfig, layout: KVLayout, blocks: BlockPort, clock: Clock
    ) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._quarantine = Quarantine(blocks, config.max_quarantine_share)
        self._receiver = PullReceiver(config, blocks, self._quarantine, clock)
        self._push_receiver = PushReceiver(
            config, blocks, self._quarantine, clock, layout.block_bytes
        )
        self._holds = HandoffLeases(config, blocks, clock)
        self._holds.make_room = lambda num_blocks: self._give_up(num_blocks)[1]
        serving = ActiveReaders()
        self._sender = PullSender(config, blocks, self._holds, serving, clock)
        self._history = HistoryHolder(config, blocks, serving, clock)
        self._push_sender = PushSender(config, layout, blocks, self._holds, clock)

    def begin_receive(
        self,
        transfer_id: TransferId,
        peer: PeerAddress,
        prompt: PromptIdentity,
        mode: Mode = Mode.PULL,
    ) -> list[Effect]:
        """See ``ConnectorPort.begin_receive``."""
        with self._lock:
            if transfer_id in self._receiver or transfer_id in self._push_receiver:
                raise _in_use(f"transfer id {transfer_id} is already being received")
            if mode is Mode.PUSH:
                return self._push_receiver.begin(transfer_id, peer, prompt)
            return self._receiver.begin(transfer_id, peer, prompt)

    def may_receive(self, transfer_id: TransferId, num_blocks: int) -> bool:
        """See ``ConnectorPort.may_receive``."""
        with self._lock:
            return self._push_receiver.may_receive(transfer_id, num_blocks)

    def receive(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], first_block: int
    ) -> list[Effect]:
        """See ``ConnectorPort.receive``."""
        with self._lock:
            if transfer_id in self._push_receiver:
                return self._push_receiver.receive(transfer_id, blocks, first_block)
            return self._receiver.receive(transfer_id, blocks, first_block)

    def read_history(self, peer: PeerAddress, wish: HistoryWish) -> tuple[TransferId, list[Effect]]:
        """See ``ConnectorPort.read_history``."""
        with self._lock:
            return self._receiver.read_history(peer, wish)

    def give_back(self, transfer_id: TransferId) -> tuple[bool, list[Effect]]:
        """See ``ConnectorPort.give_back``."""
        with self._lock:
            return self._push_receiver.give_back(transfer_id)

    def end_receive(self, transfer_id: TransferId, *, needed: bool) -> list[Effect]:
        """See ``ConnectorPort.end_receive``."""
        with self._lock:
            effects = self._push_receiver.end(transfer_id, needed=needed)
            return effects + self._receiver.end(transfer_id, needed=needed)

    def take_results(self) -> list[ReceiveResult]:
        """See ``ConnectorPort.take_results``."""
        with self._lock:
            return self._receiver.take_results() + self._push_receiver.take_results()

    def take_first_tokens(self) -> list[FirstTokenArrival]:
        """See ``ConnectorPort.take_first_tokens``."""
        with self._lock:
            return self._push_receiver.take_first_tokens()

    def begin_send(self, transfer_id: TransferId, prompt: PromptIdentity) -> list[Effect]:
        """See ``ConnectorPort.begin_send``."""
        with self._lock:
            self._require_unused(transfer_id)
            return self._push_sender.begin(transfer_id, prompt)

    def advance_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], num_tokens: int
    ) -> list[Effect]:
        """See ``ConnectorPort.advance_send``."""
        with self._lock:
            return self._push_sender.advance(transfer_id, blocks, num_tokens)

    def pause_send(self, transfer_id: TransferId) -> None:
        """See ``ConnectorPort.pause_send``."""
        with self._lock:
            self._push_sender.pause(transfer_id)

    def complete_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], end: PrefillEnd
    ) -> list[Effect]:
        """See ``ConnectorPort.complete_send``."""
        with self._lock:
            return self._push_sender.complete(transfer_id, blocks, end)

    def is_send_wanted(self, transfer_id: TransferId) -> bool:
        """See ``ConnectorPort.is_send_wanted``."""
        with self._lock:
            return self._push_sender.is_wanted(transfer_id)

    def take_stopped_sends(self) -> list[TransferId]:
        """See ``ConnectorPort.take_stopped_sends``."""
        with self._lock:
            return self._push_sender.take_stopped()

    def offer(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], prompt: PromptIdentity
    ) -> list[Effect]:
        """See ``ConnectorPort.offer``."""
        with self._lock:
            self._require_unused(transfer_id)
            effects = self._push_sender.decline_early(transfer_id)
            return effects + self._sender.offer(transfer_id, blocks, prompt)

    def withdraw(self, transfer_id: TransferId) -> list[Effect]:
        """See ``ConnectorPort.withdraw``."""
        with self._lock:
            if transfer_id in self._sender:
                return self._sender.withdraw(transfer_id)
            return self._push_sender.withdraw(transfer_id)

    def give_up_oldest(self, num_blocks: int) -> tuple[int, list[Effect]]:
        """See ``ConnectorPort.give_up_oldest``."""
        with self._lock:
            return self._give_up(num_blocks)

    def handle(self, event: Event) -> list[Effect]:
        """Take in what the mover reports."""
        with self._lock:
            match event:
                case WriteEnded():
                    return self._push_sender.on_write_ended(event)
                case AcquireAnswered() | ReadEnded():
                    return self._receiver.handle(event)
                case PeerLost():
                    if event.transfer_id in self._push_receiver:
                        return self._push_receiver.handle(event)
                    return self._receiver.handle(event)
                case _:
                    return self._push_receiver.handle(event)

    def answer_acquire(
        self, reader: str, message: Acquire | AcquireHistory
    ) -> tuple[Granted | Declined, list[Effect]]:
        """Answer a reader that shook hands with this epoch."""
        if message.holder_epoch != self._config.epoch:
            return self._decline_epoch(), []
        with self._lock:
            if isinstance(message, AcquireHistory):
                return self._history.acquire(reader, message)
            return self._sender.acquire(reader, message)

    def answer_register(
        self, reader: str, message: Register
    ) -> tuple[Registered | Declined, list[Effect]]:
        """Answer a receiver that registers its blocks."""
        if message.holder_epoch != self._config.epoch:
            return self._decline_epoch(), []
        with self._lock:
            if message.transfer_id in self._sender:
                return decline(DeclineReason.MISMATCH, NOT_PUSHED), []
            return self._push_sender.register(reader, message)

    def answer_renew(self, message: Renew) -> tuple[Renewed | Declined, list[Effect]]:
        """Answer a heartbeat."""
        if message.holder_epoch != self._config.epoch:
            return self._decline_epoch(), []
        with self._lock:
            answer = self._push_sender.renew(message)
            return answer if answer is not None else (self._sender.renew(message), [])

    def answer_release(self, reader: str, message: Release) -> tuple[Released, list[Effect]]:
        """Answer a release; one of an earlier epoch has nothing to release."""
        if message.holder_epoch != self._config.epoch:
            return Released(), []
        with self._lock:
            effects = self._history.release(reader, message)
            if effects is not None:
                return Released(), effects
            if message.transfer_id in self._sender:
                return self._sender.release(reader, message)
            return self._push_sender.release(reader, message)

    def lose_reader(self, reader: str) -> list[Effect]:
        """A reader's link has ended, or is about to be made anew."""
        with self._lock:
            return self._push_sender.lose_reader(reader)

    def tick(self) -> list[Effect]:
        """Act on all deadlines that have passed."""
        with self._lock:
            effects = self._receiver.tick() + self._push_receiver.tick()
            effects += self._sender.tick() + self._push_sender.tick() + self._history.tick()
            for transfer_id in self._holds.expire():
                effects += self._sender.expire(transfer_id) + self._push_sender.expire(transfer_id)
            return effects

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do (monotonic seconds), or None."""
        with self._lock:
            deadlines = (
                self._receiver.next_deadline_s(),
                self._push_receiver.next_deadline_s(),
                self._sender.next_deadline_s(),
                self._push_sender.next_deadline_s(),
                self._history.next_deadline_s(),
                self._holds.next_expiry_s(),
            )
        return min((d for d in deadlines if d is not None), default=None)

    def snapshot(self) -> ConnectorSnapshot:
        """Return counts for metrics and tests."""
        with self._lock:
            received = self._receiver.outcomes + self._push_receiver.outcomes
            ended = self._sender.outcomes + self._push_sender.outcomes
            outcomes = Counter({f"receive_{k}": v for k, v in received.items()})
            outcomes.update({f"offer_{k}": v for k, v in ended.items()})
            outcomes.update({f"history_{k}": v for k, v in self._history.outcomes.items()})
            num_leased = self._sender.num_blocks_leased + self._history.num_blocks_leased
            return ConnectorSnapshot(
                num_handoffs_held=self._sender.num_offers + self._push_sender.num_sends,
                num_blocks_leased=self._holds.num_blocks + num_leased,
                num_history_leases=self._history.num_leases,
                num_receives=self._receiver.num_receives + self._push_receiver.num_receives,
                num_blocks_quarantined=self._quarantine.num_blocks,
                outcomes=dict(outcomes),
            )

    def _require_unused(self, transfer_id: TransferId) -> None:
        """Leases, heartbeats and releases know a handoff by its id alone, whatever its mode."""
        if transfer_id in self._sender or transfer_id in self._push_sender:
            raise _in_use(f"transfer id {transfer_id} was used before")

    def _give_up(self, num_blocks: int) -> tuple[int, list[Effect]]:
        num_freed, effects = self._sender.give_up_oldest(num_blocks)
        more_freed, more_effects = self._push_sender.give_up_oldest(num_blocks - num_freed)
        return num_freed + more_freed, effects + more_effects

    def _decline_epoch(self) -> Declined:
        return decline(DeclineReason.GONE, "this instance has restarted since")


def _in_use(message: str) -> RequestError:
    return RequestError(message, param="kv_transfer_params.transfer_id", code="transfer_id_in_use")
