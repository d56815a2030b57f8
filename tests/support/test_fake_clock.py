from __future__ import annotations

import pytest

from tests.support.fake_clock import FakeClock


def test_time_moves_only_when_advanced() -> None:
    clock = FakeClock(5.0)
    assert clock.monotonic_s() == clock.monotonic_s() == 5.0
    clock.advance(2.5)
    clock.advance(0)
    assert clock.monotonic_s() == 7.5


def test_time_never_goes_back() -> None:
    clock = FakeClock()
    with pytest.raises(ValueError, match="monotonic"):
        clock.advance(-0.1)
    assert clock.monotonic_s() == 0.0
