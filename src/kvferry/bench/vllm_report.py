"""Text and JSON of what was measured on vLLM; measures nothing."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

from kvferry.bench.report import RATIO_LEGEND, format_ratio, format_table, machine
from kvferry.bench.stats import Ratio, paired_ratio, summarise
from kvferry.bench.vllm_bench import VllmSample
from kvferry.bench.vllm_plan import VllmArm

VLLM_RECORD_VERSION = 1
_QUANTITIES = {
    "prefill_s": "P's prefill",
    "extra_after_prefill_s": "after P less a step",
    "ttft_s": "TTFT",
    "second_gap_s": "gap to 2nd token",
    "tpot_s": "TPOT",
}
_HANDOFF_PAIRS = (
    (VllmArm.FERRY_PULL, VllmArm.NIXL_PULL),
    (VllmArm.FERRY_PUSH, VllmArm.NIXL_PUSH),
    (VllmArm.FERRY_PUSH, VllmArm.FERRY_PULL),
)
_TURN_PAIRS = (
    (VllmArm.FERRY_RECOMPUTE, VllmArm.FERRY_READ_BACK),
    (VllmArm.NIXL_READ_BACK, VllmArm.FERRY_READ_BACK),
)
_LEGEND = (
    "milliseconds, median (interquartile range); P's prefill: from sending its leg to its answer; "
    "after P: from there to the first token of D, less D's median gap between later tokens"
)
_TURN_LEGEND = (
    "a conversation's second turn, prefill without a cache of the first; read back: tokens"
)


@dataclasses.dataclass(frozen=True, slots=True)
class VllmRatio:
    """One arm over another at one prompt length. None: a draw has no positive median below."""

    num_prompt_tokens: int
    arm: VllmArm
    over: VllmArm
    ratios: dict[str, Ratio | None]
    """By quantity."""


def compare_arms(samples: Sequence[VllmSample], rng: random.Random) -> list[VllmRatio]:
    """Return the ratios of interest among the arms that were run."""
    found = []
    for length in _lengths(samples):
        for arm, over in (*_HANDOFF_PAIRS, *_TURN_PAIRS):
            first, second = (_at(samples, length, which) for which in (arm, over))
            common = {s.repeat for s in first} & {s.repeat for s in second}
            if not common:
                continue
            first, second = ([s for s in arm if s.repeat in common] for arm in (first, second))
            ratios = {
                name: paired_ratio(_values(first, name), _values(second, name), rng)
                for name in _QUANTITIES
            }
            found.append(VllmRatio(length, arm, over, ratios))
    return found


def vllm_record(
    samples: Sequence[VllmSample], arguments: dict[str, object], rng: random.Random
) -> dict[str, object]:
    """Return the JSON record: machine, arguments, summaries, ratios, raw samples."""
    return {
        "record": "vllm",
        "version": VLLM_RECORD_VERSION,
        "machine": machine(),
        "arguments": arguments,
        "summaries": [
            {
                "arm": arm.value,
                "num_prompt_tokens": length,
                **{
                    name: dataclasses.asdict(summarise(_values(found, name)))
                    for name in _QUANTITIES
                },
            }
            for length in _lengths(samples)
            for arm in VllmArm
            if (found := _at(samples, length, arm))
        ],
        "ratios": [dataclasses.asdict(ratio) for ratio in compare_arms(samples, rng)],
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }


def vllm_table(samples: Sequence[VllmSample], rng: random.Random) -> str:
    """Return the medians of handoffs and of turns, each with its ratios."""
    handoffs = [sample for sample in samples if not sample.arm.has_turns]
    turns = [sample for sample in samples if sample.arm.has_turns]
    parts = []
    if handoffs:
        parts += [_medians_table(handoffs), _LEGEND, *_ratios_table(handoffs, rng)]
    if turns:
        parts += [_medians_table(turns), _TURN_LEGEND, *_ratios_table(turns, rng)]
    return "\n\n".join(parts)


def _medians_table(samples: Sequence[VllmSample]) -> str:
    has_turns = samples[0].arm.has_turns
    header = ["prompt", "arm", "n", *_QUANTITIES.values()]
    rows = []
    for length in _lengths(samples):
        for arm in VllmArm:
            found = _at(samples, length, arm)
            if not found:
                continue
            spread = [summarise(_values(found, name)) for name in _QUANTITIES]
            cells = [
                f"{1e3 * item.median:.1f} ({1e3 * item.interquartile_range:.1f})" for item in spread
            ]
            read_back = summarise(_values(found, "num_read_back_tokens")).median
            turn_cells = [f"{read_back:.0f}"] if has_turns else []
            rows.append([str(length), arm.value, str(len(found)), *cells, *turn_cells])
    return format_table([*header, *(["read back"] if has_turns else [])], rows)


def _ratios_table(samples: Sequence[VllmSample], rng: random.Random) -> list[str]:
    compared = compare_arms(samples, rng)
    if not compared:
        return []
    header = ["prompt", "ratio", *_QUANTITIES.values()]
    rows = [
        [
            str(item.num_prompt_tokens),
            f"{item.arm} / {item.over}",
            *(format_ratio(item.ratios[name]) for name in _QUANTITIES),
        ]
        for item in compared
    ]
    return [format_table(header, rows), RATIO_LEGEND]


def _lengths(samples: Sequence[VllmSample]) -> list[int]:
    return sorted({sample.num_prompt_tokens for sample in samples})


def _at(samples: Sequence[VllmSample], length: int, arm: VllmArm) -> list[VllmSample]:
    found = [s for s in samples if s.arm is arm and s.num_prompt_tokens == length]
    return sorted(found, key=lambda sample: sample.repeat)


def _values(samples: Sequence[VllmSample], name: str) -> list[float]:
    return [float(getattr(sample, name)) for sample in samples]
