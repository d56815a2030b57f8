"""Sessions, what travels in them, and posted transfers: the nouns of the network."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from kvferry.protocol.ids import InstanceId, TransferId
from kvferry.protocol.messages import Message
from kvferry.protocol.params import PeerAddress
from tests.model.ownership import driven as ferry
from tests.model.ownership.driven import Asked, Event
from tests.model.ownership.oracle import Copy


@dataclass(eq=False)
class Flight:
    """A request on its way; ``effect`` None: the handshake."""

    effect: Asked | None
    sent_s: float
    is_copy: bool = False
    """It has arrived before."""


@dataclass(eq=False)
class Answer:
    """A reply on its way back, or a notice (``flight`` None)."""

    flight: Flight | None
    message: Message | None


@dataclass(eq=False)
class Session:
    """One handshake of ``asker`` with ``peer``, and the link that it made."""

    asker: InstanceId
    peer: PeerAddress
    requests: list[Flight] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    outbox: list[Asked] = field(default_factory=list)
    awaited: list[Flight] = field(default_factory=list)
    pushes: dict[TransferId, int] = field(default_factory=dict)
    over: set[TransferId] = field(default_factory=set)
    """Transfers of which the asker, or the peer, wants nothing more."""
    late_releases: list[ferry.Release] = field(default_factory=list)
    is_ready: bool = False
    is_lost: bool = False
    lost_at_s: float = 0.0
    was_ready: bool = False
    is_link_closed: bool = False
    """At the asker's end; what was posted may land until it is quiet."""
    is_quiet: bool = False

    def keep_release(self, release: ferry.Release) -> None:
        """Tell the peer later, if it ever was there."""
        if self.was_ready:
            self.late_releases.append(release)

    def deliverable(self) -> list[Flight]:
        """Return the requests that may arrive next: those of one transfer come in order, copies of
        what has arrived at any time, and nothing before the handshake."""
        arriving: list[Flight] = []
        for index, flight in enumerate(self.requests):
            if not any(_keeps_back(earlier, flight) for earlier in self.requests[:index]):
                arriving.append(flight)
        return arriving


def _keeps_back(earlier: Flight, later: Flight) -> bool:
    if earlier.effect is None or later.effect is None:
        return True
    return not earlier.is_copy and earlier.effect.transfer_id == later.effect.transfer_id


@dataclass(eq=False)
class Running:
    """A posted READ or WRITE."""

    poster: InstanceId
    effect: ferry.PostRead | ferry.PostWrite
    session: Session
    copy: Copy
    is_doomed: bool = False
    """Its link is gone at the poster's end: it cannot end well."""


def is_replaced(earlier: Session, later: Session) -> bool:
    return (earlier.asker, earlier.peer) == (later.asker, later.peer)


def lost_event(transfer_id: TransferId) -> ferry.PeerLost:
    return ferry.PeerLost(transfer_id, ferry.ReceiveOutcome.UNREACHABLE, "")


def answered_event(flight: Flight, effect: Asked, reply: Any) -> Event:  # noqa: ANN401 - of its kind
    if isinstance(effect, ferry.Acquire | ferry.AcquireHistory):
        return ferry.AcquireAnswered(effect.transfer_id, flight.sent_s, reply)
    if isinstance(effect, ferry.Release):
        is_quiet = getattr(reply, "is_quiet", False)
        return ferry.ReleaseAnswered(effect.transfer_id, is_quiet)
    if isinstance(effect, ferry.Register):
        return ferry.RegisterAnswered(effect.transfer_id, reply, effect.generation)
    return ferry.RenewAnswered(effect.transfer_id, reply)
