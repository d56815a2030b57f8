"""Text and JSON of measurements. Owns the record's form; measures nothing."""

from __future__ import annotations

import dataclasses
import os
import platform
import random
from collections.abc import Sequence

from kvferry import __version__
from kvferry.bench.handoff import Arm, HandoffSample
from kvferry.bench.stats import Interval, median_difference, summarise

_QUANTITIES = ("after_prefill_s", "extra_gap_s", "decode_step_s", "ttft_s")
_TITLES = {
    "after_prefill_s": "prefill's end → first token",
    "extra_gap_s": "gap to 2nd token less a step",
    "decode_step_s": "decode step",
    "ttft_s": "TTFT",
}
RECORD_VERSION = 1


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


def handoff_record(
    samples: Sequence[HandoffSample], arguments: dict[str, object], rng: random.Random
) -> dict[str, object]:
    """Return the JSON record: machine, arguments, summaries, differences, raw samples."""
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
        for arm in Arm
    ]
    differences = [
        {
            "num_prompt_tokens": length,
            **{
                name: dataclasses.asdict(_pull_less_colocated(samples, length, name, rng))
                for name in _QUANTITIES
            },
        }
        for length in _lengths(samples)
    ]
    return {
        "record": "handoff",
        "version": RECORD_VERSION,
        "machine": machine(),
        "arguments": arguments,
        "summaries": summaries,
        "pull_less_colocated": differences,
        "samples": [
            {**dataclasses.asdict(sample), "extra_gap_s": sample.extra_gap_s} for sample in samples
        ],
    }


def _pull_less_colocated(
    samples: Sequence[HandoffSample], length: int, name: str, rng: random.Random
) -> Interval:
    return median_difference(
        _values(samples, Arm.PULL, length, name),
        _values(samples, Arm.COLOCATED, length, name),
        rng,
    )


def handoff_table(samples: Sequence[HandoffSample], rng: random.Random) -> str:
    """Return the table of medians (interquartile range), and of differences (95 % interval)."""
    header = ["prompt", "arm", "n", *(f"{_TITLES[name]} ms" for name in _QUANTITIES)]
    rows = []
    for length in _lengths(samples):
        for arm in Arm:
            spread = [summarise(_values(samples, arm, length, name)) for name in _QUANTITIES]
            cells = [
                f"{1e3 * item.median:.1f} ({1e3 * item.interquartile_range:.1f})" for item in spread
            ]
            rows.append([str(length), arm.value, str(spread[0].count), *cells])
        differences = [_pull_less_colocated(samples, length, name, rng) for name in _QUANTITIES]
        cells = [
            f"{1e3 * item.estimate:+.1f} [{1e3 * item.low:+.1f}, {1e3 * item.high:+.1f}]"
            for item in differences
        ]
        rows.append([str(length), "difference", "", *cells])
    moved = [sample for sample in samples if sample.arm is Arm.PULL]
    transports = ", ".join(sorted({sample.transport for sample in moved}))
    return (
        f"{format_table(header, rows)}\n\n"
        "median (interquartile range); difference: pull less colocated [95 % interval]; "
        f"transport: {transports}"
    )
