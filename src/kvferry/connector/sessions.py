"""Conversations with holders: one session per peer and epoch, from handshake to loss.

A session queues what is to be sent until the handshake is done, matches replies to requests, and
notices when one does not come. Runs on the mover's thread only. Knows no planner: what it learns
comes back as events.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

import zmq

from kvferry.clock import Clock
from kvferry.connector.effects import SendAcquire, SendRelease, SendRenew
from kvferry.connector.events import AcquireAnswered, Event, PeerLost
from kvferry.connector.ports import ReceiveOutcome
from kvferry.errors import FerryError, IncompatiblePeerError
from kvferry.protocol.messages import (
    Acquire,
    Declined,
    DeclineReason,
    Envelope,
    Granted,
    Hello,
    HelloReply,
    Release,
    Renew,
    Reply,
    Request,
)
from kvferry.protocol.params import PeerAddress
from kvferry.transport.base import Link

Sendable = SendAcquire | SendRenew | SendRelease


class SessionState(enum.Enum):
    """Where a session is."""

    GREETING = "greeting"
    READY = "ready"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A request whose reply has not come."""

    sent_s: float
    deadline_s: float
    acquire: SendAcquire | None = None
    is_hello: bool = False


class RequestChannel(Protocol):
    """The part of ``ControlClient`` that sessions use."""

    socket: zmq.Socket[bytes]

    def send(self, message: Request) -> int | None:
        """Send without waiting; return the sequence number, or None if the queue is full."""
        ...

    def receive(self) -> list[Envelope]:
        """Return the replies that have arrived."""
        ...

    def close(self) -> None:
        """Close the socket."""
        ...


@dataclass(slots=True)
class Session:
    """One peer that is talked to. ``hello`` is this side's greeting, its link's metadata in it."""

    peer: PeerAddress
    client: RequestChannel
    link: Link
    hello: Hello
    clock: Clock
    timeout_s: float
    want_block_digests: bool
    state: SessionState = SessionState.GREETING
    lost_outcome: ReceiveOutcome = ReceiveOutcome.UNREACHABLE
    lost_detail: str = ""
    lost_at_s: float = 0.0
    last_used_s: float = 0.0
    is_retired: bool = False
    """Its socket is closed; the link goes when no READ runs on it."""
    link_closed: bool = False
    _outbox: list[Sendable] = field(default_factory=list)
    _awaited: dict[int, _Awaited] = field(default_factory=dict)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for an answer."""
        return not self._awaited and not self._outbox

    def greet(self) -> None:
        """Send the handshake."""
        self._send(self.hello, is_hello=True)

    def submit(self, message: Sendable) -> list[Event]:
        """Send ``message`` now, or after the handshake; a lost session answers at once."""
        self.last_used_s = self.clock.monotonic_s()
        if self.state is SessionState.READY:
            self._send(self._to_message(message), message)
        elif self.state is SessionState.GREETING:
            self._outbox.append(message)
        elif isinstance(message, SendAcquire):
            return [self._lost_event(message)]
        return []

    def receive(self) -> list[Event]:
        """Take in the replies that have arrived."""
        events: list[Event] = []
        for envelope in self.client.receive():
            awaited = self._awaited.pop(envelope.sequence, None)
            if awaited is not None:
                events += self._on_reply(awaited, envelope.message)
        return events

    def expire(self) -> list[Event]:
        """Give up on a peer that owes a reply for too long."""
        now_s = self.clock.monotonic_s()
        if all(now_s < awaited.deadline_s for awaited in self._awaited.values()):
            return []
        return self.lose(
            ReceiveOutcome.UNREACHABLE,
            f"{self.peer.control_address} did not answer within {self.timeout_s} s",
        )

    def next_deadline_s(self) -> float | None:
        """Return when ``expire`` has something to do, or None."""
        return min((awaited.deadline_s for awaited in self._awaited.values()), default=None)

    def lose(self, outcome: ReceiveOutcome, detail: str) -> list[Event]:
        """End the session; every acquire that waits for it is told why."""
        if self.state is SessionState.LOST:
            return []
        self.state = SessionState.LOST
        self.lost_outcome, self.lost_detail = outcome, detail
        self.lost_at_s = self.clock.monotonic_s()
        waiting = [a.acquire for a in self._awaited.values() if a.acquire is not None]
        waiting += [m for m in self._outbox if isinstance(m, SendAcquire)]
        self._awaited.clear()
        self._outbox.clear()
        return [self._lost_event(acquire) for acquire in waiting]

    def _lost_event(self, acquire: SendAcquire) -> PeerLost:
        return PeerLost(acquire.transfer_id, self.lost_outcome, self.lost_detail)

    def _send(
        self, message: Request, source: Sendable | None = None, *, is_hello: bool = False
    ) -> None:
        sent_s = self.clock.monotonic_s()
        sequence = self.client.send(message)
        acquire = source if isinstance(source, SendAcquire) else None
        if sequence is None:
            # The queue is full: the peer has read nothing for long. Its deadline says so.
            sequence = -1 - len(self._awaited)
        if acquire is not None or is_hello:
            self._awaited[sequence] = _Awaited(sent_s, sent_s + self.timeout_s, acquire, is_hello)

    def _on_reply(self, awaited: _Awaited, reply: Reply | Request) -> list[Event]:
        if awaited.is_hello:
            return self._on_hello_reply(reply)
        if awaited.acquire is None:
            return []
        if isinstance(reply, Declined) and reply.reason is DeclineReason.UNKNOWN_PEER:
            # The holder has forgotten this reader (it was idle for long): a new session can try.
            detail = f"the holder does not know this reader (any more): {reply.detail}"
            self._awaited[-1] = awaited
            return self.lose(ReceiveOutcome.DECLINED, detail)
        if isinstance(reply, Granted | Declined):
            return [AcquireAnswered(awaited.acquire.transfer_id, awaited.sent_s, reply)]
        detail = f"the peer answered an acquire with {type(reply).__name__}"
        return [PeerLost(awaited.acquire.transfer_id, ReceiveOutcome.FAILED, detail)]

    def _on_hello_reply(self, reply: Reply | Request) -> list[Event]:
        if isinstance(reply, Declined):
            incompatible = reply.reason is DeclineReason.INCOMPATIBLE
            outcome = ReceiveOutcome.INCOMPATIBLE if incompatible else ReceiveOutcome.DECLINED
            return self.lose(outcome, reply.detail)
        if not isinstance(reply, HelloReply):
            name = type(reply).__name__
            return self.lose(ReceiveOutcome.FAILED, f"the peer answered a hello with {name}")
        if (reply.instance_id, reply.epoch) != (self.peer.instance_id, self.peer.epoch):
            detail = f"{self.peer.instance_id} has restarted since, or another is in its place"
            return self.lose(ReceiveOutcome.GONE, detail)
        try:
            require_same_memory(self.hello, reply)
            self.link.connect(reply.transport_metadata)
        except IncompatiblePeerError as error:
            return self.lose(ReceiveOutcome.INCOMPATIBLE, str(error))
        except FerryError as error:
            return self.lose(ReceiveOutcome.UNREACHABLE, str(error))
        self.state = SessionState.READY
        outbox, self._outbox = self._outbox, []
        for message in outbox:
            self._send(self._to_message(message), message)
        return []

    def _to_message(self, effect: Sendable) -> Request:
        epoch = self.peer.epoch
        match effect:
            case SendAcquire():
                return Acquire(
                    instance_id=self.hello.instance_id,
                    epoch=self.hello.epoch,
                    holder_epoch=epoch,
                    transfer_id=effect.transfer_id,
                    num_tokens=effect.num_tokens,
                    digest=effect.digest,
                    duration_s=effect.duration_s,
                    first_block=effect.first_block,
                    want_block_digests=self.want_block_digests,
                )
            case SendRenew():
                return Renew(effect.transfer_id, epoch, effect.duration_s)
            case SendRelease():
                return Release(
                    self.hello.instance_id,
                    self.hello.epoch,
                    effect.transfer_id,
                    epoch,
                    effect.outcome,
                )


def require_same_memory(ours: Hello, theirs: Hello | HelloReply) -> None:
    """Raise ``IncompatiblePeerError`` naming the first difference of layout or transport."""
    ours.layout.require_equal(theirs.layout)
    if ours.transport != theirs.transport:
        raise IncompatiblePeerError("transport", ours.transport, theirs.transport)
