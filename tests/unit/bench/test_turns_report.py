"""Turns are compared in pairs, by history; table, record and curves show the same figures."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvferry.bench.turns import TurnArm, TurnSample
from kvferry.bench.turns_report import (
    check_answers,
    compare_turns,
    report_turns,
    ttft_curves,
)
from tests.unit.bench.turns_deployment import sample_of

_TTFTS_S = {
    TurnArm.RECOMPUTE: 1.0,
    TurnArm.WARM: 0.04,
    TurnArm.READ_BACK: 0.05,
    TurnArm.READ_BACK_PUSH: 0.06,
}
_SAMPLES = [
    sample_of(arm, turn, ttft_s * turn + repeat / 1000, repeat=repeat)
    for repeat in range(3)
    for arm, ttft_s in _TTFTS_S.items()
    for turn in (1, 2, 3)
]


def _record(samples: list[TurnSample]) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(
        json.dumps(report_turns(samples, random.Random(1)).record({}))
    )
    return record


def test_read_back_is_compared_with_warm_and_recompute_at_every_history() -> None:
    compared = compare_turns(_SAMPLES, random.Random(1))
    assert [(c.place[1], c.place[2], c.arm) for c in compared] == [
        (2, 1000, TurnArm.READ_BACK),
        (2, 1000, TurnArm.READ_BACK_PUSH),
        (3, 2000, TurnArm.READ_BACK),
        (3, 2000, TurnArm.READ_BACK_PUSH),
    ]
    first = compared[0]
    assert first.over_warm is not None
    assert first.recompute_over is not None
    assert first.less_warm_s is not None
    assert first.over_warm.estimate == pytest.approx(0.101 / 0.081)
    assert first.recompute_over.estimate == pytest.approx(2.001 / 0.101)
    assert first.less_warm_s.estimate == pytest.approx(0.020)
    assert first.limit_s == pytest.approx(1.5 * 0.02 + 0.005)


def test_what_was_not_run_is_not_compared() -> None:
    only = [sample for sample in _SAMPLES if sample.arm is TurnArm.READ_BACK]
    for item in compare_turns(only, random.Random(1)):
        assert (item.over_warm, item.recompute_over, item.less_warm_s) == (None, None, None)
    without = [sample for sample in _SAMPLES if not sample.arm.reads_back]
    assert compare_turns(without, random.Random(1)) == []
    assert "limit ms" not in report_turns(without, random.Random(1)).text
    failed = [
        sample_of(TurnArm.READ_BACK, 2, 0.1, plain_copy_s=None),
        sample_of(TurnArm.WARM, 2, 0.1),
    ]
    assert compare_turns(failed, random.Random(1))[0].limit_s is None


def test_record_is_json_with_every_sample_and_summary() -> None:
    record = _record(_SAMPLES)
    assert (record["record"], record["version"]) == ("turns", 1)
    assert len(record["samples"]) == len(_SAMPLES)
    keys = [(item["turn"], item["arm"]) for item in record["summaries"]]
    assert keys == [(turn, arm.value) for turn in (2, 3) for arm in TurnArm]
    read_back = record["summaries"][2]
    assert read_back["ttft_s"]["median"] == pytest.approx(0.101)
    assert read_back["num_read_back_tokens"] == 1000
    assert (read_back["num_turns_read_back"], read_back["outcomes"]) == (3, {"received": 3})
    pairs = [("warm", "recompute"), ("read-back", "recompute"), ("read-back+push", "recompute")]
    pairs += [("read-back", "warm"), ("read-back+push", "warm")]
    assert [(item["arm"], item["reference"]) for item in record["answers"]] == pairs
    assert {(item["num_compared"], item["num_same"]) for item in record["answers"]} == {(9, 9)}
    assert [item["different"] for item in record["answers"]] == [[]] * 5
    assert len(record["comparisons"]) == 4


def test_table_shows_medians_and_comparisons() -> None:
    lines = report_turns(_SAMPLES, random.Random(1)).text.splitlines()
    cells = lines[4].split()
    assert cells[:7] == ["1000", "100", "read-back", "3", "101.0", "(1.0)", "10.0"]
    assert cells[8:] == ["0", "1000", "100", "3", "received"]
    compared = [line for line in lines if line.startswith("1000") and "[" in line]
    assert len(compared) == 2
    assert compared[0].split()[2:4] == ["read-back", "1.247"]
    assert compared[0].split()[-1] == "35.0"
    assert lines[-3].split() == ["read-back+push", "warm", "9", "9"]


def _with_answers(answers: dict[tuple[TurnArm, int], tuple[int, ...]]) -> list[TurnSample]:
    return [
        sample_of(arm, turn, 0.1, answer=answers.get((arm, turn), (1,)))
        for arm in (TurnArm.RECOMPUTE, TurnArm.READ_BACK)
        for turn in (1, 2, 3)
    ]


def test_answers_are_compared_until_they_differ() -> None:
    samples = _with_answers({(TurnArm.READ_BACK, 2): (9,)})
    (check,) = check_answers(samples)
    assert (check.arm, check.reference) == (TurnArm.READ_BACK, TurnArm.RECOMPUTE)
    assert (check.num_compared, check.num_same) == (2, 1)
    assert [(sample.arm, sample.turn) for sample in check.different] == [(TurnArm.READ_BACK, 2)]
    assert _record(samples)["answers"][0]["different"] == [
        {"repeat": 0, "conversation": 0, "turn": 2}
    ]
    (check,) = check_answers(_with_answers({}))
    assert (check.num_compared, check.num_same) == (3, 3)


def test_one_arm_has_no_answers_to_compare_and_read_backs_compare_with_the_first() -> None:
    alone = [sample_of(TurnArm.READ_BACK, turn, 0.1) for turn in (1, 2)]
    assert check_answers(alone) == []
    assert "answers of" not in report_turns(alone, random.Random(1)).text
    both = [*alone, *(sample_of(TurnArm.READ_BACK_PUSH, turn, 0.1) for turn in (1, 2))]
    (check,) = check_answers(both)
    assert (check.arm, check.reference) == (TurnArm.READ_BACK_PUSH, TurnArm.READ_BACK)


def test_curves_are_medians_by_prompt_length() -> None:
    curves = ttft_curves(_SAMPLES)
    assert list(curves) == list(TurnArm)
    assert [length for length, _ in curves[TurnArm.RECOMPUTE]] == [100, 1100, 2100]
    _, spread = curves[TurnArm.READ_BACK][1]
    assert (spread.p25, spread.median, spread.p75) == pytest.approx((0.1005, 0.101, 0.1015))


def test_failed_read_backs_are_counted_by_outcome() -> None:
    outcomes = ["gone", "received", "gone"]
    samples = [
        sample_of(
            TurnArm.READ_BACK,
            2,
            0.1,
            repeat=number,
            outcome=outcome,
            num_read_back_tokens=1000 if outcome == "received" else 0,
        )
        for number, outcome in enumerate(outcomes)
    ]
    assert "2 gone, 1 received" in report_turns(samples, random.Random(1)).text
    assert _record(samples)["summaries"][0]["num_turns_read_back"] == 1


def test_one_conversation_gives_no_interval() -> None:
    once = [sample for sample in _SAMPLES if sample.repeat == 0]
    lines = report_turns(once, random.Random(1)).text.splitlines()
    compared = [line for line in lines if "[" in line and line.startswith("1000")]
    assert [line.count("[no interval: n = 1]") for line in compared] == [3, 3]
    assert "1.250 [no interval: n = 1]" in compared[0]
    assert _record(once)["comparisons"][0]["over_warm"]["high"] is None
