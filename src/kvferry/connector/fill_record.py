"""One push as its receiver keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.connector.effects import SendRegister
from kvferry.connector.ports import PrefillEnd, PromptIdentity, ReceiveOutcome
from kvferry.connector.push import PUSH_RECEIVER, FillState
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import FirstTokenReady, ReleaseOutcome, Written
from kvferry.protocol.params import PeerAddress


@dataclass(slots=True)
class Fill:
    """One push that is being received."""

    transfer_id: TransferId
    peer: PeerAddress
    prompt: PromptIdentity
    deadline_s: float
    next_beat_s: float
    posted_s: float | None = None
    """When the sender first told of WRITEs into ``blocks``."""
    state: FillState = PUSH_RECEIVER.initial
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

    def note_posting(self, now_s: float) -> None:
        """WRITEs into ``blocks`` are being posted, the first or more of them."""
        if self.posted_s is None:
            self.posted_s = now_s

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
