"""Text and JSON of the background measurement; measures nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from kvferry.bench.background import BackgroundArm, WindowSample
from kvferry.bench.report import RATIO_LEGEND, format_ratio, format_table, machine
from kvferry.bench.stats import Ratio, paired_ratio, summarise

BACKGROUND_RECORD_VERSION = 1
_MOVING = (BackgroundArm.PULL, BackgroundArm.PUSH)


def _windows(samples: Sequence[WindowSample], arm: BackgroundArm) -> list[WindowSample]:
    return sorted((s for s in samples if s.arm is arm), key=lambda sample: sample.round)


def _ratio_to_held(
    samples: Sequence[WindowSample], arm: BackgroundArm, rng: random.Random
) -> Ratio | None:
    moving, held = (
        [sample.tpot_s for sample in _windows(samples, which)]
        for which in (arm, BackgroundArm.HELD)
    )
    return paired_ratio(moving, held, rng)


def background_record(
    samples: Sequence[WindowSample], arguments: dict[str, object], rng: random.Random
) -> dict[str, object]:
    """Return the JSON record: machine, arguments, summaries, ratios, every window."""
    ratios = {arm.value: _ratio_to_held(samples, arm, rng) for arm in _MOVING}
    return {
        "record": "background",
        "version": BACKGROUND_RECORD_VERSION,
        "machine": machine(),
        "arguments": arguments,
        "tpot_s": {
            arm.value: dataclasses.asdict(summarise([s.tpot_s for s in _windows(samples, arm)]))
            for arm in BackgroundArm
        },
        "tpot_over_held": {
            name: ratio and dataclasses.asdict(ratio) for name, ratio in ratios.items()
        },
        "windows": [{**dataclasses.asdict(s), "tpot_s": s.tpot_s} for s in samples],
    }


def background_table(samples: Sequence[WindowSample], rng: random.Random) -> str:
    """Return the table of the background streams' TPOT per arm, and its ratios to ``held``."""
    header = [
        "arm",
        "windows",
        "TPOT ms",
        "longest gap ms",
        "arrivals",
        "arrival E2EL ms",
        "moved MiB/arrival",
        "TPOT / held",
    ]
    rows = []
    for arm in BackgroundArm:
        windows = _windows(samples, arm)
        tpot = summarise([sample.tpot_s for sample in windows])
        moved = sum(sample.num_moved_bytes for sample in windows)
        arrivals = sum(sample.num_arrivals for sample in windows)
        rows.append(
            [
                arm.value,
                str(len(windows)),
                f"{1e3 * tpot.median:.1f} ({1e3 * tpot.interquartile_range:.1f})",
                f"{1e3 * max(sample.longest_gap_s for sample in windows):.1f}",
                str(arrivals),
                f"{1e3 * summarise([sample.arrival_e2el_s for sample in windows]).median:.1f}",
                f"{moved / arrivals / 2**20:.1f}",
                format_ratio(_ratio_to_held(samples, arm, rng)) if arm in _MOVING else "",
            ]
        )
    return (
        f"{format_table(header, rows)}\n\n"
        f"TPOT of the background streams: median of windows (interquartile range); {RATIO_LEGEND}"
    )
