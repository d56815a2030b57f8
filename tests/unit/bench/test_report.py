"""Quantiles and intervals against known values and their own invariants; tables are aligned."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.bench.report import (
    Estimate,
    format_table,
    median_difference,
    paired_ratio,
    quantile,
    summarise,
)

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
    interval = median_difference([2.0] * 10, [0.0] * 10, random.Random(1))
    assert (interval.low, interval.estimate, interval.high) == (2, 2, 2)


def test_interval_covers_the_true_median_mostly() -> None:
    rng = random.Random(7)
    covered = 0
    for _ in range(40):
        samples = [rng.gauss(10, 3) for _ in range(30)]
        interval = median_difference(samples, [rng.gauss(0, 3) for _ in range(30)], rng)
        assert interval.low is not None
        assert interval.high is not None
        covered += interval.low <= 10 <= interval.high
    assert covered >= 34


def test_difference_has_its_sign() -> None:
    rng = random.Random(3)
    interval = median_difference([5.0, 6.0, 7.0], [1.0, 2.0, 3.0], rng)
    assert interval.estimate == 4
    assert interval.low is not None
    assert interval.high is not None
    assert 0 < interval.low <= 4 <= interval.high


def test_pairs_cancel_what_slows_both() -> None:
    slowness = [1.0, 5.0, 2.0, 9.0, 3.0]
    ratio = paired_ratio([1.2 * s for s in slowness], slowness, random.Random(3))
    assert ratio is not None
    assert (ratio.low, ratio.high) == pytest.approx((1.2, 1.2))


def test_a_single_sample_has_no_interval() -> None:
    rng = random.Random(1)
    alone = {"low": None, "high": None, "upper_bound": None}
    for first, second in (([5.0], [1.0]), ([5.0], [1.0, 1.0]), ([5.0, 5.0], [1.0])):
        difference = median_difference(first, second, rng)
        assert difference == Estimate(estimate=4.0, **alone)
    ratio = paired_ratio([5.0], [2.0], rng)
    assert ratio == Estimate(estimate=2.5, **alone)
    assert paired_ratio([5.0], [0.0], rng) is None


def test_ratio_has_its_bounds_in_order() -> None:
    rng = random.Random(5)
    first = [rng.gauss(11, 1) for _ in range(30)]
    ratio = paired_ratio(first, [rng.gauss(10, 1) for _ in range(30)], rng)
    assert ratio is not None
    assert ratio.low is not None
    assert ratio.high is not None
    assert ratio.upper_bound is not None
    assert ratio.low < ratio.estimate < ratio.upper_bound < ratio.high
    assert ratio.estimate == pytest.approx(1.1, abs=0.06)


@pytest.mark.parametrize("below", [[0.0, 0.0, 0.0], [1.0, 1.0, -1.0]])
def test_no_ratio_where_what_is_below_may_not_be_positive(below: list[float]) -> None:
    assert paired_ratio([1.0, 1.0, 1.0], below, random.Random(1)) is None


def test_columns_are_aligned() -> None:
    table = format_table(["a", "long"], [["xyz", "1"], ["x", "22222"]])
    assert table.splitlines() == ["a     long", "---  -----", "xyz      1", "x    22222"]
