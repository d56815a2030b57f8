"""Conversations with holders: one session per peer and epoch, from handshake to loss.

A session queues what is to be sent until the handshake is done, matches replies to requests, and
notices when one does not come. Runs on the mover's thread only. Knows no planner: what it learns
comes back as events.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvferry.clock import Clock
from kvferry.connector.events import (
    AcquireAnswered,
    Event,
    Noticed,
    PeerLost,
    PeerQuiet,
    RegisterAnswered,
    ReleaseAnswered,
    RenewAnswered,
)
from kvferry.connector.peers.control import ControlClient
from kvferry.connector.ports import ReceiveOutcome
from kvferry.errors import FerryError, IncompatiblePeerError
from kvferry.protocol import messages
from kvferry.protocol.compatibility import remedy_for, require_compatible
from kvferry.protocol.ids import HISTORY_VERSION, TransferId
from kvferry.protocol.params import PeerAddress
from kvferry.transport.base import Link


class SessionState(enum.Enum):
    """Where a session is."""

    IDENTIFYING = "identifying"
    """The peer was asked who it is."""
    IDENTIFIED = "identified"
    """It is the one that was looked for; not greeted yet."""
    GREETING = "greeting"
    READY = "ready"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class _Awaited:
    """A request whose reply has not come."""

    sent_s: float
    deadline_s: float
    asked: messages.Asked | None
    """None: the handshake, or the question before it who is there."""


@dataclass(slots=True)
class Session:
    """One peer that is talked to. ``hello`` is this side's greeting, its link's metadata in it."""

    peer: PeerAddress
    client: ControlClient
    link: Link
    hello: messages.Hello
    clock: Clock
    timeout_s: float
    state: SessionState = SessionState.GREETING
    lost_outcome: ReceiveOutcome = ReceiveOutcome.UNREACHABLE
    lost_detail: str = ""
    lost_at_s: float = 0.0
    last_used_s: float = 0.0
    is_retired: bool = False
    """Its socket is closed; the link goes when no READ runs on it."""
    link_closed: bool = False
    peer_version: int = 0
    """Protocol version that the peer has shown."""
    pushes: dict[TransferId, int] = field(default_factory=dict)
    """Transfers for which the peer was told where to write, with the last generation."""
    late_releases: list[messages.Release] = field(default_factory=list)
    """Releases that the peer may not have received before the session was lost: it may have been
    away for a moment only, and still hold something. Kept only if it has answered a hello."""
    was_ready: bool = False
    _outbox: list[messages.Asked] = field(default_factory=list)
    _awaited: dict[int, _Awaited] = field(default_factory=dict)
    """By sequence number; below 0: not sent; 0: its answer ends the session."""
    _num_unsent: int = 0

    @property
    def is_incompatible(self) -> bool:
        """Whether it was lost since the peer has other memory: this start of it always will."""
        is_lost = self.state is SessionState.LOST
        return is_lost and self.lost_outcome is ReceiveOutcome.INCOMPATIBLE

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits for an answer."""
        return not (self._awaited or self._outbox or self.pushes)

    def identify(self) -> None:
        """Ask who is there first: the handshake would end the peer's earlier link with us."""
        self.state = SessionState.IDENTIFYING
        self._send(messages.InstanceQuery(), None)

    def greet(self) -> None:
        """Send the handshake."""
        self.state = SessionState.GREETING
        self._send(self.hello, None)

    def submit(self, message: messages.Asked) -> list[Event]:
        """Send ``message`` now, or after the handshake; a lost session answers at once."""
        self.last_used_s = self.clock.monotonic_s()
        if self.state is SessionState.READY:
            return self._submit_now(message)
        if self.state is not SessionState.LOST:
            self._outbox.append(message)
        elif isinstance(message, messages.Release):
            self._keep_release(message)
        else:
            lost = self._lost_event(message.transfer_id)
            return (
                [lost, never_registered(message)]
                if isinstance(message, messages.Register)
                else [lost]
            )
        return []

    def receive(self) -> list[Event]:
        """Take in the replies that have arrived."""
        events: list[Event] = []
        for envelope in self.client.receive():
            message = envelope.message
            self.peer_version = envelope.version
            if envelope.sequence == messages.NOTICE_SEQUENCE and isinstance(
                message, messages.Notice
            ):
                events.append(Noticed(message.transfer_id, self.peer, message))
                continue
            awaited = self._awaited.pop(envelope.sequence, None)
            if awaited is not None:
                events += self._on_reply(awaited, message)
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
        """End the session; every transfer that waits for the peer is told why."""
        if self.state is SessionState.LOST:
            return []
        self.state = SessionState.LOST
        self.lost_outcome, self.lost_detail = outcome, detail
        self.lost_at_s = self.clock.monotonic_s()
        asked = [a.asked for a in self._awaited.values()] + list(self._outbox)
        waiting = {
            message.transfer_id: None
            for message in asked
            if message is not None and not isinstance(message, messages.Release)
        }
        waiting.update(dict.fromkeys(self.pushes))
        unsent = [message for message in self._outbox if isinstance(message, messages.Register)]
        for message in asked:
            if isinstance(message, messages.Release):
                self._keep_release(message)
        self._awaited.clear()
        self._outbox.clear()
        events: list[Event] = [self._lost_event(transfer_id) for transfer_id in waiting]
        return events + [never_registered(message) for message in unsent]

    def _keep_release(self, release: messages.Release) -> None:
        if self.was_ready:
            self.late_releases.append(release)

    def _lost_event(self, transfer_id: TransferId) -> PeerLost:
        return PeerLost(transfer_id, self.lost_outcome, self.lost_detail)

    def _send(self, message: messages.Request, asked: messages.Asked | None) -> None:
        sent_s = self.clock.monotonic_s()
        sequence = self.client.send(message)
        if sequence is None:
            # The queue is full: the peer has read nothing for long. Its deadline says so.
            self._num_unsent += 1
            sequence = -self._num_unsent
        self._awaited[sequence] = _Awaited(sent_s, sent_s + self.timeout_s, asked)
        if isinstance(asked, messages.Register):
            self.link.note_peer_writes()
            self.pushes[asked.transfer_id] = asked.generation

    def _on_reply(self, awaited: _Awaited, reply: messages.Message) -> list[Event]:
        asked = awaited.asked
        if asked is None:
            return (
                self._on_identity_reply(reply)
                if self._is_identifying
                else self._on_hello_reply(reply)
            )
        if (
            isinstance(reply, messages.Declined)
            and reply.reason is messages.DeclineReason.UNKNOWN_PEER
        ):
            # The holder has forgotten this reader (it was idle for long): a new session can try.
            detail = f"the holder does not know this reader (any more): {reply.detail}"
            self._awaited[0] = awaited
            return self.lose(ReceiveOutcome.DECLINED, detail)
        event = _answered(asked, awaited.sent_s, reply)
        if event is None:
            name = type(asked).__name__.lower()
            detail = f"the peer answered {name!r} with {type(reply).__name__}"
            event = PeerLost(asked.transfer_id, ReceiveOutcome.FAILED, detail)
        return [event]

    @property
    def _is_identifying(self) -> bool:
        return self.state is SessionState.IDENTIFYING

    def _on_identity_reply(self, reply: messages.Message) -> list[Event]:
        if not isinstance(reply, messages.InstanceInfo):
            name = type(reply).__name__
            return self.lose(ReceiveOutcome.FAILED, f"the peer answered 'instance' with {name}")
        if (reply.instance_id, reply.epoch) != (self.peer.instance_id, self.peer.epoch):
            return self._lose_to_another()
        self.state = SessionState.IDENTIFIED
        return []

    def _lose_to_another(self) -> list[Event]:
        detail = f"{self.peer.instance_id} has restarted since, or another is in its place"
        return self.lose(ReceiveOutcome.GONE, detail)

    def _on_hello_reply(self, reply: messages.Message) -> list[Event]:
        if isinstance(reply, messages.Declined):
            incompatible = reply.reason is messages.DeclineReason.INCOMPATIBLE
            outcome = ReceiveOutcome.INCOMPATIBLE if incompatible else ReceiveOutcome.DECLINED
            return self.lose(outcome, reply.detail)
        if not isinstance(reply, messages.HelloReply):
            name = type(reply).__name__
            return self.lose(ReceiveOutcome.FAILED, f"the peer answered a hello with {name}")
        if (reply.instance_id, reply.epoch) != (self.peer.instance_id, self.peer.epoch):
            return self._lose_to_another()
        try:
            require_same_memory(self.hello, reply)
            self.link.connect(reply.transport_metadata)
        except IncompatiblePeerError as error:
            return self.lose(ReceiveOutcome.INCOMPATIBLE, str(error))
        except FerryError as error:
            return self.lose(ReceiveOutcome.UNREACHABLE, str(error))
        self.state = SessionState.READY
        self.was_ready = True
        outbox, self._outbox = self._outbox, []
        return [event for message in outbox for event in self._submit_now(message)]

    def _submit_now(self, message: messages.Asked) -> list[Event]:
        if isinstance(message, messages.AcquireHistory) and self.peer_version < HISTORY_VERSION:
            # It would drop what it does not know, and be taken for dead.
            detail = f"the holder speaks protocol version {self.peer_version}, without read-back"
            refusal = messages.Declined(
                messages.DeclineReason.INCOMPATIBLE, detail, "protocol_version"
            )
            return [AcquireAnswered(message.transfer_id, self.clock.monotonic_s(), refusal)]
        self._send(message, message)
        return []


def never_registered(message: messages.Register) -> PeerQuiet:
    """Return the event for a registration that was not sent: nothing can land in its blocks."""
    return PeerQuiet(message.transfer_id, message.generation, message.generation)


def _answered(asked: messages.Asked, sent_s: float, reply: messages.Message) -> Event | None:
    """Return the event for an answer of the right kind."""
    transfer_id = asked.transfer_id
    match asked, reply:
        case (
            messages.Acquire() | messages.AcquireHistory(),
            messages.Granted() | messages.Declined(),
        ):
            return AcquireAnswered(transfer_id, sent_s, reply)
        case messages.Register(), messages.Registered() | messages.Declined():
            return RegisterAnswered(transfer_id, reply, asked.generation)
        case messages.Renew(), messages.Renewed() | messages.Declined():
            return RenewAnswered(transfer_id, reply)
        case messages.Release(), messages.Released():
            return ReleaseAnswered(transfer_id, reply.is_quiet)
        case messages.Release(), messages.Declined():
            return ReleaseAnswered(transfer_id, is_quiet=False)
    return None


def require_same_memory(ours: messages.Hello, theirs: messages.Hello | messages.HelloReply) -> None:
    """Raise ``IncompatiblePeerError`` naming the first difference that a peer must not have."""
    ours.layout.require_equal(theirs.layout)
    if ours.transport != theirs.transport:
        remedy = remedy_for("transport")
        raise IncompatiblePeerError("transport", ours.transport, theirs.transport, remedy)
    require_compatible(ours.compatibility, theirs.compatibility)
