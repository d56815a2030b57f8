"""The time source. Every deadline in the package is taken from a ``Clock`` that was passed in."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock; tests pass one that they move by hand."""

    def monotonic_s(self) -> float:
        """Seconds since an arbitrary start; never goes backwards."""
        ...


class SystemClock:
    """``CLOCK_MONOTONIC``, which on Linux is one clock for all processes of a host."""

    def monotonic_s(self) -> float:
        """Return seconds of the host's monotonic clock."""
        return time.monotonic()
