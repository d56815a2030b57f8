"""Waits for an instance's bytes, which end when the instance has fallen silent.

Owns who waits for whom. Knows neither what silence is (``silence.py`` decides) nor what becomes of
a request whose leg has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import TracebackType

from kvferry.clock import Clock
from kvferry.observe.log import get_logger
from kvferry.router.fleet.silence import Silence
from kvferry.router.upstream import LegFailedError, LegFailure

_log = get_logger(__name__)


class _Instance:
    __slots__ = ("silence", "waiting")

    def __init__(self, min_silence_s: float) -> None:
        self.silence = Silence(min_silence_s)
        self.waiting: set[LegWait] = set()


class LegWait:
    """A context manager for each wait of one leg, one at a time; it may be entered again.

    A wait that ends well is a sign of life. One that the instance's silence ends raises
    ``LegFailedError``; between two waits, while a client reads slowly say, nothing ends a leg.
    """

    __slots__ = ("_instance", "_num_cancels", "_silent_s", "_task")

    def __init__(self, instance: _Instance) -> None:
        self._instance = instance
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._silent_s: float | None = None

    def __enter__(self) -> LegWait:
        self._task = task = asyncio.current_task()
        self._num_cancels = 0 if task is None else task.cancelling()
        self._silent_s = None
        self._instance.waiting.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._instance.waiting.discard(self)
        task, self._task = self._task, None
        if kind is None:
            self._instance.silence.hear()
        if self._silent_s is None or task is None:
            return
        # As ``asyncio.timeout`` does: whoever else has cancelled the task has the last word.
        is_own = task.uncancel() <= self._num_cancels
        if is_own and kind is not None and issubclass(kind, asyncio.CancelledError):
            detail = f"it has fallen silent: nothing has come for {self._silent_s:.1f} s"
            raise LegFailedError(LegFailure.SILENT, detail) from error

    def end(self, silent_s: float) -> None:
        """End the wait, ``silent_s`` after the last that is known of the instance."""
        if self._task is not None and self._silent_s is None:
            self._silent_s = silent_s
            self._task.cancel()


class LegWaits:
    """All waits of a router, by instance. On the event loop's thread only."""

    def __init__(self, urls: Iterable[str], clock: Clock, *, min_silence_s: float) -> None:
        """``min_silence_s``: less than this is no silence, however many probes have failed."""
        self._clock = clock
        self._instances = {url: _Instance(min_silence_s) for url in urls}

    def of_leg(self, url: str) -> LegWait:
        """Return the waits of a new leg on ``url``."""
        return LegWait(self._instances[url])

    def is_doubted(self, url: str) -> bool:
        """Whether another unanswered probe might show that ``url`` has fallen silent."""
        return self._instances[url].silence.is_doubted

    def begin_probe(self, url: str) -> None:
        """A probe of ``url`` is sent."""
        self._instances[url].silence.begin_probe(self._clock.monotonic_s())

    def hear(self, url: str) -> None:
        """Something has come from ``url``: an answer, or the end of a connection."""
        self._instances[url].silence.hear()

    def take_unanswered(self, url: str) -> None:
        """A probe of ``url`` went unanswered: if that makes it silent, end what waits for it."""
        instance = self._instances[url]
        silent_s = instance.silence.take_unanswered(self._clock.monotonic_s())
        if silent_s is None or not instance.waiting:
            return
        fields = {"instance": url, "silent_s": silent_s, "num_legs": len(instance.waiting)}
        _log.warning("an instance has fallen silent", extra={"fields": fields})
        for wait in tuple(instance.waiting):
            wait.end(silent_s)
