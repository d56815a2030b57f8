"""What the mover tells the planner. Frozen and serialisable, like effects."""

from __future__ import annotations

import enum

import msgspec

from kvferry.connector.ports import ReceiveOutcome
from kvferry.protocol import messages
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import PeerAddress


class Event(msgspec.Struct, frozen=True, tag=True):
    """What has happened to one transfer."""

    transfer_id: TransferId


class AcquireAnswered(Event, frozen=True):
    """The holder's reply; the reader's lease counts from ``sent_s``, when the request left."""

    sent_s: float
    reply: messages.Granted | messages.Declined


class RegisterAnswered(Event, frozen=True):
    """The sender's reply to the registration of that generation."""

    reply: messages.Registered | messages.Declined
    generation: int


class RenewAnswered(Event, frozen=True):
    """The holder's reply to a heartbeat."""

    reply: messages.Renewed | messages.Declined


class ReleaseAnswered(Event, frozen=True):
    """The holder's reply to a release."""

    is_quiet: bool


class Noticed(Event, frozen=True):
    """A sender's notice came, from ``peer``."""

    peer: PeerAddress
    notice: messages.Notice


class PeerQuiet(Event, frozen=True):
    """A link is down, and nothing that the peer posted on it can land any more: of registrations
    from ``first_generation`` to ``generation`` it was told there, or never."""

    generation: int
    first_generation: int = 0


class PeerLost(Event, frozen=True):
    """The holder does not answer or does not fit; ``outcome`` says which."""

    outcome: ReceiveOutcome
    detail: str


class ReadStatus(enum.StrEnum):
    """How a READ ended."""

    DONE = "done"
    FAILED = "failed"


class ReadEnded(Event, frozen=True):
    """A posted READ is terminal: nothing of it can touch memory any more."""

    status: ReadStatus
    ended_s: float
    num_bytes: int = 0
    detail: str = ""


class WriteEnded(Event, frozen=True):
    """A posted WRITE is terminal."""

    write_id: int
    is_done: bool
    detail: str = ""


# How refusals and failures of a peer are reported to the engine and to operators.
OUTCOME_OF_DECLINE = {
    messages.DeclineReason.GONE: ReceiveOutcome.GONE,
    messages.DeclineReason.EXPIRED: ReceiveOutcome.EXPIRED,
    messages.DeclineReason.MISMATCH: ReceiveOutcome.MISMATCH,
    messages.DeclineReason.PRESSURE: ReceiveOutcome.DECLINED,
    messages.DeclineReason.INCOMPATIBLE: ReceiveOutcome.INCOMPATIBLE,
    messages.DeclineReason.UNKNOWN_PEER: ReceiveOutcome.DECLINED,
    messages.DeclineReason.MALFORMED: ReceiveOutcome.FAILED,
}

OUTCOME_OF_FAILURE = {
    messages.FailureReason.ABORTED: ReceiveOutcome.GONE,
    messages.FailureReason.MISMATCH: ReceiveOutcome.MISMATCH,
    messages.FailureReason.EXPIRED: ReceiveOutcome.EXPIRED,
    messages.FailureReason.PRESSURE: ReceiveOutcome.DECLINED,
    messages.FailureReason.TRANSPORT: ReceiveOutcome.FAILED,
}
