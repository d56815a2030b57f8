"""The one form of every benchmark's figures: groups of samples, records, tables, intervals.

Samples are grouped by place, such as the length of a prompt, and by arm. Within a group their
medians are taken; arms are compared place by place. Measures nothing; pure.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from kvferry import __version__

_RESAMPLES = 2000
RATIO_LEGEND = "ratio of medians [95 % interval] < upper 95 % bound"


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """An estimate with the bounds of its 95 % confidence interval; a single sample has none."""

    estimate: float
    low: float | None
    high: float | None
    upper_bound: float | None
    """The true value is below this with 95 % confidence: one-sided, so less than ``high``."""


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


def median_difference(
    first: Sequence[float], second: Sequence[float], rng: random.Random
) -> Estimate:
    """Return the median of ``first`` less that of ``second``, with bootstrap bounds.

    There are none where either is a single sample.
    """
    draws = [
        statistics.median(rng.choices(first, k=len(first)))
        - statistics.median(rng.choices(second, k=len(second)))
        for _ in range(_RESAMPLES)
    ]
    estimate = statistics.median(first) - statistics.median(second)
    return _bounded(estimate, draws, min(len(first), len(second)))


def paired_ratio(
    first: Sequence[float], second: Sequence[float], rng: random.Random
) -> Estimate | None:
    """Return the median of ``first`` over that of ``second``, whose samples belong in pairs.

    ``first[i]`` and ``second[i]`` were measured side by side, so the bootstrap draws pairs: what
    slowed both is no uncertainty of the ratio. A single pair has no bounds. None where a draw of
    ``second`` has no positive median, since there is no ratio then.
    """
    pairs = list(zip(first, second, strict=True))
    draws = [_ratio_of_medians(pairs)]
    draws += [_ratio_of_medians(rng.choices(pairs, k=len(pairs))) for _ in range(_RESAMPLES)]
    ratios = [draw for draw in draws if draw is not None]
    return _bounded(ratios[0], ratios[1:], len(pairs)) if len(ratios) == len(draws) else None


def _ratio_of_medians(pairs: Sequence[tuple[float, float]]) -> float | None:
    below = statistics.median(second for _, second in pairs)
    return statistics.median(first for first, _ in pairs) / below if below > 0 else None


def _bounded(estimate: float, draws: Sequence[float], num_samples: int) -> Estimate:
    if num_samples == 1:  # Each draw would be the same, which says nothing of how far it is off.
        return Estimate(estimate=estimate, low=None, high=None, upper_bound=None)
    low, high, upper_bound = (quantile(draws, fraction) for fraction in (0.025, 0.975, 0.95))
    return Estimate(estimate=estimate, low=low, high=high, upper_bound=upper_bound)


class Sample(Protocol):
    """What is taken at one place under one arm; its figures are attributes."""

    @property
    def arm(self) -> enum.StrEnum:
        """How it was served."""
        ...

    @property
    def repeat(self) -> int:
        """Samples of one repeat were taken side by side: they belong in pairs."""
        ...


S = TypeVar("S", bound=Sample)
Place = tuple[int, ...]
Estimator = Callable[[Sequence[float], Sequence[float], random.Random], Estimate | None]


def values(samples: Sequence[object], name: str) -> list[float]:
    """Return the figure ``name`` of each sample."""
    return [float(getattr(sample, name)) for sample in samples]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm against another at one place, figure by figure; None where there is no ratio."""

    place: Place
    arm: enum.StrEnum
    reference: enum.StrEnum
    figures: dict[str, Estimate | None]


class Groups(Generic[S]):
    """Samples by place and arm, in the order of their repeats.

    ``place`` names the attributes that make a place, and says what tables call them; those with an
    empty title are not shown.
    """

    def __init__(self, samples: Sequence[S], place: Mapping[str, str]) -> None:
        self._place = place
        self._found: dict[tuple[Place, str], list[S]] = {}
        for sample in sorted(samples, key=lambda sample: sample.repeat):
            key = (tuple(getattr(sample, name) for name in place), sample.arm)
            self._found.setdefault(key, []).append(sample)
        self.places = sorted({place for place, _ in self._found})
        present = {sample.arm for sample in samples}
        self.arms = [
            arm for kind in {type(arm) for arm in present} for arm in kind if arm in present
        ]

    def at(self, place: Place, arm: enum.StrEnum) -> list[S]:
        """Return the samples of one group; none, if it has not been measured."""
        return self._found.get((place, arm), [])

    def groups(self) -> list[tuple[Place, enum.StrEnum, list[S]]]:
        """Return every group that has been measured: by place, then in the order of arms."""
        every = [(place, arm, self.at(place, arm)) for place in self.places for arm in self.arms]
        return [group for group in every if group[2]]

    def pairs(
        self, place: Place, arm: enum.StrEnum, reference: enum.StrEnum
    ) -> tuple[list[S], list[S]]:
        """Return the samples of both arms, of the repeats that both have."""
        sides = self.at(place, arm), self.at(place, reference)
        common = {s.repeat for s in sides[0]} & {s.repeat for s in sides[1]}
        first, second = ([s for s in side if s.repeat in common] for side in sides)
        return first, second

    def compare(
        self,
        arms: Sequence[tuple[enum.StrEnum, enum.StrEnum]],
        names: Sequence[str],
        estimate: Estimator,
        rng: random.Random,
    ) -> list[Comparison]:
        """Return each arm against its reference, where both were measured, place by place."""
        found = []
        for place in self.places:
            for arm, reference in arms:
                first, second = self.pairs(place, arm, reference)
                if first:
                    figures = {n: estimate(values(first, n), values(second, n), rng) for n in names}
                    found.append(Comparison(place, arm, reference, figures))
        return found

    def summaries(self, names: Sequence[str]) -> list[dict[str, object]]:
        """Return the record's summaries: of each group the place, the arm and the figures."""
        return [
            {
                "arm": arm.value,
                **self.place_fields(place),
                **{name: dataclasses.asdict(summarise(values(found, name))) for name in names},
            }
            for place, arm, found in self.groups()
        ]

    def compared(self, comparisons: Sequence[Comparison], joint: str) -> list[dict[str, object]]:
        """Return the record's comparisons; ``joint`` names the field of the reference."""
        return [
            {
                "arm": item.arm.value,
                joint: item.reference.value,
                **self.place_fields(item.place),
                **{name: as_fields(found) for name, found in item.figures.items()},
            }
            for item in comparisons
        ]

    def place_fields(self, place: Place) -> dict[str, int]:
        """Return a place as fields of a record."""
        return dict(zip(self._place, place, strict=True))

    def medians_table(
        self,
        figures: Mapping[str, str],
        further: Mapping[str, Callable[[list[S]], str]] | None = None,
    ) -> str:
        """Return the medians of ``figures`` (titles by name) in milliseconds, with their spread.

        ``further`` are columns after them.
        """
        further = further or {}
        header = [*self._titles(), "arm", "n", *(f"{title} ms" for title in figures.values())]
        rows = [
            [
                *self.cells(place),
                arm.value,
                str(len(found)),
                *(format_spread(summarise(values(found, name))) for name in figures),
                *(shown(found) for shown in further.values()),
            ]
            for place, arm, found in self.groups()
        ]
        return format_table([*header, *further], rows)

    def comparisons_text(
        self,
        comparisons: Sequence[Comparison],
        figures: Mapping[str, str],
        joint: str,
        shown: Callable[[Estimate | None], str],
        legend: str,
    ) -> list[str]:
        """Return a table with a line for each comparison, and its legend; nothing without any.

        ``joint`` stands between the two arms.
        """
        if not comparisons:
            return []
        header = [*self._titles(), joint, *(figures[name] for name in comparisons[0].figures)]
        rows = [
            [
                *self.cells(item.place),
                f"{item.arm} {joint} {item.reference}",
                *map(shown, item.figures.values()),
            ]
            for item in comparisons
        ]
        return [format_table(header, rows), legend]

    def _titles(self) -> list[str]:
        return [title for title in self._place.values() if title]

    def cells(self, place: Place) -> list[str]:
        """Return what tables show of a place."""
        titled = zip(place, self._place.values(), strict=True)
        return [str(number) for number, title in titled if title]


def as_fields(found: Estimate | None) -> dict[str, object] | None:
    """Return an estimate as fields of a record, null where there is none."""
    return None if found is None else dataclasses.asdict(found)


def sample_fields(sample: object, *properties: str) -> dict[str, object]:
    """Return a sample as fields of a record, with some of its properties."""
    assert dataclasses.is_dataclass(sample)
    assert not isinstance(sample, type)
    return {**dataclasses.asdict(sample), **{name: getattr(sample, name) for name in properties}}


@dataclass(frozen=True, slots=True)
class Report:
    """What one run has found: the fields of its record, and the text that people read."""

    name: str
    version: int
    """Of the record's form."""
    fields: Mapping[str, object]
    text: str

    def record(self, arguments: Mapping[str, object]) -> dict[str, object]:
        """Return the JSON record: machine, arguments and everything that was found."""
        about = {"record": self.name, "version": self.version, "machine": machine()}
        return {**about, "arguments": dict(arguments), **self.fields}


def machine() -> dict[str, object]:
    """Return what figures depend on, without names of hosts or users."""
    return {
        "kvferry": __version__,
        "python": platform.python_version(),
        "platform": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "num_cores": os.cpu_count(),
    }


def _processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            names = [line for line in file if line.startswith("model name")]
    except OSError:
        return platform.processor()
    return names[0].partition(":")[2].strip() if names else platform.processor()


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a header, first column left, the others right."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


def ms(value_s: float) -> str:
    """Return seconds in milliseconds."""
    return f"{1e3 * value_s:.1f}"


def signed_ms(value_s: float) -> str:
    """Return a difference of times in milliseconds, with its sign."""
    return f"{1e3 * value_s:+.1f}"


def format_spread(summary: Summary) -> str:
    """Return a median and its interquartile range, of seconds in milliseconds."""
    return f"{ms(summary.median)} ({ms(summary.interquartile_range)})"


def format_ratio(ratio: Estimate | None) -> str:
    """Return a ratio with its interval and upper bound, or a dash where there is none."""
    shown = format_interval(ratio, "{:.3f}".format)
    if ratio is None or ratio.upper_bound is None:
        return shown
    return f"{shown} < {ratio.upper_bound:.3f}"


def format_interval(item: Estimate | None, shown: Callable[[float], str] = signed_ms) -> str:
    """Return an estimate with its interval, or that it has none; a dash for no estimate."""
    if item is None:
        return "-"
    if item.low is None or item.high is None:
        return f"{shown(item.estimate)} [no interval: n = 1]"
    return f"{shown(item.estimate)} [{shown(item.low)}, {shown(item.high)}]"
