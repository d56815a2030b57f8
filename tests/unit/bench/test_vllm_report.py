"""Medians and ratios of what was measured on vLLM, as a table and as a record."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from kvferry.bench.vllm import VllmArm, VllmSample, report_vllm


def _sample(arm: VllmArm, repeat: int, after_s: float, **fields: Any) -> VllmSample:  # noqa: ANN401
    values: dict[str, Any] = {
        "num_prompt_tokens": 512,
        "num_history_tokens": 0,
        "prefill_s": 1.0,
        "ttft_s": 1.0 + after_s,
        "second_gap_s": 0.04,
        "decode_step_s": 0.04,
        "tpot_s": 0.04,
        "num_moved_tokens": 512,
        "num_read_back_tokens": 0,
        **fields,
    }
    return VllmSample(arm=arm, repeat=repeat, after_prefill_s=after_s, **values)


_HANDOFFS = [
    _sample(arm, repeat, after_s + 0.001 * repeat)
    for arm, after_s in ((VllmArm.NIXL_PULL, 0.06), (VllmArm.FERRY_PULL, 0.05))
    for repeat in range(3)
]
_TURNS = [
    _sample(arm, 0, 0.05, ttft_s=ttft_s, num_prompt_tokens=2148, num_read_back_tokens=tokens)
    for arm, ttft_s, tokens in (
        (VllmArm.FERRY_RECOMPUTE, 6.0, 0),
        (VllmArm.FERRY_READ_BACK, 0.5, 1920),
    )
]


def _ratios(samples: list[VllmSample]) -> Any:  # noqa: ANN401
    return report_vllm(samples, random.Random(1)).record({})["ratios"]


def test_the_ratio_is_that_of_what_exceeds_a_step() -> None:
    (ratio,) = _ratios(_HANDOFFS)
    assert (ratio["arm"], ratio["over"]) == ("ferry-pull", "nixl-pull")
    assert ratio["extra_after_prefill_s"]["estimate"] == pytest.approx(0.011 / 0.021)


def test_the_table_shows_handoffs_and_turns_with_their_ratios() -> None:
    shown = report_vllm([*_HANDOFFS, *_TURNS], random.Random(1)).text
    assert "21.0 (1.0)" in shown
    assert "ferry-pull / nixl-pull" in shown
    assert "ferry-recompute / ferry-read-back" in shown
    assert "12.000 [no interval: n = 1]" in shown
    assert shown.count("read back") >= 2
    assert "second turn" not in report_vllm(_HANDOFFS, random.Random(1)).text


def test_the_record_keeps_every_sample() -> None:
    record = report_vllm([*_HANDOFFS, *_TURNS], random.Random(1)).record({"seed": 1})
    kept: Any = json.loads(json.dumps(record))
    assert len(kept["samples"]) == 8
    assert {(s["arm"], s["num_prompt_tokens"]) for s in kept["summaries"]} == {
        ("nixl-pull", 512),
        ("ferry-pull", 512),
        ("ferry-recompute", 2148),
        ("ferry-read-back", 2148),
    }
    assert kept["ratios"][0]["extra_after_prefill_s"]["upper_bound"] < 1


def test_only_repeats_that_both_arms_have_are_compared() -> None:
    odd = _sample(VllmArm.FERRY_PULL, 3, 9.0)
    assert _ratios([*_HANDOFFS, odd]) == _ratios(_HANDOFFS)
    assert _ratios([_HANDOFFS[0], odd]) == []
