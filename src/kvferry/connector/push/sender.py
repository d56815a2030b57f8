"""The sender's half of push: prefills in progress, who registered for them, what is written.

Decides by ``table.PUSH_SENDER``; moves nothing itself. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.connector.effects import (
    DisconnectReader,
    Notify,
    NotifyEngine,
    PostWrite,
)
from kvferry.connector.events import WriteEnded
from kvferry.connector.ports import PrefillEnd, PromptIdentity
from kvferry.connector.push.early_registrations import NOT_PUSHED, EarlyRegistrations, find_mismatch
from kvferry.connector.push.table import (
    ALL_GENERATIONS,
    PUSH_SENDER,
    OutgoingAction,
    OutgoingEvent,
    OutgoingState,
)
from kvferry.connector.transfers import End, Outgoing, OutgoingTransfers, RoleContext
from kvferry.errors import CapacityError, LocalProtocolError
from kvferry.protocol import messages
from kvferry.protocol.ids import BlockNumber, TransferId

_REASON_OF_END = {
    OutgoingEvent.WITHDRAWN: messages.FailureReason.ABORTED,
    OutgoingEvent.EXPIRED: messages.FailureReason.EXPIRED,
    OutgoingEvent.PRESSURE: messages.FailureReason.PRESSURE,
    OutgoingEvent.WRITE_FAILED: messages.FailureReason.TRANSPORT,
}
_PREFILL_GOES_ON = (OutgoingState.COMPUTING, OutgoingState.FOLLOWING)


@dataclass(frozen=True, slots=True)
class Registration:
    """Which of a reader's blocks are to be filled, by position from ``first_block`` on."""

    reader: str
    generation: int
    first_block: int
    blocks: tuple[BlockNumber, ...]
    wants_digests: bool = False


@dataclass(frozen=True, slots=True)
class RunningWrite:
    """A posted WRITE and its source, on which it has references of its own."""

    registration: Registration
    blocks: tuple[BlockNumber, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class OutgoingPush(Outgoing):
    """One prefill whose blocks are to be pushed. ``blocks`` are its current ones."""

    role: PushSender
    state: OutgoingState = PUSH_SENDER.initial
    num_ready: int = 0
    """Leading positions whose KV is complete, in ``blocks``."""
    next_position: int = 0
    """Earlier positions are posted for the current registration, from whatever blocks."""
    ready_digests: tuple[bytes, ...] = ()
    """Where transfers are verified: of the ready positions, taken when they became ready."""
    posted_digests: dict[int, bytes] = field(default_factory=dict)
    """The same of what is posted, by position."""
    registration: Registration | None = None
    running: dict[int, RunningWrite] = field(default_factory=dict)
    end: PrefillEnd | None = None
    has_blocks: bool = True
    """Whether the prefill has all its blocks: not while it is preempted."""
    detail: str = ""
    grace_ends_s: float = float("inf")

    @property
    def is_admitted(self) -> bool:
        """Whether the prefill goes on by itself, or has ended."""
        return self.has_blocks or self.end is not None

    @property
    def is_drained(self) -> bool:
        """Whether nothing runs."""
        return not self.running

    @property
    def is_written(self) -> bool:
        """Whether every position is written and nothing runs any more."""
        return not self.running and self.next_position >= len(self.blocks)

    @property
    def may_give_way(self) -> bool:
        """Whether nobody has registered."""
        return self.state is OutgoingState.HELD

    def is_for(self, reader: str) -> bool:
        """Whether ``reader`` has registered, and nobody since."""
        return self.registration is not None and self.registration.reader == reader

    def give_way(self) -> None:
        """End it for want of blocks."""
        self.role.step(self, OutgoingEvent.PRESSURE)

    def expire(self) -> None:
        """Nobody has had it written in time."""
        self.role.step(self, OutgoingEvent.EXPIRED)


class PushSender:
    """All pushes that this instance sends."""

    def __init__(self, context: RoleContext, outgoing: OutgoingTransfers) -> None:
        self._context = context
        self._outgoing = outgoing
        self._block_size_tokens = context.layout.block_size_tokens
        max_inflight_bytes = context.config.max_inflight_bytes
        self._max_running_blocks = max(1, max_inflight_bytes // context.layout.block_bytes)
        self.early_registrations = EarlyRegistrations(context)
        self._running_blocks: Counter[str] = Counter()
        self._next_write_id = 1
        self._stopped: list[TransferId] = []

    # -- the engine's calls -------------------------------------------------------------------
    def begin(self, transfer_id: TransferId, prompt: PromptIdentity) -> None:
        """See ``ConnectorPort.begin_send``."""
        push = OutgoingPush(transfer_id=transfer_id, prompt=prompt, role=self)
        self._outgoing.add(push)
        self._notify(push, messages.Admitted(transfer_id))
        if not self.early_registrations.begin(transfer_id):
            self.step(push, OutgoingEvent.RELEASED)
            return
        early = self.early_registrations.pop(transfer_id)
        if early is None:
            return
        refusal = find_mismatch(prompt, early.message, self._block_size_tokens)
        if refusal is None:
            self._register(push, early.reader, early.message)
        else:
            self.early_registrations.tell_mismatch(transfer_id, refusal.detail)

    def advance(self, push: OutgoingPush, blocks: Sequence[BlockNumber], num_tokens: int) -> None:
        """See ``ConnectorPort.advance_send``."""
        if push.state in _PREFILL_GOES_ON:
            self._refer(push, blocks, num_tokens // self._block_size_tokens)
            push.has_blocks = True
        self.step(push, OutgoingEvent.ADVANCED)

    def pause(self, push: OutgoingPush) -> None:
        """See ``ConnectorPort.pause_send``."""
        self.step(push, OutgoingEvent.PAUSED)
        push.has_blocks = False

    def complete(self, push: OutgoingPush, blocks: Sequence[BlockNumber], end: PrefillEnd) -> None:
        """See ``ConnectorPort.complete_send``."""
        num_blocks = -(-push.prompt.num_tokens // self._block_size_tokens)
        if len(blocks) != num_blocks:
            raise LocalProtocolError(f"{len(blocks)} blocks for a prompt of {num_blocks} blocks")
        if push.state in _PREFILL_GOES_ON:
            self._refer(push, blocks, num_blocks)
            push.end = end
        self.step(push, OutgoingEvent.COMPLETED)

    def withdraw(self, transfer_id: TransferId) -> None:
        """See ``ConnectorPort.withdraw``; of a push, or of what has not begun."""
        push = self._outgoing.find(transfer_id, OutgoingPush)
        if push is not None:
            self.step(push, OutgoingEvent.WITHDRAWN)
        elif self._outgoing.end_of(transfer_id) is None:
            # Refused before it began: whoever has registered, or will, need not wait for it.
            self.early_registrations.fail(transfer_id)

    def take_stopped(self) -> list[TransferId]:
        """See ``ConnectorPort.take_stopped_sends``."""
        stopped, self._stopped = self._stopped, []
        return stopped

    # -- the receiver's messages --------------------------------------------------------------
    def register(
        self, reader: str, message: messages.Register
    ) -> messages.Registered | messages.Declined:
        """Take in which blocks to fill."""
        push = self._outgoing.find(message.transfer_id, OutgoingPush)
        if push is None:
            return self._register_without_prefill(reader, message)
        refusal = find_mismatch(push.prompt, message, self._block_size_tokens)
        if refusal is not None:
            return refusal
        if push.state is OutgoingState.DRAINING:
            return messages.decline(messages.DeclineReason.GONE, "the push was given up")
        current = push.registration
        is_repeated = current is not None and current.reader == reader
        if current is not None and is_repeated and message.generation <= current.generation:
            return messages.Registered(current.generation)
        self._register(push, reader, message)
        return messages.Registered(message.generation)

    def _register_without_prefill(
        self, reader: str, message: messages.Register
    ) -> messages.Registered | messages.Declined:
        end = self._outgoing.end_of(message.transfer_id)
        if end is None:
            return self.early_registrations.put(reader, message)
        if end.notice is None:
            return messages.decline(messages.DeclineReason.MISMATCH, NOT_PUSHED)
        self._context.emit(Notify(message.transfer_id, end.notice))
        return messages.decline(
            messages.DeclineReason.GONE, f"the push of {message.transfer_id} has ended"
        )

    def renew(
        self, push: OutgoingPush, message: messages.Renew
    ) -> messages.Renewed | messages.Declined:
        """Answer a heartbeat, repeating the notices that still matter."""
        duration_s = message.duration_s
        if push.lease_ends_s is not None:
            try:
                duration_s = self._outgoing.renew_lease(push, duration_s)
            except CapacityError as error:
                return messages.decline(messages.DeclineReason.PRESSURE, str(error))
        if push.running and push.registration is not None:
            self._notify(push, messages.Posting(push.transfer_id, push.registration.generation))
        if push.end is not None:
            self._notify(push, _first_token_notice(push, push.end))
        return messages.Renewed(duration_s, push.is_admitted)

    def release(
        self, push: OutgoingPush, reader: str, message: messages.Release
    ) -> messages.Released:
        """Take in that the receiver wants no more."""
        is_quiet = all(w.registration.reader != reader for w in push.running.values())
        if push.registration is None or push.is_for(reader):
            self.step(push, OutgoingEvent.RELEASED)
        return messages.Released(is_quiet)

    def lose_reader(self, reader: str) -> None:
        """``reader`` connects anew: what it had registered before may be another's by now."""
        self.early_registrations.drop_reader(reader)
        for push in self._outgoing.of_kind(OutgoingPush):
            if push.is_for(reader):
                push.detail = "the receiver has connected anew since it registered"
                self.step(push, OutgoingEvent.WRITE_FAILED)

    # -- the mover's events -------------------------------------------------------------------
    def on_write_ended(self, event: WriteEnded) -> None:
        """A posted WRITE is terminal: its source may be reused, its room is another's."""
        push = self._outgoing.find(event.transfer_id, OutgoingPush)
        write = push.running.pop(event.write_id, None) if push is not None else None
        if push is None or write is None:
            return
        self._context.blocks.drop(write.blocks)
        reader = write.registration.reader
        self._running_blocks[reader] -= len(write.blocks)
        if self._running_blocks[reader] <= 0:
            del self._running_blocks[reader]
        self._tell_old_generations_quiet(push, write.registration)
        if event.is_done or not push.is_for(reader):
            self.step(push, OutgoingEvent.WRITE_DONE)
        else:
            push.detail = event.detail
            self.step(push, OutgoingEvent.WRITE_FAILED)
        for other in self._outgoing.of_kind(OutgoingPush):
            if other is not push and other.is_for(reader):
                self._post_writes(other)

    def tick(self) -> None:
        """Act on the deadlines that have passed."""
        self.early_registrations.expire()
        now_s = self._context.now_s()
        for push in self._outgoing.of_kind(OutgoingPush):
            if now_s >= push.grace_ends_s:
                self.step(push, OutgoingEvent.GRACE_OVER)

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do, or None."""
        deadlines = [p.grace_ends_s for p in self._outgoing.of_kind(OutgoingPush)]
        early_s = self.early_registrations.next_expiry_s()
        due_s = min(deadlines + ([] if early_s is None else [early_s]), default=float("inf"))
        return None if due_s == float("inf") else due_s

    # -- decisions ----------------------------------------------------------------------------
    def _refer(self, push: OutgoingPush, blocks: Sequence[BlockNumber], num_ready: int) -> None:
        """The first ``num_ready`` of ``blocks`` hold the prompt's KV."""
        is_longer = self._outgoing.refer(push, blocks)
        push.num_ready = min(num_ready, len(push.blocks))
        if self._context.digests_of is not None:
            # Now, and not when it is posted: what goes wrong in between is to be found.
            known = push.ready_digests if is_longer else ()
            ready = push.blocks[len(known) : push.num_ready]
            push.ready_digests = known + self._context.digests_of(ready)

    def _register(self, push: OutgoingPush, reader: str, message: messages.Register) -> None:
        push.registration = Registration(
            reader,
            message.generation,
            message.first_block,
            message.blocks,
            message.want_block_digests,
        )
        if message.generation > 0 and not push.running:
            self._notify(push, messages.Quiet(push.transfer_id, message.generation - 1))
        self.step(push, OutgoingEvent.REGISTERED)

    def _tell_old_generations_quiet(self, push: OutgoingPush, ended: Registration) -> None:
        current = push.registration
        if current is None or ended == current or ended.reader != current.reader:
            return
        if all(w.registration.generation >= current.generation for w in push.running.values()):
            self._notify(push, messages.Quiet(push.transfer_id, current.generation - 1))

    def step(self, push: OutgoingPush, event: OutgoingEvent) -> None:
        """Take in an event of one push."""
        self._context.run(PUSH_SENDER, push, event, lambda *what: self._act(push, *what))
        if push.state is PUSH_SENDER.final:
            if self._outgoing.end_of(push.transfer_id) is None:
                # Said only now: until then a WRITE may have run.
                nothing = messages.Quiet(push.transfer_id, ALL_GENERATIONS)
                self._outgoing.remember_end(push.transfer_id, End(event.value, nothing))
            self._outgoing.close(push)

    def _act(  # noqa: C901 - one branch per action
        self, push: OutgoingPush, action: OutgoingAction, event: OutgoingEvent
    ) -> None:
        match action:
            case OutgoingAction.RESTART_WRITES:
                if push.registration is not None:
                    push.next_position = push.registration.first_block
            case OutgoingAction.POST_WRITES:
                self._post_writes(push)
            case OutgoingAction.BEGIN_LEASE:
                self._outgoing.begin_lease(push)
            case OutgoingAction.LET_GO:
                self._outgoing.let_go(push)
                push.num_ready, push.ready_digests = 0, ()
            case OutgoingAction.STOP_PREFILL:
                self._stopped.append(push.transfer_id)
                self._context.emit(NotifyEngine())
            case OutgoingAction.TELL_FIRST_TOKEN:
                if push.end is not None:
                    self._notify(push, _first_token_notice(push, push.end))
            case OutgoingAction.TELL_WRITTEN:
                if push.end is not None:
                    self._tell_end(push, event, _written_notice(push, push.end))
            case OutgoingAction.TELL_FAILED:
                reason = _REASON_OF_END[event]
                is_quiet = not push.running
                failed = messages.Failed(push.transfer_id, reason, is_quiet, push.detail[:1024])
                self._tell_end(push, event, failed)
            case OutgoingAction.TELL_QUIET:
                generation = push.registration.generation if push.registration else 0
                self._notify(push, messages.Quiet(push.transfer_id, generation))
            case OutgoingAction.START_GRACE:
                push.grace_ends_s = self._context.now_s() + self._context.config.quarantine_grace_s
            case OutgoingAction.DISCONNECT_READER:
                readers = {w.registration.reader for w in push.running.values()}
                self._context.emit(*(DisconnectReader(reader) for reader in sorted(readers)))
            case OutgoingAction.COUNT_END:
                self._count_end(push, event)

    def _post_writes(self, push: OutgoingPush) -> None:
        registration = push.registration
        is_writing = push.state in (OutgoingState.FOLLOWING, OutgoingState.FLUSHING)
        if registration is None or not is_writing:
            return
        room = self._max_running_blocks - self._running_blocks[registration.reader]
        count = min(room, push.num_ready - push.next_position)
        if count <= 0:
            return
        if not push.running:
            self._notify(push, messages.Posting(push.transfer_id, registration.generation))
        start, end = push.next_position, push.next_position + count
        local = push.blocks[start:end]
        offset = start - registration.first_block
        remote = registration.blocks[offset : offset + count]
        write_id = self._next_write_id
        self._next_write_id += 1
        # The WRITE owns its source: the push may let go of it meanwhile.
        self._context.blocks.hold(local)
        push.next_position = end
        push.posted_digests.update(enumerate(push.ready_digests[start:end], start))
        push.running[write_id] = RunningWrite(registration, local)
        self._running_blocks[registration.reader] += count
        self._context.emit(
            PostWrite(registration.reader, push.transfer_id, write_id, local, remote)
        )

    def _notify(self, push: OutgoingPush, notice: messages.Notice) -> None:
        self._context.emit(Notify(push.transfer_id, notice))

    def _tell_end(self, push: OutgoingPush, event: OutgoingEvent, notice: messages.Notice) -> None:
        self._outgoing.remember_end(push.transfer_id, End(event.value, notice))
        self._notify(push, notice)

    def _count_end(self, push: OutgoingPush, event: OutgoingEvent) -> None:
        outcome = "written" if event is OutgoingEvent.IS_WRITTEN else event.value
        self._context.count_end("offer", outcome)


def _first_token_notice(push: OutgoingPush, end: PrefillEnd) -> messages.FirstTokenReady:
    return messages.FirstTokenReady(
        push.transfer_id, end.first_token, push.prompt.digest, end.ended_s, end.report
    )


def _written_notice(push: OutgoingPush, end: PrefillEnd) -> messages.Written:
    registration = push.registration
    first_block = registration.first_block if registration is not None else 0
    generation = registration.generation if registration is not None else 0
    return messages.Written(
        push.transfer_id,
        generation,
        first_block,
        len(push.blocks) - first_block,
        push.prompt.num_tokens,
        end.first_token,
        push.prompt.digest,
        end.ended_s,
        end.report,
        _told_digests(push, registration),
    )


def _told_digests(push: OutgoingPush, registration: Registration | None) -> tuple[bytes, ...]:
    if registration is None or not registration.wants_digests or not push.posted_digests:
        return ()
    return tuple(push.posted_digests[p] for p in range(registration.first_block, len(push.blocks)))
