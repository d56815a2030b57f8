"""The deciding half of the connector: engine's calls, peers' messages and mover's events in.

One lock is around all roles, and one queue keeps what they decide in order. Executed out of order,
a link's stop could come before its start, and the link would be progressed for ever. No I/O, no
tensor, no transport. Every method returns at once, so a peer is answered while the engine is in a
long step or idle.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig, require_allowed
from kvferry.connector.effects import ContactPeer, Effect, Notify, NotifyEngine
from kvferry.connector.events import Event, WriteEnded
from kvferry.connector.leases import ActiveReaders, HistoryHolder
from kvferry.connector.ports import (
    BlockPort,
    ConnectorSnapshot,
    FirstTokenArrival,
    HandoffOffer,
    HistoryRequest,
    LinkCounts,
    PrefillEnd,
    PromptIdentity,
    ReceiveResult,
)
from kvferry.connector.pull.receiver import PullEvent, PullReceive, PullReceiver
from kvferry.connector.pull.sender import Offer, PullSender
from kvferry.connector.pull.table import OfferEvent
from kvferry.connector.push.early_registrations import NOT_PUSHED
from kvferry.connector.push.receiver import IncomingPush, PushEvent, PushReceiver
from kvferry.connector.push.sender import OutgoingPush, PushSender
from kvferry.connector.transfers import (
    BlockDigests,
    IncomingTransfers,
    OutgoingTransfers,
    RoleContext,
    transfer_id_in_use,
)
from kvferry.errors import LocalProtocolError, RequestError
from kvferry.protocol import messages
from kvferry.protocol.compatibility import KVLayout
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.params import Mode, PeerAddress


class Planner:
    """All transfers of one instance. Implements ``ConnectorPort``; the rest is the mover's."""

    def __init__(  # noqa: PLR0913 - what an exchange is made of, by name
        self,
        config: ExchangeConfig,
        layout: KVLayout,
        blocks: BlockPort,
        clock: Clock,
        *,
        transport: str = "",
        digests_of: BlockDigests | None = None,
    ) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._context = RoleContext(config, layout, blocks, clock, transport, digests_of)
        self._incoming = IncomingTransfers(self._context)
        self._outgoing = OutgoingTransfers(self._context)
        active = ActiveReaders(self._context)
        self._pull_receiver = PullReceiver(self._context, self._incoming)
        self._push_receiver = PushReceiver(self._context, self._incoming)
        self._pull_sender = PullSender(self._context, self._outgoing, active)
        self._push_sender = PushSender(self._context, self._outgoing)
        self._history = HistoryHolder(self._context, active)
        self.address = PeerAddress(config.instance_id, config.epoch, "")
        """Of this instance; its control address is known once the port is open."""
        self.wake: Callable[[], None] = lambda: None
        """Called after each call of an engine: there may be something to do."""
        self.count_links: Callable[[], LinkCounts] = LinkCounts

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Another thread than the mover's decides."""
        try:
            with self._lock:
                yield
        finally:
            # Also where nothing was decided: a deadline may have come nearer.
            self.wake()

    # -- receiver (decode) --------------------------------------------------------------------
    def begin_receive(
        self,
        transfer_id: TransferId,
        peer: PeerAddress,
        prompt: PromptIdentity,
        *,
        mode: Mode = Mode.PULL,
    ) -> None:
        """See ``ConnectorPort``. Raises ``RequestError`` for an address that is not allowed, and
        where this instance would wait for itself to push."""
        require_allowed(self._config, peer)
        if mode is Mode.PUSH:
            self._require_another(peer, "peer", "is the router's --control right?")
        with self._deciding():
            role = self._push_receiver if mode is Mode.PUSH else self._pull_receiver
            role.begin(transfer_id, peer, prompt)

    def may_receive(self, transfer_id: TransferId, num_blocks: int) -> bool:
        """See ``ConnectorPort``."""
        with self._lock:
            transfer = self._incoming.get(transfer_id)
            if not isinstance(transfer, IncomingPush):
                return True
            return self._push_receiver.may_receive(transfer, num_blocks)

    def receive(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], first_block: int
    ) -> None:
        """See ``ConnectorPort``."""
        with self._deciding():
            match self._incoming.get(transfer_id):
                case PullReceive() as receive:
                    self._pull_receiver.receive(receive, blocks, first_block)
                case IncomingPush() as push:
                    self._push_receiver.receive(push, blocks, first_block)
                case _:
                    raise LocalProtocolError(f"receive of {transfer_id} was not begun")

    def give_back(self, transfer_id: TransferId) -> bool:
        """See ``ConnectorPort``."""
        with self._deciding():
            push = self._incoming.get(transfer_id)
            return isinstance(push, IncomingPush) and self._push_receiver.give_back(push)

    def end_receive(self, transfer_id: TransferId, *, needed: bool) -> None:
        """See ``ConnectorPort``."""
        with self._deciding():
            self._incoming.discard_results(transfer_id)
            match self._incoming.get(transfer_id):
                case PullReceive() as receive:
                    self._pull_receiver.end(receive, needed=needed)
                case IncomingPush() as push:
                    self._push_receiver.end(push, needed=needed)

    def take_results(self) -> list[ReceiveResult]:
        """See ``ConnectorPort``."""
        with self._lock:
            return self._incoming.take_results()

    def take_first_tokens(self) -> list[FirstTokenArrival]:
        """See ``ConnectorPort``."""
        with self._lock:
            return self._incoming.take_first_tokens()

    # -- reader of a history (prefill) --------------------------------------------------------
    def contact(self, peer: PeerAddress) -> None:
        """See ``ConnectorPort``."""
        self._require_holder(peer)
        with self._deciding():
            self._context.emit(ContactPeer(peer))

    def read_history(self, peer: PeerAddress, request: HistoryRequest) -> TransferId:
        """See ``ConnectorPort``."""
        self._require_holder(peer)
        with self._deciding():
            return self._pull_receiver.read_history(peer, request)

    # -- sender (prefill) ---------------------------------------------------------------------
    def begin_send(self, transfer_id: TransferId, prompt: PromptIdentity) -> None:
        """See ``ConnectorPort``."""
        with self._deciding():
            self._require_not_refused(transfer_id)
            self._push_sender.begin(transfer_id, prompt)

    def advance_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], num_tokens: int
    ) -> None:
        """See ``ConnectorPort``."""
        with self._deciding():
            push = self._outgoing.find(transfer_id, OutgoingPush)
            if push is not None:
                self._push_sender.advance(push, blocks, num_tokens)

    def pause_send(self, transfer_id: TransferId) -> None:
        """See ``ConnectorPort``."""
        with self._deciding():
            push = self._outgoing.find(transfer_id, OutgoingPush)
            if push is not None:
                self._push_sender.pause(push)

    def complete_send(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], end: PrefillEnd
    ) -> HandoffOffer:
        """See ``ConnectorPort``."""
        with self._deciding():
            push = self._outgoing.find(transfer_id, OutgoingPush)
            if push is not None:
                self._push_sender.complete(push, blocks, end)
            return self._offer()

    def is_send_wanted(self, transfer_id: TransferId) -> bool:
        """See ``ConnectorPort``."""
        with self._lock:
            return self._push_sender.early_registrations.is_wanted(transfer_id)

    def take_stopped_sends(self) -> list[TransferId]:
        """See ``ConnectorPort``."""
        with self._lock:
            return self._push_sender.take_stopped()

    def offer(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], prompt: PromptIdentity
    ) -> HandoffOffer:
        """See ``ConnectorPort``."""
        with self._deciding():
            self._require_not_refused(transfer_id)
            self._pull_sender.offer(transfer_id, blocks, prompt)
            self._push_sender.early_registrations.decline(transfer_id, NOT_PUSHED)
            return self._offer()

    def withdraw(self, transfer_id: TransferId) -> None:
        """See ``ConnectorPort``."""
        with self._deciding():
            offer = self._outgoing.find(transfer_id, Offer)
            if offer is not None:
                self._pull_sender.step(offer, OfferEvent.WITHDRAWN)
            else:
                self._push_sender.withdraw(transfer_id)

    def give_up_oldest(self, num_blocks: int) -> int:
        """See ``ConnectorPort``."""
        with self._deciding():
            return self._outgoing.give_up_oldest(num_blocks)

    def snapshot(self) -> ConnectorSnapshot:
        """See ``ConnectorPort``."""
        links = self.count_links()
        with self._lock:
            num_blocks_read = self._pull_sender.leases.num_blocks_leased
            num_blocks_read += self._history.leases.num_blocks_leased
            return ConnectorSnapshot(
                num_handoffs_held=len(self._outgoing) + len(self._push_sender.early_registrations),
                num_blocks_leased=self._outgoing.num_blocks_leased + num_blocks_read,
                num_history_leases=self._history.leases.num_leases,
                num_receives=len(self._incoming),
                num_blocks_quarantined=self._incoming.num_blocks_quarantined,
                num_peers_resting=links.num_peers_resting,
                num_links_served=links.num_active,
                outcomes=dict(self._context.outcomes),
            )

    def ends_of_receives(self) -> dict[str, int]:
        """Return how many receives have ended, by outcome."""
        with self._lock:
            outcomes = self._context.outcomes
            prefix = "receive_"
            return {k.removeprefix(prefix): n for k, n in outcomes.items() if k.startswith(prefix)}

    # -- the mover's events -------------------------------------------------------------------
    def handle(self, event: Event) -> None:
        """Take in what the mover reports. What is of a transfer that is closed changes nothing."""
        with self._lock:
            if isinstance(event, WriteEnded):
                self._push_sender.on_write_ended(event)
                return
            match self._incoming.get(event.transfer_id):
                case PullReceive() as receive if isinstance(event, PullEvent):
                    self._pull_receiver.handle(receive, event)
                case IncomingPush() as push if isinstance(event, PushEvent):
                    self._push_receiver.handle(push, event)

    def take_effect(self) -> Effect | None:
        """Take out the oldest decision that was not executed yet; None if there is none."""
        # Appending and taking out at the other end need no lock.
        return self._context.effects.popleft() if self._context.effects else None

    @property
    def has_effects(self) -> bool:
        """Whether something is decided and not executed yet."""
        return bool(self._context.effects)

    def tick(self) -> None:
        """Act on all deadlines that have passed."""
        with self._lock:
            for role in (self._pull_receiver, self._push_receiver):
                role.tick()
            for sender in (self._pull_sender, self._push_sender, self._history):
                sender.tick()
            self._outgoing.expire()

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do (monotonic seconds), or None."""
        with self._lock:
            deadlines = (
                self._pull_receiver.next_deadline_s(),
                self._push_receiver.next_deadline_s(),
                self._pull_sender.leases.next_expiry_s(),
                self._push_sender.next_deadline_s(),
                self._history.leases.next_expiry_s(),
                self._outgoing.next_expiry_s(),
            )
        return min((d for d in deadlines if d is not None), default=None)

    # -- the peers' messages ------------------------------------------------------------------
    def answer(self, reader: str, message: messages.Asked) -> messages.Answer:
        """Answer a reader that shook hands with this epoch."""
        if message.holder_epoch != self._config.epoch:
            # What an earlier start has granted does not exist: there is nothing to release.
            is_release = isinstance(message, messages.Release)
            gone = messages.decline(
                messages.DeclineReason.GONE, "this instance has restarted since"
            )
            return messages.Released() if is_release else gone
        with self._lock:
            match message:
                case messages.Acquire():
                    return self._pull_sender.acquire(reader, message)
                case messages.AcquireHistory():
                    return self._history.acquire(reader, message)
                case messages.Register():
                    return self._register(reader, message)
                case messages.Renew():
                    return self._renew(message)
                case messages.Release():
                    return self._release(reader, message)

    def lose_reader(self, reader: str) -> None:
        """A reader's link has ended, or is about to be made anew."""
        with self._lock:
            self._push_sender.lose_reader(reader)

    def _register(
        self, reader: str, message: messages.Register
    ) -> messages.Registered | messages.Declined:
        if self._outgoing.find(message.transfer_id, Offer) is not None:
            return messages.decline(messages.DeclineReason.MISMATCH, NOT_PUSHED)
        return self._push_sender.register(reader, message)

    def _renew(self, message: messages.Renew) -> messages.Renewed | messages.Declined:
        transfer_id = message.transfer_id
        end = self._outgoing.end_of(transfer_id)
        notice = (
            self._push_sender.early_registrations.refusal(transfer_id)
            if end is None
            else end.notice
        )
        if notice is not None:
            self._context.emit(Notify(transfer_id, notice))
            return messages.Renewed(0.0, True)
        push = self._outgoing.find(transfer_id, OutgoingPush)
        if push is not None:
            return self._push_sender.renew(push, message)
        if transfer_id in self._push_sender.early_registrations:
            return messages.Renewed(message.duration_s)
        return self._pull_sender.renew(message)

    def _release(self, reader: str, message: messages.Release) -> messages.Released:
        transfer_id = message.transfer_id
        if self._history.release(reader, message):
            return messages.Released()
        offer = self._outgoing.find(transfer_id, Offer)
        if offer is not None:
            self._pull_sender.release(offer, reader, message)
            return messages.Released()
        push = self._outgoing.find(transfer_id, OutgoingPush)
        if push is not None:
            return self._push_sender.release(push, reader, message)
        is_unknown = self._outgoing.end_of(transfer_id) is None
        if is_unknown and self._push_sender.early_registrations.withdraw(transfer_id, reader):
            self._context.emit(NotifyEngine())
        return messages.Released()

    # -- inside -------------------------------------------------------------------------------
    def _offer(self) -> HandoffOffer:
        return HandoffOffer(self.address, self._config.handoff_lease_s)

    def _require_not_refused(self, transfer_id: TransferId) -> None:
        if self._push_sender.early_registrations.refusal(transfer_id) is not None:
            raise transfer_id_in_use(f"transfer id {transfer_id} was withdrawn before")

    def _require_holder(self, peer: PeerAddress) -> None:
        require_allowed(self._config, peer)
        self._require_another(peer, "history", "it holds its own history anyway")

    def _require_another(self, peer: PeerAddress, param: str, advice: str) -> None:
        if peer.instance_id == self._config.instance_id:
            raise RequestError(
                f"{peer.instance_id} is this instance itself: {advice}",
                param=f"kv_transfer_params.{param}",
                code="invalid_value",
            )
