"""The one impure part of the connector: a thread that executes effects and reports events.

Owns the control sockets, the transport's links and the timers. It waits in one poll on all sockets
and a wake-up descriptor; only while a transfer runs does it turn by itself, backing off to one
millisecond. Nothing here waits for an engine step, and no engine thread waits for anything here.
"""

from __future__ import annotations

import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import zmq

from kvferry.clock import Clock
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.control import ControlClient, ControlContext, ControlServer
from kvferry.connector.effects import (
    ContactPeer,
    CountOfferEnd,
    DisconnectPeer,
    Effect,
    NotifyEngine,
    PostRead,
    SendAcquire,
    SendRelease,
    SendRenew,
    StartServing,
    StopServing,
)
from kvferry.connector.events import Event, PeerLost
from kvferry.connector.planner import Planner
from kvferry.connector.ports import ReceiveOutcome
from kvferry.connector.readers import BlockDigester, Readers
from kvferry.connector.reads import Reads
from kvferry.connector.sessions import Sendable, Session, SessionState
from kvferry.errors import FerryError
from kvferry.observe.log import get_logger
from kvferry.observe.metrics import ExchangeMetrics
from kvferry.protocol.messages import Hello, InstanceInfo, InstanceQuery
from kvferry.protocol.params import PeerAddress
from kvferry.transport.base import Transport

LOST_SESSION_REST_S = 1.0
"""A lost peer is not tried again for so long; requests for it are told at once."""
MIN_TURN_S = 0.0001
MAX_TURN_S = 0.001
MAX_WAIT_S = 60.0
UNQUIET_POLL_S = 0.1
"""Between two looks at whether a peer that may still write into failed READs' blocks has ended."""
FAILURE_REST_S = 0.05
"""After a bug was met: keeps a failure that repeats from eating a core."""
_logger = get_logger(__name__)


@dataclass(slots=True)
class MoverParts:
    """What a mover is made of; each is used on its thread only, but for the planner."""

    config: ExchangeConfig
    hello: Hello
    transport: Transport
    planner: Planner
    clock: Clock
    metrics: ExchangeMetrics
    digester: BlockDigester | None
    describe: Callable[[str], InstanceInfo]
    """Control address → the answer to ``InstanceQuery``."""
    on_results: Callable[[], None] = field(default=lambda: None)


class Mover:
    """Runs effects. ``start``, then ``submit`` from any thread, then ``close``."""

    def __init__(self, parts: MoverParts) -> None:
        self._parts = parts
        self._context = ControlContext(parts.config.cluster_key)
        try:
            self._server = ControlServer(self._context, parts.config, self._count_malformed)
        except FerryError:
            self._context.close()
            raise
        self.control_address = self._server.address
        self._readers = Readers(
            parts.hello,
            parts.transport,
            parts.planner,
            parts.digester,
            max_peers=parts.config.max_peers,
        )
        self._reads = Reads(parts.clock, parts.digester)
        self._sessions: dict[PeerAddress, Session] = {}
        self._inbox: deque[Effect] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._is_closed = False
        self._is_torn_down = False
        self._poller = zmq.Poller()
        self._stopping = False
        self._turn_s = MIN_TURN_S
        self._failure_rest_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvferry-mover", daemon=True)

    def start(self) -> None:
        """Start the thread; the control port answers from now on."""
        self._thread.start()

    def submit(self, effects: Sequence[Effect]) -> None:
        """Have ``effects`` executed soon, in order. Any thread.

        Wakes the mover even for none: what the planner was told may have brought a deadline nearer.
        """
        self._inbox.extend(effects)
        self._wake()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread, end every link and free the control port. Safe to repeat."""
        self._stopping = True
        self._wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _logger.error("the mover did not stop within %.0f s", timeout_s)
                return
        else:
            self._tear_down()
        with self._wake_lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self._wake_fd)

    def _wake(self) -> None:
        # After the end the descriptor's number may be another file's.
        with self._wake_lock:
            if not self._is_closed:
                os.eventfd_write(self._wake_fd, 1)

    # -- the loop -------------------------------------------------------------------------------
    def _run(self) -> None:
        self._poller.register(self._server.socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        try:
            while not self._stopping:
                self._wait()
                self._turn()
            self._execute_inbox()
        finally:
            self._tear_down()

    def _wait(self) -> None:
        wait_s = self._wait_s()
        if wait_s < MAX_TURN_S:
            # ZeroMQ waits in whole milliseconds; a transfer that runs wants shorter turns.
            select.select([self._wake_fd], [], [], wait_s)
            wait_s = 0.0
        self._poller.poll(math.ceil(wait_s * 1000))

    def _turn(self) -> None:
        """Do one turn of each duty. A bug met in one must not end the thread that all need."""
        duties = (
            self._execute_inbox,
            self._answer_requests,
            self._hear_sessions,
            self._poll_reads,
            self._readers.progress,
            self._act_on_deadlines,
        )
        self._drain_wake_fd()
        for duty in duties:
            try:
                duty()
            except Exception:
                _logger.exception("the mover failed in %s: a bug in kvferry", duty.__name__)
                self._failure_rest_s = FAILURE_REST_S

    def _poll_reads(self) -> None:
        self._handle(self._reads.poll())

    def _act_on_deadlines(self) -> None:
        self._execute(self._parts.planner.tick())

    def _wait_s(self) -> float:
        if self._failure_rest_s:
            rest_s, self._failure_rest_s = self._failure_rest_s, 0.0
            return rest_s
        if self._inbox:
            return 0.0
        if self._reads.num_running or self._readers.is_serving:
            wait_s, self._turn_s = self._turn_s, min(2 * self._turn_s, MAX_TURN_S)
            return wait_s
        self._turn_s = MIN_TURN_S
        deadlines = [self._parts.planner.next_deadline_s()]
        if self._reads.num_unquiet:
            deadlines.append(self._parts.clock.monotonic_s() + UNQUIET_POLL_S)
        deadlines += [s.next_deadline_s() for s in self._sessions.values()]
        due_s = min((d for d in deadlines if d is not None), default=None)
        if due_s is None:
            return MAX_WAIT_S
        return min(max(due_s - self._parts.clock.monotonic_s(), 0.0), MAX_WAIT_S) + MAX_TURN_S

    def _drain_wake_fd(self) -> None:
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            return

    def _answer_requests(self) -> None:
        for request in self._server.receive():
            message = request.envelope.message
            if isinstance(message, InstanceQuery):
                self._server.reply(request, self._parts.describe(self.control_address))
                continue
            reply, effects = self._readers.answer(message)
            # A grant must have its link progressed before the reader can start.
            self._execute(effects)
            self._server.reply(request, reply)
            labels = (type(message).__name__.lower(), type(reply).__name__.lower())
            self._parts.metrics.control_requests.labels(*labels).inc()

    def _hear_sessions(self) -> None:
        for session in list(self._sessions.values()):
            if not session.is_retired:
                self._handle(session.receive())
                self._handle(session.expire())
            if session.state is SessionState.LOST:
                self._retire(session)

    # -- effects --------------------------------------------------------------------------------
    def _execute_inbox(self) -> None:
        while self._inbox:
            self._execute([self._inbox.popleft()])

    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            self._execute(self._parts.planner.handle(event))

    def _execute(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            match effect:
                case ContactPeer():
                    self._session(effect.peer)
                case SendAcquire() | SendRenew() | SendRelease():
                    self._send(effect)
                case PostRead():
                    self._post_read(effect)
                case DisconnectPeer():
                    self._disconnect(effect.peer)
                case StartServing():
                    self._readers.start_serving(effect.reader)
                case StopServing():
                    self._readers.stop_serving(effect.reader)
                case CountOfferEnd():
                    self._parts.metrics.handoffs.labels(effect.outcome).inc()
                case NotifyEngine():
                    self._parts.on_results()

    def _send(self, effect: Sendable) -> None:
        try:
            self._handle(self._session(effect.peer).submit(effect))
        except FerryError as error:
            if not isinstance(effect, SendAcquire):
                raise
            lost = PeerLost(effect.transfer_id, ReceiveOutcome.UNREACHABLE, str(error))
            self._handle([lost])

    def _post_read(self, effect: PostRead) -> None:
        self._turn_s = MIN_TURN_S
        session = self._sessions.get(effect.peer)
        link = session.link if session is not None else None
        num_blocks = len(effect.local_blocks)
        _logger.debug("reading %d blocks of %s", num_blocks, effect.transfer_id)
        self._handle(self._reads.post(effect, link))

    def _session(self, peer: PeerAddress) -> Session:
        session = self._sessions.get(peer)
        if session is not None:
            rested_s = self._parts.clock.monotonic_s() - session.lost_at_s
            lost = session.state is SessionState.LOST
            if not lost or rested_s < LOST_SESSION_REST_S or not session.link_closed:
                return session
            del self._sessions[peer]
        self._make_room(peer)
        return self._open_session(peer)

    def _make_room(self, peer: PeerAddress) -> None:
        """Let go of earlier epochs of ``peer``, and of the session that was idle longest."""
        for other, session in list(self._sessions.items()):
            if other.instance_id == peer.instance_id:
                self._handle(session.lose(ReceiveOutcome.GONE, "it has restarted since"))
            if session.link_closed:
                del self._sessions[other]
        live = [s for s in self._sessions.values() if s.state is not SessionState.LOST]
        idle = [s for s in live if s.is_idle and not self._reads.uses(s.link)]
        if len(live) >= self._parts.config.max_peers and idle:
            oldest = min(idle, key=lambda s: s.last_used_s)
            self._handle(oldest.lose(ReceiveOutcome.GONE, "idle for longest"))

    def _open_session(self, peer: PeerAddress) -> Session:
        parts = self._parts
        client = ControlClient(self._context, peer.control_address, self._count_malformed)
        link = parts.transport.open_link(peer.instance_id, peer_writes=False)
        hello = Hello(
            parts.hello.instance_id,
            parts.hello.epoch,
            parts.hello.layout,
            parts.hello.transport,
            link.local_metadata,
        )
        session = Session(
            peer,
            client,
            link,
            hello,
            parts.clock,
            parts.config.control_timeout_s,
            parts.digester is not None,
        )
        self._sessions[peer] = session
        self._poller.register(client.socket, zmq.POLLIN)
        session.greet()
        return session

    def _retire(self, session: Session) -> None:
        """Close a lost session's socket at once, its link as soon as nothing runs on it."""
        if not session.is_retired:
            session.is_retired = True
            _logger.warning("lost %s: %s", session.peer.instance_id, session.lost_detail)
            self._poller.unregister(session.client.socket)
            session.client.close()
        if not session.link_closed and not self._reads.uses(session.link):
            session.link_closed = True
            session.link.disconnect()

    def _disconnect(self, peer: PeerAddress) -> None:
        session = self._sessions.get(peer)
        if session is None:
            return
        self._handle(session.lose(ReceiveOutcome.SLOW, "a READ did not end in time"))
        session.link_closed = True
        self._handle(self._reads.end_link(session.link))
        self._retire(session)

    def _count_malformed(self, reason: str) -> None:
        self._parts.metrics.control_malformed.labels(reason).inc()

    def _tear_down(self) -> None:
        if self._is_torn_down:
            return
        self._is_torn_down = True
        for session in self._sessions.values():
            self._handle(self._reads.end_link(session.link))
            if not session.is_retired:
                session.client.close()
        self._readers.close()
        self._server.close()
        self._context.close()
