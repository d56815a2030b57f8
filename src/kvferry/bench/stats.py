"""Medians, quantiles and bootstrap intervals of a few dozen samples. Pure; numpy-free."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """An estimate and the bounds of its 95 % confidence interval, None where there is none."""

    estimate: float
    low: float | None
    high: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """An estimated ratio, its 95 % confidence interval, and its upper 95 % bound.

    All three bounds are None where there are none.
    """

    estimate: float
    low: float | None
    high: float | None
    upper_bound: float | None
    """The ratio is below this with 95 % confidence: one-sided, so less than ``high``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """How one quantity is spread, in the samples' unit."""

    count: int
    median: float
    p25: float
    p75: float
    p90: float
    least: float
    greatest: float

    @property
    def interquartile_range(self) -> float:
        """The middle half's width."""
        return self.p75 - self.p25


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Return the quantile at ``fraction`` (0 to 1), interpolated linearly. Needs one sample."""
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def summarise(samples: Sequence[float]) -> Summary:
    """Return the summary of at least one sample."""
    return Summary(
        count=len(samples),
        median=statistics.median(samples),
        p25=quantile(samples, 0.25),
        p75=quantile(samples, 0.75),
        p90=quantile(samples, 0.90),
        least=min(samples),
        greatest=max(samples),
    )


def median_interval(samples: Sequence[float], rng: random.Random) -> Interval:
    """Return the median with its bootstrap interval; a single sample has none."""
    return _bootstrap(
        lambda: statistics.median(rng.choices(samples, k=len(samples))),
        estimate=statistics.median(samples),
        num_samples=len(samples),
    )


def median_difference(
    first: Sequence[float], second: Sequence[float], rng: random.Random
) -> Interval:
    """Return the median of ``first`` less that of ``second``, with its bootstrap interval.

    There is none where either is a single sample.
    """
    return _bootstrap(
        lambda: (
            statistics.median(rng.choices(first, k=len(first)))
            - statistics.median(rng.choices(second, k=len(second)))
        ),
        estimate=statistics.median(first) - statistics.median(second),
        num_samples=min(len(first), len(second)),
    )


def paired_ratio(
    first: Sequence[float], second: Sequence[float], rng: random.Random
) -> Ratio | None:
    """Return the median of ``first`` over that of ``second``, whose samples belong in pairs.

    ``first[i]`` and ``second[i]`` were measured side by side, so the bootstrap draws pairs: what
    slowed both is no uncertainty of the ratio. A single pair has no bounds. None where a draw of
    ``second`` has no positive median, since there is no ratio then.
    """
    pairs = list(zip(first, second, strict=True))
    draws = [_ratio_of_medians(pairs)]
    draws += [_ratio_of_medians(rng.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES)]
    ratios = [draw for draw in draws if draw is not None]
    if len(ratios) < len(draws):
        return None
    if len(pairs) == 1:
        return Ratio(estimate=ratios[0], low=None, high=None, upper_bound=None)
    return Ratio(
        estimate=ratios[0],
        low=quantile(ratios[1:], 0.025),
        high=quantile(ratios[1:], 0.975),
        upper_bound=quantile(ratios[1:], 0.95),
    )


def _ratio_of_medians(pairs: Sequence[tuple[float, float]]) -> float | None:
    below = statistics.median(second for _, second in pairs)
    return statistics.median(first for first, _ in pairs) / below if below > 0 else None


def _bootstrap(resample: Callable[[], float], *, estimate: float, num_samples: int) -> Interval:
    if num_samples == 1:  # Each draw would be the same, which says nothing of how far it is off.
        return Interval(estimate=estimate, low=None, high=None)
    draws = [resample() for _ in range(_RESAMPLES)]
    return Interval(estimate=estimate, low=quantile(draws, 0.025), high=quantile(draws, 0.975))
