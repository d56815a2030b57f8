"""The sender's half of the planner: offers in hand, their holds, their readers' leases.

Decides by the table in ``pull``; moves nothing itself. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.blocks.lease import Lease, LeaseLimits, LeaseTable
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.leases.active_readers import ActiveReaders
from kvferry.connector.leases.handoff import HandoffLeases
from kvferry.connector.machine.effects import CountOfferEnd, Effect
from kvferry.connector.ports import BlockPort, PromptIdentity
from kvferry.connector.pull.table import SENDER, OfferAction, OfferEvent, OfferState
from kvferry.errors import CapacityError, FerryError
from kvferry.protocol.ids import BlockNumber, LeaseId, TransferId
from kvferry.protocol.messages import (
    Acquire,
    Declined,
    DeclineReason,
    Granted,
    Release,
    Released,
    ReleaseOutcome,
    Renew,
    Renewed,
    decline,
)

MAX_REMEMBERED_ENDS = 4096

_EVENT_OF_RELEASE = {
    ReleaseOutcome.READ: OfferEvent.READ,
    ReleaseOutcome.NOT_NEEDED: OfferEvent.NOT_NEEDED,
    ReleaseOutcome.CANCELLED: OfferEvent.CANCELLED,
    ReleaseOutcome.FAILED: OfferEvent.READER_FAILED,
}

_DECLINE_OF_END = {
    OfferEvent.EXPIRED: DeclineReason.EXPIRED,
    OfferEvent.PRESSURE: DeclineReason.PRESSURE,
}


@dataclass(slots=True)
class _Offer:
    """One finished prefill, held for its readers."""

    transfer_id: TransferId
    prompt: PromptIdentity
    blocks: tuple[BlockNumber, ...]
    state: OfferState = SENDER.initial
    readers: dict[str, LeaseId] = field(default_factory=dict)


class PullSender:
    """All offers of one instance."""

    def __init__(
        self,
        config: ExchangeConfig,
        blocks: BlockPort,
        holds: HandoffLeases,
        serving: ActiveReaders,
        clock: Clock,
    ) -> None:
        self._config = config
        self._holds = holds
        self._serving = serving
        limits = LeaseLimits(config.max_lease_s, config.max_renewals, config.max_reader_share)
        self._leases = LeaseTable(blocks, clock, limits)
        self._offers: OrderedDict[TransferId, _Offer] = OrderedDict()
        self._transfer_of_lease: dict[LeaseId, TransferId] = {}
        self._ends: OrderedDict[TransferId, OfferEvent] = OrderedDict()
        self.outcomes: Counter[str] = Counter()

    def __contains__(self, transfer_id: TransferId) -> bool:
        """Return whether ``transfer_id`` is, or was lately, an offer."""
        return transfer_id in self._offers or transfer_id in self._ends

    @property
    def num_offers(self) -> int:
        """Offers held or still being read."""
        return len(self._offers)

    @property
    def num_blocks_leased(self) -> int:
        """Blocks under a reader's lease."""
        return self._leases.num_blocks_leased

    def offer(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], prompt: PromptIdentity
    ) -> list[Effect]:
        """See ``ConnectorPort.offer``; the planner has checked that the id is free. Oldest unread
        offers give way to a new one."""
        effects = self._holds.take(transfer_id, blocks)
        self._offers[transfer_id] = _Offer(transfer_id, prompt, tuple(blocks))
        return effects

    def withdraw(self, transfer_id: TransferId) -> list[Effect]:
        """See ``ConnectorPort.withdraw``."""
        offer = self._offers.get(transfer_id)
        return self._step(offer, OfferEvent.WITHDRAWN) if offer else []

    def give_up_oldest(self, num_blocks: int) -> tuple[int, list[Effect]]:
        """See ``ConnectorPort.give_up_oldest``; also returns what is to be done."""
        effects: list[Effect] = []
        num_freed = 0
        for offer in list(self._offers.values()):
            if num_freed >= num_blocks:
                break
            if offer.state is OfferState.HELD and not offer.readers:
                num_freed += len(offer.blocks)
                effects += self._step(offer, OfferEvent.PRESSURE)
        return num_freed, effects

    def acquire(self, reader: str, message: Acquire) -> tuple[Granted | Declined, list[Effect]]:
        """Answer a reader that wants an offer's blocks."""
        offer = self._offers.get(message.transfer_id)
        if offer is None or offer.state is not OfferState.HELD:
            return self._decline_missing(message.transfer_id), []
        refusal = _check(offer, message)
        if refusal is not None:
            return refusal, []
        wanted = offer.blocks[message.first_block :]
        effects = self._release_reader(offer, reader)
        try:
            lease = self._leases.grant(reader, wanted, message.duration_s)
        except CapacityError as error:
            return decline(DeclineReason.PRESSURE, str(error)), effects
        offer.readers[reader] = lease.lease_id
        self._transfer_of_lease[lease.lease_id] = offer.transfer_id
        effects += self._serving.begin(reader)
        duration_s = min(message.duration_s, self._config.max_lease_s)
        return Granted(lease.lease_id, duration_s, wanted), effects

    def renew(self, message: Renew) -> Renewed | Declined:
        """Answer a receiver's heartbeat."""
        offer = self._offers.get(message.transfer_id)
        if offer is None or offer.state is not OfferState.HELD:
            return self._decline_missing(message.transfer_id)
        try:
            return Renewed(self._holds.renew(offer.transfer_id, message.duration_s), True)
        except FerryError as error:
            return decline(DeclineReason.PRESSURE, str(error))

    def release(self, reader: str, message: Release) -> tuple[Released, list[Effect]]:
        """Take in that a receiver is done."""
        offer = self._offers.get(message.transfer_id)
        if offer is None:
            return Released(), []
        return Released(), self._step(offer, _EVENT_OF_RELEASE[message.outcome], reader)

    def tick(self) -> list[Effect]:
        """Act on the readers' leases whose time is over."""
        effects: list[Effect] = []
        for lease in self._leases.expire():
            offer = self._offer_of(lease)
            if offer is not None:
                effects += self._step(offer, OfferEvent.READER_EXPIRED, lease.owner)
        return effects

    def expire(self, transfer_id: TransferId) -> list[Effect]:
        """The hold of ``transfer_id`` is past its time."""
        offer = self._offers.get(transfer_id)
        return self._step(offer, OfferEvent.EXPIRED) if offer is not None else []

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do, or None."""
        return self._leases.next_expiry_s()

    def _offer_of(self, lease: Lease) -> _Offer | None:
        transfer_id = self._transfer_of_lease.get(lease.lease_id)
        return self._offers.get(transfer_id) if transfer_id is not None else None

    def _decline_missing(self, transfer_id: TransferId) -> Declined:
        end = self._ends.get(transfer_id)
        reason = DeclineReason.GONE if end is None else _DECLINE_OF_END.get(end, DeclineReason.GONE)
        ended = f"ended before: {end}" if end else "is not known here"
        return Declined(reason, f"transfer id {transfer_id} {ended}")

    def _step(self, offer: _Offer, event: OfferEvent, reader: str = "") -> list[Effect]:
        rule = SENDER.step(offer.state, event)
        was_held = offer.state is OfferState.HELD
        offer.state = rule.next_state
        effects: list[Effect] = []
        if was_held and offer.state is OfferState.CLOSED:
            self._remember_end(offer.transfer_id, event)
            effects.append(CountOfferEnd(event))
        for action in rule.actions:
            match action:
                case OfferAction.RELEASE_READER:
                    effects += self._release_reader(offer, reader)
                case OfferAction.RELEASE_HOLD:
                    self._holds.release(offer.transfer_id)
                case OfferAction.GRANT | OfferAction.EXTEND_HOLD:
                    pass  # the answers to these two carry data: ``acquire`` and ``renew`` do them
        if offer.state is OfferState.CLOSED and not offer.readers:
            self._offers.pop(offer.transfer_id, None)
        return effects

    def _release_reader(self, offer: _Offer, reader: str) -> list[Effect]:
        lease_id = offer.readers.pop(reader, None)
        if lease_id is None:
            return []
        self._leases.release(lease_id)
        self._transfer_of_lease.pop(lease_id, None)
        return self._serving.end(reader)

    def _remember_end(self, transfer_id: TransferId, event: OfferEvent) -> None:
        self.outcomes[event] += 1
        self._ends[transfer_id] = event
        while len(self._ends) > MAX_REMEMBERED_ENDS:
            self._ends.popitem(last=False)


def _check(offer: _Offer, message: Acquire) -> Declined | None:
    if message.num_tokens != offer.prompt.num_tokens:
        return decline(
            DeclineReason.MISMATCH,
            f"the prompt has {offer.prompt.num_tokens} tokens here and {message.num_tokens} there",
        )
    if message.digest != offer.prompt.digest:
        return decline(
            DeclineReason.MISMATCH, "the prompt's tokens, salt or adapter differ on both sides"
        )
    if message.first_block >= len(offer.blocks):
        return decline(DeclineReason.MISMATCH, f"there is no block {message.first_block}")
    return None
