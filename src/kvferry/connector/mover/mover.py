"""The one impure part of the connector: a thread that executes effects and reports events.

Owns the control sockets, the transport's links and the timers. It waits in one poll on all sockets
and a wake-up descriptor; only while a transfer runs does it turn by itself, backing off to one
millisecond. Nothing here waits for an engine step, and no engine thread waits for anything here.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import zmq

from kvferry.connector.decisions import Answer, Decisions, Question
from kvferry.connector.machine.effects import (
    ContactPeer,
    CountHistoryEnd,
    CountOfferEnd,
    DisconnectPeer,
    DisconnectReader,
    Effect,
    Notify,
    NotifyEngine,
    PostRead,
    PostWrite,
    StartProgress,
    StartServing,
    StopProgress,
    StopServing,
)
from kvferry.connector.machine.events import Event
from kvferry.connector.mover.waker import Waker
from kvferry.connector.peers.control import ControlContext, ControlServer, Received
from kvferry.connector.peers.inbound import InboundPeers
from kvferry.connector.peers.outbound import OutboundPeers
from kvferry.connector.peers.parts import MoverParts
from kvferry.connector.peers.reads import Reads
from kvferry.connector.peers.requests import Sendable
from kvferry.connector.peers.writes import Writes
from kvferry.errors import FerryError
from kvferry.observe.log import get_logger
from kvferry.protocol.messages import InstanceQuery

MIN_TURN_S = 0.0001
MAX_TURN_S = 0.001
MAX_WAIT_S = 60.0
UNQUIET_POLL_S = 0.1
"""Between two looks at whether a peer that may still write into failed READs' blocks has ended."""
FAILURE_REST_S = 0.05
"""After a bug was met: keeps a failure that repeats from eating a core."""
_logger = get_logger(__name__)


class Mover:
    """Executes what the planner decides. ``start``, then ``decide`` from any thread, ``close``."""

    def __init__(self, parts: MoverParts) -> None:
        self._parts = parts
        self._context = ControlContext(parts.config.cluster_key)
        try:
            self._server = ControlServer(self._context, parts.config, self._count_malformed)
        except FerryError:
            self._context.close()
            raise
        self.control_address = self._server.address
        self._decisions = Decisions()
        self._is_executing = False
        self._readers = InboundPeers(
            parts.hello,
            parts.transport,
            parts.planner,
            self._decisions,
            self._execute,
            parts.digester,
            max_peers=parts.config.max_peers,
        )
        self._reads = Reads(parts.clock, parts.digester)
        self._writes = Writes()
        self._requests: deque[Received] = deque()
        self._waker = Waker()
        self._is_torn_down = False
        self._poller = zmq.Poller()
        self._holders = OutboundPeers(
            parts=parts,
            context=self._context,
            poller=self._poller,
            reads=self._reads,
            handle=self._handle,
            count_malformed=self._count_malformed,
        )
        self._stopping = False
        self._turn_s = MIN_TURN_S
        self._failure_rest_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvferry-mover", daemon=True)

    def start(self) -> None:
        """Start the thread; the control port answers from now on."""
        self._thread.start()

    def submit(self, effects: Sequence[Effect]) -> None:
        """Have ``effects`` executed soon, in order. Any thread."""
        self._decisions.add(effects)
        self._waker.wake()

    def decide(
        self,
        decide: Callable[Question, Sequence[Effect]],
        *args: Question.args,
        **kwargs: Question.kwargs,
    ) -> None:
        """Have ``decide`` called, and what it returns executed soon, in order. Any thread.

        Wakes the mover even for none: what the planner was told may have brought a deadline nearer.
        """
        self._decisions.make(decide, *args, **kwargs)
        self._waker.wake()

    def answer(
        self,
        decide: Callable[Question, tuple[Answer, Sequence[Effect]]],
        *args: Question.args,
        **kwargs: Question.kwargs,
    ) -> Answer:
        """Like ``decide``, for a decision that is also an answer; return that. Any thread."""
        answer = self._decisions.answer(decide, *args, **kwargs)
        self._waker.wake()
        return answer

    def num_resting_peers(self) -> int:
        """Return how many lost peers are not tried again yet. Any thread."""
        return self._holders.num_resting()

    def num_served(self) -> int:
        """Return for how many readers and transfers links are progressed right now. Any thread."""
        return self._readers.num_served + self._holders.num_served

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread, end every link and free the control port. Safe to repeat."""
        self._stopping = True
        self._waker.wake()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                _logger.error("the mover did not stop within %.0f s", timeout_s)
                return
        else:
            self._tear_down()
        self._waker.close()

    # -- the loop -------------------------------------------------------------------------------
    def _run(self) -> None:
        self._poller.register(self._server.socket, zmq.POLLIN)
        self._poller.register(self._waker.descriptor, zmq.POLLIN)
        try:
            while not self._stopping:
                self._wait_or_rest()
                self._turn()
            self._execute()
        finally:
            self._tear_down()

    def _wait_or_rest(self) -> None:
        """Wait for what is next. A bug met in waiting must not end the thread that all need."""
        try:
            self._wait()
        except Exception:
            _logger.exception("the mover failed in waiting: a bug in kvferry")
            time.sleep(FAILURE_REST_S)

    def _wait(self) -> None:
        wait_s = self._wait_s()
        if wait_s < MAX_TURN_S:
            # ZeroMQ waits in whole milliseconds; a transfer that runs wants shorter turns.
            self._waker.wait(wait_s)
            wait_s = 0.0
        self._poller.poll(math.ceil(wait_s * 1000))
        self._waker.clear()

    def _turn(self) -> None:
        """Do one turn of each duty. A bug met in one must not end the thread that all need."""
        duties = (
            self._execute,
            self._answer_requests,
            self._holders.hear,
            self._poll_transfers,
            self._readers.progress,
            self._holders.progress,
            self._holders.tell_quiet,
            self._holders.send_late_releases,
            self._act_on_deadlines,
        )
        for duty in duties:
            try:
                duty()
            except Exception:
                _logger.exception("the mover failed in %s: a bug in kvferry", duty.__name__)
                self._failure_rest_s = FAILURE_REST_S

    def _poll_transfers(self) -> None:
        self._handle(self._reads.poll())
        self._holders.drop_broken()
        self._handle(self._writes.poll())
        self._drop_broken_readers()

    def _act_on_deadlines(self) -> None:
        self._decisions.make(self._parts.planner.tick)
        self._execute()

    def _wait_s(self) -> float:
        if self._failure_rest_s:
            rest_s, self._failure_rest_s = self._failure_rest_s, 0.0
            return rest_s
        if self._decisions:
            return 0.0
        if self._is_transferring():
            wait_s, self._turn_s = self._turn_s, min(2 * self._turn_s, MAX_TURN_S)
            return wait_s
        self._turn_s = MIN_TURN_S
        deadlines = [self._parts.planner.next_deadline_s()]
        if self._reads.num_unquiet or self._holders.has_unquiet:
            deadlines.append(self._parts.clock.monotonic_s() + UNQUIET_POLL_S)
        deadlines.append(self._holders.next_deadline_s())
        due_s = min((d for d in deadlines if d is not None), default=None)
        if due_s is None:
            return MAX_WAIT_S
        return min(max(due_s - self._parts.clock.monotonic_s(), 0.0), MAX_WAIT_S) + MAX_TURN_S

    def _is_transferring(self) -> bool:
        is_sending = self._writes.num_running > 0 or self._readers.is_serving
        return is_sending or self._reads.num_running > 0 or self._holders.is_progressing

    def _answer_requests(self) -> None:
        self._requests.extend(self._server.receive())
        while self._requests:
            # Taken out first: a bug that one of them meets must not cost the others their answers.
            request = self._requests.popleft()
            message = request.envelope.message
            if isinstance(message, InstanceQuery):
                self._server.reply(request, self._parts.describe(self.control_address))
                continue
            reply = self._readers.answer(request.identity, message)
            # A grant must have its link progressed before the reader can start.
            self._execute()
            self._server.reply(request, reply)
            labels = (type(message).__name__.lower(), type(reply).__name__.lower())
            self._parts.metrics.control_requests.labels(*labels).inc()

    # -- effects --------------------------------------------------------------------------------
    def _handle(self, events: Sequence[Event]) -> None:
        for event in events:
            self._decisions.make(self._parts.planner.handle, event)
        self._execute()

    def _execute(self) -> None:
        """Execute what was decided, the oldest first, and what that leads to."""
        if self._is_executing:
            return  # an effect led to more: they follow it
        self._is_executing = True
        try:
            while (effect := self._decisions.take()) is not None:
                self._execute_one(effect)
        finally:
            self._is_executing = False

    def _execute_one(self, effect: Effect) -> None:
        match effect:
            case _ if isinstance(effect, Sendable):
                self._holders.send(effect)
            case PostRead() | PostWrite():
                self._post(effect)
            case StartProgress() | StopProgress() | StartServing() | StopServing():
                self._progress_or_not(effect)
            case ContactPeer() | DisconnectPeer() | DisconnectReader():
                self._join_or_part(effect)
            case Notify():
                self._notify(effect)
            case CountOfferEnd() | CountHistoryEnd():
                self._count_end(effect)
            case NotifyEngine():
                self._parts.on_results()

    def _count_end(self, effect: CountOfferEnd | CountHistoryEnd) -> None:
        metrics = self._parts.metrics
        is_offer = isinstance(effect, CountOfferEnd)
        (metrics.handoffs if is_offer else metrics.history_leases).labels(effect.outcome).inc()

    def _post(self, effect: PostRead | PostWrite) -> None:
        self._turn_s = MIN_TURN_S
        num_blocks, transfer_id = len(effect.local_blocks), effect.transfer_id
        if isinstance(effect, PostRead):
            _logger.debug("reading %d blocks of %s", num_blocks, transfer_id)
            self._handle(self._reads.post(effect, self._holders.link(effect.peer)))
        else:
            _logger.debug("writing %d blocks of %s", num_blocks, transfer_id)
            self._handle(self._writes.post(effect, self._readers.link(effect.reader)))

    def _progress_or_not(
        self, effect: StartProgress | StopProgress | StartServing | StopServing
    ) -> None:
        self._turn_s = MIN_TURN_S
        match effect:
            case StartProgress():
                self._holders.start_progress(effect.peer, effect.transfer_id)
            case StopProgress():
                self._holders.stop_progress(effect.peer, effect.transfer_id)
            case StartServing():
                self._readers.start_serving(effect.reader)
            case StopServing():
                self._readers.stop_serving(effect.reader)

    def _join_or_part(self, effect: ContactPeer | DisconnectPeer | DisconnectReader) -> None:
        match effect:
            case ContactPeer():
                self._holders.contact(effect.peer)
            case DisconnectPeer():
                self._holders.disconnect(effect.peer, effect.transfer_id)
            case DisconnectReader():
                link = self._readers.link(effect.reader)
                if link is not None:
                    self._handle(self._writes.end_link(link))
                    self._readers.drop(effect.reader)

    def _drop_broken_readers(self) -> None:
        """A link on which a WRITE failed serves no more; its reader hears so, and connects anew."""
        for reader, link in self._writes.take_broken():
            if self._readers.link(reader) is link:
                self._readers.drop(reader)
                self._decisions.make(self._parts.planner.lose_reader, reader)
        self._execute()

    def _notify(self, effect: Notify) -> None:
        identity = self._readers.route(effect.transfer_id)
        if identity is not None:
            self._server.notify(identity, effect.notice)

    def _count_malformed(self, reason: str) -> None:
        self._parts.metrics.control_malformed.labels(reason).inc()

    def _tear_down(self) -> None:
        if self._is_torn_down:
            return
        self._is_torn_down = True
        self._holders.close()
        self._readers.close()
        self._server.close()
        self._context.close()
