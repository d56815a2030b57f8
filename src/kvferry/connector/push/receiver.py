"""The receiver's half of push: which blocks are registered, what has come, what is in quarantine.

Decides by ``push.PUSH_RECEIVER``; moves nothing itself. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvferry.blocks.quarantine import Quarantine
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.machine.effects import (
    ContactPeer,
    DisconnectPeer,
    Effect,
    NotifyEngine,
    SendRelease,
    StartProgress,
    StopProgress,
)
from kvferry.connector.machine.events import (
    Noticed,
    PeerLost,
    PeerQuiet,
    RegisterAnswered,
    ReleaseAnswered,
    RenewAnswered,
)
from kvferry.connector.machine.outcomes import OUTCOME_OF_DECLINE, OUTCOME_OF_FAILURE
from kvferry.connector.ports import (
    BlockPort,
    FirstTokenArrival,
    PrefillEnd,
    PromptIdentity,
    ReceiveOutcome,
    ReceiveResult,
)
from kvferry.connector.push.incoming import IncomingPush, prefill_end
from kvferry.connector.push.table import PUSH_RECEIVER, IncomingAction, IncomingEvent, IncomingState
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import (
    Admitted,
    Declined,
    Failed,
    FirstTokenReady,
    Notice,
    Posting,
    Quiet,
    ReleaseOutcome,
    Written,
)
from kvferry.protocol.params import PeerAddress

PushEvent = RegisterAnswered | RenewAnswered | ReleaseAnswered | Noticed | PeerQuiet | PeerLost

_EPOCH_BITS_NOT_IN_GENERATION = 23
"""Of the 62 of an epoch: what is left, and as many registrations as there will be, fit."""
_RELEASE_OUTCOME = {
    IncomingEvent.WRITTEN: ReleaseOutcome.READ,
    IncomingEvent.NOT_NEEDED: ReleaseOutcome.NOT_NEEDED,
    IncomingEvent.CANCELLED: ReleaseOutcome.CANCELLED,
}


class PushReceiver:
    """All pushes that this instance receives."""

    def __init__(
        self,
        config: ExchangeConfig,
        blocks: BlockPort,
        quarantine: Quarantine,
        clock: Clock,
        block_bytes: int,
    ) -> None:
        self._config = config
        self._pool = blocks
        self._quarantine = quarantine
        self._clock = clock
        self._block_bytes = block_bytes
        self._max_registered = int(config.max_registered_share * blocks.num_blocks)
        # Counted on from a number of this start's own: no two registrations share one, not even
        # those of two instances under one transfer id.
        self._next_generation = config.epoch >> _EPOCH_BITS_NOT_IN_GENERATION
        self._fills: dict[TransferId, IncomingPush] = {}
        self._results: list[ReceiveResult] = []
        self._first_tokens: list[FirstTokenArrival] = []
        self.outcomes: Counter[str] = Counter()

    def __contains__(self, transfer_id: TransferId) -> bool:
        """Return whether ``transfer_id`` is being received, or in quarantine."""
        return transfer_id in self._fills

    @property
    def num_receives(self) -> int:
        """Pushes that are not closed, quarantined ones included."""
        return len(self._fills)

    # -- the engine's calls -------------------------------------------------------------------
    def begin(
        self, transfer_id: TransferId, peer: PeerAddress, prompt: PromptIdentity
    ) -> list[Effect]:
        """See ``ConnectorPort.begin_receive``; the planner has checked that the id is free."""
        now_s = self._clock.monotonic_s()
        fill = self._fills[transfer_id] = IncomingPush(
            transfer_id,
            peer,
            prompt,
            wait_deadline_s=now_s + self._config.prefill_timeout_s,
            next_beat_s=now_s + self._config.push_heartbeat_s,
        )
        # The first beat at once: it tells the sender where to send its notices.
        return [ContactPeer(peer), fill.beat(self._config.handoff_lease_s)]

    def may_receive(self, transfer_id: TransferId, num_blocks: int) -> bool:
        """See ``ConnectorPort.may_receive``."""
        fill = self._fills.get(transfer_id)
        if fill is None or fill.is_admitted:
            return True
        room = self._max_registered - num_blocks
        return room >= 0 and room >= sum(
            len(f.blocks)
            for f in self._fills.values()
            if f.state is IncomingState.FILLING and not f.is_admitted
        )

    def receive(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], first_block: int
    ) -> list[Effect]:
        """See ``ConnectorPort.receive``."""
        fill = self._fills.get(transfer_id)
        if fill is None or fill.state is not IncomingState.ANNOUNCED:
            raise LocalProtocolError(f"receive of {transfer_id} was not begun, or is under way")
        if self._quarantine.is_closed_to(fill.peer.instance_id):
            fill.outcome = ReceiveOutcome.DECLINED
            fill.detail = "too many blocks are in quarantine to start another with this peer"
            return self._step(fill, IncomingEvent.DEADLINE)
        fill.set_aside(blocks, first_block, self._next_generation)
        self._next_generation += 1
        if fill.end is not None:
            fill.deadline_s = self._clock.monotonic_s() + self._config.receive_timeout_s
        return self._step(fill, IncomingEvent.BLOCKS_GIVEN)

    def give_back(self, transfer_id: TransferId) -> tuple[bool, list[Effect]]:
        """See ``ConnectorPort.give_back``; also returns what is to be done."""
        fill = self._fills.get(transfer_id)
        if fill is None or fill.state is not IncomingState.FILLING:
            return False, []
        fill.deadline_s = fill.wait_deadline_s
        return True, self._step(fill, IncomingEvent.GIVEN_BACK)

    def end(self, transfer_id: TransferId, *, needed: bool) -> list[Effect]:
        """See ``ConnectorPort.end_receive``."""
        self._results = [r for r in self._results if r.transfer_id != transfer_id]
        self._first_tokens = [t for t in self._first_tokens if t.transfer_id != transfer_id]
        fill = self._fills.get(transfer_id)
        if fill is None:
            return []
        return self._step(fill, IncomingEvent.CANCELLED if needed else IncomingEvent.NOT_NEEDED)

    def take_results(self) -> list[ReceiveResult]:
        """See ``ConnectorPort.take_results``."""
        results, self._results = self._results, []
        return results

    def take_first_tokens(self) -> list[FirstTokenArrival]:
        """See ``ConnectorPort.take_first_tokens``."""
        tokens, self._first_tokens = self._first_tokens, []
        return tokens

    # -- the mover's events -------------------------------------------------------------------
    def handle(self, event: PushEvent) -> list[Effect]:
        """Take in what the mover reports about a transfer of ``self``."""
        fill = self._fills.get(event.transfer_id)
        if fill is None:
            return []
        match event:
            case RegisterAnswered(reply=Declined() as declined):
                fill.outcome = OUTCOME_OF_DECLINE[declined.reason]
                fill.detail = declined.detail
                return self._step(fill, IncomingEvent.DECLINED)
            case RegisterAnswered():
                fill.is_known = True
                return []
            case RenewAnswered():
                return self._on_beat_answered(fill, event)
            case ReleaseAnswered():
                return self._on_quiet(fill, fill.generation) if event.is_quiet else []
            case PeerQuiet():
                return self._on_quiet(fill, fill.generation)
            case PeerLost():
                fill.outcome, fill.detail = event.outcome, event.detail
                return self._step(fill, IncomingEvent.PEER_LOST)
            case Noticed():
                return self._on_notice(fill, event) if event.peer == fill.peer else []

    def tick(self) -> list[Effect]:
        """Act on the deadlines that have passed."""
        now_s = self._clock.monotonic_s()
        effects: list[Effect] = []
        for fill in list(self._fills.values()):
            if now_s >= fill.deadline_s:
                effects += self._on_deadline(fill, now_s)
            elif fill.state is not IncomingState.QUARANTINED and now_s >= fill.next_beat_s:
                fill.next_beat_s = now_s + self._config.push_heartbeat_s
                effects.append(fill.beat(self._config.handoff_lease_s))
        return effects

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do, or None."""
        due = [
            f.deadline_s
            if f.state is IncomingState.QUARANTINED
            else min(f.deadline_s, f.next_beat_s)
            for f in self._fills.values()
        ]
        return min(due, default=None)

    # -- decisions ----------------------------------------------------------------------------
    def _on_beat_answered(self, fill: IncomingPush, event: RenewAnswered) -> list[Effect]:
        if isinstance(event.reply, Declined):
            if not fill.is_known:
                return []  # the prefill leg may be on its way; the deadline bounds the wait
            fill.outcome = OUTCOME_OF_DECLINE[event.reply.reason]
            fill.detail = event.reply.detail
            return self._step(fill, IncomingEvent.PEER_LOST)
        fill.is_known = True
        if not event.reply.is_admitted:
            fill.is_admitted = fill.end is not None  # The prefill may have been preempted.
            return []
        return self._admit(fill)

    def _admit(self, fill: IncomingPush) -> list[Effect]:
        if fill.is_admitted:
            return []
        fill.is_admitted = True
        return [NotifyEngine()]

    def _on_notice(self, fill: IncomingPush, event: Noticed) -> list[Effect]:
        fill.is_known = True
        notice: Notice = event.notice
        match notice:
            case Admitted():
                return self._admit(fill)
            case Posting() if notice.generation == fill.generation:
                fill.note_posting(self._clock.monotonic_s())
                return self._step(fill, IncomingEvent.POSTING)
            case FirstTokenReady() | Written() if notice.digest != fill.prompt.digest:
                return []  # of another prompt under this id: the registration is declined
            case FirstTokenReady():
                return self._on_first_token(fill, prefill_end(notice))
            case Written():
                return self._on_written(fill, notice)
            case Failed():
                return self._on_failed(fill, notice)
            case Quiet():
                if fill.state is IncomingState.FILLING and notice.generation >= fill.generation:
                    fill.outcome = ReceiveOutcome.GONE
                    fill.detail = "the sender has ended the push, or serves another receiver"
                    self._leave(fill, notice.generation)
                    return self._step(fill, IncomingEvent.FAILED_QUIET)
                return self._on_quiet(fill, notice.generation)
        return []

    def _on_first_token(self, fill: IncomingPush, end: PrefillEnd) -> list[Effect]:
        if fill.end is not None:
            return []
        fill.end = end
        fill.is_admitted = True
        if fill.state is IncomingState.FILLING:
            fill.deadline_s = self._clock.monotonic_s() + self._config.receive_timeout_s
        return self._step(fill, IncomingEvent.FIRST_TOKEN)

    def _on_written(self, fill: IncomingPush, notice: Written) -> list[Effect]:
        effects = self._on_first_token(fill, prefill_end(notice))
        if notice.generation != fill.generation:
            return effects
        if fill.state is IncomingState.QUARANTINED:
            return effects + self._on_quiet(fill, notice.generation)
        if fill.state is IncomingState.ANNOUNCED:
            self._leave(fill, notice.generation)
            fill.outcome = ReceiveOutcome.FAILED
            fill.detail = "its blocks were given back, and the sender has written them since"
            return effects + self._step(fill, IncomingEvent.FAILED_QUIET)
        expected = (fill.first_block, len(fill.blocks), fill.prompt.num_tokens)
        if (notice.first_block, notice.num_blocks, notice.num_tokens) != expected:
            fill.detail = "the sender wrote other positions than were registered"
            return effects + self._step(fill, IncomingEvent.FAILED)
        fill.outcome = ReceiveOutcome.RECEIVED
        fill.num_bytes = len(fill.blocks) * self._block_bytes
        # The highest generation is written, and the sender lets no older one outlive it.
        self._leave(fill, notice.generation)
        return effects + self._step(fill, IncomingEvent.WRITTEN)

    def _on_failed(self, fill: IncomingPush, notice: Failed) -> list[Effect]:
        if fill.state is IncomingState.QUARANTINED:
            return self._on_quiet(fill, fill.generation) if notice.is_quiet else []
        if notice.is_quiet:
            self._leave(fill, fill.generation)
        fill.outcome = OUTCOME_OF_FAILURE[notice.reason]
        fill.detail = notice.detail or f"the sender gave up: {notice.reason}"
        return self._step(
            fill, IncomingEvent.FAILED_QUIET if notice.is_quiet else IncomingEvent.FAILED
        )

    def _on_quiet(self, fill: IncomingPush, generation: int) -> list[Effect]:
        self._leave(fill, generation)
        if fill.state is IncomingState.QUARANTINED and not fill.quarantined:
            return self._step(fill, IncomingEvent.QUIET)
        return []

    def _leave(self, fill: IncomingPush, generation: int) -> None:
        """Take the blocks of ``generation`` and older ones out of quarantine."""
        current = fill.generation if fill.state is IncomingState.FILLING else -1
        for quiet in [g for g in fill.quarantined if g <= generation and g != current]:
            self._quarantine.leave((fill.transfer_id, quiet))
            fill.quarantined.discard(quiet)

    def _on_deadline(self, fill: IncomingPush, now_s: float) -> list[Effect]:
        if fill.state is IncomingState.QUARANTINED:
            fill.deadline_s = now_s + self._config.quarantine_grace_s
            return self._step(fill, IncomingEvent.GRACE_OVER)
        fill.outcome = ReceiveOutcome.SLOW
        fill.detail = "prefill did not complete, or its blocks did not come, in time"
        return self._step(fill, IncomingEvent.DEADLINE)

    def _step(self, fill: IncomingPush, event: IncomingEvent) -> list[Effect]:
        rule = PUSH_RECEIVER.step(fill.state, event)
        was, fill.state = fill.state, rule.next_state
        fill.release_outcome = _RELEASE_OUTCOME.get(event, fill.release_outcome)
        effects: list[Effect] = []
        # An earlier generation may not be quiet yet: the request's end is not this record's.
        is_outlived = fill.state is IncomingState.CLOSED and bool(fill.quarantined)
        for action in rule.actions:
            if not (is_outlived and action is IncomingAction.STOP_PROGRESS):
                effects += self._act(fill, action)
        if is_outlived:
            fill.state = IncomingState.QUARANTINED
        if fill.state is IncomingState.QUARANTINED and was is not IncomingState.QUARANTINED:
            fill.deadline_s = self._clock.monotonic_s() + self._config.quarantine_grace_s
        if fill.state is IncomingState.CLOSED:
            self._fills.pop(fill.transfer_id, None)
            if was is IncomingState.ANNOUNCED and fill.generation >= 0:
                # For blocks that were given back since.
                effects.append(StopProgress(fill.peer, fill.transfer_id))
        return effects

    def _act(self, fill: IncomingPush, action: IncomingAction) -> list[Effect]:  # noqa: C901 - one per action
        match action:
            case IncomingAction.HOLD_BLOCKS:
                self._pool.hold(fill.blocks)
            case IncomingAction.DROP_BLOCKS:
                self._pool.drop(fill.blocks)
                fill.blocks = ()
            case IncomingAction.QUARANTINE_BLOCKS:
                self._enter_quarantine(fill)
            case IncomingAction.LEAVE_QUARANTINE:
                self._leave(fill, fill.generation)
            case IncomingAction.SEND_REGISTER:
                return [fill.registration(self._clock.monotonic_s())]
            case IncomingAction.START_PROGRESS:
                return [StartProgress(fill.peer, fill.transfer_id)]
            case IncomingAction.STOP_PROGRESS:
                return [StopProgress(fill.peer, fill.transfer_id)]
            case IncomingAction.SEND_RELEASE:
                return [SendRelease(fill.peer, fill.transfer_id, fill.release_outcome)]
            case IncomingAction.REPORT:
                return self._report(fill)
            case IncomingAction.REPORT_FIRST_TOKEN if fill.end is not None:
                self._first_tokens.append(FirstTokenArrival(fill.transfer_id, fill.end))
                return [NotifyEngine()]
            case IncomingAction.DISCONNECT_PEER:
                return [DisconnectPeer(fill.peer, fill.transfer_id)]
            case _:  # pragma: no cover - a first token is reported only where there is one
                pass
        return []

    def _enter_quarantine(self, fill: IncomingPush) -> None:
        # The quarantine takes its own reference before the fill's is dropped.
        key = (fill.transfer_id, fill.generation)
        self._quarantine.enter(key, fill.peer.instance_id, fill.blocks)
        self._pool.drop(fill.blocks)
        fill.quarantined.add(fill.generation)
        fill.blocks = ()

    def _report(self, fill: IncomingPush) -> list[Effect]:
        received = fill.outcome is ReceiveOutcome.RECEIVED
        self.outcomes[fill.outcome] += 1
        self._results.append(
            ReceiveResult(
                fill.transfer_id,
                fill.outcome,
                fill.detail,
                num_bytes=fill.num_bytes if received else 0,
                started_s=fill.posted_s,
                finished_s=self._clock.monotonic_s(),
            )
        )
        return [NotifyEngine()]
