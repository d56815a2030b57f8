"""The one impure part of the connector: a thread that executes effects and reports events.

Owns the control sockets, the transport's links and the timers. It waits in one poll on all sockets
and a wake-up descriptor; only while a transfer runs does it turn by itself, backing off to one
millisecond. Nothing here waits for an engine step, and no engine thread waits for anything here.
What has happened goes into one queue of events; after each duty, ``_settle`` has the
planner decide on them, and executes what was decided.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable

import zmq

from kvferry.clock import Clock
from kvferry.connector import effects
from kvferry.connector.config import ExchangeConfig
from kvferry.connector.events import Event
from kvferry.connector.peers.control import ControlContext, ControlServer, Received
from kvferry.connector.peers.inbound import InboundPeers, reader_name
from kvferry.connector.peers.outbound import OutboundPeers
from kvferry.connector.peers.posted import Reads, Writes
from kvferry.connector.planner import Planner
from kvferry.connector.ports import LinkCounts
from kvferry.errors import FerryError
from kvferry.observe.log import get_logger
from kvferry.observe.metrics import ExchangeMetrics
from kvferry.protocol import messages
from kvferry.transport.base import Transport

MIN_TURN_S = 0.0001
MAX_TURN_S = 0.001
MAX_WAIT_S = 60.0
UNQUIET_POLL_S = 0.1
"""Between two looks at whether a peer that may still write into failed READs' blocks has ended."""
FAILURE_REST_S = 0.05
"""After a bug was met: keeps a failure that repeats from eating a core."""
_logger = get_logger(__name__)


class Waker:
    """Ends the mover's waits, in a poll on sockets or a shorter one. ``wake`` may be called from
    any thread, all else from the one that waits."""

    def __init__(self) -> None:
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable from a ``wake`` to the next ``clear``, for a poll."""
        self._is_woken = threading.Event()
        self._lock = threading.Lock()
        self._is_closed = False

    def wake(self) -> None:
        """End the wait that runs, or else the next one. Does nothing after ``close``."""
        # After the end the descriptor's number may be another file's.
        with self._lock:
            if not self._is_closed:
                self._is_woken.set()
                os.eventfd_write(self.descriptor, 1)

    def wait(self, timeout_s: float) -> None:
        """Wait for a ``wake``, for less than the millisecond that a poll takes at least.

        Not by ``select``, which takes no descriptor above 1023.
        """
        self._is_woken.wait(timeout_s)

    def clear(self) -> None:
        """Forget what woke: whatever was decided before a ``wake`` is looked at after this."""
        self._is_woken.clear()
        try:
            os.eventfd_read(self.descriptor)
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close the descriptor. Safe to repeat."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                os.close(self.descriptor)


class Mover:
    """Executes what the planner decides. ``start``, then ``close``."""

    def __init__(  # noqa: PLR0913 - what it is made of, by name
        self,
        config: ExchangeConfig,
        hello: messages.Hello,
        transport: Transport,
        planner: Planner,
        clock: Clock,
        metrics: ExchangeMetrics,
        describe: Callable[[str], messages.InstanceInfo],
    ) -> None:
        """``describe``: control address → the answer to ``InstanceQuery``."""
        self._planner = planner
        self._clock = clock
        self._metrics = metrics
        self._describe = describe
        self.on_results: Callable[[], None] = lambda: None
        self._context = ControlContext(config.cluster_key, self._count_malformed)
        try:
            self._server = ControlServer(self._context, config)
        except FerryError:
            self._context.close()
            raise
        self.control_address = self._server.address
        self._requests: deque[Received] = deque()
        self._waker = Waker()
        self._is_torn_down = False
        self._events: deque[Event] = deque()
        self._reads = Reads(clock, self._events)
        self._writes = Writes(clock, self._events)
        self._inbound = InboundPeers(config.max_peers, hello, transport, planner)
        self._outbound = OutboundPeers(
            config, hello, transport, clock, self._context, self._reads, self._events
        )
        planner.wake = self._waker.wake
        planner.count_links = self._count_links
        self._stopping = False
        self._turn_s = MIN_TURN_S
        self._failure_rest_s = 0.0
        self._thread = threading.Thread(target=self._run, name="kvferry-mover", daemon=True)

    def start(self) -> None:
        """Start the thread; the control port answers from now on."""
        self._thread.start()

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
        self._context.poller.register(self._waker.descriptor, zmq.POLLIN)
        try:
            while not self._stopping:
                self._wait()
                self._turn()
            self._settle()
        finally:
            self._tear_down()

    def _wait(self) -> None:
        """Wait for what is next. A bug met in waiting must not end the thread that all need."""
        try:
            wait_s = self._wait_s()
            if wait_s < MAX_TURN_S:
                # ZeroMQ waits in whole milliseconds; a transfer that runs wants shorter turns.
                self._waker.wait(wait_s)
                wait_s = 0.0
            self._context.poller.poll(math.ceil(wait_s * 1000))
            self._waker.clear()
        except Exception:
            _logger.exception("the mover failed in waiting: a bug in kvferry")
            time.sleep(FAILURE_REST_S)

    def _turn(self) -> None:
        """Do one turn of each duty. A bug met in one must not end the thread that all need."""
        duties = (
            self._settle,
            self._answer_requests,
            self._outbound.receive,
            self._poll_reads,
            self._poll_writes,
            self._inbound.progress,
            self._outbound.progress,
            self._outbound.tell_quiet,
            self._outbound.send_late_releases,
            self._planner.tick,
        )
        for duty in duties:
            try:
                duty()
                self._settle()
            except Exception:
                _logger.exception("the mover failed in %s: a bug in kvferry", duty.__name__)
                self._failure_rest_s = FAILURE_REST_S

    def _poll_reads(self) -> None:
        self._reads.poll()
        self._settle()
        self._outbound.drop_broken()

    def _poll_writes(self) -> None:
        self._writes.poll()
        self._settle()
        # A link on which a WRITE failed serves no more; its reader hears so, and connects anew.
        for effect, link in self._writes.take_broken():
            if self._inbound.link(effect.reader) is link:
                self._inbound.drop(effect.reader)
                self._planner.lose_reader(effect.reader)

    def _wait_s(self) -> float:
        if self._failure_rest_s:
            rest_s, self._failure_rest_s = self._failure_rest_s, 0.0
            return rest_s
        if self._planner.has_effects:
            return 0.0
        if self._is_transferring():
            wait_s, self._turn_s = self._turn_s, min(2 * self._turn_s, MAX_TURN_S)
            return wait_s
        self._turn_s = MIN_TURN_S
        deadlines = [self._planner.next_deadline_s(), self._outbound.next_deadline_s()]
        if self._reads.num_unquiet or self._writes.num_unquiet or self._outbound.has_unquiet:
            deadlines.append(self._clock.monotonic_s() + UNQUIET_POLL_S)
        due_s = min((d for d in deadlines if d is not None), default=None)
        if due_s is None:
            return MAX_WAIT_S
        return min(max(due_s - self._clock.monotonic_s(), 0.0), MAX_WAIT_S) + MAX_TURN_S

    def _is_transferring(self) -> bool:
        is_sending = self._writes.num_running > 0 or self._inbound.num_active > 0
        return is_sending or self._reads.num_running > 0 or self._outbound.is_progressing

    def _answer_requests(self) -> None:
        self._requests.extend(self._server.receive())
        while self._requests:
            # Taken out first: a bug that one of them meets must not cost the others their answers.
            request = self._requests.popleft()
            message = request.envelope.message
            if isinstance(message, messages.InstanceQuery):
                self._server.reply(request, self._describe(self.control_address))
                continue
            reply = self._answer(request.identity, message)
            # A grant must have its link progressed before the reader can start.
            self._settle()
            self._server.reply(request, reply)
            labels = (type(message).__name__.lower(), type(reply).__name__.lower())
            self._metrics.control_requests.labels(*labels).inc()

    def _answer(self, identity: bytes, message: messages.Message) -> messages.Reply:
        if not isinstance(message, messages.Hello):
            return self._inbound.answer(identity, message)
        # What the reader registered on an earlier link, it has given up with that link; and what
        # was decided for the old link must not be executed on the new one.
        self._planner.lose_reader(reader_name(message))
        self._settle()
        return self._inbound.greet(identity, message)

    # -- effects --------------------------------------------------------------------------------
    def _settle(self) -> None:
        """Have the planner decide on what has happened, and execute what was decided, the oldest
        first, with all that this leads to."""
        events = self._events
        while True:
            if events:
                self._planner.handle(events.popleft())
            elif (effect := self._planner.take_effect()) is not None:
                self._execute(effect)
            else:
                return

    def _execute(self, effect: effects.Effect) -> None:  # noqa: C901 - one branch per effect
        # What is decided may have to be looked after soon.
        self._turn_s = MIN_TURN_S
        match effect:
            case effects.Send():
                self._outbound.send(effect)
            case effects.PostRead():
                self._log_post("reading", effect)
                self._reads.post(effect, self._outbound.link(effect.peer))
            case effects.PostWrite():
                self._log_post("writing", effect)
                self._writes.post(effect, self._inbound.link(effect.reader))
            case effects.StartProgress():
                self._outbound.start_progress(effect.peer, effect.transfer_id)
            case effects.StopProgress():
                self._outbound.stop_progress(effect.peer, effect.transfer_id)
            case effects.ActivateReader():
                self._inbound.activate(effect.reader)
            case effects.DeactivateReader():
                self._inbound.deactivate(effect.reader)
            case effects.ContactPeer():
                self._outbound.contact(effect.peer)
            case effects.DisconnectPeer():
                self._outbound.disconnect(effect.peer, effect.transfer_id)
            case effects.DisconnectReader():
                self._disconnect_reader(effect.reader)
            case effects.Notify():
                self._notify(effect)
            case effects.NotifyEngine():
                self.on_results()
            case _:
                self._count(effect)

    def _count(self, effect: effects.Effect) -> None:
        metrics = self._metrics
        match effect:
            case effects.CountEnd(kind="offer"):
                metrics.handoffs.labels(effect.outcome).inc()
            case effects.CountEnd():
                metrics.history_leases.labels(effect.outcome).inc()
            case effects.CountDropped():
                metrics.dropped_events.labels(effect.role, effect.event).inc()
            case effects.CountReceive():
                metrics.receives.labels(effect.mode, effect.outcome).inc()
                metrics.verified_blocks.labels("compared").inc(effect.num_verified)
                metrics.verified_blocks.labels("not_told").inc(effect.num_unverified)
                if effect.num_bytes:
                    metrics.transfer_bytes.labels("in", effect.mode).inc(effect.num_bytes)
                if effect.duration_s is not None:
                    metrics.transfer_s.labels(effect.mode).observe(effect.duration_s)

    def _log_post(self, doing: str, effect: effects.PostRead | effects.PostWrite) -> None:
        _logger.debug("%s %d blocks of %s", doing, len(effect.local_blocks), effect.transfer_id)

    def _disconnect_reader(self, reader: str) -> None:
        link = self._inbound.link(reader)
        if link is not None:
            self._writes.end_link(link)
            self._inbound.drop(reader)

    def _notify(self, effect: effects.Notify) -> None:
        identity = self._inbound.route(effect.transfer_id)
        if identity is not None:
            self._server.notify(identity, effect.notice)

    def _count_links(self) -> LinkCounts:
        num_served = self._inbound.num_active + self._outbound.num_progressing
        return LinkCounts(self._outbound.num_resting(), num_served)

    def _count_malformed(self, reason: str) -> None:
        self._metrics.control_malformed.labels(reason).inc()

    def _tear_down(self) -> None:
        if self._is_torn_down:
            return
        self._is_torn_down = True
        self._outbound.end_links()
        self._settle()
        self._outbound.close()
        self._inbound.close()
        self._server.close()
        self._context.close()
