"""Moving or computing: by number, and by what either way has cost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.engine.threshold import (
    MAX_PEERS,
    SAMPLE_LIFE_S,
    CostLine,
    RecomputeThreshold,
)
from kvferry.protocol.ids import InstanceId
from tests.support.fake_clock import FakeClock

PEER = InstanceId("decode-0")
COMPUTE_S = 0.001
"""Of one token."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(100.0)


@pytest.fixture
def measured(clock: FakeClock) -> RecomputeThreshold:
    """Knows what computing costs, and of no move."""
    threshold = RecomputeThreshold(None, clock)
    for num_tokens in (100, 512):
        threshold.note_computed(num_tokens, COMPUTE_S * num_tokens)
    return threshold


@pytest.mark.parametrize(("num_tokens", "moves"), [(63, False), (64, True), (65, True)])
def test_a_fixed_threshold_counts(clock: FakeClock, num_tokens: int, moves: bool) -> None:
    threshold = RecomputeThreshold(64, clock)
    assert threshold.is_worth_moving(PEER, num_tokens) is moves
    assert threshold.min_tokens(PEER, 1000) == 64


def test_until_something_was_measured_the_number_decides(clock: FakeClock) -> None:
    threshold = RecomputeThreshold(None, clock)
    assert not threshold.is_worth_moving(PEER, 63)
    assert threshold.is_worth_moving(PEER, 64)
    assert threshold.min_tokens(PEER, 1000) == 64


def test_a_far_link_moves_much_and_not_little(measured: RecomputeThreshold) -> None:
    """0.5 s for any move and 0.1 ms a token: 100 tokens compute in 0.1 s, 2000 in 2 s."""
    for num_tokens in (160, 2000):
        measured.note_moved(PEER, num_tokens, 0.5 + 0.0001 * num_tokens)
    assert not measured.is_worth_moving(PEER, 100)
    assert measured.is_worth_moving(PEER, 2000)
    assert measured.min_tokens(PEER, 2000) == 556  # 0.5 + 0.0001 n < 0.001 n


def test_a_near_link_moves_little_too(measured: RecomputeThreshold) -> None:
    for num_tokens in (160, 2000):
        measured.note_moved(PEER, num_tokens, 0.002 + 0.00001 * num_tokens)
    assert measured.is_worth_moving(PEER, 16)


def test_each_peer_has_a_link_of_its_own(measured: RecomputeThreshold) -> None:
    measured.note_moved(PEER, 1000, 100.0)
    assert not measured.is_worth_moving(PEER, 1000)
    assert measured.is_worth_moving(InstanceId("decode-1"), 1000)


def test_one_size_seen_says_little_of_smaller_ones(measured: RecomputeThreshold) -> None:
    """They are tried, and tell."""
    measured.note_moved(PEER, 2000, 0.7)
    assert measured.is_worth_moving(PEER, 100)
    measured.note_moved(PEER, 100, 0.51)
    assert not measured.is_worth_moving(PEER, 100)


def test_old_samples_are_forgotten(measured: RecomputeThreshold, clock: FakeClock) -> None:
    measured.note_moved(PEER, 1000, 100.0)
    clock.advance(SAMPLE_LIFE_S + 1)
    measured.note_computed(512, 0.5)
    assert measured.is_worth_moving(PEER, 1000)


def test_peers_are_bounded_in_number(measured: RecomputeThreshold) -> None:
    measured.note_moved(PEER, 1000, 100.0)
    for number in range(MAX_PEERS):
        measured.note_moved(InstanceId(f"other-{number}"), 100, 0.01)
    assert measured.is_worth_moving(PEER, 1000), "the one not heard of for longest is forgotten"


def test_nothing_to_move_is_not_worth_it(measured: RecomputeThreshold) -> None:
    measured.note_moved(PEER, 100, 0.0)
    assert not measured.is_worth_moving(PEER, 0)


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 100)), min_size=1, max_size=40),
    st.integers(1, 20_000),
)
def test_a_line_never_falls_and_is_never_below_zero(
    samples: list[tuple[int, float]], num_tokens: int
) -> None:
    line = CostLine(FakeClock(0.0))
    for size, seconds in samples:
        line.add(size, seconds)
    here, further = line.seconds(num_tokens), line.seconds(num_tokens + 100)
    assert here is not None
    assert further is not None
    assert -1e-6 <= here <= further + 1e-6


def test_a_fixed_threshold_learns_nothing(clock: FakeClock) -> None:
    threshold = RecomputeThreshold(5, clock)
    threshold.note_computed(512, 0.001)
    threshold.note_moved(PEER, 100, 100.0)
    assert threshold.is_worth_moving(PEER, 5)
    assert not threshold.is_worth_moving(PEER, 4)
