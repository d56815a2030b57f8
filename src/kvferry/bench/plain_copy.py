"""How long one plain copy of some bytes takes here: what moving them is compared with."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from kvferry.clock import Clock

if TYPE_CHECKING:
    # Imported when bytes are copied: the command line starts without it.
    import numpy as np
    from numpy.typing import NDArray

_REPEATS = 3


class PlainCopy:
    """Two buffers that grow as needed; their memory is touched before it is measured."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._buffers: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None

    def time_s(self, num_bytes: int) -> float:
        """Return the median seconds of a few copies of ``num_bytes``, at least 1."""
        source, target = self._sized(num_bytes)
        return statistics.median(
            self._copy_s(source[:num_bytes], target[:num_bytes]) for _ in range(_REPEATS)
        )

    def _sized(self, num_bytes: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        import numpy as np

        if self._buffers is None or self._buffers[0].size < num_bytes:
            self._buffers = (
                np.full(num_bytes, 1, dtype=np.uint8),
                np.full(num_bytes, 2, dtype=np.uint8),
            )
        return self._buffers

    def _copy_s(self, source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
        begun_s = self._clock.monotonic_s()
        target[:] = source
        return self._clock.monotonic_s() - begun_s
