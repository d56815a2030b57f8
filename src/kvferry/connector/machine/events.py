"""What the mover tells the planner. Frozen and serialisable, like effects."""

from __future__ import annotations

import enum

import msgspec

from kvferry.connector.ports import ReceiveOutcome
from kvferry.protocol.ids import TransferId
from kvferry.protocol.messages import (
    Declined,
    DeclineReason,
    FailureReason,
    Granted,
    Notice,
    Registered,
    Renewed,
)
from kvferry.protocol.params import PeerAddress


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class AcquireAnswered(_Event, frozen=True):
    """The holder's reply; the reader's lease counts from ``sent_s``, when the request left."""

    transfer_id: TransferId
    sent_s: float
    reply: Granted | Declined


class RegisterAnswered(_Event, frozen=True):
    """The sender's reply to the registration of that generation."""

    transfer_id: TransferId
    reply: Registered | Declined
    generation: int


class RenewAnswered(_Event, frozen=True):
    """The holder's reply to a heartbeat."""

    transfer_id: TransferId
    reply: Renewed | Declined


class ReleaseAnswered(_Event, frozen=True):
    """The holder's reply to a release."""

    transfer_id: TransferId
    is_quiet: bool


class Noticed(_Event, frozen=True):
    """A sender's notice came, from ``peer``."""

    transfer_id: TransferId
    peer: PeerAddress
    notice: Notice


class PeerQuiet(_Event, frozen=True):
    """A link is down, and nothing that the peer posted on it can land any more: of registrations
    from ``first_generation`` to ``generation`` it was told there, or never."""

    transfer_id: TransferId
    generation: int
    first_generation: int = 0


class PeerLost(_Event, frozen=True):
    """The holder does not answer or does not fit; ``outcome`` says which."""

    transfer_id: TransferId
    outcome: ReceiveOutcome
    detail: str


class ReadStatus(enum.StrEnum):
    """How a READ ended."""

    DONE = "done"
    FAILED = "failed"


class ReadEnded(_Event, frozen=True):
    """A posted READ is terminal: nothing of it can touch memory any more."""

    transfer_id: TransferId
    status: ReadStatus
    ended_s: float
    num_bytes: int = 0
    detail: str = ""


class WriteEnded(_Event, frozen=True):
    """A posted WRITE is terminal."""

    transfer_id: TransferId
    write_id: int
    is_done: bool
    detail: str = ""


ReceiveSideEvent = (
    AcquireAnswered
    | RegisterAnswered
    | RenewAnswered
    | ReleaseAnswered
    | Noticed
    | PeerQuiet
    | PeerLost
    | ReadEnded
)
Event = ReceiveSideEvent | WriteEnded

# How refusals and failures of a peer are reported to the engine and to operators.
OUTCOME_OF_DECLINE = {
    DeclineReason.GONE: ReceiveOutcome.GONE,
    DeclineReason.EXPIRED: ReceiveOutcome.EXPIRED,
    DeclineReason.MISMATCH: ReceiveOutcome.MISMATCH,
    DeclineReason.PRESSURE: ReceiveOutcome.DECLINED,
    DeclineReason.INCOMPATIBLE: ReceiveOutcome.INCOMPATIBLE,
    DeclineReason.UNKNOWN_PEER: ReceiveOutcome.DECLINED,
    DeclineReason.MALFORMED: ReceiveOutcome.FAILED,
}

OUTCOME_OF_FAILURE = {
    FailureReason.ABORTED: ReceiveOutcome.GONE,
    FailureReason.MISMATCH: ReceiveOutcome.MISMATCH,
    FailureReason.EXPIRED: ReceiveOutcome.EXPIRED,
    FailureReason.PRESSURE: ReceiveOutcome.DECLINED,
    FailureReason.TRANSPORT: ReceiveOutcome.FAILED,
}
