"""The receiver's half of a pull, and of a read-back: what is asked for, READ, and when it ends.

Decides by ``table.RECEIVER``; moves nothing itself. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.blocks.lease import READER_MARGIN_S, reader_deadline_s
from kvferry.connector.effects import (
    ContactPeer,
    DisconnectPeer,
    PostRead,
    Send,
)
from kvferry.connector.events import (
    OUTCOME_OF_DECLINE,
    AcquireAnswered,
    PeerLost,
    ReadEnded,
    ReadStatus,
)
from kvferry.connector.ports import HISTORY_MODE, HistoryRequest, PromptIdentity, ReceiveOutcome
from kvferry.connector.pull.table import RECEIVER, ReceiveAction, ReceiveEvent, ReceiveState
from kvferry.connector.transfers import Incoming, IncomingTransfers, RoleContext
from kvferry.errors import LocalProtocolError
from kvferry.protocol import messages
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.params import Mode, PeerAddress

PullEvent = AcquireAnswered | PeerLost | ReadEnded

_RELEASE_OUTCOME = {
    ReceiveEvent.READ_DONE: messages.ReleaseOutcome.READ,
    ReceiveEvent.NOT_NEEDED: messages.ReleaseOutcome.NOT_NEEDED,
    ReceiveEvent.CANCELLED: messages.ReleaseOutcome.CANCELLED,
}


@dataclass(slots=True, eq=False, kw_only=True)
class PullReceive(Incoming):
    """One receive in hand: of a handoff (``source`` is its prompt) or of a history."""

    source: PromptIdentity | HistoryRequest
    timeout_s: float
    state: ReceiveState = RECEIVER.initial
    next_renew_s: float = float("inf")
    num_renewals: int = 0
    lease_deadline_s: float = float("inf")
    remote_blocks: tuple[BlockNumber, ...] = ()
    """The holder's, under a lease."""
    block_digests: tuple[bytes, ...] = ()
    """Of those, where the holder tells them."""


class PullReceiver:
    """All receives of one instance that READ."""

    def __init__(self, context: RoleContext, incoming: IncomingTransfers) -> None:
        self._context = context
        self._config = context.config
        self._incoming = incoming
        self._num_histories = 0

    # -- the engine's calls -------------------------------------------------------------------
    def begin(self, transfer_id: TransferId, peer: PeerAddress, prompt: PromptIdentity) -> None:
        """See ``ConnectorPort.begin_receive``."""
        receive = PullReceive(
            transfer_id=transfer_id,
            peer=peer,
            mode=Mode.PULL,
            source=prompt,
            timeout_s=self._config.receive_timeout_s,
            next_renew_s=self._context.now_s() + self._config.heartbeat_interval_s,
        )
        self._incoming.add(receive)
        self._context.emit(ContactPeer(peer))

    def read_history(self, peer: PeerAddress, request: HistoryRequest) -> TransferId:
        """See ``ConnectorPort.read_history``."""
        self._num_histories += 1
        # Told apart from a router's ids, and from those of an earlier start.
        transfer_id = TransferId(f"history-{self._config.epoch:x}-{self._num_histories}")
        receive = PullReceive(
            transfer_id=transfer_id,
            peer=peer,
            mode=HISTORY_MODE,
            source=request,
            timeout_s=self._config.history_timeout_s,
        )
        self._incoming.refer(receive, request.blocks)
        self._incoming.add(receive)
        self._start(receive)
        return transfer_id

    def receive(
        self, receive: PullReceive, blocks: Sequence[BlockNumber], first_block: int
    ) -> None:
        """See ``ConnectorPort.receive``."""
        if receive.state is not ReceiveState.ANNOUNCED:
            raise LocalProtocolError(f"receive of {receive.transfer_id} is under way")
        self._incoming.refer(receive, blocks)
        receive.first_block = first_block
        self._start(receive)

    def _start(self, receive: PullReceive) -> None:
        receive.started_s = self._context.now_s()
        receive.deadline_s = receive.started_s + receive.timeout_s
        is_refused = self._incoming.is_closed_to(receive)
        self._step(receive, ReceiveEvent.REFUSED if is_refused else ReceiveEvent.BLOCKS_GIVEN)

    def end(self, receive: PullReceive, *, needed: bool) -> None:
        """See ``ConnectorPort.end_receive``."""
        self._step(receive, ReceiveEvent.CANCELLED if needed else ReceiveEvent.NOT_NEEDED)

    # -- the mover's events -------------------------------------------------------------------
    def handle(self, receive: PullReceive, event: PullEvent) -> None:
        """Take in what the mover reports of a receive."""
        match event:
            case AcquireAnswered():
                self._on_answer(receive, event)
            case PeerLost():
                receive.outcome, receive.detail = event.outcome, event.detail
                self._step(receive, ReceiveEvent.PEER_LOST)
            case ReadEnded():
                self._on_read_ended(receive, event)

    def tick(self) -> None:
        """Act on the deadlines that have passed."""
        now_s = self._context.now_s()
        for receive in self._incoming.of_kind(PullReceive):
            if receive.state is ReceiveState.ANNOUNCED:
                self._renew(receive, now_s)
            elif now_s >= receive.deadline_s:
                self._on_deadline(receive)

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do, or None."""
        deadlines = [
            r.next_renew_s if r.state is ReceiveState.ANNOUNCED else r.deadline_s
            for r in self._incoming.of_kind(PullReceive)
        ]
        return min(deadlines, default=None)

    # -- decisions ----------------------------------------------------------------------------
    def _renew(self, receive: PullReceive, now_s: float) -> None:
        if now_s < receive.next_renew_s:
            return
        receive.num_renewals += 1
        if receive.num_renewals > self._config.max_renewals:
            receive.next_renew_s = float("inf")
            return
        receive.next_renew_s = now_s + self._config.heartbeat_interval_s
        self._incoming.send_renew(receive)

    def _on_deadline(self, receive: PullReceive) -> None:
        if receive.state is ReceiveState.QUARANTINED:
            self._step(receive, ReceiveEvent.GRACE_OVER)
            return
        receive.outcome = ReceiveOutcome.SLOW
        receive.detail = f"not received within {receive.timeout_s} s"
        self._step(receive, ReceiveEvent.DEADLINE)

    def _on_answer(self, receive: PullReceive, event: AcquireAnswered) -> None:
        reply = event.reply
        if isinstance(reply, messages.Declined):
            receive.outcome, receive.detail = OUTCOME_OF_DECLINE[reply.reason], reply.detail
            is_mismatch = reply.reason is messages.DeclineReason.MISMATCH
            self._step(receive, ReceiveEvent.MISMATCHED if is_mismatch else ReceiveEvent.DECLINED)
            return
        if receive.state is not ReceiveState.ACQUIRING:
            self._step(receive, ReceiveEvent.GRANTED)  # too late, or twice: it has no rule
            return
        num_granted, num_expected = len(reply.blocks), len(receive.blocks)
        if isinstance(receive.source, HistoryRequest):
            num_expected = min(max(1, num_granted), len(receive.source.hashes))
        if num_granted != num_expected:
            receive.outcome = ReceiveOutcome.FAILED
            receive.detail = (
                f"the peer granted {num_granted} blocks where {num_expected} were expected"
            )
            self._step(receive, ReceiveEvent.PEER_LOST)
            return
        receive.remote_blocks = reply.blocks
        receive.block_digests = reply.block_digests[:num_granted]
        if isinstance(receive.source, HistoryRequest):
            self._trim(receive, receive.source, reply)
        receive.lease_deadline_s = reader_deadline_s(event.sent_s, reply.duration_s)
        self._step(receive, ReceiveEvent.GRANTED)

    def _trim(
        self, receive: PullReceive, request: HistoryRequest, granted: messages.Granted
    ) -> None:
        """The holder may have less than was asked for: the other blocks are not touched."""
        count = len(granted.blocks)
        partial = request.fitting(count, granted.partials)
        if partial is not None:
            index = count + granted.partials.index(partial)
            receive.remote_blocks += (partial.block,)
            receive.block_digests += granted.block_digests[index : index + 1]
            receive.num_partial_tokens = partial.num_tokens
        self._incoming.drop(receive, len(receive.remote_blocks))

    def _on_read_ended(self, receive: PullReceive, event: ReadEnded) -> None:
        receive.num_bytes, receive.detail = event.num_bytes, event.detail
        if event.status is ReadStatus.FAILED:
            receive.outcome = ReceiveOutcome.FAILED
            self._step(receive, ReceiveEvent.READ_FAILED)
        elif event.ended_s >= receive.lease_deadline_s:
            receive.outcome = ReceiveOutcome.EXPIRED
            receive.detail = "the lease ended before the READ did"
            self._step(receive, ReceiveEvent.READ_TOO_LATE)
        elif not self._incoming.is_intact(receive, receive.block_digests):
            self._step(receive, ReceiveEvent.READ_CORRUPT)
        else:
            receive.outcome = ReceiveOutcome.RECEIVED
            self._step(receive, ReceiveEvent.READ_DONE)

    def _step(self, receive: PullReceive, event: ReceiveEvent) -> None:
        receive.release_outcome = _RELEASE_OUTCOME.get(event, receive.release_outcome)
        self._context.run(RECEIVER, receive, event, lambda action, _: self._act(receive, action))
        if receive.state is RECEIVER.final:
            self._incoming.close(receive)

    def _act(self, receive: PullReceive, action: ReceiveAction) -> None:
        peer, transfer_id = receive.peer, receive.transfer_id
        match action:
            case ReceiveAction.SEND_ACQUIRE:
                self._context.emit(Send(peer, self._acquire(receive)))
            case ReceiveAction.POST_READ:
                local, remote = receive.blocks, receive.remote_blocks
                self._context.emit(PostRead(peer, transfer_id, local, remote))
            case ReceiveAction.DROP_BLOCKS:
                self._incoming.drop(receive)
            case ReceiveAction.QUARANTINE_BLOCKS:
                self._incoming.enter_quarantine(receive)
            case ReceiveAction.LEAVE_QUARANTINE:
                self._incoming.leave_quarantine(receive, [receive.generation])
            case ReceiveAction.START_GRACE:
                self._incoming.start_grace(receive)
            case ReceiveAction.REPORT:
                self._incoming.report(receive)
            case ReceiveAction.SEND_RELEASE:
                self._incoming.send_release(receive)
            case ReceiveAction.DISCONNECT_PEER:
                self._context.emit(DisconnectPeer(peer, transfer_id))

    def _acquire(self, receive: PullReceive) -> messages.Acquire | messages.AcquireHistory:
        source, duration_s = receive.source, receive.timeout_s + 2 * READER_MARGIN_S
        own = (self._config.instance_id, self._config.epoch)
        named = (*own, receive.peer.epoch, receive.transfer_id)
        verifies = self._context.digests_of is not None
        if isinstance(source, HistoryRequest):
            wanted = (source.hashes, source.min_blocks, duration_s)
            return messages.AcquireHistory(*named, *wanted, verifies, want_partials=True)
        prompt = (source.num_tokens, source.digest, duration_s)
        return messages.Acquire(*named, *prompt, receive.first_block, verifies)
