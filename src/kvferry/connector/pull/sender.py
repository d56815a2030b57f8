"""The sender's half of a pull: offers in hand and their readers' leases.

Decides by ``table.SENDER``; moves nothing itself. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.connector.leases.readers import ActiveReaders, ReaderLeases
from kvferry.connector.machine.effects import CountOfferEnd
from kvferry.connector.ports import PromptIdentity
from kvferry.connector.pull.table import SENDER, OfferAction, OfferEvent, OfferState
from kvferry.connector.transfers.context import RoleContext
from kvferry.connector.transfers.outgoing import End, Outgoing, OutgoingTransfers
from kvferry.errors import CapacityError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import (
    Acquire,
    Declined,
    DeclineReason,
    Granted,
    Release,
    ReleaseOutcome,
    Renew,
    Renewed,
    decline,
)

_EVENT_OF_RELEASE = {
    ReleaseOutcome.READ: OfferEvent.READ,
    ReleaseOutcome.NOT_NEEDED: OfferEvent.NOT_NEEDED,
    ReleaseOutcome.CANCELLED: OfferEvent.CANCELLED,
    ReleaseOutcome.FAILED: OfferEvent.READER_FAILED,
}
_DECLINE_OF_END = {
    OfferEvent.EXPIRED.value: DeclineReason.EXPIRED,
    OfferEvent.PRESSURE.value: DeclineReason.PRESSURE,
}


@dataclass(slots=True, eq=False, kw_only=True)
class Offer(Outgoing):
    """One finished prefill, held for its readers."""

    role: PullSender
    state: OfferState = SENDER.initial
    readers: set[str] = field(default_factory=set)
    """Those with a lease."""

    @property
    def may_give_way(self) -> bool:
        """Whether nobody reads it."""
        return self.state is OfferState.HELD and not self.readers

    def give_way(self) -> None:
        """End it for want of blocks."""
        self.role.step(self, OfferEvent.PRESSURE)

    def expire(self) -> None:
        """Its time is over; a reader's own lease may still run."""
        self.role.step(self, OfferEvent.EXPIRED)


class PullSender:
    """All offers of one instance."""

    def __init__(
        self, context: RoleContext, outgoing: OutgoingTransfers, active: ActiveReaders
    ) -> None:
        self._context = context
        self._outgoing = outgoing
        self.leases = ReaderLeases[Offer](context, active, context.config.max_reader_share)

    def offer(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], prompt: PromptIdentity
    ) -> None:
        """See ``ConnectorPort.offer``. Oldest unread offers give way to a new one."""
        offer = Offer(transfer_id=transfer_id, prompt=prompt, role=self)
        self._outgoing.add(offer, blocks)
        self._outgoing.hold(offer)

    # -- the receiver's messages --------------------------------------------------------------
    def acquire(self, reader: str, message: Acquire) -> Granted | Declined:
        """Answer a reader that wants an offer's blocks."""
        offer = self._outgoing.find(message.transfer_id, Offer)
        if offer is None or offer.state is not OfferState.HELD:
            return self._decline_missing(message.transfer_id)
        refusal = _check(offer, message)
        if refusal is not None:
            return refusal
        answer: list[Granted | Declined] = []
        SENDER.run(
            offer,
            OfferEvent.ACQUIRED,
            lambda *_: answer.append(self._grant(offer, reader, message)),
        )
        return answer[0]

    def renew(self, message: Renew) -> Renewed | Declined:
        """Answer a receiver's heartbeat."""
        offer = self._outgoing.find(message.transfer_id, Offer)
        if offer is None or offer.state is not OfferState.HELD:
            return self._decline_missing(message.transfer_id)
        lasts_s: list[float] = []
        try:
            SENDER.run(
                offer,
                OfferEvent.RENEWED,
                lambda *_: lasts_s.append(self._outgoing.renew(offer, message.duration_s)),
            )
        except CapacityError as error:
            return decline(DeclineReason.PRESSURE, str(error))
        return Renewed(lasts_s[0], True)

    def release(self, offer: Offer, reader: str, message: Release) -> None:
        """Take in that a receiver is done."""
        self.step(offer, _EVENT_OF_RELEASE[message.outcome], reader)

    def tick(self) -> None:
        """Act on the readers' leases whose time is over."""
        for reader, offer in self.leases.take_expired():
            self.step(offer, OfferEvent.READER_EXPIRED, reader)

    # -- decisions ----------------------------------------------------------------------------
    def _decline_missing(self, transfer_id: TransferId) -> Declined:
        end = self._outgoing.end_of(transfer_id)
        reason = _DECLINE_OF_END.get(end.cause, DeclineReason.GONE) if end else DeclineReason.GONE
        ended = f"ended before: {end.cause}" if end else "is not known here"
        return decline(reason, f"transfer id {transfer_id} {ended}")

    def _grant(self, offer: Offer, reader: str, message: Acquire) -> Granted | Declined:
        """A reader's second lease on an offer takes the place of its first."""
        self._release_reader(offer, reader)
        try:
            wanted = offer.blocks[message.first_block :]
            granted = self.leases.grant(reader, offer, wanted, message)
        except CapacityError as error:
            return decline(DeclineReason.PRESSURE, str(error))
        offer.readers.add(reader)
        return granted

    def step(self, offer: Offer, event: OfferEvent, reader: str = "") -> None:
        """Take in an event of one of the offer's readers, or of nobody's."""
        self._context.run(SENDER, offer, event, lambda *what: self._act(offer, reader, *what))
        if offer.state is SENDER.final and not offer.readers:
            self._outgoing.close(offer)

    def _act(self, offer: Offer, reader: str, action: OfferAction, event: OfferEvent) -> None:
        match action:
            case OfferAction.RELEASE_READER:
                self._release_reader(offer, reader)
            case OfferAction.LET_GO:
                self._outgoing.let_go(offer)
            case OfferAction.COUNT_END:
                self._outgoing.remember_end(offer.transfer_id, End(event.value))
                self._context.count("offer", event)
                self._context.emit(CountOfferEnd(event))

    def _release_reader(self, offer: Offer, reader: str) -> None:
        self.leases.release(reader, offer)
        offer.readers.discard(reader)


def _check(offer: Offer, message: Acquire) -> Declined | None:
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
