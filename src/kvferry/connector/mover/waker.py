"""``Waker``: how other threads wake the mover, in a poll on sockets or in a shorter wait."""

from __future__ import annotations

import os
import threading


class Waker:
    """``wake`` from any thread; all else on the one that waits."""

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
