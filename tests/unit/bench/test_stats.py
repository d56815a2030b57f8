"""Quantiles and intervals against known values and their own invariants."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.bench.stats import median_difference, median_interval, quantile, summarise

_samples = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50)


@pytest.mark.parametrize(("fraction", "value"), [(0, 1), (0.25, 1.75), (0.5, 2.5), (1, 4)])
def test_quantile_interpolates(fraction: float, value: float) -> None:
    assert quantile([4, 1, 3, 2], fraction) == value


def test_summary_of_known_values() -> None:
    summary = summarise([float(value) for value in range(1, 102)])
    assert (summary.count, summary.median, summary.p90) == (101, 51, 91)
    assert (summary.least, summary.greatest, summary.interquartile_range) == (1, 101, 50)


@given(_samples)
def test_quantiles_are_ordered_and_within(samples: list[float]) -> None:
    summary = summarise(samples)
    ordered = [summary.least, summary.p25, summary.median, summary.p75, summary.greatest]
    assert ordered == pytest.approx(sorted(ordered))
    assert quantile(samples, 0.5) == pytest.approx(statistics.median(samples))


def test_interval_of_a_constant_is_a_point() -> None:
    interval = median_interval([2.0] * 10, random.Random(1))
    assert (interval.low, interval.estimate, interval.high) == (2, 2, 2)


def test_interval_covers_the_true_median_mostly() -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(40):
        samples = [rng.gauss(10, 3) for _ in range(30)]
        interval = median_interval(samples, rng)
        covered += interval.low <= 10 <= interval.high
    assert covered >= 34


def test_difference_has_its_sign() -> None:
    rng = random.Random(3)
    interval = median_difference([5.0, 6.0, 7.0], [1.0, 2.0, 3.0], rng)
    assert interval.estimate == 4
    assert 0 < interval.low <= 4 <= interval.high
