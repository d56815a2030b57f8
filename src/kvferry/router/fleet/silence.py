"""Whether an instance has fallen silent, and the waits for its bytes that end then.

Silence is judged from probes and from all that came of the instance; that is pure. Owns who waits
for one instance. Knows not what becomes of a request whose leg has ended.
"""

from __future__ import annotations

import asyncio
from types import TracebackType

from kvferry.observe.log import get_logger
from kvferry.router.upstream import LegFailedError, LegFailure

_NUM_PROBES = 2
"""Unanswered in a row, with no sign of life since the first of them began."""

_log = get_logger(__name__)


class Silence:
    """One instance's. A sign of life is anything that came from it: an answer, a byte on a leg."""

    __slots__ = (
        "_is_last_unanswered",
        "_num_signs",
        "_num_signs_before",
        "_num_unanswered",
        "_since_s",
    )

    def __init__(self) -> None:
        self._num_signs = 0
        self._num_signs_before = 0
        self._num_unanswered = 0
        self._since_s = 0.0
        self._is_last_unanswered = False

    @property
    def is_doubted(self) -> bool:
        """Whether the last probe went unanswered, and that is not enough yet."""
        return self._is_last_unanswered and self._num_unanswered < _NUM_PROBES

    def hear(self) -> None:
        """Something has come."""
        self._num_signs += 1

    def begin_probe(self, now_s: float) -> None:
        """A probe is sent; what has been heard by now does not speak for it."""
        if self._num_unanswered == 0 or self._num_signs != self._num_signs_before:
            self._num_unanswered = 0
            self._since_s = now_s
        self._num_signs_before = self._num_signs
        self._is_last_unanswered = False

    def take_unanswered(self, now_s: float, min_silence_s: float) -> float | None:
        """The probe went unanswered. Return for how many seconds nothing has come, if that is
        silence; None if the instance may be merely busy.

        ``min_silence_s``: probes that fail at once prove nothing in less time than this.
        """
        self._is_last_unanswered = True
        if self._num_signs != self._num_signs_before:
            return None
        self._num_unanswered += 1
        silent_s = now_s - self._since_s
        is_silent = self._num_unanswered >= _NUM_PROBES and silent_s >= min_silence_s
        return silent_s if is_silent else None


class InstanceWaits:
    """What is known of one instance's silence, and who waits for it. Event loop's thread only."""

    __slots__ = ("_url", "_waiting", "silence")

    def __init__(self, url: str) -> None:
        self._url = url
        self._waiting: set[LegWait] = set()
        self.silence = Silence()

    def of_leg(self) -> LegWait:
        """Return the waits of a new leg."""
        return LegWait(self.silence, self._waiting)

    def take_unanswered(self, now_s: float, min_silence_s: float) -> None:
        """A probe went unanswered: if that makes the instance silent, end what waits for it."""
        silent_s = self.silence.take_unanswered(now_s, min_silence_s)
        if silent_s is None or not self._waiting:
            return
        fields = {"instance": self._url, "silent_s": silent_s, "num_legs": len(self._waiting)}
        _log.warning("an instance has fallen silent", extra={"fields": fields})
        for wait in tuple(self._waiting):
            wait.end(silent_s)


class LegWait:
    """A context manager for each wait of one leg, one at a time; it may be entered again.

    A wait that ends well is a sign of life. One that the instance's silence ends raises
    ``LegFailedError``; between two waits, while a client reads slowly say, nothing ends a leg.
    """

    __slots__ = ("_num_cancels", "_silence", "_silent_s", "_task", "_waiting")

    def __init__(self, silence: Silence, waiting: set[LegWait]) -> None:
        self._silence = silence
        self._waiting = waiting
        self._task: asyncio.Task[object] | None = None
        self._num_cancels = 0
        self._silent_s: float | None = None

    def __enter__(self) -> LegWait:
        self._task = task = asyncio.current_task()
        self._num_cancels = 0 if task is None else task.cancelling()
        self._silent_s = None
        self._waiting.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._waiting.discard(self)
        task, self._task = self._task, None
        if kind is None:
            self._silence.hear()
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
