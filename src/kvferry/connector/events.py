"""What the mover tells the planner. Frozen and serialisable, like effects."""

from __future__ import annotations

import enum

import msgspec

from kvferry.connector.ports import ReceiveOutcome
from kvferry.protocol.ids import TransferId
from kvferry.protocol.messages import Declined, Granted


class _Event(msgspec.Struct, frozen=True, tag=True):
    pass


class AcquireAnswered(_Event, frozen=True):
    """The holder's reply; the reader's lease counts from ``sent_s``, when the request left."""

    transfer_id: TransferId
    sent_s: float
    reply: Granted | Declined


class PeerLost(_Event, frozen=True):
    """The holder does not answer or does not fit; ``outcome`` says which."""

    transfer_id: TransferId
    outcome: ReceiveOutcome
    detail: str


class ReadStatus(enum.StrEnum):
    """How a READ ended."""

    DONE = "done"
    FAILED = "failed"
    CORRUPT = "corrupt"


class ReadEnded(_Event, frozen=True):
    """A posted READ is terminal: nothing of it can touch memory any more."""

    transfer_id: TransferId
    status: ReadStatus
    ended_s: float
    num_bytes: int = 0
    detail: str = ""


Event = AcquireAnswered | PeerLost | ReadEnded
