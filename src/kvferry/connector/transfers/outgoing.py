"""What this instance sends: one object a transfer, and the blocks of finished prefills that wait.

A finished prefill is held for its receiver for a time, which its heartbeats lengthen; all held ones
together have a share of the pool, and the oldest that nobody uses give way.
"""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from kvferry.blocks.cover import Cover
from kvferry.connector.ports import PromptIdentity
from kvferry.connector.transfers.context import RoleContext
from kvferry.errors import CapacityError, LocalProtocolError, RequestError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import Notice

MAX_REMEMBERED_ENDS = 8192


@dataclass(slots=True, eq=False, kw_only=True)
class Outgoing(abc.ABC):
    """One prompt whose blocks are handed over.

    It owns one reference on each of ``blocks``, from the moment that it is told of them.
    """

    transfer_id: TransferId
    prompt: PromptIdentity
    blocks: tuple[BlockNumber, ...] = ()
    hold_ends_s: float | None = None
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


def transfer_id_in_use(message: str) -> RequestError:
    """Return the refusal of an id that names another transfer."""
    return RequestError(message, param="kv_transfer_params.transfer_id", code="transfer_id_in_use")


@dataclass(frozen=True, slots=True)
class End:
    """How a transfer ended: ``cause`` is a metric label, ``notice`` what its receiver is told."""

    cause: str
    notice: Notice | None = None


class OutgoingTransfers:
    """All that is being handed over, and how the last ones ended."""

    def __init__(self, context: RoleContext) -> None:
        self._context = context
        self._transfers: OrderedDict[TransferId, Outgoing] = OrderedDict()
        self._held = Cover()
        self._max_held_blocks = int(context.config.max_held_share * context.blocks.num_blocks)
        self._lease_s = min(context.config.handoff_lease_s, context.config.max_lease_s)
        self._ends: OrderedDict[TransferId, End] = OrderedDict()

    def __len__(self) -> int:
        """Return how many are not closed."""
        return len(self._transfers)

    @property
    def num_blocks_held(self) -> int:
        """Distinct blocks of finished prefills that wait."""
        return len(self._held)

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
        if transfer.hold_ends_s is not None:
            transfer.hold_ends_s = None
            self._held.remove(transfer.blocks)
        self._context.blocks.drop(transfer.blocks)
        transfer.blocks = ()

    # -- finished prefills --------------------------------------------------------------------
    def hold(self, transfer: Outgoing) -> None:
        """Its prefill is complete: keep its blocks for a time, and let the oldest give way."""
        if transfer.hold_ends_s is not None:
            raise LocalProtocolError(f"transfer id {transfer.transfer_id} is held already")
        excess = len(self._held) + len(transfer.blocks) - self._max_held_blocks
        self.give_up_oldest(excess)
        transfer.hold_ends_s = self._context.now_s() + self._lease_s
        self._held.add(transfer.blocks)

    def renew(self, transfer: Outgoing, duration_s: float) -> float:
        """Lengthen a hold; return how long it now lasts, or raise ``CapacityError`` when its
        renewals are used up. Never shortens."""
        config, now_s = self._context.config, self._context.now_s()
        ends_s = now_s if transfer.hold_ends_s is None else transfer.hold_ends_s
        wanted_s = now_s + min(duration_s, config.max_lease_s)
        if wanted_s > ends_s:
            if transfer.num_renewals >= config.max_renewals:
                raise CapacityError(f"it was renewed {transfer.num_renewals} times already")
            transfer.num_renewals += 1
            transfer.hold_ends_s = ends_s = wanted_s
        return ends_s - now_s

    def give_up_oldest(self, num_blocks: int) -> int:
        """See ``ConnectorPort.give_up_oldest``."""
        num_freed = 0
        for transfer in list(self._transfers.values()):
            if num_freed >= num_blocks:
                break
            if transfer.hold_ends_s is not None and transfer.may_give_way:
                num_freed += len(transfer.blocks)
                transfer.give_way()
        return num_freed

    def expire(self) -> None:
        """End those whose time is over."""
        now_s = self._context.now_s()
        for transfer in list(self._transfers.values()):
            if transfer.hold_ends_s is not None and transfer.hold_ends_s <= now_s:
                transfer.expire()

    def next_expiry_s(self) -> float | None:
        """Return when the next one ends (monotonic seconds), or None."""
        ends = [t.hold_ends_s for t in self._transfers.values() if t.hold_ends_s is not None]
        return min(ends, default=None)
