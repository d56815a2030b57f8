"""The sender's half of push: prefills in progress, who registered for them, what is written.

Decides by ``push.PUSH_SENDER``; moves nothing itself. Not locked: ``Planner`` is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.leases.handoff import HandoffLeases
from kvferry.connector.machine.effects import (
    CountOfferEnd,
    DisconnectReader,
    Effect,
    Notify,
    NotifyEngine,
    PostWrite,
)
from kvferry.connector.machine.events import WriteEnded
from kvferry.connector.ports import BlockPort, PrefillEnd, PromptIdentity
from kvferry.connector.push.early import (
    NOT_PUSHED,
    EarlyRegistrations,
    find_mismatch,
    mismatch_notice,
)
from kvferry.connector.push.outgoing import (
    REASON_OF_END,
    OutgoingPush,
    Registration,
    RunningWrite,
    first_token_notice,
    written_notice,
)
from kvferry.connector.push.table import PUSH_SENDER, OutgoingAction, OutgoingEvent, OutgoingState
from kvferry.errors import FerryError, LocalProtocolError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.layout import KVLayout
from kvferry.protocol.messages import (
    Admitted,
    Declined,
    DeclineReason,
    Failed,
    FailureReason,
    Notice,
    Posting,
    Quiet,
    Register,
    Registered,
    Release,
    Released,
    Renew,
    Renewed,
    decline,
)

MAX_REMEMBERED_ENDS = 4096


class PushSender:
    """All pushes that this instance sends."""

    def __init__(
        self,
        config: ExchangeConfig,
        layout: KVLayout,
        blocks: BlockPort,
        holds: HandoffLeases,
        clock: Clock,
    ) -> None:
        self._config = config
        self._block_size_tokens = layout.block_size_tokens
        self._max_running_blocks = max(1, config.max_inflight_bytes // layout.block_bytes)
        self._pool = blocks
        self._holds = holds
        self._clock = clock
        self._sends: OrderedDict[TransferId, OutgoingPush] = OrderedDict()
        self._early = EarlyRegistrations(config, clock)
        self._ends: OrderedDict[TransferId, Notice] = OrderedDict()
        self._running_blocks: Counter[str] = Counter()
        self._next_write_id = 1
        self._stopped: list[TransferId] = []
        self.outcomes: Counter[str] = Counter()

    def __contains__(self, transfer_id: TransferId) -> bool:
        """Return whether ``transfer_id`` is, or was lately, a push."""
        return transfer_id in self._sends or transfer_id in self._ends

    @property
    def num_sends(self) -> int:
        """Pushes that are not closed, and registrations that wait for their prefill."""
        return len(self._sends) + len(self._early)

    # -- the engine's calls -------------------------------------------------------------------
    def begin(self, transfer_id: TransferId, prompt: PromptIdentity) -> list[Effect]:
        """See ``ConnectorPort.begin_send``; the planner has checked that the id is free."""
        send = OutgoingPush(transfer_id, prompt)
        self._sends[transfer_id] = send
        effects: list[Effect] = [Notify(transfer_id, Admitted(transfer_id))]
        if not self._early.begin(transfer_id):
            return effects + self._step(send, OutgoingEvent.RELEASED)
        early = self._early.pop(transfer_id)
        if early is None:
            return effects
        refusal = find_mismatch(send.prompt, early.message, self._block_size_tokens)
        if refusal is not None:
            return [*effects, mismatch_notice(transfer_id, refusal.detail)]
        return effects + self._register(send, early.reader, early.message)

    def advance(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], num_tokens: int
    ) -> list[Effect]:
        """See ``ConnectorPort.advance_send``."""
        send = self._sends.get(transfer_id)
        if send is None or send.end is not None:
            return []
        self._refer_to(send, blocks)
        send.num_ready = min(num_tokens // self._block_size_tokens, len(send.blocks))
        send.has_blocks = True
        return self._step(send, OutgoingEvent.ADVANCED)

    def pause(self, transfer_id: TransferId) -> None:
        """See ``ConnectorPort.pause_send``."""
        send = self._sends.get(transfer_id)
        if send is not None and send.end is None:
            send.has_blocks = False
            self._let_go(send)

    def complete(
        self, transfer_id: TransferId, blocks: Sequence[BlockNumber], end: PrefillEnd
    ) -> list[Effect]:
        """See ``ConnectorPort.complete_send``."""
        send = self._sends.get(transfer_id)
        if send is None or send.end is not None:
            return []
        num_blocks = -(-send.prompt.num_tokens // self._block_size_tokens)
        if len(blocks) != num_blocks:
            raise LocalProtocolError(f"{len(blocks)} blocks for a prompt of {num_blocks} blocks")
        self._refer_to(send, blocks)
        send.num_ready = len(send.blocks)
        send.end = end
        return self._step(send, OutgoingEvent.COMPLETED)

    def withdraw(self, transfer_id: TransferId) -> list[Effect]:
        """See ``ConnectorPort.withdraw``."""
        send = self._sends.get(transfer_id)
        if send is not None:
            return self._step(send, OutgoingEvent.WITHDRAWN)
        self._early.pop(transfer_id)
        if transfer_id in self._ends:
            return []
        # Refused before it began: whoever has registered, or will, need not wait for it.
        failed = Failed(transfer_id, FailureReason.ABORTED, True, "the prefill never began")
        return [self._remember_end(transfer_id, failed)]

    def decline_early(self, transfer_id: TransferId) -> list[Effect]:
        """The prefill is handed over by pull: tell whoever has registered for it already."""
        return self._early.decline(transfer_id, NOT_PUSHED)

    def is_wanted(self, transfer_id: TransferId) -> bool:
        """See ``ConnectorPort.is_send_wanted``."""
        return self._early.is_wanted(transfer_id)

    def take_stopped(self) -> list[TransferId]:
        """See ``ConnectorPort.take_stopped_sends``."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def give_up_oldest(self, num_blocks: int) -> tuple[int, list[Effect]]:
        """Give up held pushes that nobody registered for; also see ``ConnectorPort``."""
        effects: list[Effect] = []
        num_freed = 0
        for send in list(self._sends.values()):
            if num_freed >= num_blocks:
                break
            # A send that is just being completed must not make room for itself.
            if send.state is OutgoingState.HELD and send.transfer_id in self._holds:
                num_freed += len(send.blocks)
                effects += self._step(send, OutgoingEvent.PRESSURE)
        return num_freed, effects

    def expire(self, transfer_id: TransferId) -> list[Effect]:
        """The hold of ``transfer_id`` is past its time."""
        send = self._sends.get(transfer_id)
        return self._step(send, OutgoingEvent.EXPIRED) if send is not None else []

    # -- the receiver's messages --------------------------------------------------------------
    def register(
        self, reader: str, message: Register
    ) -> tuple[Registered | Declined, list[Effect]]:
        """Take in which blocks to fill."""
        send = self._sends.get(message.transfer_id)
        if send is None:
            end = self._ends.get(message.transfer_id)
            if end is not None:
                detail = f"the push of {message.transfer_id} has ended"
                return decline(DeclineReason.GONE, detail), [Notify(message.transfer_id, end)]
            return self._early.put(reader, message), []
        refusal = find_mismatch(send.prompt, message, self._block_size_tokens)
        if refusal is not None:
            return refusal, []
        if send.state is OutgoingState.DRAINING:
            return decline(DeclineReason.GONE, "the push was given up"), []
        current = send.registration
        is_repeated = current is not None and current.reader == reader
        if current is not None and is_repeated and message.generation <= current.generation:
            return Registered(current.generation), []
        return Registered(message.generation), self._register(send, reader, message)

    def renew(self, message: Renew) -> tuple[Renewed | Declined, list[Effect]] | None:
        """Answer a heartbeat, repeating the notices that still matter; None: not ours."""
        transfer_id = message.transfer_id
        end = self._ends.get(transfer_id)
        if end is not None:
            return Renewed(0.0, True), [Notify(transfer_id, end)]
        send = self._sends.get(transfer_id)
        if send is None:
            return (Renewed(message.duration_s), []) if transfer_id in self._early else None
        duration_s = message.duration_s
        if send.state in (OutgoingState.HELD, OutgoingState.FLUSHING):
            try:
                duration_s = self._holds.renew(transfer_id, message.duration_s)
            except FerryError as error:
                return decline(DeclineReason.PRESSURE, str(error)), []
        effects: list[Effect] = []
        if send.running and send.registration is not None:
            effects.append(Notify(transfer_id, Posting(transfer_id, send.registration.generation)))
        if send.end is not None:
            effects.append(Notify(transfer_id, first_token_notice(send, send.end)))
        return Renewed(duration_s, send.is_admitted), effects

    def release(self, reader: str, message: Release) -> tuple[Released, list[Effect]]:
        """Take in that the receiver wants no more."""
        transfer_id = message.transfer_id
        send = self._sends.get(transfer_id)
        if send is not None:
            is_quiet = all(w.registration.reader != reader for w in send.running.values())
            current = send.registration
            is_anothers = current is not None and current.reader != reader
            return Released(is_quiet), [] if is_anothers else self._step(
                send, OutgoingEvent.RELEASED
            )
        if transfer_id in self._ends:
            return Released(), []
        return Released(), [NotifyEngine()] if self._early.withdraw(transfer_id, reader) else []

    def lose_reader(self, reader: str) -> list[Effect]:
        """``reader`` connects anew: what it had registered before may be another's by now."""
        self._early.drop_reader(reader)
        effects: list[Effect] = []
        for send in list(self._sends.values()):
            if send.registration is not None and send.registration.reader == reader:
                send.detail = "the receiver has connected anew since it registered"
                effects += self._step(send, OutgoingEvent.WRITE_FAILED)
        return effects

    # -- the mover's events -------------------------------------------------------------------
    def on_write_ended(self, event: WriteEnded) -> list[Effect]:
        """A posted WRITE is terminal: its source may be reused, its room is another's."""
        send = self._sends.get(event.transfer_id)
        write = send.running.pop(event.write_id, None) if send is not None else None
        if send is None or write is None:
            return []
        self._pool.drop(write.blocks)
        reader = write.registration.reader
        self._running_blocks[reader] -= len(write.blocks)
        if self._running_blocks[reader] <= 0:
            del self._running_blocks[reader]
        effects = self._tell_old_generations_quiet(send, write.registration)
        current = send.registration
        if event.is_done or (current is not None and current.reader != reader):
            effects += self._step(send, OutgoingEvent.WRITE_DONE)
        else:
            send.detail = event.detail
            effects += self._step(send, OutgoingEvent.WRITE_FAILED)
        for other in list(self._sends.values()):
            registration = other.registration
            if other is not send and registration is not None and registration.reader == reader:
                effects += self._post_writes(other)
        return effects

    def tick(self) -> list[Effect]:
        """Act on the deadlines that have passed."""
        self._early.expire()
        now_s = self._clock.monotonic_s()
        effects: list[Effect] = []
        for send in list(self._sends.values()):
            if now_s >= send.grace_ends_s:
                send.grace_ends_s = now_s + self._config.quarantine_grace_s
                effects += self._step(send, OutgoingEvent.GRACE_OVER)
        return effects

    def next_deadline_s(self) -> float | None:
        """Return when ``tick`` has something to do, or None."""
        deadlines = [s.grace_ends_s for s in self._sends.values()]
        early = self._early.next_expiry_s()
        due_s = min(deadlines + ([early] if early is not None else []), default=None)
        return None if due_s == float("inf") else due_s

    # -- decisions ----------------------------------------------------------------------------
    def _refer_to(self, send: OutgoingPush, blocks: Sequence[BlockNumber]) -> None:
        """The prompt is in ``blocks``: keep each from being reused until it is written.

        What was posted from other blocks stays right: each WRITE has references of its own.
        """
        is_longer = tuple(blocks[: len(send.blocks)]) == send.blocks
        added, dropped = (blocks[len(send.blocks) :], ()) if is_longer else (blocks, send.blocks)
        self._pool.hold(added)
        self._pool.drop(dropped)
        send.blocks = tuple(blocks)

    def _let_go(self, send: OutgoingPush) -> None:
        """Nothing more is posted from the blocks of now."""
        self._pool.drop(send.blocks)
        send.blocks, send.num_ready = (), 0

    def _register(self, send: OutgoingPush, reader: str, message: Register) -> list[Effect]:
        send.registration = Registration(
            reader, message.generation, message.first_block, message.blocks
        )
        effects: list[Effect] = []
        if message.generation > 0 and not send.running:
            quiet = Quiet(send.transfer_id, message.generation - 1)
            effects.append(Notify(send.transfer_id, quiet))
        return effects + self._step(send, OutgoingEvent.REGISTERED)

    def _tell_old_generations_quiet(self, send: OutgoingPush, ended: Registration) -> list[Effect]:
        current = send.registration
        if current is None or ended == current or ended.reader != current.reader:
            return []
        if any(w.registration.generation < current.generation for w in send.running.values()):
            return []
        return [Notify(send.transfer_id, Quiet(send.transfer_id, current.generation - 1))]

    def _step(self, send: OutgoingPush, event: OutgoingEvent) -> list[Effect]:
        was = send.state
        rule = PUSH_SENDER.step(was, event)
        send.state = rule.next_state
        effects: list[Effect] = []
        for action in rule.actions:
            effects += self._act(send, action, event)
        if send.state in (OutgoingState.DRAINING, OutgoingState.CLOSED):
            self._let_go(send)
        if send.state is OutgoingState.DRAINING and was is not OutgoingState.DRAINING:
            send.grace_ends_s = self._clock.monotonic_s() + self._config.quarantine_grace_s
        if send.state is OutgoingState.FLUSHING and send.is_written:
            effects += self._step(send, OutgoingEvent.ALL_WRITTEN)
        elif send.state is OutgoingState.DRAINING and not send.running:
            effects += self._step(send, OutgoingEvent.DRAINED)
        elif send.state is OutgoingState.CLOSED and was is not OutgoingState.CLOSED:
            effects.append(self._close(send, event))
        return effects

    def _act(  # noqa: C901 - one branch per action
        self, send: OutgoingPush, action: OutgoingAction, event: OutgoingEvent
    ) -> list[Effect]:
        match action:
            case OutgoingAction.RESTART_WRITES:
                if send.registration is not None:
                    send.next_position = send.registration.first_block
            case OutgoingAction.POST_WRITES:
                return self._post_writes(send)
            case OutgoingAction.TAKE_HOLD:
                return self._holds.take(send.transfer_id, send.blocks)
            case OutgoingAction.RELEASE_HOLD:
                self._holds.release(send.transfer_id)
            case OutgoingAction.STOP_PREFILL:
                self._stopped.append(send.transfer_id)
                return [NotifyEngine()]
            case OutgoingAction.TELL_FIRST_TOKEN if send.end is not None:
                return [Notify(send.transfer_id, first_token_notice(send, send.end))]
            case OutgoingAction.TELL_WRITTEN if send.end is not None:
                return [self._remember_end(send.transfer_id, written_notice(send, send.end))]
            case OutgoingAction.TELL_FAILED:
                reason = REASON_OF_END[event]
                failed = Failed(send.transfer_id, reason, not send.running, send.detail[:1024])
                return [self._remember_end(send.transfer_id, failed)]
            case OutgoingAction.TELL_QUIET:
                generation = send.registration.generation if send.registration else 0
                return [Notify(send.transfer_id, Quiet(send.transfer_id, generation))]
            case OutgoingAction.DISCONNECT_READER:
                readers = {w.registration.reader for w in send.running.values()}
                return [DisconnectReader(reader) for reader in sorted(readers)]
            case _:  # pragma: no cover - a token is told only where there is one
                pass
        return []

    def _post_writes(self, send: OutgoingPush) -> list[Effect]:
        registration = send.registration
        if registration is None or send.state not in (
            OutgoingState.FOLLOWING,
            OutgoingState.FLUSHING,
        ):
            return []
        effects: list[Effect] = []
        room = self._max_running_blocks - self._running_blocks[registration.reader]
        count = min(room, send.num_ready - send.next_position)
        if count <= 0:
            return []
        if not send.running:
            posting = Posting(send.transfer_id, registration.generation)
            effects.append(Notify(send.transfer_id, posting))
        start, end = send.next_position, send.next_position + count
        local = send.blocks[start:end]
        offset = start - registration.first_block
        remote = registration.blocks[offset : offset + count]
        self._pool.hold(local)
        send.next_position = end
        send.running[self._next_write_id] = RunningWrite(registration, local)
        self._running_blocks[registration.reader] += count
        effects.append(
            PostWrite(registration.reader, send.transfer_id, self._next_write_id, local, remote)
        )
        self._next_write_id += 1
        return effects

    def _remember_end(self, transfer_id: TransferId, notice: Notice) -> Effect:
        self._ends[transfer_id] = notice
        while len(self._ends) > MAX_REMEMBERED_ENDS:
            self._ends.popitem(last=False)
        return Notify(transfer_id, notice)

    def _close(self, send: OutgoingPush, event: OutgoingEvent) -> Effect:
        self._sends.pop(send.transfer_id, None)
        if send.transfer_id not in self._ends:
            self._remember_end(send.transfer_id, Quiet(send.transfer_id, 2**40))
        outcome = "written" if event is OutgoingEvent.ALL_WRITTEN else event.value
        self.outcomes[outcome] += 1
        return CountOfferEnd(outcome)
