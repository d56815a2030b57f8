"""The receiver's half of the planner: receives in hand, their deadlines, their ends.

Decides by the table in ``pull``; moves nothing itself. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.blocks.lease import READER_MARGIN_S, reader_deadline_s
from kvferry.blocks.quarantine import Quarantine
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.machine.effects import (
    ContactPeer,
    DisconnectPeer,
    Effect,
    NotifyEngine,
    PostRead,
    SendAcquire,
    SendAcquireHistory,
    SendRelease,
    SendRenew,
)
from kvferry.connector.machine.events import AcquireAnswered, PeerLost, ReadEnded, ReadStatus
from kvferry.connector.machine.outcomes import OUTCOME_OF_DECLINE
from kvferry.connector.ports import BlockPort, PromptIdentity, ReceiveOutcome, ReceiveResult
from kvferry.connector.pull.table import RECEIVER, ReceiveAction, ReceiveEvent, ReceiveState
from kvferry.connector.wish import HistoryWish
from kvferry.errors import LocalProtocolError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import Declined, Granted, PartialBlock, ReleaseOutcome
from kvferry.protocol.params import PeerAddress

PullEvent = AcquireAnswered | PeerLost | ReadEnded

_RELEASE_OUTCOME = {
    ReceiveEvent.READ_DONE: ReleaseOutcome.READ,
    ReceiveEvent.NOT_NEEDED: ReleaseOutcome.NOT_NEEDED,
    ReceiveEvent.CANCELLED: ReleaseOutcome.CANCELLED,
}

_EVENT_OF_READ = {
    ReadStatus.FAILED: ReceiveEvent.READ_FAILED,
    ReadStatus.CORRUPT: ReceiveEvent.READ_CORRUPT,
}


@dataclass(slots=True)
class _Receive:
    """One receive in hand: of a handoff (``source`` is its prompt) or of a history."""

    transfer_id: TransferId
    peer: PeerAddress
    source: PromptIdentity | HistoryWish
    timeout_s: float
    next_renew_s: float = float("inf")
    state: ReceiveState = RECEIVER.initial
    num_renewals: int = 0
    blocks: tuple[BlockNumber, ...] = ()
    first_block: int = 0
    started_s: float = 0.0
    deadline_s: float = float("inf")
    lease_deadline_s: float = float("inf")
    granted: Granted | None = None
    partial: PartialBlock | None = None
    """Of a history: what the last of ``blocks`` is filled with, if that is a part only."""
    outcome: ReceiveOutcome = ReceiveOutcome.FAILED
    detail: str = ""
    num_bytes: int = 0
    end_of_request: ReleaseOutcome = field(default=ReleaseOutcome.FAILED)


class PullReceiver:
    """All receives of one instance."""

    def __init__(
        self, config: ExchangeConfig, blocks: BlockPort, quarantine: Quarantine, clock: Clock
    ) -> None:
        self._config = config
        self._blocks = blocks
        self._quarantine = quarantine
        self._clock = clock
        self._receives: dict[TransferId, _Receive] = {}
        self._results: list[ReceiveResult] = []
        self._num_histories = 0
        self.outcomes: Counter[str] = Counter()

    def __contains__(self, transfer_id: TransferId) -> bool:
        """Return whether ``transfer_id`` is being received, or in quarantine."""
        return transfer_id in self._receives

    @property
    def num_receives(self) -> int:
        """Receives that are not closed, quarantined ones included."""
        return len(self._receives)

    def begin(
        self, transfer_id: TransferId, peer: PeerAddress, prompt: PromptIdentity
    ) -> list[Effect]:
        """See ``ConnectorPort.begin_receive``; the planner has checked that the id is free."""
        next_renew_s = self._clock.monotonic_s() + self._config.heartbeat_interval_s
        self._receives[transfer_id] = _Receive(
            transfer_id, peer, prompt, self._config.receive_timeout_s, next_renew_s
        )
        return [ContactPeer(peer)]

    def read_history(self, peer: PeerAddress, wish: HistoryWish) -> tuple[TransferId, list[Effect]]:
        """See ``ConnectorPort.read_history``."""
        self._num_histories += 1
        # Told apart from a router's ids, and from those of an earlier start.
        transfer_id = TransferId(f"history-{self._config.epoch:x}-{self._num_histories}")
        self._receives[transfer_id] = _Receive(
            transfer_id, peer, wish, self._config.history_timeout_s
        )
        return transfer_id, self.receive(transfer_id, wish.blocks, 0)

    def receive(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], first_block: int
    ) -> list[Effect]:
        """See ``ConnectorPort.receive``."""
        receive = self._receives.get(transfer_id)
        if receive is None or receive.state is not ReceiveState.ANNOUNCED:
            raise LocalProtocolError(f"receive of {transfer_id} was not begun, or is under way")
        receive.blocks = tuple(blocks)
        receive.first_block = first_block
        receive.started_s = self._clock.monotonic_s()
        receive.deadline_s = receive.started_s + receive.timeout_s
        effects = self._step(receive, ReceiveEvent.BLOCKS_GIVEN)
        if self._quarantine.is_closed_to(receive.peer.instance_id):
            receive.outcome = ReceiveOutcome.DECLINED
            receive.detail = "too many blocks are in quarantine to start another with this peer"
            return self._step(receive, ReceiveEvent.DEADLINE)
        return effects

    def end(self, transfer_id: TransferId, *, needed: bool) -> list[Effect]:
        """See ``ConnectorPort.end_receive``."""
        receive = self._receives.get(transfer_id)
        # A result that was not collected yet is of no use any more.
        self._results = [r for r in self._results if r.transfer_id != transfer_id]
        if receive is None:
            return []
        event = ReceiveEvent.CANCELLED if needed else ReceiveEvent.NOT_NEEDED
        return self._step(receive, event)

    def take_results(self) -> list[ReceiveResult]:
        """See ``ConnectorPort.take_results``."""
        results, self._results = self._results, []
        return results

    def handle(self, event: PullEvent) -> list[Effect]:
        """Take in what the mover reports. Events of receives that are closed are ignored."""
        receive = self._receives.get(event.transfer_id)
        if receive is None:
            return []
        match event:
            case AcquireAnswered():
                return self._on_answer(receive, event)
            case PeerLost():
                receive.outcome, receive.detail = event.outcome, event.detail
                return self._step(receive, ReceiveEvent.PEER_LOST)
            case ReadEnded():
                return self._on_read_ended(receive, event)

    def tick(self) -> list[Effect]:
        """Act on the deadlines that have passed."""
        now_s = self._clock.monotonic_s()
        effects: list[Effect] = []
        for receive in list(self._receives.values()):
            if receive.state is ReceiveState.ANNOUNCED:
                effects += self._renew(receive, now_s)
            elif now_s >= receive.deadline_s:
                effects += self._on_deadline(receive)
        return effects

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do, or None."""
        deadlines = [
            r.next_renew_s if r.state is ReceiveState.ANNOUNCED else r.deadline_s
            for r in self._receives.values()
        ]
        return min(deadlines, default=None)

    def _renew(self, receive: _Receive, now_s: float) -> list[Effect]:
        if now_s < receive.next_renew_s:
            return []
        receive.num_renewals += 1
        if receive.num_renewals > self._config.max_renewals:
            receive.next_renew_s = float("inf")
            return []
        receive.next_renew_s = now_s + self._config.heartbeat_interval_s
        lease_s = self._config.handoff_lease_s
        return [SendRenew(receive.peer, receive.transfer_id, lease_s)]

    def _on_deadline(self, receive: _Receive) -> list[Effect]:
        if receive.state is ReceiveState.QUARANTINED:
            receive.deadline_s += self._config.quarantine_grace_s
            return self._step(receive, ReceiveEvent.GRACE_OVER)
        receive.outcome = ReceiveOutcome.SLOW
        receive.detail = f"not received within {receive.timeout_s} s"
        return self._step(receive, ReceiveEvent.DEADLINE)

    def _on_answer(self, receive: _Receive, event: AcquireAnswered) -> list[Effect]:
        if isinstance(event.reply, Declined):
            receive.outcome = OUTCOME_OF_DECLINE[event.reply.reason]
            receive.detail = event.reply.detail
            return self._step(receive, ReceiveEvent.DECLINED)
        num_granted = len(event.reply.blocks)
        num_expected = len(receive.blocks)
        if isinstance(receive.source, HistoryWish):
            num_expected = min(max(1, num_granted), len(receive.source.hashes))
        if num_granted != num_expected:
            receive.outcome = ReceiveOutcome.FAILED
            receive.detail = (
                f"the peer granted {num_granted} blocks where {num_expected} were expected"
            )
            return self._step(receive, ReceiveEvent.PEER_LOST)
        if isinstance(receive.source, HistoryWish):
            self._trim(receive, receive.source, event.reply)
        receive.granted = event.reply
        receive.lease_deadline_s = reader_deadline_s(event.sent_s, event.reply.duration_s)
        return self._step(receive, ReceiveEvent.GRANTED)

    def _trim(self, receive: _Receive, wish: HistoryWish, granted: Granted) -> None:
        """The holder may have less than was asked for: the other blocks are not touched."""
        count = len(granted.blocks)
        receive.partial = wish.fitting(count, granted.partials)
        if receive.partial is not None:
            count += 1
        self._blocks.drop(receive.blocks[count:])
        receive.blocks = receive.blocks[:count]

    def _on_read_ended(self, receive: _Receive, event: ReadEnded) -> list[Effect]:
        receive.num_bytes, receive.detail = event.num_bytes, event.detail
        if event.status is not ReadStatus.DONE:
            corrupt = event.status is ReadStatus.CORRUPT
            receive.outcome = ReceiveOutcome.CORRUPT if corrupt else ReceiveOutcome.FAILED
            return self._step(receive, _EVENT_OF_READ[event.status])
        if event.ended_s >= receive.lease_deadline_s:
            receive.outcome = ReceiveOutcome.EXPIRED
            receive.detail = "the lease ended before the READ did"
            return self._step(receive, ReceiveEvent.READ_TOO_LATE)
        receive.outcome = ReceiveOutcome.RECEIVED
        return self._step(receive, ReceiveEvent.READ_DONE)

    def _step(self, receive: _Receive, event: ReceiveEvent) -> list[Effect]:
        rule = RECEIVER.step(receive.state, event)
        receive.state = rule.next_state
        if event in _RELEASE_OUTCOME:
            receive.end_of_request = _RELEASE_OUTCOME[event]
        effects: list[Effect] = []
        for action in rule.actions:
            effects += self._act(receive, action)
        if receive.state is RECEIVER.final:
            self._receives.pop(receive.transfer_id, None)
        return effects

    def _act(self, receive: _Receive, action: ReceiveAction) -> list[Effect]:
        match action:
            case ReceiveAction.HOLD_BLOCKS:
                self._blocks.hold(receive.blocks)
            case ReceiveAction.DROP_BLOCKS:
                self._blocks.drop(receive.blocks)
            case ReceiveAction.QUARANTINE_BLOCKS:
                self._enter_quarantine(receive)
            case ReceiveAction.LEAVE_QUARANTINE:
                self._quarantine.leave(receive.transfer_id)
            case ReceiveAction.REPORT:
                return self._report(receive)
            case ReceiveAction.SEND_ACQUIRE:
                return [self._acquire(receive)]
            case ReceiveAction.POST_READ:
                return [self._post_read(receive)]
            case ReceiveAction.SEND_RELEASE:
                return [SendRelease(receive.peer, receive.transfer_id, receive.end_of_request)]
            case ReceiveAction.DISCONNECT_PEER:
                return [DisconnectPeer(receive.peer, receive.transfer_id)]
        return []

    def _enter_quarantine(self, receive: _Receive) -> None:
        # The quarantine takes its own reference before the receive's is dropped.
        self._quarantine.enter(receive.transfer_id, receive.peer.instance_id, receive.blocks)
        self._blocks.drop(receive.blocks)
        receive.deadline_s = self._clock.monotonic_s() + self._config.quarantine_grace_s

    def _acquire(self, receive: _Receive) -> SendAcquire | SendAcquireHistory:
        peer, transfer_id, source = receive.peer, receive.transfer_id, receive.source
        duration_s = receive.timeout_s + 2 * READER_MARGIN_S
        if isinstance(source, HistoryWish):
            hashes, min_blocks = source.hashes, source.min_blocks
            return SendAcquireHistory(peer, transfer_id, hashes, min_blocks, duration_s)
        return SendAcquire(
            peer, transfer_id, source.num_tokens, source.digest, duration_s, receive.first_block
        )

    def _post_read(self, receive: _Receive) -> PostRead:
        granted = receive.granted
        if granted is None:  # pragma: no cover - the table posts only after a grant
            raise LocalProtocolError("a READ was to be posted before a lease was granted")
        remote, digests = granted.blocks, granted.block_digests[: len(granted.blocks)]
        if receive.partial is not None:
            index = len(remote) + granted.partials.index(receive.partial)
            remote, digests = (
                (*remote, receive.partial.block),
                (*digests, *granted.block_digests[index : index + 1]),
            )
        return PostRead(receive.peer, receive.transfer_id, receive.blocks, remote, digests)

    def _report(self, receive: _Receive) -> list[Effect]:
        received = receive.outcome is ReceiveOutcome.RECEIVED
        self.outcomes[receive.outcome] += 1
        self._results.append(
            ReceiveResult(
                receive.transfer_id,
                receive.outcome,
                receive.detail,
                num_bytes=receive.num_bytes if received else 0,
                num_blocks=len(receive.blocks) if received else 0,
                num_partial_tokens=receive.partial.num_tokens
                if received and receive.partial is not None
                else 0,
                started_s=receive.started_s,
                finished_s=self._clock.monotonic_s(),
            )
        )
        return [NotifyEngine()]
