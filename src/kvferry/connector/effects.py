"""What the planner wants done. Frozen and serialisable: planner and mover may be two processes."""

from __future__ import annotations

import msgspec

from kvferry.protocol.ids import BlockNumber, TransferId
from kvferry.protocol.messages import ReleaseOutcome
from kvferry.protocol.params import PeerAddress


class _Effect(msgspec.Struct, frozen=True, tag=True):
    pass


class ContactPeer(_Effect, frozen=True):
    """Shake hands with a holder, unless that was done."""

    peer: PeerAddress


class SendAcquire(_Effect, frozen=True):
    """Ask the holder for a lease; answered by an ``AcquireAnswered`` or ``PeerLost`` event."""

    peer: PeerAddress
    transfer_id: TransferId
    num_tokens: int
    digest: bytes
    duration_s: float
    first_block: int


class SendRenew(_Effect, frozen=True):
    """Keep the holder's offer alive; the answer does not matter."""

    peer: PeerAddress
    transfer_id: TransferId
    duration_s: float


class SendRelease(_Effect, frozen=True):
    """Tell the holder that its blocks are not needed any more; the answer does not matter."""

    peer: PeerAddress
    transfer_id: TransferId
    outcome: ReleaseOutcome


class PostRead(_Effect, frozen=True):
    """READ; answered by one ``ReadEnded`` event, however long that takes."""

    peer: PeerAddress
    transfer_id: TransferId
    local_blocks: tuple[BlockNumber, ...]
    remote_blocks: tuple[BlockNumber, ...]
    block_digests: tuple[bytes, ...] = ()


class DisconnectPeer(_Effect, frozen=True):
    """Tear the link to a holder down; its READs then end."""

    peer: PeerAddress


class StartServing(_Effect, frozen=True):
    """A reader may transfer now: progress its link until ``StopServing``."""

    reader: str


class StopServing(_Effect, frozen=True):
    """The reader is done, or its lease is over."""

    reader: str


class CountOfferEnd(_Effect, frozen=True):
    """An offer ended; ``outcome`` is a metric label."""

    outcome: str


class NotifyEngine(_Effect, frozen=True):
    """There are results to collect."""


Effect = (
    ContactPeer
    | SendAcquire
    | SendRenew
    | SendRelease
    | PostRead
    | DisconnectPeer
    | StartServing
    | StopServing
    | CountOfferEnd
    | NotifyEngine
)
