"""Text and JSON of measurements. Owns the record's form; measures nothing."""

from __future__ import annotations

import dataclasses
import os
import platform
import random
from collections.abc import Callable, Sequence

from kvferry import __version__
from kvferry.bench.handoff import Arm, HandoffSample
from kvferry.bench.stats import Interval, Ratio, median_difference, paired_ratio, summarise

_QUANTITIES = (
    "until_prefill_end_s",
    "after_prefill_s",
    "extra_gap_s",
    "decode_step_s",
    "ttft_s",
)
_COMPARED = ("until_prefill_end_s", "after_prefill_s", "extra_gap_s")
_TITLES = {
    "until_prefill_end_s": "sending → prefill's end",
    "after_prefill_s": "prefill's end → first token",
    "extra_gap_s": "gap to 2nd token less a step",
    "decode_step_s": "decode step",
    "ttft_s": "TTFT",
}
RECORD_VERSION = 2


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows under a header, first column left, the others right."""
    table = [list(header), *map(list, rows)]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([line(header), line(["-" * width for width in widths]), *map(line, rows)])


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


def _values(samples: Sequence[HandoffSample], arm: Arm, length: int, name: str) -> list[float]:
    return [
        float(getattr(sample, name))
        for sample in samples
        if sample.arm is arm and sample.num_prompt_tokens == length
    ]


def _lengths(samples: Sequence[HandoffSample]) -> list[int]:
    return sorted({sample.num_prompt_tokens for sample in samples})


def _arms(samples: Sequence[HandoffSample]) -> list[Arm]:
    present = {sample.arm for sample in samples}
    return [arm for arm in Arm if arm in present]


def _pairs(samples: Sequence[HandoffSample], first: set[Arm], second: Arm) -> list[tuple[Arm, Arm]]:
    """Return which arms are compared: each of ``first`` that was run with ``second``."""
    present = _arms(samples)
    return [(arm, second) for arm in present if arm in first and second in present]


def _moving_less_colocated(samples: Sequence[HandoffSample]) -> list[tuple[Arm, Arm]]:
    return _pairs(samples, {Arm.PULL, Arm.PUSH, Arm.PUSH_LATE}, Arm.COLOCATED)


def _push_over_pull(samples: Sequence[HandoffSample]) -> list[tuple[Arm, Arm]]:
    return _pairs(samples, {Arm.PUSH, Arm.PUSH_LATE}, Arm.PULL)


def _difference(
    samples: Sequence[HandoffSample],
    pair: tuple[Arm, Arm],
    length: int,
    name: str,
    rng: random.Random,
) -> Interval:
    first, second = (_values(samples, arm, length, name) for arm in pair)
    return median_difference(first, second, rng)


def _ratio(
    samples: Sequence[HandoffSample],
    pair: tuple[Arm, Arm],
    length: int,
    name: str,
    rng: random.Random,
) -> Ratio | None:
    first, second = (_values(samples, arm, length, name) for arm in pair)
    return paired_ratio(first, second, rng)


def handoff_record(
    samples: Sequence[HandoffSample], arguments: dict[str, object], rng: random.Random
) -> dict[str, object]:
    """Return the JSON record: machine, arguments, summaries, comparisons, raw samples."""
    summaries = [
        {
            "arm": arm.value,
            "num_prompt_tokens": length,
            **{
                name: dataclasses.asdict(summarise(_values(samples, arm, length, name)))
                for name in _QUANTITIES
            },
        }
        for length in _lengths(samples)
        for arm in _arms(samples)
    ]
    return {
        "record": "handoff",
        "version": RECORD_VERSION,
        "machine": machine(),
        "arguments": arguments,
        "summaries": summaries,
        "differences": _differences(samples, rng),
        "ratios": _ratios(samples, rng),
        "samples": [
            {**dataclasses.asdict(sample), "extra_gap_s": sample.extra_gap_s} for sample in samples
        ],
    }


def _differences(samples: Sequence[HandoffSample], rng: random.Random) -> list[dict[str, object]]:
    return [
        {
            "num_prompt_tokens": length,
            "arm": pair[0].value,
            "less": pair[1].value,
            **{
                name: dataclasses.asdict(_difference(samples, pair, length, name, rng))
                for name in _QUANTITIES
            },
        }
        for length in _lengths(samples)
        for pair in _moving_less_colocated(samples)
    ]


def _ratios(samples: Sequence[HandoffSample], rng: random.Random) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for length in _lengths(samples):
        for pair in _push_over_pull(samples):
            ratios = {name: _ratio(samples, pair, length, name, rng) for name in _COMPARED}
            found.append(
                {
                    "num_prompt_tokens": length,
                    "arm": pair[0].value,
                    "over": pair[1].value,
                    **{name: ratio and dataclasses.asdict(ratio) for name, ratio in ratios.items()},
                }
            )
    return found


def handoff_table(samples: Sequence[HandoffSample], rng: random.Random) -> str:
    """Return medians (interquartile range), differences (95 % interval), and ratios."""
    header = ["prompt", "arm", "n", *(f"{_TITLES[name]} ms" for name in _QUANTITIES)]
    rows = []
    for length in _lengths(samples):
        for arm in _arms(samples):
            spread = [summarise(_values(samples, arm, length, name)) for name in _QUANTITIES]
            cells = [
                f"{1e3 * item.median:.1f} ({1e3 * item.interquartile_range:.1f})" for item in spread
            ]
            rows.append([str(length), arm.value, str(spread[0].count), *cells])
        for pair in _moving_less_colocated(samples):
            differences = [_difference(samples, pair, length, name, rng) for name in _QUANTITIES]
            cells = [
                format_interval(item, lambda value_s: f"{1e3 * value_s:+.1f}")
                for item in differences
            ]
            rows.append([str(length), f"{pair[0]} less {pair[1]}", "", *cells])
    transports = sorted({sample.transport for sample in samples if sample.transport})
    parts = [
        format_table(header, rows),
        "median (interquartile range); less: difference of medians [95 % interval]; "
        f"transport: {', '.join(transports) or '-'}",
        *_ratio_table(samples, rng),
    ]
    return "\n\n".join(parts)


def _ratio_table(samples: Sequence[HandoffSample], rng: random.Random) -> list[str]:
    pairs = _push_over_pull(samples)
    if not pairs:
        return []
    header = ["prompt", "ratio", *(_TITLES[name] for name in _COMPARED)]
    rows = [
        [
            str(length),
            f"{pair[0]} / {pair[1]}",
            *(format_ratio(_ratio(samples, pair, length, name, rng)) for name in _COMPARED),
        ]
        for length in _lengths(samples)
        for pair in pairs
    ]
    return [format_table(header, rows), RATIO_LEGEND]


RATIO_LEGEND = "ratio of medians [95 % interval] < upper 95 % bound"


def format_ratio(ratio: Ratio | None) -> str:
    """Return a ratio with its interval and bound, or a dash where there is none."""
    shown = format_interval(ratio, "{:.3f}".format)
    if ratio is None or ratio.upper_bound is None:
        return shown
    return f"{shown} < {ratio.upper_bound:.3f}"


def format_interval(item: Ratio | Interval | None, shown: Callable[[float], str]) -> str:
    """Return an estimate with its interval, or that it has none; a dash for no estimate."""
    if item is None:
        return "-"
    if item.low is None or item.high is None:
        return f"{shown(item.estimate)} [no interval: n = 1]"
    return f"{shown(item.estimate)} [{shown(item.low)}, {shown(item.high)}]"
