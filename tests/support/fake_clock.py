"""``FakeClock``: time that a test moves by hand."""

from __future__ import annotations

import threading


class FakeClock:
    """A ``Clock`` that stands still until ``advance``. Thread-safe."""

    def __init__(self, start: float = 0.0) -> None:
        self._now_s = start
        self._lock = threading.Lock()

    def monotonic_s(self) -> float:
        """Return the seconds that the test has set."""
        with self._lock:
            return self._now_s

    def advance(self, seconds: float) -> None:
        """Move forward; raises ``ValueError`` for a step back, which a real clock never takes."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot move by {seconds} s")
        with self._lock:
            self._now_s += seconds
