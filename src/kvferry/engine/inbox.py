"""``Inbox``: what other threads ask of the engine, and what its thread sleeps on.

Owns the one lock between callers and the engine's thread, and which request ids are in use. Knows
nothing of blocks, steps or tokens.
"""

from __future__ import annotations

import threading

from kvferry.engine.live_request import LiveRequest
from kvferry.errors import EngineError, RequestError
from kvferry.protocol.ids import RequestId


class Inbox:
    """Requests and aborts on their way to the engine's thread. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._arrived: list[LiveRequest] = []
        self._aborts: set[RequestId] = set()
        self._in_use: set[RequestId] = set()
        """From ``claim`` to ``forget``."""
        self._delivered: set[RequestId] = set()
        """Those of ``_in_use`` that were ``put``; an abort that came earlier waits for that."""
        self._num_claims = 0
        self._is_awake = False
        self._is_closing = False
        self._failure: str | None = None

    @property
    def failure(self) -> str | None:
        """Why the engine can serve no more, if so."""
        with self._changed:
            return self._failure

    @property
    def num_arrived(self) -> int:
        """Requests that the engine's thread has not taken yet."""
        with self._changed:
            return len(self._arrived)

    def claim(self, request_id: RequestId) -> int:
        """Reserve ``request_id`` and return its rank by arrival.

        Raises ``RequestError`` if it is in use, ``EngineError`` if the engine serves no more.
        """
        with self._changed:
            self._require_open()
            if request_id in self._in_use:
                raise RequestError(f"request id {request_id!r} is in use", code="invalid_value")
            self._in_use.add(request_id)
            self._num_claims += 1
            return self._num_claims

    def put(self, live: LiveRequest) -> None:
        """Hand a claimed request over. Raises ``EngineError`` if the engine serves no more."""
        with self._changed:
            self._require_open()
            self._arrived.append(live)
            self._delivered.add(live.request.request_id)
            self._changed.notify_all()

    def forget(self, request_id: RequestId) -> None:
        """The request has ended: its id may be used again."""
        with self._changed:
            self._in_use.discard(request_id)
            self._delivered.discard(request_id)

    def abort(self, request_id: RequestId) -> None:
        """Ask for the end of a request that is in use; otherwise do nothing."""
        with self._changed:
            if request_id in self._in_use:
                self._aborts.add(request_id)
                self._changed.notify_all()

    def wake(self) -> None:
        """Make the next ``wait`` return."""
        with self._changed:
            self._is_awake = True
            self._changed.notify_all()

    def close(self) -> None:
        """Accept nothing more, and let the engine's thread end."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def fail(self, message: str) -> None:
        """Accept nothing more, because of ``message``."""
        with self._changed:
            self._failure = message

    # -- the engine's thread ------------------------------------------------------------------

    def wait(self, timeout_s: float | None) -> bool:
        """Sleep until there is news, or ``timeout_s`` is over; False means: end.

        None sleeps until there is news, 0 does not sleep.
        """
        with self._changed:
            if timeout_s != 0:
                self._changed.wait_for(self._has_news, timeout_s)
            self._is_awake = False
            return not self._is_closing

    def take(self) -> tuple[list[LiveRequest], set[RequestId]]:
        """Return what arrived since the last call, and which requests to abort after that."""
        with self._changed:
            arrived, self._arrived = self._arrived, []
            aborts = self._aborts & self._delivered
            self._aborts = (self._aborts & self._in_use) - aborts
            return arrived, aborts

    def _has_news(self) -> bool:
        has_abort = not self._delivered.isdisjoint(self._aborts)
        return bool(self._arrived or has_abort or self._is_awake or self._is_closing)

    def _require_open(self) -> None:
        if self._failure is not None or self._is_closing:
            raise EngineError(self._failure or "the engine is shutting down")
