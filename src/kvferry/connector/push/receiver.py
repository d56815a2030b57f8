"""The receiver's half of push: which blocks are registered, what has come, what is in quarantine.

Decides by ``table.PUSH_RECEIVER``; moves nothing itself. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from kvferry.connector.effects import (
    ContactPeer,
    DisconnectPeer,
    NotifyEngine,
    Send,
    StartProgress,
    StopProgress,
)
from kvferry.connector.events import (
    OUTCOME_OF_DECLINE,
    OUTCOME_OF_FAILURE,
    Noticed,
    PeerLost,
    PeerQuiet,
    RegisterAnswered,
    ReleaseAnswered,
    RenewAnswered,
)
from kvferry.connector.ports import PrefillEnd, PromptIdentity, ReceiveOutcome
from kvferry.connector.push.table import (
    ALL_GENERATIONS,
    PUSH_RECEIVER,
    IncomingAction,
    IncomingEvent,
    IncomingState,
)
from kvferry.connector.transfers import Incoming, IncomingTransfers, RoleContext
from kvferry.errors import LocalProtocolError
from kvferry.protocol import messages
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.params import Mode, PeerAddress

PushEvent = RegisterAnswered | RenewAnswered | ReleaseAnswered | Noticed | PeerQuiet | PeerLost

_EPOCH_BITS_NOT_IN_GENERATION = 23
"""Dropped from an epoch's 62 bits, which leaves room to count registrations on from the rest."""
_RELEASE_OUTCOME = {
    IncomingEvent.WRITTEN: messages.ReleaseOutcome.READ,
    IncomingEvent.NOT_NEEDED: messages.ReleaseOutcome.NOT_NEEDED,
    IncomingEvent.CANCELLED: messages.ReleaseOutcome.CANCELLED,
}


@dataclass(slots=True, eq=False, kw_only=True)
class IncomingPush(Incoming):
    """One push that is being received. ``generation`` names its last registration."""

    prompt: PromptIdentity
    wait_deadline_s: float
    """Without blocks it waits until then, for prefill or for its turn."""
    next_heartbeat_s: float
    state: IncomingState = PUSH_RECEIVER.initial
    generation: int = -1
    answered_generation: int = -1
    """The last one that the sender has answered. What it says of the whole push may not concern
    later ones, of which it may not know yet."""
    quiet_generations: frozenset[int] = frozenset()
    """Generations in quarantine that the last message has proven quiet."""
    is_known: bool = False
    """The sender has answered for this transfer before: if it no longer does, it is gone."""
    is_admitted: bool = False
    end: PrefillEnd | None = None

    @property
    def is_unanswered(self) -> bool:
        """Whether the sender may still get to know of the current blocks."""
        is_filling = self.state is IncomingState.FILLING
        return is_filling and self.answered_generation < self.generation

    def quarantined_up_to(self, generation: int) -> frozenset[int]:
        """Return which in quarantine are not later ones than ``generation``."""
        return frozenset(g for g in self.quarantined if g <= generation)

    @property
    def is_waiting_for_prefill(self) -> bool:
        """Whether blocks are registered, and prefill may not have been admitted yet."""
        return self.state is IncomingState.FILLING and not self.is_admitted


class PushReceiver:
    """All pushes that this instance receives."""

    def __init__(self, context: RoleContext, incoming: IncomingTransfers) -> None:
        self._context = context
        self._config = context.config
        self._incoming = incoming
        self._max_registered = int(self._config.max_registered_share * context.blocks.num_blocks)
        # Counted on from a number of this start's own: no two registrations share one, not even
        # those of two instances under one transfer id.
        self._next_generation = self._config.epoch >> _EPOCH_BITS_NOT_IN_GENERATION
        self._first_generation = self._next_generation

    # -- the engine's calls -------------------------------------------------------------------
    def begin(self, transfer_id: TransferId, peer: PeerAddress, prompt: PromptIdentity) -> None:
        """See ``ConnectorPort.begin_receive``."""
        now_s = self._context.now_s()
        # The first wait is for prefill.
        deadline_s = now_s + self._config.prefill_timeout_s
        push = IncomingPush(
            transfer_id=transfer_id,
            peer=peer,
            mode=Mode.PUSH,
            prompt=prompt,
            deadline_s=deadline_s,
            wait_deadline_s=deadline_s,
            next_heartbeat_s=now_s + self._config.push_heartbeat_s,
        )
        self._incoming.add(push)
        # The first beat at once: it tells the sender where to send its notices.
        self._context.emit(ContactPeer(peer))
        self._incoming.send_renew(push)

    def may_receive(self, push: IncomingPush, num_blocks: int) -> bool:
        """See ``ConnectorPort.may_receive``."""
        if push.is_admitted:
            return True
        room = self._max_registered - num_blocks
        return room >= 0 and room >= sum(
            len(p.blocks) for p in self._incoming.of_kind(IncomingPush) if p.is_waiting_for_prefill
        )

    def receive(self, push: IncomingPush, blocks: Sequence[BlockNumber], first_block: int) -> None:
        """See ``ConnectorPort.receive``."""
        if push.state is not IncomingState.ANNOUNCED:
            raise LocalProtocolError(f"receive of {push.transfer_id} is under way, or has ended")
        if self._incoming.is_closed_to(push):
            self._step(push, IncomingEvent.DEADLINE)
            return
        self._incoming.refer(push, blocks)
        push.first_block, push.started_s = first_block, None
        push.generation = self._next_generation
        self._next_generation += 1
        if push.end is not None:
            push.deadline_s = self._context.now_s() + self._config.receive_timeout_s
        self._step(push, IncomingEvent.BLOCKS_GIVEN)

    def give_back(self, push: IncomingPush) -> bool:
        """See ``ConnectorPort.give_back``."""
        if push.state is not IncomingState.FILLING:
            return False
        push.deadline_s = push.wait_deadline_s
        self._step(push, IncomingEvent.GIVEN_BACK)
        return True

    def end(self, push: IncomingPush, *, needed: bool) -> None:
        """See ``ConnectorPort.end_receive``."""
        self._step(push, IncomingEvent.CANCELLED if needed else IncomingEvent.NOT_NEEDED)

    # -- the mover's events -------------------------------------------------------------------
    def handle(self, push: IncomingPush, event: PushEvent) -> None:
        """Take in what the mover reports of a push."""
        match event:
            case RegisterAnswered():
                self._on_registration_answered(push, event)
            case RenewAnswered():
                self._on_heartbeat_answered(push, event)
            case ReleaseAnswered():
                if event.is_quiet:
                    self._on_quiet(push, push.answered_generation)
            case PeerQuiet():
                quiet = push.quarantined_up_to(event.generation)
                self._leave(push, {g for g in quiet if g >= event.first_generation})
            case PeerLost():
                push.outcome, push.detail = event.outcome, event.detail
                self._step(push, IncomingEvent.PEER_LOST)
            case Noticed():
                if event.peer == push.peer:
                    push.is_known = True
                    self._on_notice(push, event.notice)

    def tick(self) -> None:
        """Act on the deadlines that have passed."""
        now_s = self._context.now_s()
        for push in self._incoming.of_kind(IncomingPush):
            if now_s >= push.deadline_s:
                self._on_deadline(push)
            elif push.state is not IncomingState.ENDED and now_s >= push.next_heartbeat_s:
                push.next_heartbeat_s = now_s + self._config.push_heartbeat_s
                self._incoming.send_renew(push)

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do, or None."""
        due = [
            p.deadline_s
            if p.state is IncomingState.ENDED
            else min(p.deadline_s, p.next_heartbeat_s)
            for p in self._incoming.of_kind(IncomingPush)
        ]
        return min(due, default=None)

    # -- decisions ----------------------------------------------------------------------------
    def _fail(self, push: IncomingPush, declined: messages.Declined) -> None:
        push.outcome, push.detail = OUTCOME_OF_DECLINE[declined.reason], declined.detail

    def _on_registration_answered(self, push: IncomingPush, event: RegisterAnswered) -> None:
        push.answered_generation = max(push.answered_generation, event.generation)
        if not isinstance(event.reply, messages.Declined):
            push.is_known = True
            return
        if push.state is not IncomingState.FILLING or event.generation != push.generation:
            # Its blocks were given back since, or the request has ended: none was ever accepted.
            self._leave(push, {event.generation})
            return
        self._fail(push, event.reply)
        is_mismatch = event.reply.reason is messages.DeclineReason.MISMATCH
        self._step(push, IncomingEvent.MISMATCHED if is_mismatch else IncomingEvent.DECLINED)

    def _on_heartbeat_answered(self, push: IncomingPush, event: RenewAnswered) -> None:
        if isinstance(event.reply, messages.Declined):
            if not push.is_known:
                return  # the prefill leg may be on its way; the deadline bounds the wait
            self._fail(push, event.reply)
            self._step(push, IncomingEvent.PEER_LOST)
            return
        push.is_known = True
        if event.reply.is_admitted:
            self._admit(push)
        else:
            push.is_admitted = push.end is not None  # The prefill may have been preempted.

    def _admit(self, push: IncomingPush) -> None:
        if not push.is_admitted:
            push.is_admitted = True
            self._context.emit(NotifyEngine())

    def _on_notice(self, push: IncomingPush, notice: messages.Notice) -> None:
        match notice:
            case messages.Admitted():
                self._admit(push)
            case messages.Posting():
                if notice.generation == push.generation:
                    self._on_posting(push)
            case messages.FirstTokenReady() | messages.Written() if (
                notice.digest != push.prompt.digest
            ):
                pass  # of another prompt under this id: the registration is declined
            case messages.FirstTokenReady():
                self._on_first_token(push, _prefill_end(notice))
            case messages.Written():
                self._on_written(push, notice)
            case messages.Failed():
                self._on_failed(push, notice)
            case messages.Quiet():
                self._on_quiet_notice(push, notice.generation)

    def _on_posting(self, push: IncomingPush) -> None:
        if push.started_s is None:
            push.started_s = self._context.now_s()
        self._step(push, IncomingEvent.POSTING)

    def _on_first_token(self, push: IncomingPush, end: PrefillEnd) -> None:
        if push.end is not None:
            return
        push.end = end
        push.is_admitted = True
        if push.state is IncomingState.FILLING:
            push.deadline_s = self._context.now_s() + self._config.receive_timeout_s
        self._step(push, IncomingEvent.FIRST_TOKEN)

    def _on_written(self, push: IncomingPush, notice: messages.Written) -> None:
        if push.state is not IncomingState.ENDED:
            self._on_first_token(push, _prefill_end(notice))
        if notice.generation != push.generation:
            return
        if push.state is IncomingState.ENDED:
            self._on_quiet(push, notice.generation)
            return
        push.quiet_generations = push.quarantined_up_to(notice.generation)
        if push.state is IncomingState.ANNOUNCED:
            push.outcome = ReceiveOutcome.FAILED
            push.detail = "its blocks were given back, and the sender has written them since"
            self._step(push, IncomingEvent.FAILED_QUIET)
            return
        expected = (push.first_block, len(push.blocks), push.prompt.num_tokens)
        if (notice.first_block, notice.num_blocks, notice.num_tokens) != expected:
            push.detail = "the sender wrote other positions than were registered"
            self._step(push, IncomingEvent.FAILED)
            return
        if not self._incoming.is_intact(push, notice.block_digests):
            self._step(push, IncomingEvent.WRITTEN_CORRUPT)
            return
        push.outcome = ReceiveOutcome.RECEIVED
        push.num_bytes = len(push.blocks) * self._context.layout.block_bytes
        # The highest generation is written, and the sender lets no older one outlive it.
        self._step(push, IncomingEvent.WRITTEN)

    def _on_failed(self, push: IncomingPush, notice: messages.Failed) -> None:
        if notice.is_quiet:
            self._on_quiet(push, push.answered_generation)
        if push.state is IncomingState.ENDED or push.state is IncomingState.CLOSED:
            return
        push.outcome = OUTCOME_OF_FAILURE[notice.reason]
        push.detail = notice.detail or f"the sender gave up: {notice.reason}"
        if not notice.is_quiet or push.is_unanswered:
            self._step(push, IncomingEvent.FAILED)
            return
        is_mismatch = notice.reason is messages.FailureReason.MISMATCH
        self._step(push, IncomingEvent.MISMATCHED if is_mismatch else IncomingEvent.FAILED_QUIET)

    def _on_quiet_notice(self, push: IncomingPush, generation: int) -> None:
        is_own = self._first_generation <= generation < self._next_generation
        if generation >= ALL_GENERATIONS:  # the push has ended, for all who had registered by then
            generation = push.answered_generation
        elif not is_own:
            return  # of another receiver, which was heard of before
        self._on_quiet(push, generation)
        if push.state is not IncomingState.FILLING or (is_own and generation < push.generation):
            return
        push.outcome = ReceiveOutcome.GONE
        push.detail = "the sender has ended the push, or serves another receiver"
        is_unknown = push.is_unanswered and not is_own
        self._step(push, IncomingEvent.FAILED if is_unknown else IncomingEvent.FAILED_QUIET)

    def _on_quiet(self, push: IncomingPush, generation: int) -> None:
        """Nothing of ``generation`` and of older ones can land here any more."""
        self._leave(push, push.quarantined_up_to(generation))

    def _leave(self, push: IncomingPush, generations: Set[int]) -> None:
        push.quiet_generations = frozenset(generations)
        self._step(push, IncomingEvent.QUIET)

    def _on_deadline(self, push: IncomingPush) -> None:
        if push.state is IncomingState.ENDED:
            self._step(push, IncomingEvent.GRACE_OVER)
            return
        push.outcome = ReceiveOutcome.SLOW
        push.detail = "prefill did not complete, or its blocks did not come, in time"
        self._step(push, IncomingEvent.DEADLINE)

    def _step(self, push: IncomingPush, event: IncomingEvent) -> None:
        push.release_outcome = _RELEASE_OUTCOME.get(event, push.release_outcome)
        self._context.run(PUSH_RECEIVER, push, event, lambda action, _: self._act(push, action))
        if push.state is PUSH_RECEIVER.final:
            self._incoming.close(push)

    def _act(self, push: IncomingPush, action: IncomingAction) -> None:  # noqa: C901 - one an action
        peer, transfer_id = push.peer, push.transfer_id
        match action:
            case IncomingAction.SEND_REGISTER:
                self._context.emit(Send(peer, self._registration(push)))
            case IncomingAction.DROP_BLOCKS:
                self._incoming.drop(push)
            case IncomingAction.QUARANTINE_BLOCKS:
                self._incoming.enter_quarantine(push)
            case IncomingAction.LEAVE_QUARANTINE:
                self._incoming.leave_quarantine(push, push.quiet_generations)
            case IncomingAction.START_PROGRESS:
                self._context.emit(StartProgress(peer, transfer_id))
            case IncomingAction.STOP_PROGRESS:
                self._context.emit(StopProgress(peer, transfer_id))
            case IncomingAction.START_GRACE:
                self._incoming.start_grace(push)
            case IncomingAction.SEND_RELEASE:
                self._incoming.send_release(push)
            case IncomingAction.REPORT:
                self._incoming.report(push)
            case IncomingAction.REPORT_FIRST_TOKEN:
                if push.end is not None:
                    self._incoming.report_first_token(push, push.end)
            case IncomingAction.DISCONNECT_PEER:
                self._context.emit(DisconnectPeer(peer, transfer_id))

    def _registration(self, push: IncomingPush) -> messages.Register:
        return messages.Register(
            self._config.instance_id,
            self._config.epoch,
            push.peer.epoch,
            push.transfer_id,
            push.generation,
            push.prompt.num_tokens,
            push.prompt.digest,
            push.first_block,
            push.blocks,
            max(0.0, push.deadline_s - self._context.now_s()),
            self._context.digests_of is not None,
        )


def _prefill_end(notice: messages.FirstTokenReady | messages.Written) -> PrefillEnd:
    return PrefillEnd(notice.first_token, notice.prefill_end_s, notice.prefill_report)
