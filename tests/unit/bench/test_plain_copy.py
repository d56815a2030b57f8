"""Every copy is of all the bytes, and its time is what the clock says."""

from __future__ import annotations

import numpy as np

from kvferry.bench.turns import PlainCopy


class _Clock:
    """Ticks by one more second each time it is read."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._step_s = 0.0

    def monotonic_s(self) -> float:
        self._step_s += 1
        self._now_s += self._step_s
        return self._now_s


def test_the_time_is_the_median_of_the_copies() -> None:
    # Read at 1, 3 | 6, 10 | 15, 21.
    assert PlainCopy(_Clock()).time_s(1000) == 4


def test_all_bytes_are_copied_and_buffers_grow() -> None:
    copy = PlainCopy(_Clock())
    for num_bytes in (10, 5_000, 100):
        copy.time_s(num_bytes)
        source, target = copy._sized(num_bytes)
        assert source.size >= num_bytes
        assert not np.shares_memory(source, target)
        assert np.array_equal(source[:num_bytes], target[:num_bytes])
