"""What this instance receives: one object a transfer, its blocks, its quarantine and its end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from kvferry.blocks.quarantine import Quarantine
from kvferry.connector.machine.effects import CountReceive, NotifyEngine, Send
from kvferry.connector.ports import FirstTokenArrival, PrefillEnd, ReceiveOutcome, ReceiveResult
from kvferry.connector.transfers.context import RoleContext
from kvferry.errors import RequestError
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import Release, ReleaseOutcome, Renew
from kvferry.protocol.params import PeerAddress


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
    release_outcome: ReleaseOutcome = ReleaseOutcome.FAILED

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
            raise RequestError(
                f"transfer id {transfer.transfer_id} is already being received",
                param="kv_transfer_params.transfer_id",
                code="transfer_id_in_use",
            )
        self._transfers[transfer.transfer_id] = transfer

    def close(self, transfer: Incoming) -> None:
        """Forget ``transfer``: nothing of it is left."""
        del self._transfers[transfer.transfer_id]

    # -- what its peer is told ----------------------------------------------------------------
    def send_renew(self, transfer: Incoming) -> None:
        """Ask the peer whether it still holds the blocks, and tell it that they are wanted."""
        lease_s = self._context.config.handoff_lease_s
        renew = Renew(transfer.transfer_id, transfer.peer.epoch, lease_s)
        self._context.emit(Send(transfer.peer, renew))

    def send_release(self, transfer: Incoming) -> None:
        """Tell the peer that nothing is wanted of it any more, and why."""
        config, peer = self._context.config, transfer.peer
        release = Release(
            config.instance_id,
            config.epoch,
            transfer.transfer_id,
            peer.epoch,
            transfer.release_outcome,
        )
        self._context.emit(Send(peer, release))

    # -- blocks -------------------------------------------------------------------------------
    def hold(self, transfer: Incoming, blocks: Sequence[BlockNumber]) -> None:
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
        self._context.count("receive", transfer.outcome)
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
