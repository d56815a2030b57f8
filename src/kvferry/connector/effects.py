"""What the planner wants done. Frozen and serialisable: planner and mover may be two processes."""

from __future__ import annotations

from typing import Literal

import msgspec

from kvferry.protocol import messages
from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.params import PeerAddress


class Effect(msgspec.Struct, frozen=True, tag=True):
    """One thing to do."""


class ContactPeer(Effect, frozen=True):
    """Shake hands with a holder, unless that was done."""

    peer: PeerAddress


class Send(Effect, frozen=True):
    """Ask a peer; answered by the event for the reply, or by ``PeerLost``. A release that is lost
    is said later, if the peer comes back."""

    peer: PeerAddress
    message: messages.Asked


class PostRead(Effect, frozen=True):
    """READ; answered by one ``ReadEnded`` event, however long that takes."""

    peer: PeerAddress
    transfer_id: TransferId
    local_blocks: tuple[BlockNumber, ...]
    remote_blocks: tuple[BlockNumber, ...]


class PostWrite(Effect, frozen=True):
    """WRITE to a reader; answered by one ``WriteEnded`` event, however long that takes."""

    reader: str
    transfer_id: TransferId
    write_id: int
    local_blocks: tuple[BlockNumber, ...]
    remote_blocks: tuple[BlockNumber, ...]


class Notify(Effect, frozen=True):
    """Send a notice to the receiver of a transfer, where it was last heard of."""

    transfer_id: TransferId
    notice: messages.Notice


class StartProgress(Effect, frozen=True):
    """A holder may WRITE for this transfer now: progress its link until ``StopProgress``."""

    peer: PeerAddress
    transfer_id: TransferId


class StopProgress(Effect, frozen=True):
    """Nothing of this transfer can land any more."""

    peer: PeerAddress
    transfer_id: TransferId


class DisconnectReader(Effect, frozen=True):
    """Tear the link to a reader down; our WRITEs to it then end."""

    reader: str


class DisconnectPeer(Effect, frozen=True):
    """Tear the link to a holder down, unless it was made since and has nothing of this transfer;
    our READs then end, and ``PeerQuiet`` follows once nothing that the holder posted can land."""

    peer: PeerAddress
    transfer_id: TransferId


class ActivateReader(Effect, frozen=True):
    """A reader may transfer now: progress its link until ``DeactivateReader``."""

    reader: str


class DeactivateReader(Effect, frozen=True):
    """The reader is done, or its lease is over."""

    reader: str


class CountReceive(Effect, frozen=True):
    """A receive ended; ``duration_s`` is there where it brought something, and is known."""

    mode: str
    outcome: str
    num_bytes: int
    duration_s: float | None
    num_verified: int = 0
    """Blocks whose digests were compared."""
    num_unverified: int = 0
    """Blocks whose digests were to be compared, and were not told."""


class CountDropped(Effect, frozen=True):
    """A peer, a transfer or a clock said what has no rule in this state; it changed nothing."""

    role: str
    event: str
    state: str


class CountEnd(Effect, frozen=True):
    """An offer, or a lease on a conversation's blocks (``history``), ended; ``outcome`` is a metric
    label."""

    kind: Literal["offer", "history"]
    outcome: str


class NotifyEngine(Effect, frozen=True):
    """There are results to collect."""
