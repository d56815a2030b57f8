"""One object a transfer, found by its id, and what all roles share.

A transfer has a reference of its own on each of its blocks, from the moment that it is told of them
until nothing that was posted can touch them. A finished prefill is kept for its receiver by a
handoff lease, which the receiver's heartbeats lengthen; all of them together have a share of the
pool, and the oldest that nobody uses give way. Pure, and not locked: ``Planner`` is.
"""

from __future__ import annotations

import abc
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from kvferry.blocks.lease import Cover
from kvferry.blocks.quarantine import Quarantine
from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.effects import (
    CountDropped,
    CountEnd,
    CountReceive,
    Effect,
    NotifyEngine,
    Send,
)
from kvferry.connector.ports import (
    BlockPort,
    FirstTokenArrival,
    PrefillEnd,
    PromptIdentity,
    ReceiveOutcome,
    ReceiveResult,
)
from kvferry.connector.table import ActionT, EventT, StateT, Subject, Table
from kvferry.errors import CapacityError, LocalProtocolError, RequestError
from kvferry.protocol import messages
from kvferry.protocol.compatibility import KVLayout
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.params import PeerAddress

MAX_REMEMBERED_ENDS = 8192

BlockDigests = Callable[[Sequence[BlockNumber]], tuple[bytes, ...]]
"""32 bytes per block, over its memory as it is now."""


def transfer_id_in_use(message: str) -> RequestError:
    """Return the refusal of an id that names another transfer."""
    return RequestError(message, param="kv_transfer_params.transfer_id", code="transfer_id_in_use")


@dataclass(slots=True)
class RoleContext:
    """What every role decides with, and what it decides into. ``digests_of`` is there where
    transfers are verified."""

    config: ExchangeConfig
    layout: KVLayout
    blocks: BlockPort
    clock: Clock
    transport: str = ""
    digests_of: BlockDigests | None = None
    effects: deque[Effect] = field(default_factory=deque)
    """What is decided and not executed yet, in the order in which it was decided."""
    outcomes: Counter[str] = field(default_factory=Counter)

    def emit(self, *effects: Effect) -> None:
        """Have ``effects`` executed after all that was decided before."""
        self.effects.extend(effects)

    def now_s(self) -> float:
        """Return the monotonic time."""
        return self.clock.monotonic_s()

    def run(
        self,
        table: Table[StateT, EventT, ActionT],
        subject: Subject[StateT],
        event: EventT,
        act: Callable[[ActionT, EventT], None],
    ) -> bool:
        """See ``Table.run``; an event that has no rule is counted."""
        is_known = table.run(subject, event, act)
        if not is_known:
            self.emit(CountDropped(table.name, str(event), str(subject.state)))
        return is_known

    def count_end(self, kind: Literal["offer", "history"], outcome: str) -> None:
        """Count one end, for the snapshot and for metrics."""
        self.outcomes[f"{kind}_{outcome}"] += 1
        self.emit(CountEnd(kind, outcome))


@dataclass(slots=True, eq=False, kw_only=True)
class Incoming:
    """One transfer that is received, from its request's arrival until nothing can touch its blocks.

    It owns one reference on each of ``blocks``, from the moment that it is given them.
    """

    transfer_id: TransferId
    peer: PeerAddress
    mode: str
    """Label in metrics."""
    deadline_s: float = float("inf")
    started_s: float | None = None
    """When it was asked for, or when the sender first told of WRITEs."""
    blocks: tuple[BlockNumber, ...] = ()
    first_block: int = 0
    generation: int = 0
    quarantined: set[int] = field(default_factory=set)
    """Generations whose blocks a posted transfer may still touch."""
    outcome: ReceiveOutcome = ReceiveOutcome.FAILED
    detail: str = ""
    num_bytes: int = 0
    num_partial_tokens: int = 0
    num_verified: int = 0
    num_unverified: int = 0
    release_outcome: messages.ReleaseOutcome = messages.ReleaseOutcome.FAILED

    @property
    def is_quiet(self) -> bool:
        """Whether nothing that was posted can touch memory here any more."""
        return not self.quarantined


IncomingT = TypeVar("IncomingT", bound=Incoming)


class IncomingTransfers:
    """All that is being received or in quarantine, and what the engine has not collected yet."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._transfers: dict[TransferId, Incoming] = {}
        self._quarantine = Quarantine(context.blocks, context.config.max_quarantine_share)
        self._results: dict[TransferId, ReceiveResult] = {}
        self._first_tokens: dict[TransferId, FirstTokenArrival] = {}

    def __len__(self) -> int:
        """Return how many are not closed."""
        return len(self._transfers)

    @property
    def num_blocks_quarantined(self) -> int:
        """Distinct blocks that a posted transfer may still touch."""
        return self._quarantine.num_blocks

    def get(self, transfer_id: TransferId) -> Incoming | None:
        """Return the transfer of that id, if there is one."""
        return self._transfers.get(transfer_id)

    def of_kind(self, kind: type[IncomingT]) -> list[IncomingT]:
        """Return the transfers of one role."""
        return [t for t in self._transfers.values() if isinstance(t, kind)]

    def add(self, transfer: Incoming) -> None:
        """Keep ``transfer``. Raises ``RequestError`` if its id is in use."""
        if transfer.transfer_id in self._transfers:
            transfer_id = transfer.transfer_id
            raise transfer_id_in_use(f"transfer id {transfer_id} is already being received")
        self._transfers[transfer.transfer_id] = transfer

    def close(self, transfer: Incoming) -> None:
        """Forget ``transfer``: nothing of it is left."""
        del self._transfers[transfer.transfer_id]

    # -- what its peer is told ----------------------------------------------------------------
    def send_renew(self, transfer: Incoming) -> None:
        """Ask the peer whether it still holds the blocks, and tell it that they are wanted."""
        lease_s = self._context.config.handoff_lease_s
        renew = messages.Renew(transfer.transfer_id, transfer.peer.epoch, lease_s)
        self._context.emit(Send(transfer.peer, renew))

    def send_release(self, transfer: Incoming) -> None:
        """Tell the peer that nothing is wanted of it any more, and why."""
        config, peer = self._context.config, transfer.peer
        release = messages.Release(
            config.instance_id,
            config.epoch,
            transfer.transfer_id,
            peer.epoch,
            transfer.release_outcome,
        )
        self._context.emit(Send(peer, release))

    # -- blocks -------------------------------------------------------------------------------
    def refer(self, transfer: Incoming, blocks: Sequence[BlockNumber]) -> None:
        """Give ``transfer`` a reference on each of ``blocks``, which must have one already."""
        self._context.blocks.hold(blocks)
        transfer.blocks = tuple(blocks)

    def drop(self, transfer: Incoming, first: int = 0) -> None:
        """Take the references on its blocks from index ``first`` on back."""
        self._context.blocks.drop(transfer.blocks[first:])
        transfer.blocks = transfer.blocks[:first]

    def is_closed_to(self, transfer: Incoming) -> bool:
        """Whether to start nothing with its peer; then it says why."""
        if not self._quarantine.is_closed_to(transfer.peer.instance_id):
            return False
        transfer.outcome = ReceiveOutcome.DECLINED
        transfer.detail = "too many blocks are in quarantine to start another with this peer"
        return True

    def enter_quarantine(self, transfer: Incoming) -> None:
        """Its blocks may still be touched: they are kept beyond the end of its request."""
        key = (transfer.transfer_id, transfer.generation)
        # The quarantine takes its own reference before the transfer's is dropped.
        self._quarantine.enter(key, transfer.peer.instance_id, transfer.blocks)
        transfer.quarantined.add(transfer.generation)
        self.drop(transfer)

    def leave_quarantine(self, transfer: Incoming, generations: Iterable[int]) -> None:
        """Nothing of ``generations`` can touch memory here any more."""
        for quiet in generations:
            self._quarantine.leave((transfer.transfer_id, quiet))
            transfer.quarantined.discard(quiet)

    def start_grace(self, transfer: Incoming) -> None:
        """From now on what is posted may run for a while before its link is torn down."""
        transfer.deadline_s = self._context.now_s() + self._context.config.quarantine_grace_s

    def is_intact(self, transfer: Incoming, told: Sequence[bytes]) -> bool:
        """Whether its blocks hold what the other side had, where that is verified and it has told
        their digests; else the outcome is set."""
        digests_of, blocks = self._context.digests_of, transfer.blocks
        if digests_of is None:
            return True
        transfer.num_verified = len(blocks) if len(told) == len(blocks) else 0
        transfer.num_unverified = len(blocks) - transfer.num_verified
        if not transfer.num_verified or digests_of(blocks) == tuple(told):
            return True
        transfer.outcome = ReceiveOutcome.CORRUPT
        transfer.detail = "the blocks' digests differ on both sides"
        return False

    # -- what the engine collects -------------------------------------------------------------
    def report(self, transfer: Incoming) -> None:
        """Tell the engine how ``transfer`` has ended. ``blocks`` are still its own."""
        received = transfer.outcome is ReceiveOutcome.RECEIVED
        result = ReceiveResult(
            transfer.transfer_id,
            transfer.outcome,
            transfer.detail,
            num_bytes=transfer.num_bytes if received else 0,
            num_blocks=len(transfer.blocks) if received else 0,
            num_partial_tokens=transfer.num_partial_tokens if received else 0,
            transport=self._context.transport,
            started_s=transfer.started_s,
            finished_s=self._context.now_s(),
        )
        self._results[transfer.transfer_id] = result
        self._context.outcomes[f"receive_{transfer.outcome}"] += 1
        count = CountReceive(
            transfer.mode,
            transfer.outcome,
            result.num_bytes,
            result.duration_s if received else None,
            transfer.num_verified,
            transfer.num_unverified,
        )
        self._context.emit(count, NotifyEngine())

    def report_first_token(self, transfer: Incoming, end: PrefillEnd) -> None:
        """Tell the engine of the prompt's first token."""
        self._first_tokens[transfer.transfer_id] = FirstTokenArrival(transfer.transfer_id, end)
        self._context.emit(NotifyEngine())

    def discard_results(self, transfer_id: TransferId) -> None:
        """What was not collected yet is of no use any more."""
        self._results.pop(transfer_id, None)
        self._first_tokens.pop(transfer_id, None)

    def take_results(self) -> list[ReceiveResult]:
        """See ``ConnectorPort.take_results``."""
        results, self._results = self._results, {}
        return list(results.values())

    def take_first_tokens(self) -> list[FirstTokenArrival]:
        """See ``ConnectorPort.take_first_tokens``."""
        arrivals, self._first_tokens = self._first_tokens, {}
        return list(arrivals.values())


@dataclass(slots=True, eq=False, kw_only=True)
class Outgoing(abc.ABC):
    """One prompt whose blocks are handed over.

    It owns one reference on each of ``blocks``, from the moment that it is told of them.
    """

    transfer_id: TransferId
    prompt: PromptIdentity
    blocks: tuple[BlockNumber, ...] = ()
    lease_ends_s: float | None = None
    """Until when the finished prefill is held (monotonic seconds)."""
    num_renewals: int = 0

    @property
    @abc.abstractmethod
    def may_give_way(self) -> bool:
        """Whether it is held and nobody uses it."""

    @abc.abstractmethod
    def give_way(self) -> None:
        """End it for want of blocks."""

    @abc.abstractmethod
    def expire(self) -> None:
        """End it: its time is over."""


OutgoingT = TypeVar("OutgoingT", bound=Outgoing)


@dataclass(frozen=True, slots=True)
class End:
    """How a transfer ended: ``cause`` is a metric label, ``notice`` what its receiver is told."""

    cause: str
    notice: messages.Notice | None = None


class OutgoingTransfers:
    """All that is being handed over, and how the last ones ended."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._transfers: OrderedDict[TransferId, Outgoing] = OrderedDict()
        self._leased = Cover()
        self._max_leased_blocks = int(context.config.max_held_share * context.blocks.num_blocks)
        self._lease_s = min(context.config.handoff_lease_s, context.config.max_lease_s)
        self._ends: OrderedDict[TransferId, End] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are not closed."""
        return len(self._transfers)

    @property
    def num_blocks_leased(self) -> int:
        """Distinct blocks of finished prefills that wait."""
        return len(self._leased)

    def find(self, transfer_id: TransferId, kind: type[OutgoingT]) -> OutgoingT | None:
        """Return the transfer of that id, if there is one and it is of that role."""
        transfer = self._transfers.get(transfer_id)
        return transfer if isinstance(transfer, kind) else None

    def of_kind(self, kind: type[OutgoingT]) -> list[OutgoingT]:
        """Return the transfers of one role, oldest first."""
        return [t for t in self._transfers.values() if isinstance(t, kind)]

    def end_of(self, transfer_id: TransferId) -> End | None:
        """Return how a transfer has ended, if that is known."""
        return self._ends.get(transfer_id)

    def add(self, transfer: Outgoing, blocks: Sequence[BlockNumber] = ()) -> None:
        """Keep ``transfer`` and its ``blocks``. Raises ``RequestError`` if its id is or was in use:
        heartbeats and releases know a handoff by its id alone, whatever its mode."""
        transfer_id = transfer.transfer_id
        if transfer_id in self._transfers or transfer_id in self._ends:
            raise transfer_id_in_use(f"transfer id {transfer_id} was used before")
        self.refer(transfer, blocks)
        self._transfers[transfer_id] = transfer

    def remember_end(self, transfer_id: TransferId, end: End) -> None:
        """Let whoever asks for it later hear how it ended."""
        self._ends[transfer_id] = end
        while len(self._ends) > MAX_REMEMBERED_ENDS:
            self._ends.popitem(last=False)

    def close(self, transfer: Outgoing) -> None:
        """Forget ``transfer``: nothing of it is left."""
        del self._transfers[transfer.transfer_id]

    # -- blocks -------------------------------------------------------------------------------
    def refer(self, transfer: Outgoing, blocks: Sequence[BlockNumber]) -> bool:
        """The prompt is in ``blocks``, which must have a reference already: keep them from reuse.

        Returns whether they begin with those of before. Others take the place of those; what was
        posted from them has references of its own.
        """
        known, blocks = transfer.blocks, tuple(blocks)
        is_longer = blocks[: len(known)] == known
        num_same = len(known) if is_longer else 0
        self._context.blocks.hold(blocks[num_same:])
        self._context.blocks.drop(known[num_same:])
        transfer.blocks = blocks
        return is_longer

    def let_go(self, transfer: Outgoing) -> None:
        """Nothing more is read or posted from its blocks of now. Safe to repeat."""
        if transfer.lease_ends_s is not None:
            transfer.lease_ends_s = None
            self._leased.remove(transfer.blocks)
        self._context.blocks.drop(transfer.blocks)
        transfer.blocks = ()

    # -- finished prefills --------------------------------------------------------------------
    def begin_lease(self, transfer: Outgoing) -> None:
        """Its prefill is complete: keep its blocks for a time, and let the oldest give way."""
        if transfer.lease_ends_s is not None:
            raise LocalProtocolError(f"transfer id {transfer.transfer_id} is held already")
        excess = len(self._leased) + len(transfer.blocks) - self._max_leased_blocks
        self.give_up_oldest(excess)
        transfer.lease_ends_s = self._context.now_s() + self._lease_s
        self._leased.add(transfer.blocks)

    def renew_lease(self, transfer: Outgoing, duration_s: float) -> float:
        """Lengthen a handoff lease, never shorten it; return how long it now lasts (seconds).

        Raises ``CapacityError`` when its renewals are used up.
        """
        config, now_s = self._context.config, self._context.now_s()
        ends_s = now_s if transfer.lease_ends_s is None else transfer.lease_ends_s
        wanted_s = now_s + min(duration_s, config.max_lease_s)
        if wanted_s > ends_s:
            if transfer.num_renewals >= config.max_renewals:
                raise CapacityError(f"it was renewed {transfer.num_renewals} times already")
            transfer.num_renewals += 1
            transfer.lease_ends_s = ends_s = wanted_s
        return ends_s - now_s

    def give_up_oldest(self, num_blocks: int) -> int:
        """See ``ConnectorPort.give_up_oldest``."""
        num_freed = 0
        for transfer in list(self._transfers.values()):
            if num_freed >= num_blocks:
                break
            if transfer.lease_ends_s is not None and transfer.may_give_way:
                num_freed += len(transfer.blocks)
                transfer.give_way()
        return num_freed

    def expire(self) -> None:
        """End those whose time is over."""
        now_s = self._context.now_s()
        for transfer in list(self._transfers.values()):
            if transfer.lease_ends_s is not None and transfer.lease_ends_s <= now_s:
                transfer.expire()

    def next_expiry_s(self) -> float | None:
        """Return when the next one ends (monotonic seconds), or None."""
        ends = [t.lease_ends_s for t in self._transfers.values() if t.lease_ends_s is not None]
        return min(ends, default=None)
