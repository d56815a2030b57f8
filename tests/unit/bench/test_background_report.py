"""The background measurement's record and table: TPOT per arm, ratios paired by round."""

from __future__ import annotations

import json
import random

import pytest

from kvferry.bench.background import BackgroundArm, WindowSample, report_background


def _window(arm: BackgroundArm, number: int, tpot_s: float) -> WindowSample:
    return WindowSample(
        arm=arm,
        repeat=number,
        stream_tpots_s=(tpot_s / 2, tpot_s, 2 * tpot_s),
        longest_gap_s=3 * tpot_s,
        num_arrivals=10,
        arrival_e2el_s=0.2,
        num_moved_bytes=0 if arm is BackgroundArm.HELD else 20 * 2**20,
    )


_FACTORS = {BackgroundArm.PUSH: 1.02, BackgroundArm.HELD: 1.0, BackgroundArm.PULL: 1.1}
# Each round is slower than the one before, which is no difference between the arms.
_WINDOWS = [
    _window(arm, number, factor * (number + 1) / 100)
    for number in range(5)
    for arm, factor in _FACTORS.items()
]
_REPORT = report_background(_WINDOWS, random.Random(1))


def test_record_has_every_window_and_the_ratios() -> None:
    record = json.loads(json.dumps(_REPORT.record({"seed": 1})))
    assert (record["record"], record["arguments"]) == ("background", {"seed": 1})
    assert len(record["samples"]) == 15
    medians = {item["arm"]: item["tpot_s"]["median"] for item in record["summaries"]}
    assert medians["held"] == 0.03
    assert [(item["arm"], item["over"]) for item in record["ratios"]] == [
        ("pull", "held"),
        ("push", "held"),
    ]
    for item, factor in zip(record["ratios"], (1.1, 1.02), strict=True):
        ratio = item["tpot_s"]
        assert [ratio["low"], ratio["estimate"], ratio["high"]] == pytest.approx([factor] * 3)


def test_table_has_a_row_for_each_arm() -> None:
    lines = _REPORT.text.splitlines()
    assert [line.split()[0] for line in lines[2:5]] == ["held", "pull", "push"]
    assert lines[2].split() == ["held", "5", "30.0", "(20.0)", "150.0", "50", "200.0", "0.0"]
    assert lines[4].endswith("2.0  1.020 [1.020, 1.020] < 1.020")
