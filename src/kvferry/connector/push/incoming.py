"""One push as its receiver keeps it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvferry.connector.machine.effects import SendRegister, SendRenew
from kvferry.connector.ports import PrefillEnd, PromptIdentity, ReceiveOutcome
from kvferry.connector.push.table import PUSH_RECEIVER, IncomingState
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import FirstTokenReady, ReleaseOutcome, Written
from kvferry.protocol.params import PeerAddress


@dataclass(slots=True)
class IncomingPush:
    """One push that is being received."""

    transfer_id: TransferId
    peer: PeerAddress
    prompt: PromptIdentity
    wait_deadline_s: float
    """Without blocks it waits until then, for prefill or for its turn."""
    next_beat_s: float
    deadline_s: float = field(init=False)
    posted_s: float | None = None
    """When the sender first told of WRITEs into ``blocks``."""
    state: IncomingState = PUSH_RECEIVER.initial
    generation: int = -1
    first_block: int = 0
    blocks: tuple[BlockNumber, ...] = ()
    quarantined: set[int] = field(default_factory=set)
    """Generations whose blocks a posted WRITE may still touch."""
    is_known: bool = False
    """The sender has answered for this transfer before: if it no longer does, it is gone."""
    is_admitted: bool = False
    end: PrefillEnd | None = None
    outcome: ReceiveOutcome = ReceiveOutcome.FAILED
    detail: str = ""
    num_bytes: int = 0
    release_outcome: ReleaseOutcome = ReleaseOutcome.FAILED

    def __post_init__(self) -> None:
        """The first wait is for prefill."""
        self.deadline_s = self.wait_deadline_s

    def set_aside(self, blocks: Sequence[BlockNumber], first_block: int, generation: int) -> None:
        """Take ``blocks`` for the prompt's from ``first_block`` on; nothing of them is posted."""
        self.blocks, self.posted_s = tuple(blocks), None
        self.first_block, self.generation = first_block, generation

    def note_posting(self, now_s: float) -> None:
        """WRITEs into ``blocks`` are being posted, the first or more of them."""
        if self.posted_s is None:
            self.posted_s = now_s

    def beat(self, lease_s: float) -> SendRenew:
        """Return what asks the sender whether it lives, and tells it that this receiver does."""
        return SendRenew(self.peer, self.transfer_id, lease_s)

    def registration(self, now_s: float) -> SendRegister:
        """Return what tells the sender of ``blocks``."""
        return SendRegister(
            self.peer,
            self.transfer_id,
            self.generation,
            self.prompt.num_tokens,
            self.prompt.digest,
            self.first_block,
            self.blocks,
            max(0.0, self.deadline_s - now_s),
        )


def prefill_end(notice: FirstTokenReady | Written) -> PrefillEnd:
    """Return how the sender's prefill ended, as its notice says."""
    return PrefillEnd(notice.first_token, notice.prefill_end_s, notice.prefill_report)
