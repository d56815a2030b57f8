"""The sender's half of a pull: offers in hand and their readers' leases.

Decides by ``table.SENDER``; moves nothing itself. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.connector.leases import ActiveReaders, ReaderLeases
from kvferry.connector.ports import PromptIdentity
from kvferry.connector.pull.table import SENDER, OfferAction, OfferEvent, OfferState
from kvferry.connector.transfers import End, Outgoing, OutgoingTransfers, RoleContext
from kvferry.errors import CapacityError
from kvferry.protocol import messages
from kvferry.protocol.ids import BlockNumber, TransferId

_EVENT_OF_RELEASE = {
    messages.ReleaseOutcome.READ: OfferEvent.READ,
    messages.ReleaseOutcome.NOT_NEEDED: OfferEvent.NOT_NEEDED,
    messages.ReleaseOutcome.CANCELLED: OfferEvent.CANCELLED,
    messages.ReleaseOutcome.FAILED: OfferEvent.READER_FAILED,
}
_DECLINE_OF_END = {
    OfferEvent.EXPIRED.value: messages.DeclineReason.EXPIRED,
    OfferEvent.PRESSURE.value: messages.DeclineReason.PRESSURE,
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
        self._outgoing.begin_lease(offer)

    # -- the receiver's messages --------------------------------------------------------------
    def acquire(
        self, reader: str, message: messages.Acquire
    ) -> messages.Granted | messages.Declined:
        """Answer a reader that wants an offer's blocks."""
        offer = self._outgoing.find(message.transfer_id, Offer)
        if offer is None or offer.state is not OfferState.HELD:
            return self._decline_missing(message.transfer_id)
        refusal = _check(offer, message)
        if refusal is not None:
            return refusal
        answer: list[messages.Granted | messages.Declined] = []
        SENDER.run(
            offer,
            OfferEvent.ACQUIRED,
            lambda *_: answer.append(self._grant(offer, reader, message)),
        )
        return answer[0]

    def renew(self, message: messages.Renew) -> messages.Renewed | messages.Declined:
        """Answer a receiver's heartbeat."""
        offer = self._outgoing.find(message.transfer_id, Offer)
        if offer is None or offer.state is not OfferState.HELD:
            return self._decline_missing(message.transfer_id)
        lasts_s: list[float] = []
        try:
            SENDER.run(
                offer,
                OfferEvent.RENEWED,
                lambda *_: lasts_s.append(self._outgoing.renew_lease(offer, message.duration_s)),
            )
        except CapacityError as error:
            return messages.decline(messages.DeclineReason.PRESSURE, str(error))
        return messages.Renewed(lasts_s[0], True)

    def release(self, offer: Offer, reader: str, message: messages.Release) -> None:
        """Take in that a receiver is done."""
        self.step(offer, _EVENT_OF_RELEASE[message.outcome], reader)

    def tick(self) -> None:
        """Act on the readers' leases whose time is over."""
        for lease in self.leases.past_their_time():
            self.step(lease.subject, OfferEvent.READER_EXPIRED, lease.owner)

    # -- decisions ----------------------------------------------------------------------------
    def _decline_missing(self, transfer_id: TransferId) -> messages.Declined:
        end = self._outgoing.end_of(transfer_id)
        reason = (
            _DECLINE_OF_END.get(end.cause, messages.DeclineReason.GONE)
            if end
            else messages.DeclineReason.GONE
        )
        ended = f"ended before: {end.cause}" if end else "is not known here"
        return messages.decline(reason, f"transfer id {transfer_id} {ended}")

    def _grant(
        self, offer: Offer, reader: str, message: messages.Acquire
    ) -> messages.Granted | messages.Declined:
        """A reader's second lease on an offer takes the place of its first."""
        self._release_reader(offer, reader)
        try:
            wanted = offer.blocks[message.first_block :]
            granted = self.leases.answer(reader, offer, wanted, message)
        except CapacityError as error:
            return messages.decline(messages.DeclineReason.PRESSURE, str(error))
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
                self._context.count_end("offer", event)

    def _release_reader(self, offer: Offer, reader: str) -> None:
        self.leases.release(reader, offer)
        offer.readers.discard(reader)


def _check(offer: Offer, message: messages.Acquire) -> messages.Declined | None:
    if message.num_tokens != offer.prompt.num_tokens:
        return messages.decline(
            messages.DeclineReason.MISMATCH,
            f"the prompt has {offer.prompt.num_tokens} tokens here and {message.num_tokens} there",
        )
    if message.digest != offer.prompt.digest:
        return messages.decline(
            messages.DeclineReason.MISMATCH,
            "the prompt's tokens, salt or adapter differ on both sides",
        )
    if message.first_block >= len(offer.blocks):
        return messages.decline(
            messages.DeclineReason.MISMATCH, f"there is no block {message.first_block}"
        )
    return None
