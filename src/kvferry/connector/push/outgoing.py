"""One push as its sender keeps it, and the notices that are made of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvferry.connector.ports import PrefillEnd, PromptIdentity
from kvferry.connector.push.table import PUSH_SENDER, OutgoingEvent, OutgoingState
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import FailureReason, FirstTokenReady, Written

REASON_OF_END = {
    OutgoingEvent.WITHDRAWN: FailureReason.ABORTED,
    OutgoingEvent.EXPIRED: FailureReason.EXPIRED,
    OutgoingEvent.PRESSURE: FailureReason.PRESSURE,
    OutgoingEvent.WRITE_FAILED: FailureReason.TRANSPORT,
}


@dataclass(frozen=True, slots=True)
class Registration:
    """Which of a reader's blocks are to be filled, by position from ``first_block`` on."""

    reader: str
    generation: int
    first_block: int
    blocks: tuple[BlockNumber, ...]


@dataclass(frozen=True, slots=True)
class RunningWrite:
    """A posted WRITE and its pinned source."""

    registration: Registration
    blocks: tuple[BlockNumber, ...]


@dataclass(slots=True)
class OutgoingPush:
    """One prefill whose blocks are to be pushed."""

    transfer_id: TransferId
    prompt: PromptIdentity
    state: OutgoingState = PUSH_SENDER.initial
    blocks: tuple[BlockNumber, ...] = ()
    num_ready: int = 0
    """Leading positions whose KV is complete."""
    next_position: int = 0
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
    def is_written(self) -> bool:
        """Whether every position is written and nothing runs any more."""
        return not self.running and self.next_position >= len(self.blocks)


def first_token_notice(send: OutgoingPush, end: PrefillEnd) -> FirstTokenReady:
    """Return the notice that prefill is complete."""
    return FirstTokenReady(
        send.transfer_id, end.first_token, send.prompt.digest, end.ended_s, end.report
    )


def written_notice(send: OutgoingPush, end: PrefillEnd) -> Written:
    """Return the notice that all of the registration is written."""
    registration = send.registration
    first_block = registration.first_block if registration is not None else 0
    generation = registration.generation if registration is not None else 0
    return Written(
        send.transfer_id,
        generation,
        first_block,
        len(send.blocks) - first_block,
        send.prompt.num_tokens,
        end.first_token,
        send.prompt.digest,
        end.ended_s,
        end.report,
    )
