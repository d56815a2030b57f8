"""What the planner wants done. Frozen and serialisable: planner and mover may be two processes."""

from __future__ import annotations

import msgspec

from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import (
    Acquire,
    AcquireHistory,
    Notice,
    Register,
    Release,
    Renew,
)
from kvferry.protocol.params import PeerAddress


class _Effect(msgspec.Struct, frozen=True, tag=True):
    pass


class ContactPeer(_Effect, frozen=True):
    """Shake hands with a holder, unless that was done."""

    peer: PeerAddress


Asked = Acquire | AcquireHistory | Register | Renew | Release


class Send(_Effect, frozen=True):
    """Ask a peer; answered by the event for the reply, or by ``PeerLost``. A release that is lost
    is said later, if the peer comes back."""

    peer: PeerAddress
    message: Asked


class PostRead(_Effect, frozen=True):
    """READ; answered by one ``ReadEnded`` event, however long that takes."""

    peer: PeerAddress
    transfer_id: TransferId
    local_blocks: tuple[BlockNumber, ...]
    remote_blocks: tuple[BlockNumber, ...]


class PostWrite(_Effect, frozen=True):
    """WRITE to a reader; answered by one ``WriteEnded`` event, however long that takes."""

    reader: str
    transfer_id: TransferId
    write_id: int
    local_blocks: tuple[BlockNumber, ...]
    remote_blocks: tuple[BlockNumber, ...]


class Notify(_Effect, frozen=True):
    """Send a notice to the receiver of a transfer, where it was last heard of."""

    transfer_id: TransferId
    notice: Notice


class StartProgress(_Effect, frozen=True):
    """A holder may WRITE for this transfer now: progress its link until ``StopProgress``."""

    peer: PeerAddress
    transfer_id: TransferId


class StopProgress(_Effect, frozen=True):
    """Nothing of this transfer can land any more."""

    peer: PeerAddress
    transfer_id: TransferId


class DisconnectReader(_Effect, frozen=True):
    """Tear the link to a reader down; our WRITEs to it then end."""

    reader: str


class DisconnectPeer(_Effect, frozen=True):
    """Tear the link to a holder down, unless it was made since and has nothing of this transfer;
    our READs then end, and ``PeerQuiet`` follows once nothing that the holder posted can land."""

    peer: PeerAddress
    transfer_id: TransferId


class StartServing(_Effect, frozen=True):
    """A reader may transfer now: progress its link until ``StopServing``."""

    reader: str


class StopServing(_Effect, frozen=True):
    """The reader is done, or its lease is over."""

    reader: str


class CountReceive(_Effect, frozen=True):
    """A receive ended; ``duration_s`` is there where it brought something, and is known."""

    mode: str
    outcome: str
    num_bytes: int
    duration_s: float | None
    num_verified: int = 0
    """Blocks whose digests were compared."""
    num_unverified: int = 0
    """Blocks whose digests were to be compared, and were not told."""


class CountDropped(_Effect, frozen=True):
    """A peer, a transfer or a clock said what has no rule in this state; it changed nothing."""

    role: str
    event: str
    state: str


class CountOfferEnd(_Effect, frozen=True):
    """An offer ended; ``outcome`` is a metric label."""

    outcome: str


class CountHistoryEnd(_Effect, frozen=True):
    """A lease on a conversation's blocks ended; ``outcome`` is a metric label."""

    outcome: str


class NotifyEngine(_Effect, frozen=True):
    """There are results to collect."""


Effect = (
    ContactPeer
    | Send
    | PostRead
    | PostWrite
    | Notify
    | StartProgress
    | StopProgress
    | DisconnectReader
    | DisconnectPeer
    | StartServing
    | StopServing
    | CountReceive
    | CountDropped
    | CountOfferEnd
    | CountHistoryEnd
    | NotifyEngine
)
