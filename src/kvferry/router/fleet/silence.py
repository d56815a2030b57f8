"""Whether an instance has fallen silent: judged from its probes and all that came of it. Pure."""

from __future__ import annotations

_NUM_PROBES = 2
"""Unanswered in a row, with no sign of life since the first of them began."""


class Silence:
    """One instance's. A sign of life is anything that came from it: an answer, a byte on a leg."""

    __slots__ = (
        "_is_last_unanswered",
        "_min_silence_s",
        "_num_signs",
        "_num_signs_before",
        "_num_unanswered",
        "_since_s",
    )

    def __init__(self, min_silence_s: float) -> None:
        """``min_silence_s``: probes that fail at once prove nothing in less time than this."""
        self._min_silence_s = min_silence_s
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

    def take_unanswered(self, now_s: float) -> float | None:
        """The probe went unanswered. Return for how many seconds nothing has come, if that is
        silence; None if the instance may be merely busy."""
        self._is_last_unanswered = True
        if self._num_signs != self._num_signs_before:
            return None
        self._num_unanswered += 1
        silent_s = now_s - self._since_s
        is_silent = self._num_unanswered >= _NUM_PROBES and silent_s >= self._min_silence_s
        return silent_s if is_silent else None
