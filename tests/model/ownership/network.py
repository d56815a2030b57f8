"""What lies between the instances: sessions, links and posted transfers, all at the walk's mercy.

Stands for the mover of each instance. A session keeps what one transfer's receiver says in order
where the order matters; everything else may be late, lost, repeated and overtaken. Nothing lands on
a link after both its ends are proven quiet; until then, anything posted may.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from kvferry.clock import Clock
from kvferry.protocol.ids import InstanceId, TransferId
from kvferry.protocol.messages import Declined, DeclineReason, Granted, Notice, decline
from kvferry.protocol.params import PeerAddress
from tests.model.ownership import driven as ferry
from tests.model.ownership.driven import Asked, Driven, Effect, Event
from tests.model.ownership.links import (
    Answer,
    Flight,
    Running,
    Session,
    answered_event,
    is_replaced,
    lost_event,
)
from tests.model.ownership.oracle import Oracle, Promise

REST_S = 1.0
CONTROL_TIMEOUT_S = 2.0


@dataclass
class Network:
    """The movers of all instances."""

    clock: Clock
    oracle: Oracle
    planners: dict[InstanceId, Driven]
    sessions: dict[tuple[InstanceId, InstanceId], Session] = field(default_factory=dict)
    """By asker and peer."""
    links: dict[tuple[InstanceId, str], Session] = field(default_factory=dict)
    """By the asked instance and the reader's name there: whose handshake it took last."""
    routes: dict[tuple[InstanceId, TransferId], tuple[Session, str]] = field(default_factory=dict)
    replaced: list[Session] = field(default_factory=list)
    """Lost ones, of which something may still arrive until the next handshake does."""
    running: list[Running] = field(default_factory=list)
    unquiet: list[Session] = field(default_factory=list)
    """Links that are closed at the asker's end, and not proven quiet."""
    serving: Counter[InstanceId] = field(default_factory=Counter)
    _decided: deque[tuple[InstanceId, Effect]] = field(default_factory=deque)
    _is_pumping: bool = False

    def call(self, name: InstanceId, method: str, *args: object, **options: object) -> Any:  # noqa: ANN401 - that of any method
        """Call the planner of ``name``; do what it decides; return its answer."""
        answer, effects = self.planners[name].call(method, *args, **options)
        self._decided.extend((name, effect) for effect in effects)
        self._pump()
        return answer

    def tell(self, name: InstanceId, event: Event) -> None:
        """The mover of ``name`` reports ``event``."""
        self.call(name, "handle", event)

    def _pump(self) -> None:
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._decided:
                self._execute(*self._decided.popleft())
        finally:
            self._is_pumping = False

    def _execute(self, name: InstanceId, effect: Effect) -> None:
        match effect:
            case ferry.Send():
                self._send(name, effect.peer, effect.message)
            case ferry.ContactPeer():
                self.contact(name, effect.peer)
            case ferry.Notify():
                self._notify(name, effect)
            case ferry.PostRead():
                self._post_read(name, effect)
            case ferry.PostWrite():
                self._post_write(name, effect)
            case ferry.DisconnectPeer():
                self._disconnect_peer(name, effect)
            case ferry.DisconnectReader():
                self._disconnect_reader(name, effect.reader)
            case ferry.StopProgress():
                session = self.sessions.get((name, effect.peer.instance_id))
                if session is not None:
                    session.pushes.pop(effect.transfer_id, None)
            case ferry.ActivateReader():
                self.serving[name] += 1
            case ferry.DeactivateReader():
                self.serving[name] -= 1
            case _:
                pass

    # -- sessions -------------------------------------------------------------------------------
    def _session(self, name: InstanceId, peer: PeerAddress) -> Session:
        session = self.sessions.get((name, peer.instance_id))
        if session is not None:
            is_resting = self.clock.monotonic_s() - session.lost_at_s < REST_S
            if not session.is_lost or is_resting or not session.is_link_closed:
                return session
        new = self.sessions[name, peer.instance_id] = Session(name, peer)
        if session is not None:
            new.outbox += session.late_releases
            self.replaced.append(session)
        greeting = Flight(None, self.clock.monotonic_s())
        new.requests.append(greeting)
        new.awaited.append(greeting)
        return new

    def contact(self, name: InstanceId, peer: PeerAddress) -> None:
        """``name`` shakes hands with ``peer``, unless that was done."""
        self._session(name, peer)

    def _send(self, name: InstanceId, peer: PeerAddress, message: Asked) -> None:
        session = self._session(name, peer)
        if session.is_ready:
            self._submit(session, message)
        elif not session.is_lost:
            session.outbox.append(message)
        elif isinstance(message, ferry.Release):
            session.keep_release(message)
        else:
            self.tell(name, lost_event(message.transfer_id))
            self._tell_unsent(session, message)

    def _submit(self, session: Session, message: Asked) -> None:
        flight = Flight(message, self.clock.monotonic_s())
        session.requests.append(flight)
        session.awaited.append(flight)
        if isinstance(message, ferry.Register):
            session.pushes[message.transfer_id] = message.generation
        elif isinstance(message, ferry.Release):
            session.over.add(message.transfer_id)

    def _tell_unsent(self, session: Session, message: Asked) -> None:
        if isinstance(message, ferry.Register):
            self.tell(session.asker, ferry.never_registered(message))

    def overdue(self) -> list[Session]:
        """Return the sessions whose peer owes an answer for too long."""
        sent_before_s = self.clock.monotonic_s() - CONTROL_TIMEOUT_S
        return [
            session
            for session in self.sessions.values()
            if any(flight.sent_s < sent_before_s for flight in session.awaited)
        ]

    def lose(self, session: Session) -> None:
        """The peer owes an answer for too long, or does not know the asker any more."""
        if session.is_lost:
            return
        session.is_lost, session.is_ready = True, False
        session.lost_at_s = self.clock.monotonic_s()
        unsent = list(session.outbox)
        effects = [f.effect for f in session.awaited if f.effect is not None] + unsent
        waiting = dict.fromkeys(
            [e.transfer_id for e in effects if not isinstance(e, ferry.Release)]
            + sorted(session.pushes)
        )
        for effect in effects:
            if isinstance(effect, ferry.Release):
                session.keep_release(effect)
        session.awaited.clear()
        session.outbox.clear()
        session.answers.clear()
        for transfer_id in waiting:
            self.tell(session.asker, lost_event(transfer_id))
        for effect in unsent:
            self._tell_unsent(session, effect)
        self._retire(session)

    def _retire(self, session: Session) -> None:
        if (
            session.is_lost
            and not session.is_link_closed
            and not self._using(session, ferry.PostRead)
        ):
            self._close_link(session)

    def _close_link(self, session: Session) -> None:
        session.is_link_closed = True
        self.unquiet.append(session)

    def _using(self, session: Session | None, kind: type) -> list[Running]:
        return [r for r in self.running if r.session is session and isinstance(r.effect, kind)]

    def tear_down(self, session: Session) -> None:
        """The asker's end of the link goes, with all that uses it."""
        self.lose(session)
        if not session.is_link_closed:
            self._close_link(session)
        for read in self._using(session, ferry.PostRead):
            read.is_doomed = True

    def go_quiet(self, session: Session) -> None:
        """Nothing that was posted on a closed link can land any more, and the asker knows."""
        self.unquiet.remove(session)
        session.is_quiet = True
        for running in self.running:
            if running.session is session:
                running.copy.left.clear()
        for read in self._using(session, ferry.PostRead):
            self._end(read, is_done=False)
        for transfer_id, generation in sorted(session.pushes.items()):
            self.tell(session.asker, ferry.PeerQuiet(transfer_id, generation))

    # -- messages -------------------------------------------------------------------------------
    def on_the_way(self, *, copies: bool = False) -> list[tuple[Session, Flight]]:
        """Return the requests that may arrive next, for the first time or once more."""
        sessions = [*self.sessions.values(), *self.replaced]
        return [
            (session, flight)
            for session in sessions
            for flight in session.deliverable()
            if flight.is_copy == copies and not self._is_pointless(session, flight)
        ]

    def on_the_way_back(self) -> list[tuple[Session, Answer]]:
        """Return the replies and notices that may arrive next."""
        return [(s, answer) for s in self.sessions.values() for answer in s.answers]

    def repeat(self, session: Session, flight: Flight) -> None:
        """``flight``, which arrives now, may come once more. What must not is not repeated."""
        if flight.effect is not None and not isinstance(flight.effect, ferry.AcquireHistory):
            session.requests.append(Flight(flight.effect, flight.sent_s, is_copy=True))

    def _is_pointless(self, session: Session, flight: Flight) -> bool:
        """Whether a copy asks for what its sender, or the router, has given up meanwhile.

        No control connection repeats anything; this is about what is said to be safe to repeat.
        """
        effect = flight.effect
        if not flight.is_copy or not isinstance(effect, ferry.Register):
            return False
        _, registered = self.routes.get((session.peer.instance_id, effect.transfer_id), (None, ""))
        is_another = registered != self._reader_name(session)
        return is_another or effect.transfer_id in session.over or session.is_lost

    def arrive(self, session: Session, flight: Flight) -> None:
        """A request reaches the peer, whose answer goes on its way."""
        asked = session.peer.instance_id
        reader = self._reader_name(session)
        if flight.effect is None:
            self.call(asked, "lose_reader", reader)
            for write in self._using(self.links.get((asked, reader)), ferry.PostWrite):
                write.is_doomed = True
            self.links[asked, reader] = session
            self.replaced = [r for r in self.replaced if not is_replaced(r, session)]
            reply = None
        else:
            reply = self._ask(session, reader, flight.effect)
            if isinstance(reply, Declined):
                session.over.add(flight.effect.transfer_id)
        if not session.is_lost:
            session.answers.append(Answer(flight, reply))

    def _ask(self, session: Session, reader: str, message: Asked) -> Any:  # noqa: ANN401 - the reply
        asked, transfer_id = session.peer.instance_id, message.transfer_id
        if not isinstance(message, ferry.Acquire | ferry.AcquireHistory):
            self._note_route(session, reader, message)
        is_known = (asked, reader) in self.links
        match message:
            case ferry.Renew():
                return self.call(asked, "answer", reader, message)
            case ferry.Release():
                reply = self.call(asked, "answer", reader, message)
                self.oracle.break_promise(asked, session.asker, transfer_id)
                return reply
            case _ if not is_known:
                return decline(DeclineReason.UNKNOWN_PEER, f"{reader} has not said hello")
            case ferry.Register():
                return self.call(asked, "answer", reader, message)
        reply = self.call(asked, "answer", reader, message)
        if isinstance(reply, Granted):
            promise = Promise(reply, self.clock.monotonic_s() + reply.duration_s)
            self.oracle.grant(asked, session.asker, transfer_id, promise)
        return reply

    def _note_route(self, session: Session, reader: str, message: Asked) -> None:
        key = (session.peer.instance_id, message.transfer_id)
        registered = self.routes[key][1] if key in self.routes else ""
        if isinstance(message, ferry.Register):
            registered = reader
        elif isinstance(message, ferry.Release) and registered not in ("", reader):
            return
        self.routes[key] = (session, registered)

    def _notify(self, name: InstanceId, effect: ferry.Notify) -> None:
        route = self.routes.get((name, effect.transfer_id))
        if route is not None and not route[0].is_lost:
            route[0].answers.append(Answer(None, effect.notice))

    def come_back(self, session: Session, answer: Answer) -> None:
        """A reply or a notice reaches the asker."""
        flight, message = answer.flight, answer.message
        if flight is None:
            assert isinstance(message, Notice)
            self.tell(session.asker, ferry.Noticed(message.transfer_id, session.peer, message))
            return
        if flight in session.awaited:
            session.awaited.remove(flight)
        if flight.effect is None:
            session.is_ready = session.was_ready = True
            outbox, session.outbox = session.outbox, []
            for effect in outbox:
                self._submit(session, effect)
        elif isinstance(message, Declined) and message.reason is DeclineReason.UNKNOWN_PEER:
            session.awaited.append(flight)
            self.lose(session)
        else:
            self.tell(session.asker, answered_event(flight, flight.effect, message))

    # -- transfers ------------------------------------------------------------------------------
    def _post_read(self, name: InstanceId, effect: ferry.PostRead) -> None:
        now_s, peer = self.clock.monotonic_s(), effect.peer.instance_id
        session = self.sessions.get((name, peer))
        if session is None or session.is_link_closed:
            failed = ferry.ReadStatus.FAILED
            self.tell(name, ferry.ReadEnded(effect.transfer_id, failed, now_s))
            return
        copy = self.oracle.post_read(name, peer, effect, now_s)
        self.running.append(Running(name, effect, session, copy))

    def _post_write(self, name: InstanceId, effect: ferry.PostWrite) -> None:
        session = self.links.get((name, effect.reader))
        if session is None:
            self.tell(name, ferry.WriteEnded(effect.transfer_id, effect.write_id, is_done=False))
            return
        copy = self.oracle.post_write(
            name, session.asker, effect, self.clock.monotonic_s(), can_land=not session.is_quiet
        )
        self.running.append(Running(name, effect, session, copy))

    def may_succeed(self, running: Running) -> bool:
        """Whether ``running`` can end well."""
        return not running.is_doomed and not running.session.is_quiet

    def end(self, running: Running, *, is_done: bool) -> None:
        """A transfer becomes terminal. One that fails takes its link along."""
        if is_done:
            while running.copy.left:
                self.oracle.land(running.copy, 0)
            self._end(running, is_done=True)
        elif isinstance(running.effect, ferry.PostRead):
            self.tear_down(running.session)
        else:
            self._end(running, is_done=False)
            reader = running.effect.reader
            if self.links.get((running.poster, reader)) is running.session:
                self._disconnect_reader(running.poster, reader)
                self.call(running.poster, "lose_reader", reader)

    def _end(self, running: Running, *, is_done: bool) -> None:
        self.running.remove(running)
        self.oracle.end(running.copy)
        effect = running.effect
        if isinstance(effect, ferry.PostWrite):
            self.tell(
                running.poster, ferry.WriteEnded(effect.transfer_id, effect.write_id, is_done)
            )
            return
        status = ferry.ReadStatus.DONE if is_done else ferry.ReadStatus.FAILED
        now_s = self.clock.monotonic_s()
        self.tell(running.poster, ferry.ReadEnded(effect.transfer_id, status, now_s, 1))
        self._retire(running.session)

    def _disconnect_peer(self, name: InstanceId, effect: ferry.DisconnectPeer) -> None:
        session = self.sessions.get((name, effect.peer.instance_id))
        if session is None or session.is_link_closed:
            return
        reads = self._using(session, ferry.PostRead)
        if effect.transfer_id in session.pushes or any(
            r.effect.transfer_id == effect.transfer_id for r in reads
        ):
            self.tear_down(session)

    def _disconnect_reader(self, name: InstanceId, reader: str) -> None:
        session = self.links.pop((name, reader), None)
        if session is None:
            return
        for write in self._using(session, ferry.PostWrite):
            self._end(write, is_done=False)

    def _reader_name(self, session: Session) -> str:
        return f"{session.asker}/{self.planners[session.asker].hello.epoch}"
