"""The peers that this instance talks to: their sessions, their links, and the ends of both.

Bounded in number; a lost peer rests before it is tried again. Runs on the mover's thread only.
"""

from __future__ import annotations

import contextlib
from collections import deque

import msgspec

from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.effects import Send
from kvferry.connector.events import Event, PeerLost, PeerQuiet
from kvferry.connector.peers.control import ControlClient, ControlContext
from kvferry.connector.peers.posted import Reads
from kvferry.connector.peers.sessions import Session, SessionState, never_registered
from kvferry.connector.ports import ReceiveOutcome
from kvferry.errors import CapacityError, FerryError
from kvferry.observe.log import get_logger
from kvferry.protocol import messages
from kvferry.protocol.ids import TransferId
from kvferry.protocol.params import PeerAddress
from kvferry.transport.base import Link, Transport

LOST_SESSION_REST_S = 1.0
"""A lost peer is not tried again for so long; requests for it are told at once."""

_logger = get_logger(__name__)


class OutboundPeers:
    """Sessions with holders and senders, by address. What they learn goes to the events."""

    def __init__(  # noqa: PLR0913 - what it is made of, by name
        self,
        config: ExchangeConfig,
        hello: messages.Hello,
        transport: Transport,
        clock: Clock,
        context: ControlContext,
        reads: Reads,
        events: deque[Event],
    ) -> None:
        self._config = config
        self._hello = hello
        self._transport = transport
        self._clock = clock
        self._context = context
        self._reads = reads
        self._events = events
        self._sessions: dict[PeerAddress, Session] = {}
        self._progressing: dict[TransferId, PeerAddress] = {}
        self._unquiet: list[tuple[Link, dict[TransferId, int]]] = []
        """Links that are down, and the pushes that may still land on them."""

    @property
    def is_progressing(self) -> bool:
        """Whether some peer may write here right now and needs us for it."""
        return any(self._is_ready(peer) for peer in self._progressing.values())

    @property
    def has_unquiet(self) -> bool:
        """Whether a link is down on which something may still land; only time will tell."""
        return bool(self._unquiet)

    @property
    def num_progressing(self) -> int:
        """Transfers of which a peer may write here right now. Callable from any thread."""
        return len(self._progressing)

    def num_resting(self) -> int:
        """Return how many lost peers are not tried again yet. Callable from any thread."""
        sessions = list(self._sessions.values())
        return sum(self._is_resting(s) and not s.is_incompatible for s in sessions)

    def next_deadline_s(self) -> float | None:
        """Return when a session's peer owes its answer at the latest, or may be tried again for
        what it was not told; or None."""
        deadlines = [session.next_deadline_s() for session in self._sessions.values()]
        deadlines += [s.lost_at_s + LOST_SESSION_REST_S for s in self._with_late_releases()]
        return min((d for d in deadlines if d is not None), default=None)

    def contact(self, peer: PeerAddress) -> None:
        """Shake hands with ``peer``, unless that was done.

        Where it cannot be tried, whoever sends to the peer is told.
        """
        with contextlib.suppress(FerryError):
            self._session(peer)

    def send(self, effect: Send) -> None:
        """Send to the effect's peer, when the handshake is done."""
        try:
            self._events.extend(self._session(effect.peer).submit(effect.message))
        except FerryError as error:
            # Nothing was sent: what the peer was not told of, it can neither fill nor hold.
            transfer_id = effect.message.transfer_id
            lost = PeerLost(transfer_id, ReceiveOutcome.UNREACHABLE, str(error))
            if not isinstance(effect.message, messages.Release):
                self._events.append(lost)
            if isinstance(effect.message, messages.Register):
                self._events.append(never_registered(effect.message))

    def link(self, peer: PeerAddress) -> Link | None:
        """Return the link to ``peer``, if there is one."""
        session = self._sessions.get(peer)
        return session.link if session is not None else None

    def start_progress(self, peer: PeerAddress, transfer_id: TransferId) -> None:
        """``peer`` may write for ``transfer_id`` from now on."""
        self._progressing[transfer_id] = peer

    def stop_progress(self, peer: PeerAddress, transfer_id: TransferId) -> None:
        """Nothing of ``transfer_id`` can land any more."""
        self._progressing.pop(transfer_id, None)
        session = self._sessions.get(peer)
        if session is not None:
            session.pushes.pop(transfer_id, None)

    def progress(self) -> None:
        """Serve what senders have posted."""
        for peer in set(self._progressing.values()):
            if self._is_ready(peer):
                self._sessions[peer].link.progress()

    def receive(self) -> None:
        """Take in replies and notices; give up on peers that owe one for too long."""
        for session in list(self._sessions.values()):
            if not session.is_retired:
                self._events.extend(session.receive())
                self._events.extend(session.expire())
            if session.state is SessionState.IDENTIFIED:
                self._take_over(session)
            if session.state is SessionState.LOST:
                self._retire(session)

    def send_late_releases(self) -> None:
        """Tell peers that were lost a while ago what they need not hold for us."""
        for session in self._with_late_releases():
            if not self._is_resting(session):
                releases, session.late_releases = session.late_releases, []
                for release in releases:
                    self.send(Send(session.peer, release))

    def tell_quiet(self) -> None:
        """Report the pushes of links that are down and have become quiet."""
        unquiet, self._unquiet = self._unquiet, []
        for link, pushes in unquiet:
            link.disconnect()  # again, where it could not be torn down before
            if link.is_quiet():
                self._events.extend(PeerQuiet(*push) for push in sorted(pushes.items()))
            else:
                self._unquiet.append((link, pushes))

    def disconnect(self, peer: PeerAddress, transfer_id: TransferId) -> None:
        """Tear the link down that ``transfer_id`` uses; all that waits for ``peer`` is told."""
        session = self._sessions.get(peer)
        if session is None or session.link_closed:
            return
        if transfer_id not in session.pushes and not self._reads.uses(session.link, transfer_id):
            return  # its own link is down already, and this one serves others
        self._tear_down(session, ReceiveOutcome.SLOW, "a transfer did not end in time")

    def drop_broken(self) -> None:
        """Give up the sessions whose links have failed; whoever comes next connects anew."""
        broken = [link for _, link in self._reads.take_broken()]
        for session in list(self._sessions.values()) if broken else ():
            if session.link in broken and not session.link_closed:
                self._tear_down(session, ReceiveOutcome.FAILED, "its link has failed")

    def _tear_down(self, session: Session, outcome: ReceiveOutcome, detail: str) -> None:
        self._events.extend(session.lose(outcome, detail))
        self._note_link_closed(session)
        self._reads.end_link(session.link)
        self._retire(session)

    def end_links(self) -> None:
        """End all that is posted. What that leads to may open sessions yet."""
        for session in list(self._sessions.values()):
            self._reads.end_link(session.link)

    def close(self) -> None:
        """End every session."""
        for session in self._sessions.values():
            session.link.disconnect()
            if not session.is_retired:
                session.client.close()

    def _with_late_releases(self) -> list[Session]:
        return [s for s in self._sessions.values() if s.late_releases and s.link_closed]

    def _is_ready(self, peer: PeerAddress) -> bool:
        session = self._sessions.get(peer)
        return session is not None and session.state is SessionState.READY

    def _is_resting(self, session: Session) -> bool:
        """Whether it is not tried again yet; one that does not fit, never under this epoch."""
        rested_s = self._clock.monotonic_s() - session.lost_at_s
        rests = rested_s < LOST_SESSION_REST_S or session.is_incompatible
        return session.state is SessionState.LOST and rests

    def _session(self, peer: PeerAddress) -> Session:
        session = self._sessions.get(peer)
        if session is not None:
            is_lost = session.state is SessionState.LOST
            if not is_lost or self._is_resting(session) or not session.link_closed:
                return session
        self._make_room()
        self._sessions.pop(peer, None)
        late_releases = session.late_releases if session is not None else []
        # One that was lost may have restarted: as another epoch it must not hear our hello twice.
        opened = self._open_session(peer, was_lost=session is not None)
        for release in late_releases:
            self._events.extend(opened.submit(release))
        return opened

    def _others(self, peer: PeerAddress) -> list[Session]:
        """Return the live sessions with the instance of ``peer`` under another epoch or address, or
        with another instance at its address."""
        return [
            session
            for other, session in self._sessions.items()
            if peer != other
            and (
                peer.instance_id == other.instance_id
                or peer.control_address == other.control_address
            )
            and session.state is not SessionState.LOST
        ]

    def _take_over(self, session: Session) -> None:
        """``session`` has found its peer, which takes one link of ours: end the others' sessions.

        One of the same start that is in use proves that the peer can be reached without this one.
        """
        others = self._others(session.peer)
        is_same_start = any(
            other.peer.epoch == session.peer.epoch and self._is_in_use(other) for other in others
        )
        if is_same_start:
            detail = "it is being talked to at another address"
            self._events.extend(session.lose(ReceiveOutcome.DECLINED, detail))
            return
        for other in others:
            self._events.extend(other.lose(ReceiveOutcome.GONE, "it has restarted or moved since"))
        session.greet()

    def _is_in_use(self, session: Session) -> bool:
        is_ready = session.state is SessionState.READY
        return is_ready and not (session.is_idle and not self._reads.uses(session.link))

    def _make_room(self) -> None:
        """Forget sessions that have ended, and let go of the one that was idle longest.

        Raises ``CapacityError`` where too many peers have not answered yet: a session has sockets
        and a link from its first hello on, whether anybody is there or not.
        """
        incompatible = [s for s in self._sessions.values() if s.is_incompatible]
        kept = incompatible[-self._config.max_peers :]
        for other, session in list(self._sessions.items()):
            if session.link_closed and not session.late_releases and session not in kept:
                del self._sessions[other]
        live = [s for s in self._sessions.values() if s.state is not SessionState.LOST]
        num_unanswered = sum(s.state is not SessionState.READY for s in live)
        if num_unanswered >= self._config.max_peers:
            raise CapacityError(f"{num_unanswered} other peers have not answered yet")
        idle = [s for s in live if s.is_idle and not self._reads.uses(s.link)]
        if len(live) >= self._config.max_peers and idle:
            oldest = min(idle, key=lambda s: s.last_used_s)
            self._events.extend(oldest.lose(ReceiveOutcome.GONE, "idle for longest"))

    def _open_session(self, peer: PeerAddress, *, was_lost: bool) -> Session:
        client = ControlClient(self._context, peer.control_address)
        try:
            link = self._transport.open_link(peer.instance_id, peer_writes=False)
        except FerryError:
            client.close()
            raise
        hello = msgspec.structs.replace(self._hello, transport_metadata=link.local_metadata)
        session = Session(peer, client, link, hello, self._clock, self._config.control_timeout_s)
        identifies_first = was_lost or bool(self._others(peer))
        self._sessions[peer] = session
        if identifies_first:
            # The handshake ends the link that the peer has with us: a hint that is old or wrong
            # must not do that to those who use it.
            session.identify()
        else:
            session.greet()
        return session

    def _retire(self, session: Session) -> None:
        """Close a lost session's socket at once, its link as soon as no READ runs on it."""
        if not session.is_retired:
            session.is_retired = True
            _logger.warning("lost %s: %s", session.peer.instance_id, session.lost_detail)
            session.client.close()
        if not session.link_closed and not self._reads.uses(session.link):
            self._note_link_closed(session)
            session.link.disconnect()

    def _note_link_closed(self, session: Session) -> None:
        session.link_closed = True
        if session.pushes:
            self._unquiet.append((session.link, dict(session.pushes)))
