"""The record holds raw samples and what follows from them; the table shows the same figures."""

from __future__ import annotations

import json
import random
from typing import Any

from kvferry.bench.handoff import Arm, HandoffSample, report_handoffs


def _sample(arm: Arm, repeat: int, after_prefill_s: float, gap_s: float = 0.05) -> HandoffSample:
    return HandoffSample(
        arm=arm,
        num_prompt_tokens=512,
        repeat=repeat,
        ttft_s=1.0,
        until_prefill_end_s=1.0 - after_prefill_s,
        after_prefill_s=after_prefill_s,
        second_gap_s=gap_s,
        decode_step_s=0.04,
        num_received_tokens=512,
        num_received_bytes=100,
        transport="shm" if arm is Arm.PULL else "",
    )


_SAMPLES = [
    _sample(arm, repeat, base_s + repeat / 1000)
    for arm, base_s in ((Arm.PULL, 0.010), (Arm.COLOCATED, 0.004))
    for repeat in range(5)
]


def test_record_is_json_with_summaries_and_samples() -> None:
    text = json.dumps(report_handoffs(_SAMPLES, random.Random(1)).record({"repeats": 5}))
    record: dict[str, Any] = json.loads(text)
    assert (record["record"], record["arguments"]) == ("handoff", {"repeats": 5})
    assert len(record["samples"]) == 10
    medians = {item["arm"]: item["after_prefill_s"]["median"] for item in record["summaries"]}
    assert medians == {"colocated": 0.006, "pull": 0.012}
    assert [(d["arm"], d["less"]) for d in record["differences"]] == [("pull", "colocated")]
    assert record["ratios"] == []
    difference = record["differences"][0]["after_prefill_s"]
    assert round(difference["estimate"], 6) == 0.006
    assert difference["low"] <= difference["estimate"] <= difference["high"]
    assert record["machine"]["num_cores"] >= 1


def test_table_shows_medians_and_difference() -> None:
    shown = report_handoffs(_SAMPLES, random.Random(1)).text
    lines = shown.splitlines()
    assert lines[2].split()[:7] == ["512", "colocated", "5", "994.0", "(2.0)", "6.0", "(2.0)"]
    assert lines[3].split()[:7] == ["512", "pull", "5", "988.0", "(2.0)", "12.0", "(2.0)"]
    (less,) = [line for line in lines if "less colocated" in line]
    assert less.split()[:5] == ["512", "pull", "less", "colocated", "-6.0"]
    assert less.split()[7] == "+6.0"
    assert "transport: shm" in shown


_PUSHED = [*_SAMPLES, *(_sample(Arm.PUSH, n, 0.009 + n / 1000, 0.042) for n in range(5))]


def test_push_is_compared_with_pull() -> None:
    record = json.loads(json.dumps(report_handoffs(_PUSHED, random.Random(1)).record({})))
    assert [(r["arm"], r["over"]) for r in record["ratios"]] == [("push", "pull")]
    gap, after = (record["ratios"][0][name] for name in ("extra_gap_s", "after_prefill_s"))
    assert (round(gap["estimate"], 6), round(gap["upper_bound"], 6)) == (0.2, 0.2)
    assert round(after["estimate"], 6) == round(11 / 12, 6)
    assert after["low"] <= after["estimate"] <= after["upper_bound"] <= after["high"] < 1
    shown = report_handoffs(_PUSHED, random.Random(1)).text
    (line,) = [line for line in shown.splitlines() if "/ pull" in line]
    assert line.split()[:4] == ["512", "push", "/", "pull"]
    assert line.endswith("0.200 [0.200, 0.200] < 0.200")


def test_one_repeat_gives_no_interval() -> None:
    once = [sample for sample in _PUSHED if sample.repeat == 0]
    record = json.loads(json.dumps(report_handoffs(once, random.Random(1)).record({})))
    difference, ratio = (record[name][0]["after_prefill_s"] for name in ("differences", "ratios"))
    assert (difference["low"], difference["high"]) == (None, None)
    assert (ratio["low"], ratio["high"], ratio["upper_bound"]) == (None, None, None)
    lines = report_handoffs(once, random.Random(1)).text.splitlines()
    (less,) = [line for line in lines if "pull less colocated" in line]
    assert "+6.0 [no interval: n = 1]" in less
    (over,) = [line for line in lines if "push / pull" in line]
    assert over.endswith("0.200 [no interval: n = 1]")


def test_a_ratio_to_nothing_is_no_ratio() -> None:
    gapless = [_sample(arm, n, 0.01, 0.04) for arm in (Arm.PULL, Arm.PUSH) for n in range(3)]
    record = json.loads(json.dumps(report_handoffs(gapless, random.Random(1)).record({})))
    assert record["ratios"][0]["extra_gap_s"] is None
    assert report_handoffs(gapless, random.Random(1)).text.splitlines()[-3].split()[-1] == "-"
