"""Text, JSON and curves of turns; measures nothing."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from kvferry.bench.report import format_interval, format_table, machine
from kvferry.bench.stats import Interval, Ratio, median_difference, paired_ratio, summarise
from kvferry.bench.turns import TurnSample
from kvferry.bench.turns_plan import TurnArm

TURNS_RECORD_VERSION = 1
COPIES_ALLOWED = 1.5
ALLOWED_S = 0.005
"""A turn with read-back may take that many plain copies of its bytes and this longer than warm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A read-back arm against the others, at one turn. None: an arm was not run, or no ratio."""

    conversation: int
    turn: int
    num_history_tokens: int
    num_new_tokens: int
    arm: TurnArm
    over_warm: Ratio | None
    recompute_over: Ratio | None
    less_warm_s: Interval | None
    limit_s: float | None
    """What the difference to warm may be; None: nothing was read back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerCheck:
    """An arm's answers beside another's to the same prompts."""

    arm: TurnArm
    reference: TurnArm
    num_compared: int
    different: tuple[TurnSample, ...]
    """Those of ``arm`` that are not the same."""

    @property
    def num_same(self) -> int:
        """How many are the same."""
        return self.num_compared - len(self.different)


@dataclass(frozen=True, slots=True, kw_only=True)
class CurvePoint:
    """TTFT at one prompt length: median and quartiles, in seconds."""

    num_prompt_tokens: int
    median_s: float
    p25_s: float
    p75_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One arm's TTFT against prompt length, shortest first."""

    arm: TurnArm
    points: tuple[CurvePoint, ...]


def _arms(samples: Sequence[TurnSample]) -> list[TurnArm]:
    present = {sample.arm for sample in samples}
    return [arm for arm in TurnArm if arm in present]


def _turns(samples: Sequence[TurnSample]) -> list[tuple[int, int]]:
    """Return (conversation, turn) of every turn with a history, in order."""
    return sorted({(s.conversation, s.turn) for s in samples if s.num_history_tokens})


def _at(samples: Sequence[TurnSample], turn: tuple[int, int], arm: TurnArm) -> list[TurnSample]:
    found = [s for s in samples if s.arm is arm and (s.conversation, s.turn) == turn]
    return sorted(found, key=lambda sample: sample.repeat)


def _ttfts_s(samples: Sequence[TurnSample]) -> list[float]:
    return [sample.ttft_s for sample in samples]


def compare_turns(samples: Sequence[TurnSample], rng: random.Random) -> list[Comparison]:
    """Return each read-back arm against warm and recompute, turn by turn."""
    return [
        _comparison(samples, turn, arm, rng)
        for turn in _turns(samples)
        for arm in _arms(samples)
        if arm.reads_back
    ]


def _comparison(
    samples: Sequence[TurnSample], turn: tuple[int, int], arm: TurnArm, rng: random.Random
) -> Comparison:
    own, warm, recompute = (
        _at(samples, turn, which) for which in (arm, TurnArm.WARM, TurnArm.RECOMPUTE)
    )
    ttfts_s = _ttfts_s(own)
    copies_s = [s.plain_copy_s for s in own if s.plain_copy_s is not None]
    return Comparison(
        conversation=turn[0],
        turn=turn[1],
        num_history_tokens=own[0].num_history_tokens,
        num_new_tokens=own[0].num_new_tokens,
        arm=arm,
        over_warm=paired_ratio(ttfts_s, _ttfts_s(warm), rng) if warm else None,
        recompute_over=paired_ratio(_ttfts_s(recompute), ttfts_s, rng) if recompute else None,
        less_warm_s=median_difference(ttfts_s, _ttfts_s(warm), rng) if warm else None,
        limit_s=COPIES_ALLOWED * statistics.median(copies_s) + ALLOWED_S if copies_s else None,
    )


def check_answers(samples: Sequence[TurnSample]) -> list[AnswerCheck]:
    """Compare each arm's answers with those of the arms before it that read nothing back.

    An answer is part of the next prompt, so what follows a different one is not compared.
    """
    arms = _arms(samples)
    return [
        _check(samples, arm, reference)
        for number, reference in enumerate(arms)
        for arm in arms[number + 1 :]
        if not reference.reads_back or number == 0
    ]


def _check(samples: Sequence[TurnSample], arm: TurnArm, reference: TurnArm) -> AnswerCheck:
    num_compared = 0
    different: list[TurnSample] = []
    for key in sorted({(s.repeat, s.conversation) for s in samples if s.arm is arm}):
        pairs = zip(_held(samples, arm, key), _held(samples, reference, key), strict=False)
        for ours, theirs in pairs:
            num_compared += 1
            if ours.answer != theirs.answer:
                different.append(ours)
                break
    return AnswerCheck(
        arm=arm, reference=reference, num_compared=num_compared, different=tuple(different)
    )


def _held(samples: Sequence[TurnSample], arm: TurnArm, key: tuple[int, int]) -> list[TurnSample]:
    """Return the turns of one conversation, given by its repeat and number."""
    found = [s for s in samples if s.arm is arm and (s.repeat, s.conversation) == key]
    return sorted(found, key=lambda sample: sample.turn)


def ttft_curves(samples: Sequence[TurnSample]) -> list[Curve]:
    """Return TTFT against prompt length, one curve an arm."""
    curves = []
    for arm in _arms(samples):
        by_turn: dict[tuple[int, int], list[TurnSample]] = {}
        for sample in samples:
            if sample.arm is arm:
                by_turn.setdefault((sample.conversation, sample.turn), []).append(sample)
        points = sorted(map(_curve_point, by_turn.values()), key=lambda p: p.num_prompt_tokens)
        curves.append(Curve(arm=arm, points=tuple(points)))
    return curves


def _curve_point(samples: Sequence[TurnSample]) -> CurvePoint:
    spread = summarise(_ttfts_s(samples))
    return CurvePoint(
        num_prompt_tokens=round(statistics.median(s.num_prompt_tokens for s in samples)),
        median_s=spread.median,
        p25_s=spread.p25,
        p75_s=spread.p75,
    )


_SPREAD = ("ttft_s", "read_back_s", "compute_s")
_COUNTED = (
    "num_cached_tokens",
    "num_read_back_tokens",
    "num_read_back_bytes",
    "num_computed_tokens",
)


def turns_record(
    samples: Sequence[TurnSample], arguments: dict[str, object], rng: random.Random
) -> dict[str, object]:
    """Return the JSON record: machine, arguments, summaries, comparisons, answers, raw samples."""
    return {
        "record": "turns",
        "version": TURNS_RECORD_VERSION,
        "machine": machine(),
        "arguments": arguments,
        "summaries": [
            _summary(found)
            for turn in _turns(samples)
            for arm in _arms(samples)
            if (found := _at(samples, turn, arm))
        ],
        "comparisons": [dataclasses.asdict(item) for item in compare_turns(samples, rng)],
        "answers": [_shown_check(check) for check in check_answers(samples)],
        "samples": [dataclasses.asdict(sample) for sample in samples],
    }


def _shown_check(check: AnswerCheck) -> dict[str, object]:
    return {
        "arm": check.arm.value,
        "reference": check.reference.value,
        "num_compared": check.num_compared,
        "num_same": check.num_same,
        "different": [
            {name: getattr(sample, name) for name in ("repeat", "conversation", "turn")}
            for sample in check.different
        ],
    }


def _summary(samples: Sequence[TurnSample]) -> dict[str, object]:
    first = samples[0]
    return {
        "arm": first.arm.value,
        "conversation": first.conversation,
        "turn": first.turn,
        "num_history_tokens": first.num_history_tokens,
        "num_new_tokens": first.num_new_tokens,
        "num_turns_read_back": sum(s.num_read_back_tokens > 0 for s in samples),
        "outcomes": _outcomes(samples),
        **{name: dataclasses.asdict(summarise(_values(samples, name))) for name in _SPREAD},
        **{name: statistics.median(_values(samples, name)) for name in _COUNTED},
    }


def _values(samples: Sequence[TurnSample], name: str) -> list[float]:
    return [float(getattr(sample, name)) for sample in samples]


def _outcomes(samples: Sequence[TurnSample]) -> dict[str, int]:
    outcomes = [sample.outcome for sample in samples if sample.outcome]
    return {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}


def turns_table(samples: Sequence[TurnSample], rng: random.Random) -> str:
    """Return the medians of every turn with a history, the comparisons, and what they mean."""
    parts = [_medians_table(samples), _MEDIANS_LEGEND]
    comparisons = compare_turns(samples, rng)
    if comparisons:
        parts += [_comparisons_table(comparisons), _COMPARISONS_LEGEND]
    checks = check_answers(samples)
    if checks:
        parts += [_answers_table(checks), _ANSWERS_LEGEND]
    return "\n\n".join(parts)


_MEDIANS_LEGEND = (
    "median (interquartile range); reading, computing: prefill's time; cached (by prefill itself), "
    "read back, computed (by prefill): tokens of the prompt"
)
_COMPARISONS_LEGEND = (
    "ratios of median TTFTs and difference of medians, [95 % interval]; limit of the difference: "
    f"{COPIES_ALLOWED:g} plain copies of the bytes that were read back, and "
    f"{1e3 * ALLOWED_S:g} ms"
)
_ANSWERS_LEGEND = (
    "answers to the same prompts; in float32 they are the same, in bfloat16 near ties may differ"
)


def _medians_table(samples: Sequence[TurnSample]) -> str:
    header = ["history", "new", "arm", "n", "TTFT ms", "reading ms", "computing ms"]
    header += ["cached", "read back", "computed", "outcomes"]
    rows = []
    for turn in _turns(samples):
        for arm in _arms(samples):
            found = _at(samples, turn, arm)
            if not found:
                continue
            ttft, reading, computing = (summarise(_values(found, name)) for name in _SPREAD)
            rows.append(
                [
                    str(found[0].num_history_tokens),
                    str(found[0].num_new_tokens),
                    arm.value,
                    str(len(found)),
                    f"{1e3 * ttft.median:.1f} ({1e3 * ttft.interquartile_range:.1f})",
                    f"{1e3 * reading.median:.1f}",
                    f"{1e3 * computing.median:.1f}",
                    *(
                        f"{statistics.median(_values(found, f'num_{name}_tokens')):.0f}"
                        for name in ("cached", "read_back", "computed")
                    ),
                    ", ".join(f"{count} {name}" for name, count in _outcomes(found).items()) or "-",
                ]
            )
    return format_table(header, rows)


def _comparisons_table(comparisons: Sequence[Comparison]) -> str:
    header = ["history", "new", "arm", "arm / warm", "recompute / arm", "arm less warm ms"]
    rows = [
        [
            str(item.num_history_tokens),
            str(item.num_new_tokens),
            item.arm.value,
            format_interval(item.over_warm, "{:.3f}".format),
            format_interval(item.recompute_over, "{:.1f}".format),
            format_interval(item.less_warm_s, lambda value_s: f"{1e3 * value_s:+.1f}"),
            "-" if item.limit_s is None else f"{1e3 * item.limit_s:.1f}",
        ]
        for item in comparisons
    ]
    return format_table([*header, "limit ms"], rows)


def _answers_table(checks: Sequence[AnswerCheck]) -> str:
    rows = [
        [check.arm.value, check.reference.value, str(check.num_compared), str(check.num_same)]
        for check in checks
    ]
    return format_table(["answers of", "beside those of", "compared", "the same"], rows)
